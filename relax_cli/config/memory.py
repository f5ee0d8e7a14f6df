"""How much memory the processes of a run need, from the sizes in `config.json` and the batch; pure arithmetic.

Weights, gradients and Adam's moments are exact. Activations are counted tensor by tensor, as the layers in
`backends/megatron/layers.py` save them, for micro-batches of full length: real batches stay below.

Legend: `S` prompt + response, `N` response tokens of a micro-batch, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relax_cli.config.model_spec import ModelSpec
from relax_cli.config.placement import ranks_of
from relax_cli.config.schema import Config

MIB = 1 << 20
LIBRARIES = "Python and libraries"
OBJECT_STORE = "object store"
GRADIENTS = "gradients"

BASE_BYTES = 450 * MIB
"""Memory of a worker before it holds a model: Python, torch, Ray and what the role imports (measured)."""
SHARED_BYTES = 120 * MIB
"""The part of it that all workers share: code of libraries (measured)."""
OTHER_PROCESSES = 1200 * MIB
"""The driver, Ray's own processes and TransferQueue's two, without what is shared (measured)."""

MOST_ROWS = 256
"""Most rows that the embedded engine generates at a time."""
KV_CACHE_BYTES = 1 << 30
"""Most bytes of its key/value cache, unless a single row needs more."""
PREFILL_TOKENS = 4096
"""Prompt tokens it computes at a time."""


@dataclass(frozen=True)
class Precision:
    """Bytes of one number of each kind."""

    name: str
    weights: int
    gradients: int
    master: int
    moments: int
    activations: int


CPU = Precision("fp32 on a CPU", weights=4, gradients=4, master=0, moments=8, activations=4)
GPU = Precision("bf16 on a GPU", weights=2, gradients=4, master=4, moments=8, activations=2)


@dataclass(frozen=True)
class RoleMemory:
    """Memory of one process of a role, in bytes by what it is for."""

    role: str
    ranks: int
    resident: dict[str, int]
    """Held all the time on a CPU; parked in host memory while the role sleeps on a GPU."""
    working: dict[str, int]
    """Comes on top while the role works, at most."""
    publishing: dict[str, int]
    """Comes on top while new weights go from the actor's first rank to the rollout workers."""
    keeps_freed: bool
    """Whether memory that a phase frees is of no use to the next: on a CPU the allocator keeps most of it in pieces."""

    @property
    def base_bytes(self) -> int:
        """What the process needs before it holds a model."""
        return self.resident.get(LIBRARIES, 0)

    @property
    def model_bytes(self) -> int:
        """What it holds all the time."""
        return sum(self.resident.values()) - self.base_bytes

    @property
    def parked_bytes(self) -> int:
        """What goes to host memory while the role sleeps on a GPU; gradients are dropped."""
        return self.model_bytes - self.resident.get(GRADIENTS, 0)

    @property
    def extra_bytes(self) -> int:
        """The most that comes on top."""
        phases = sum(self.working.values()), sum(self.publishing.values())
        return sum(phases) if self.keeps_freed else max(phases)

    @property
    def all_publishing_bytes(self) -> int:
        """What publishing needs in all processes of the role: of the actor's only the first publishes."""
        return sum(self.publishing.values()) * (1 if self.role == "actor" else self.ranks)

    @property
    def peak_bytes(self) -> int:
        """The most that the process needs at a time."""
        return self.base_bytes + self.model_bytes + self.extra_bytes


@dataclass(frozen=True)
class Lengths:
    """Longest prompt and response, in tokens."""

    prompt: int
    response: int


def precision_of(config: Config) -> Precision:
    """bf16 with `--device cuda`, fp32 otherwise."""
    return GPU if config.parallel.device == "cuda" else CPU


def roles_memory(config: Config, roles: tuple[str, ...], spec: ModelSpec, lengths: Lengths) -> list[RoleMemory]:
    """One process of each role, on the CPU or the GPU as `--device` says (`auto`: CPU)."""
    sizes = _Sizes(config, spec, lengths, precision_of(config))
    return [sizes.role(role) for role in roles]


def phase_bytes(config: Config, memory: Sequence[RoleMemory]) -> dict[str, int]:
    """What each phase needs: in all processes together on a CPU, on one GPU with `--device cuda`."""
    if config.parallel.device == "cuda":
        return {m.role: m.model_bytes + sum(m.working.values()) for m in memory if m.model_bytes}
    held = _base(config, memory) + sum(m.ranks * m.model_bytes for m in memory)
    phases = {m.role: held + m.ranks * sum(m.working.values()) for m in memory if m.working}
    return {**phases, "publish weights": held + sum(m.all_publishing_bytes for m in memory)}


def host_peak(config: Config, memory: Sequence[RoleMemory]) -> int:
    """The most that all processes of a CPU run hold together."""
    held = _base(config, memory) + sum(m.ranks * m.model_bytes for m in memory)
    if config.parallel.launcher == "local":
        return held + max(m.extra_bytes for m in memory)
    readers = sum(m.ranks for m in memory if m.role == "rollout")
    # The object store's copy of the weights is in the memory of every process that looks at it, but exists once.
    counted_again = readers * max(m.publishing.get(OBJECT_STORE, 0) for m in memory)
    working = sum(m.ranks * sum(m.working.values()) for m in memory)
    return held + working + sum(m.all_publishing_bytes for m in memory) - counted_again


def _base(config: Config, memory: Sequence[RoleMemory]) -> int:
    """Memory without any model."""
    if config.parallel.launcher == "local":
        return BASE_BYTES
    return OTHER_PROCESSES + SHARED_BYTES + sum(m.ranks * (m.base_bytes - SHARED_BYTES) for m in memory)


def kv_cache_bytes(spec: ModelSpec, rows: int, columns: int) -> int:
    """fp32 keys and values of `rows` samples of `columns` tokens."""
    return 2 * 4 * spec.num_layers * spec.num_kv_heads * spec.head_dim * rows * columns


def engine_rows(spec: ModelSpec, requests: int, columns: int) -> int:
    """Rows that the embedded engine generates at a time."""
    return min(requests, MOST_ROWS, max(1, KV_CACHE_BYTES // kv_cache_bytes(spec, 1, columns)))


def checkpoint_bytes(config: Config, spec: ModelSpec) -> int:
    """One checkpoint of the actor, and of the critic if it is saved: weights, master copies and moments."""
    precision = precision_of(config)
    saves_critic = "critic" in config.parallel.resource and config.critic.critic_save is not None
    parameters = spec.parameters + (spec.value_parameters if saves_critic else 0)
    return (precision.weights + precision.master + precision.moments) * parameters


def in_bytes(size: int) -> str:
    """A size for people: `6.3 MB`, `1.5 GB`."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1000:.0f} kB"


class _Sizes:
    """The arithmetic of one configuration."""

    def __init__(self, config: Config, spec: ModelSpec, lengths: Lengths, precision: Precision) -> None:
        self.config = config
        self.spec = spec
        self.lengths = lengths
        self.precision = precision
        self.tensor_parallel = config.parallel.tensor_model_parallel_size
        self.on_cpu = precision is CPU

    def role(self, role: str) -> RoleMemory:
        """One process of `role`."""
        ranks = ranks_of(self.config.parallel, role) if role in self.config.parallel.resource else 1
        base = {LIBRARIES: BASE_BYTES} if self.on_cpu else {}
        weights = self.precision.weights * self.spec.parameters_of_rank(self.tensor_parallel)
        resident, working, publishing = base, dict[str, int](), dict[str, int]()
        if role in ("actor", "critic"):
            resident = base | self._trained(role)
            working = {"activations": self._activations(self._micro_batch(ranks))}
        if role == "actor":
            working |= {"logits": self._logits(self._micro_batch(ranks))}
            publishing = self._published()
        elif role == "reference":
            resident, working = base | {"weights": weights}, self._forward_only(ranks)
        elif role == "rollout":
            # Tied weights are held twice on a CPU: rows of the embedding, and packed for the output layer.
            head = 4 * self.spec.vocab_size * self.spec.hidden_size if self.spec.tied and self.on_cpu else 0
            resident = base | {"weights": weights + head}
            if self.on_cpu:
                working = self._generation(ranks)
                publishing = self._published() | {"unpacked weights": weights}
        return RoleMemory(role, ranks, resident, working, publishing, keeps_freed=self.on_cpu)

    def _trained(self, role: str) -> dict[str, int]:
        spec, precision = self.spec, self.precision
        count = spec.parameters_of_rank if role == "actor" else spec.value_parameters_of_rank
        parameters = count(self.tensor_parallel)
        held = {
            "weights": precision.weights * parameters,
            GRADIENTS: precision.gradients * parameters,
            "Adam moments": precision.moments * parameters,
        }
        return held | ({"fp32 master weights": precision.master * parameters} if precision.master else {})

    def _published(self) -> dict[str, int]:
        """Weights in Ray's object store, where actor and rollout workers share them."""
        if self.config.parallel.launcher == "local" or not self.on_cpu:
            return {}
        return {OBJECT_STORE: self.precision.weights * self.spec.parameters}

    def _generation(self, ranks: int) -> dict[str, int]:
        spec, lengths, batch = self.spec, self.lengths, self.config.batch
        columns = lengths.prompt + lengths.response
        requests = -(-batch.rollout_batch_size // ranks) * batch.n_samples_per_prompt
        rows = engine_rows(spec, requests, columns)
        tokens = min(max(PREFILL_TOKENS, lengths.prompt), rows * lengths.prompt)
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        width = 3 * spec.hidden_size + 2 * queries + 3 * keys + 3 * spec.ffn_hidden_size
        return {
            "KV cache": kv_cache_bytes(spec, rows, columns),
            "activations": 4 * tokens * width,
            # Logits, log-softmax and its exponential in fp32, the cumulative sum in fp64.
            "sampling": 20 * rows * spec.vocab_size,
        }

    def _micro_batch(self, ranks: int) -> int:
        """Samples in one forward and backward pass."""
        data_parallel = max(1, ranks // self.tensor_parallel)
        per_rank = -(-self.config.batch.samples_per_step // data_parallel)
        return max(1, min(self.config.batch.micro_batch_size, per_rank))

    def _activations(self, samples: int) -> int:
        """Tensors that a forward pass saves for its backward pass, and the gradients of one layer."""
        spec, shards = self.spec, self.tensor_parallel
        tokens = samples * (self.lengths.prompt + self.lengths.response - 1)
        answers = samples * self.lengths.response
        queries, keys = spec.num_heads * spec.head_dim // shards, spec.num_kv_heads * spec.head_dim // shards
        # Norms save their unit vectors and hand their outputs to matrix products, which save them too. Attention saves
        # q, k, v and its output; v is a view that keeps the fused tensor, the output is copied when heads are joined.
        attention = 2 * spec.hidden_size + 4 * queries + 3 * keys
        if spec.qk_norm:
            attention += queries + keys
        mlp = 2 * spec.hidden_size + 3 * (spec.ffn_hidden_size // shards)
        saved = spec.num_layers * tokens * attention
        # The last layer's MLP and the final norm see response tokens only.
        saved += (spec.num_layers - 1) * tokens * mlp + answers * (mlp + 2 * spec.hidden_size)
        in_flight = tokens * (4 * (spec.ffn_hidden_size // shards) + 4 * spec.hidden_size)
        return self.precision.activations * (saved + in_flight)

    def _logits(self, samples: int) -> int:
        """fp32: logits, log-softmax and its exponential, or their gradients; the entropy bonus keeps two more."""
        copies = 5 if self.config.algorithm.entropy_coef else 3
        return 4 * copies * samples * self.lengths.response * self.spec.vocab_size // self.tensor_parallel

    def _forward_only(self, ranks: int) -> dict[str, int]:
        samples = self._micro_batch(ranks)
        tokens = samples * (self.lengths.prompt + self.lengths.response - 1)
        width = 4 * self.spec.hidden_size + 3 * (self.spec.ffn_hidden_size // self.tensor_parallel)
        return {"activations": self.precision.activations * tokens * width, "logits": self._logits(samples)}
