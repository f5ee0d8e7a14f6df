"""What one forward and backward pass keeps, counted tensor by tensor as the layers of `backends/megatron` save them."""

from __future__ import annotations

from dataclasses import dataclass

from relax_cli.config.schema import BatchSection, ParallelSection
from relax_cli.models.spec import ModelSpec
from relax_cli.preflight.memory.sizes import Lengths


@dataclass(frozen=True)
class Pass:
    """A micro-batch of the longest samples."""

    samples: float
    """Not whole where shorter ones fill a packed micro-batch up."""
    lengths: Lengths
    ranks: int = 1
    """Context-parallel ranks, which share out each sample."""

    @property
    def tokens(self) -> int:
        """Tokens that go through the layers of a rank; the last one predicts nothing."""
        return -(-int(self.samples * (self.lengths.prompt + self.lengths.response - 1)) // self.ranks)

    @property
    def answers(self) -> int:
        """Response tokens on the rank that has the most."""
        response, whole = self.lengths.response, self.lengths.prompt + self.lengths.response - 1
        # A rank has one piece of the first half of a sample and one of the second, and responses are at the end.
        piece = -(-whole // (2 * self.ranks))
        most = min(response, piece) + min(max(0, response - whole // 2), piece)
        return int(self.samples * (response if self.ranks == 1 else most))


def largest_pass(
    batch: BatchSection, lengths: Lengths, data_parallel: int, *, packed: bool, layout: ParallelSection
) -> Pass:
    """The largest micro-batch of a rank; one of more, but shorter samples has no more tokens."""
    per_rank = -(-batch.samples_per_step // max(1, data_parallel))
    most: float = batch.micro_batch_size
    if batch.use_dynamic_batch_size and batch.max_tokens_per_gpu is not None:
        most = batch.max_tokens_per_gpu / layout.tokens_of_rank(lengths.prompt + lengths.response)
        most = most if packed else int(most)
    return Pass(max(1, min(most, per_rank)), lengths, layout.context_parallel_size)


def activation_bytes(
    spec: ModelSpec, layout: ParallelSection, work: Pass, bytes_each: int, *, layers: int, in_flight: int
) -> int:
    """What `in_flight` micro-batches save for their backward pass with recomputation, and one layer's gradients."""
    ranks = layout.tensor_model_parallel_size
    gradients = work.tokens * (spec.mlp_in_flight(ranks) + 4 * spec.hidden_size)
    return bytes_each * (_saved(spec, layout, work, layers, in_flight) + gradients)


def at_head_bytes(spec: ModelSpec, layout: ParallelSection, work: Pass, bytes_each: int, *, layers: int) -> int:
    """What is saved while logits exist: the layers are computed again one at a time, and later."""
    saved = _saved(spec, layout, work, layers, 1, again=False)
    return bytes_each * (saved + 2 * work.answers * spec.hidden_size)


def logits_bytes(spec: ModelSpec, layout: ParallelSection, work: Pass, *, entropy_grad: bool) -> int:
    """fp32 tensors of the logits' size in the backward pass of `heads`: what is kept, and gradients. Forward has fewer.
    A vocabulary that is split keeps exponentials in the place of one log-softmax."""
    ranks = layout.tensor_model_parallel_size
    copies = (6 if entropy_grad else 4) if ranks > 1 else (4 if entropy_grad else 3)
    tokens = min(work.answers, layout.log_probs_chunk_size or work.answers)
    return 4 * copies * tokens * spec.vocabulary_of_rank(ranks)


def forward_bytes(spec: ModelSpec, layout: ParallelSection, work: Pass, bytes_each: int) -> int:
    """A forward pass that keeps nothing."""
    width = 4 * spec.hidden_size + spec.mlp_numbers(layout.tensor_model_parallel_size)
    return bytes_each * work.tokens * width


def _saved(
    spec: ModelSpec, layout: ParallelSection, work: Pass, layers: int, in_flight: int, *, again: bool = True
) -> int:
    """Numbers that are kept from the forward to the backward pass; `again`: with layers that are computed again."""
    kept = _whole_layers(spec, layout, work) * layers // spec.num_layers
    layer_input = work.tokens * _states(spec, layout)
    if layout.recompute_granularity != "full":
        return in_flight * kept
    count = layout.recompute_num_layers or 1
    if layout.recompute_method == "block":
        # The first layers keep their input; one of them at a time is recomputed, next to the others, which keep all.
        few = min(count, layers)
        waiting = (in_flight - 1) * (kept * (layers - few) // layers)
        return in_flight * few * layer_input + waiting + kept * min(layers, layers - few + again) // layers
    chunks = -(-layers // count)
    return in_flight * chunks * layer_input + again * kept * min(count, layers) // layers


def _whole_layers(spec: ModelSpec, layout: ParallelSection, work: Pass) -> int:
    """Without recomputation, or with that of parts of a layer."""
    ranks, layers, states = layout.tensor_model_parallel_size, spec.num_layers, _states(spec, layout)
    parts = set(layout.recompute_modules or ("core_attn",)) if layout.recompute_granularity == "selective" else set()
    # Norms save their unit vectors and hand their outputs to matrix products, which also save them.
    norm = 2 * states
    attention = spec.attention_numbers(ranks)
    if "core_attn" in parts:
        attention -= spec.core_attention_numbers(ranks)
    mlp = norm + (0 if "mlp" in parts else spec.mlp_numbers(ranks))
    saved = work.tokens * (layers * norm + attention)
    # The last layer's MLP and the final norm see response tokens only, where the model is ours.
    last = work.answers if spec.answers_early else work.tokens
    return saved + (layers - 1) * work.tokens * mlp + last * (mlp + 2 * states)


def _states(spec: ModelSpec, layout: ParallelSection) -> int:
    """Numbers of one token between layers on one rank."""
    return spec.hidden_size // layout.tensor_model_parallel_size if layout.sequence_parallel else spec.hidden_size
