"""A decoder-only transformer for sampling on the CPU: Llama, Qwen2, Qwen3 and Qwen3-MoE in plain torch, float32.

Written for tokens per CPU second: packed weights with the activation, the product and the residual fused in,
keys rotated straight into the cache, grouped queries attended as extra query rows (keys and values are not
repeated), and the last layer of a prompt computed for its last position only.

Legend: `B` rows, `P` positions of one pass, `N = B * P`, `S` cached positions, `H` hidden, `D` head width,
`K` key/value heads, `G` query heads per key/value head, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from relax_cli.backends.rollout.embedded.kv_cache import KVCache, Prefix, in_blocks
from relax_cli.backends.rollout.embedded.weights import Layer, Weights, load_weights
from relax_cli.config.engine_limits import PREFILL_TOKENS
from relax_cli.models.hf import inverse_frequencies
from relax_cli.models.spec import ModelSpec, MoeSpec

BATCHED_COLUMNS = 128
"""Two batched products beat the fused kernel over so few columns, and for a single query over any number."""


@dataclass(frozen=True)
class _Pass:
    """What all layers of one forward pass share."""

    cache: KVCache
    rows: int
    positions: int
    queries: int
    """How many queries of each row and head are computed; those beyond `positions` are dropped."""
    columns: int
    """How many columns of the cache are attended to."""
    places: Tensor
    """Where the new keys and values go, `[B * P * K]`."""
    rotation: Tensor
    """Unit complex numbers `[B, P, 1, D/2]`, or `[1, P, 1, D/2]` where the rows are at the same positions."""


class Decoder:
    """The model: `load` weights, then `prefill` and `step` over a `KVCache`."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._weights: Weights | None = None
        self._rotations_SD = rotations(spec, 0)

    @torch.inference_mode()
    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Replace every weight, see `load_weights`; after an error there are no weights."""
        # The old ones go first, so that two models never exist side by side.
        self._weights = None
        self._weights = load_weights(self.spec, named)

    @torch.inference_mode()
    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        cache: KVCache,
        prefixes: Sequence[Prefix | None] = (),
        *,
        max_tokens: int = PREFILL_TOKENS,
    ) -> Tensor:
        """Fill `cache` with the prompts, about `max_tokens` at a time; logits of the last tokens `[B, V]`.

        Args:
            prefixes: what is known of the beginning of each prompt, less than all of it; rows that are computed
                together compute as many tokens as the one of which least is known.
        """
        lengths = [len(prompt) for prompt in prompts]
        if len(self._rotations_SD) < cache.capacity[1]:
            self._rotations_SD = rotations(self.spec, cache.capacity[1])
        logits = []
        for first, last in _together(lengths, max_tokens):
            part, longest = cache.part(first, last), max(lengths[first:last])
            part.begin(lengths[first:last])
            known = dict(enumerate(prefixes[first:last]))
            begun = min(part.put(row, known.get(row)) for row in range(last - first))
            tokens = [(*prompt[begun:], *(0,) * (longest - len(prompt))) for prompt in prompts[first:last]]
            logits.append(self._forward(torch.tensor(tokens), part, torch.arange(begun, longest)[None]))
        return torch.cat(logits)

    @torch.inference_mode()
    def step(self, tokens_B: Tensor, cache: KVCache) -> Tensor:
        """Append one token per row; logits of the next one `[B, V]`."""
        return self._forward(tokens_B[:, None], cache, cache.extend())

    def _forward(self, tokens_BP: Tensor, cache: KVCache, positions: Tensor) -> Tensor:
        assert self._weights is not None, "no weights are loaded"
        eps = self.spec.rms_eps
        rows, count = tokens_BP.shape
        columns = in_blocks(int(positions.max()) + 1)
        rotation = self._rotations_SD.index_select(0, positions.flatten()).view(*positions.shape, 1, -1)
        batched = count == 1 or columns <= BATCHED_COLUMNS
        queries = count if batched else in_blocks(count)
        this = _Pass(cache, rows, count, queries, columns, cache.places(positions), rotation)
        step_bias = cache.bias(columns)
        bias = step_bias if count == 1 else _causal(int(positions[0, 0]), queries, columns, batched=batched)
        x_NH = F.embedding(tokens_BP.flatten(), self._weights.embedding)
        for index, layer in enumerate(self._weights.layers):
            qkv = layer.qkv(_rms_norm(x_NH, layer.input_norm, eps))
            query, keys, values = self._rotate_and_cache(qkv, layer, index, this)
            if count > 1 and index == self.spec.num_layers - 1:
                # Nothing after the last layer looks at earlier positions: only their keys and values matter.
                ends_B, numbers_B = cache.lengths_B - 1 - positions[0, 0], torch.arange(rows)
                x_NH = x_NH.view(rows, count, -1)[numbers_B, ends_B]
                query, bias = query[numbers_B, :, :, ends_B].unsqueeze(3), step_bias
            out = _attend(query, keys, values, bias)
            # [B, K, G, P, D] as [N, K * G * D]
            out_NH = out[:, :, :, :count].permute(0, 3, 1, 2, 4).reshape(len(x_NH), -1)
            x_NH = layer.output.plus(out_NH, x_NH)
            h_NH = _rms_norm(x_NH, layer.post_norm, eps)
            x_NH = self._mixture(h_NH, layer, x_NH) if layer.router is not None else layer.mlps[0].plus(h_NH, x_NH)
        return self._weights.head(_rms_norm(x_NH, self._weights.norm, eps))

    def _mixture(self, h_NH: Tensor, layer: Layer, x_NH: Tensor) -> Tensor:
        """`x_NH` plus what the best experts of each row compute, weighed by their probabilities."""
        assert isinstance(self.spec, MoeSpec), "layers with a router are of such models"
        assert layer.router is not None
        weights_Nk, chosen_Nk = F.linear(h_NH, layer.router).softmax(-1).topk(self.spec.experts_per_token)
        if self.spec.normalized_routing:
            weights_Nk /= weights_Nk.sum(-1, keepdim=True)
        for expert in set(chosen_Nk.flatten().tolist()):
            rows, place = (chosen_Nk == expert).nonzero(as_tuple=True)
            x_NH.index_add_(0, rows, layer.mlps[expert](h_NH[rows]) * weights_Nk[rows, place, None])
        return x_NH

    def _rotate_and_cache(self, qkv: Tensor, layer: Layer, index: int, this: _Pass) -> tuple[Tensor, Tensor, Tensor]:
        """Write new keys and values to the cache.

        Returns:
            rotated queries `[B, K, G, P, D]`, and all keys and values of the cache `[B, K, S, D]`.
        """
        c, cache = self.spec, this.cache
        heads = qkv.view(this.rows, this.positions, -1, c.head_dim)
        rotated, value = heads.split_with_sizes((c.num_heads + c.num_kv_heads, c.num_kv_heads), dim=2)
        if layer.qk_norm is not None:
            rotated = _rms_norm(rotated, layer.qk_norm, c.rms_eps)
        query, key = rotated.split_with_sizes((c.num_heads, c.num_kv_heads), dim=2)
        layers = cache.keys[index], cache.values[index]
        new_keys = torch.view_as_real(_as_complex(key) * this.rotation)
        for target, new in zip(layers, (new_keys, value), strict=True):
            target.view(-1, c.head_dim).index_copy_(0, this.places, new.reshape(-1, c.head_dim))
        groups = c.num_heads // c.num_kv_heads
        rotated_query = torch.empty(this.rows, c.num_kv_heads, groups, this.queries, c.head_dim)
        query = torch.unflatten(query, 2, (c.num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
        out = _as_complex(rotated_query)[:, :, :, : this.positions]
        torch.mul(_as_complex(query), this.rotation.view(-1, 1, 1, this.positions, c.head_dim // 2), out=out)
        keys, values = (layer[:, :, : this.columns] for layer in layers)
        return rotated_query, keys, values


def rotations(spec: ModelSpec, length: int) -> Tensor:
    """`exp(i * position * frequency)` as complex64 `[length, D/2]`, computed as Hugging Face computes cos and sin."""
    angle_SD = torch.arange(length).float()[:, None] * inverse_frequencies(spec)
    return torch.complex(angle_SD.cos(), angle_SD.sin())


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `F.rms_norm`, which takes three times as long because it writes the squares to memory."""
    size = x.shape[-1]
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = torch.addcmul(norm.new_full((), eps), norm, norm, value=1 / size).rsqrt_()
    return (x * scale).mul_(weight)


def _together(lengths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Ranges of prompts to compute in one pass: at most `most` tokens, and with the same kind of attention."""
    first = longest = 0
    for place, length in enumerate(lengths):
        longest_now = max(longest, length)
        fits = (place + 1 - first) * longest_now <= most
        if place > first and not (fits and (longest <= BATCHED_COLUMNS) == (length <= BATCHED_COLUMNS)):
            yield first, place
            first, longest_now = place, length
        longest = longest_now
    yield first, len(lengths)


def _causal(first: int, queries: int, columns: int, *, batched: bool) -> Tensor | None:
    """Additive mask `[P, S]` of queries from position `first` on; None where the fused kernel needs none."""
    return torch.full((queries, columns), -math.inf).triu_(1 + first) if batched or first else None


def _attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """Attention of `[B, K, G, P, D]` over `[B, K, S, D]`.

    Args:
        bias: additive mask `[B * K, 1, S]` or `[P, S]`; causal if None.
    """
    groups, positions, width = query.shape[2:]
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    if bias is not None and (positions == 1 or keys.shape[1] <= BATCHED_COLUMNS):
        bias = bias if bias.dim() == 3 else bias.repeat(groups, 1)
        scores = torch.baddbmm(bias, query.view(-1, groups * positions, width), keys.mT, alpha=width**-0.5)
        return torch.bmm(scores.softmax(-1), values).view(query.shape)
    # Key/value heads join the batch, so that query heads share them by a stride of 0.
    out = F.scaled_dot_product_attention(
        query.flatten(0, 1),
        keys[:, None].expand(-1, groups, -1, -1),
        values[:, None].expand(-1, groups, -1, -1),
        attn_mask=bias,
        is_causal=bias is None,
    )
    return out.view(query.shape)


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(torch.unflatten(x, -1, (-1, 2)))
