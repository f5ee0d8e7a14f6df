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

import torch
import torch.nn.functional as F
from torch import Tensor

from relax_cli.backends.rollout.embedded.kv_cache import CachedLayer, KVCache, Prefix, in_blocks
from relax_cli.backends.rollout.embedded.weights import Layer, Weights, load_weights
from relax_cli.config.placement import PREFILL_TOKENS
from relax_cli.models.hf import inverse_frequencies
from relax_cli.models.spec import ModelSpec, MoeSpec

BATCHED_COLUMNS = 128
"""Two batched products beat the fused kernel over so few columns, and for a single query over any number."""


class Decoder:
    """The model: `load` weights, then `prefill` and `step` over a `KVCache`."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._weights: Weights | None = None
        self._rotations_SD = rotations(spec, 0)
        self._eps = torch.tensor(spec.rms_eps)

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
            logits.append(
                self._forward(torch.tensor(tokens), part, torch.arange(begun, longest).expand(last - first, -1))
            )
        return torch.cat(logits)

    @torch.inference_mode()
    def step(self, tokens_B: Tensor, cache: KVCache) -> Tensor:
        """Append one token per row; logits of the next one `[B, V]`."""
        return self._forward(tokens_B[:, None], cache, cache.extend())

    def _forward(self, tokens_BP: Tensor, cache: KVCache, positions_BP: Tensor) -> Tensor:
        assert self._weights is not None, "no weights are loaded"
        rows, count = tokens_BP.shape
        columns = in_blocks(int(positions_BP.max()) + 1)
        cached = cache.layers(columns)
        places, newest = cache.places(positions_BP), cache.bias(columns)
        rotation, causal = self._rotation(positions_BP), _causal_mask(positions_BP, columns)
        x_NH = F.embedding(tokens_BP.flatten(), self._weights.embedding)
        for index, layer in enumerate(self._weights.layers):
            qkv = layer.qkv(_rms_norm(x_NH, layer.input_norm, self._eps))
            query = self._rotate_and_cache(qkv, layer, cached[index], places, rotation)
            if count > 1 and index < len(cached) - 1:
                out = _attend_prompts(query.view(rows, count, -1, *query.shape[1:]), cached[index], causal)
            else:
                if count > 1:
                    # Nothing after the last layer looks at earlier positions: only their keys and values matter.
                    ends = torch.arange(rows), cache.lengths_B - 1 - positions_BP[:, 0]
                    x_NH = x_NH.view(rows, count, -1)[ends]
                    query = query.view(rows, count, -1, *query.shape[1:])[ends].flatten(0, 1)
                out = _attend(query, cached[index], newest)
            x_NH = layer.output.plus(out.view(len(x_NH), -1), x_NH)
            h_NH = _rms_norm(x_NH, layer.post_norm, self._eps)
            if layer.router is None:
                x_NH = layer.mlps[0].plus(h_NH, x_NH)
                continue
            x_NH, chosen_Nk = self._mixture(h_NH, layer, x_NH)
            if cache.routes is not None:
                # The last layer has computed the newest position of each row only.
                at_BP = positions_BP if len(chosen_Nk) == positions_BP.numel() else cache.lengths_B[:, None] - 1
                chosen = chosen_Nk.view(*at_BP.shape, -1).to(torch.int16)
                cache.routes[torch.arange(rows)[:, None], at_BP, index] = chosen
        return self._weights.head(_rms_norm(x_NH, self._weights.norm, self._eps))

    def _rotation(self, positions_BP: Tensor) -> Tensor:
        """Unit complex numbers `[N, 1, (G + 2) * D/2]` for queries and key, ones for the value: such rows are fast."""
        one = self._rotations_SD.index_select(0, positions_BP.reshape(-1))[:, None]
        groups = self.spec.num_heads // self.spec.num_kv_heads
        return torch.cat((one.expand(-1, groups + 1, -1), torch.ones_like(one)), 1).view(len(one), 1, -1)

    def _mixture(self, h_NH: Tensor, layer: Layer, x_NH: Tensor) -> tuple[Tensor, Tensor]:
        """`x_NH` plus what the best experts of each row compute, weighed by their probabilities; and which they are."""
        assert isinstance(self.spec, MoeSpec), "layers with a router are of such models"
        assert layer.router is not None
        weights_Nk, chosen_Nk = layer.router(h_NH).softmax(-1).topk(self.spec.experts_per_token)
        if self.spec.normalized_routing:
            weights_Nk /= weights_Nk.sum(-1, keepdim=True)
        for expert in set(chosen_Nk.flatten().tolist()):
            rows, place = (chosen_Nk == expert).nonzero(as_tuple=True)
            x_NH.index_add_(0, rows, layer.mlps[expert](h_NH[rows]) * weights_Nk[rows, place, None])
        return x_NH, chosen_Nk

    def _rotate_and_cache(
        self, qkv: Tensor, layer: Layer, cached: CachedLayer, places: Tensor, rotation: Tensor
    ) -> Tensor:
        """Write new keys and values to their places in the cache; queries `[N * K, G, D]`, rotated where they are."""
        heads = qkv.view(len(places), -1, self.spec.head_dim)
        if layer.qk_norm is not None:
            rotated = heads[:, :-1]
            rotated.mul_(_rms_scale(rotated, self._eps)).mul_(layer.qk_norm)
        torch.view_as_complex(qkv.view(len(qkv), self.spec.num_kv_heads, -1, 2)).mul_(rotation)
        cached.all_keys.index_copy_(0, places, heads[:, -2])
        cached.all_values.index_copy_(0, places, heads[:, -1])
        return heads[:, :-2]


def rotations(spec: ModelSpec, length: int) -> Tensor:
    """`exp(i * position * frequency)` as complex64 `[length, D/2]`, computed as Hugging Face computes cos and sin."""
    angle_SD = torch.arange(length).float()[:, None] * inverse_frequencies(spec)
    return torch.complex(angle_SD.cos(), angle_SD.sin())


def _causal_mask(positions_BP: Tensor, columns: int) -> Tensor | None:
    """Additive mask `[P, S]` of the new positions; None where there is one, or the fused kernel needs none."""
    count, first = positions_BP.shape[1], int(positions_BP[0, 0])
    batched = columns <= BATCHED_COLUMNS
    if count == 1 or not (batched or first):
        return None
    return torch.full((count if batched else in_blocks(count), columns), -math.inf).triu_(1 + first)


def _rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """As `F.rms_norm`, which takes three times as long because it writes the squares to memory."""
    return (x * _rms_scale(x, eps)).mul_(weight)


def _rms_scale(x: Tensor, eps: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()


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


def _attend(query: Tensor, cached: CachedLayer, bias: Tensor) -> Tensor:
    """Attention of `[B * K, M, D]` by two batched products, with an additive mask `[B * K, 1, S]` or `[M, S]`."""
    scores = torch.baddbmm(bias, query, cached.keys.mT, alpha=query.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(-1), cached.values)


def _attend_prompts(query: Tensor, cached: CachedLayer, causal: Tensor | None) -> Tensor:
    """Attention of `[B, P, K, G, D]` over all columns up to the own one, in the same shape."""
    rows, count, heads, groups, width = query.shape
    # Key/value heads join the batch: [B * K, G, P, D].
    query = query.permute(0, 2, 3, 1, 4).flatten(0, 1)
    if causal is not None and causal.shape[1] <= BATCHED_COLUMNS:
        out = _attend(query.reshape(rows * heads, -1, width), cached, causal.repeat(groups, 1))
    else:
        # Whole blocks of queries, for the reason that there are whole blocks of columns. Query heads share keys and
        # values by a stride of 0.
        query = F.pad(query, (0, 0, 0, in_blocks(count) - count))
        keys, values = (x[:, None].expand(-1, groups, -1, -1) for x in (cached.keys, cached.values))
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=causal, is_causal=causal is None)
        out = out[:, :, :count]
    return out.reshape(rows, heads, groups, count, width).permute(0, 3, 1, 2, 4).contiguous()
