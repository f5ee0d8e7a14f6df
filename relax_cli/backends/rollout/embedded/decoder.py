"""A decoder-only transformer for sampling on the CPU: Llama, Qwen2, Qwen3 and Qwen3-MoE in plain torch, float32.

Written for tokens per CPU second: packed weights with the activation, the product and the residual fused in,
keys rotated straight into the cache, grouped queries attended as extra query rows (keys and values are not
repeated), and the last layer of a prompt computed for its last position only.

Legend: `B` rows, `P` positions of one pass, `N = B * P`, `S` cached positions, `H` hidden, `D` head width,
`K` key/value heads, `G` query heads per key/value head, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from relax_cli.backends.rollout.embedded.kv_cache import KVCache, Prefix
from relax_cli.backends.rollout.embedded.weights import Layer, Weights, load_weights
from relax_cli.config.engine_limits import PREFILL_TOKENS
from relax_cli.models.hf import inverse_frequencies
from relax_cli.models.spec import ModelSpec, MoeSpec


@dataclass(frozen=True)
class _Pass:
    """What all layers of one forward pass share."""

    cache: KVCache
    rows: int
    positions: int
    first: int
    """Column of the cache at which the new positions begin."""
    rotation: Tensor
    """Unit complex numbers `[P, D/2]`, or `[B, 1, P, D/2]` where rows are padded."""


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
        longest = max(lengths)
        cache.reset(lengths)
        if len(self._rotations_SD) < cache.capacity[1]:
            self._rotations_SD = rotations(self.spec, cache.capacity[1])
        tokens_BP = torch.tensor([(0,) * (longest - len(prompt)) + tuple(prompt) for prompt in prompts])
        rows = max(1, max_tokens // longest)
        parts = [(first, min(first + rows, len(prompts))) for first in range(0, len(prompts), rows)]
        logits = []
        for first, last in parts:
            part = cache.part(first, last)
            known = dict(enumerate(prefixes[first:last]))
            part.length = min(part.put(row, known.get(row)) for row in range(last - first))
            logits.append(self._forward(tokens_BP[first:last, part.length :], part))
        cache.length = longest
        return torch.cat(logits)

    @torch.inference_mode()
    def step(self, tokens_B: Tensor, cache: KVCache) -> Tensor:
        """Append one token per row; logits of the next one `[B, V]`."""
        return self._forward(tokens_B[:, None], cache)

    def _forward(self, tokens_BP: Tensor, cache: KVCache) -> Tensor:
        assert self._weights is not None, "no weights are loaded"
        eps, hidden = self.spec.rms_eps, (self.spec.hidden_size,)
        rows, positions = tokens_BP.shape
        first, cache.length = cache.length, cache.length + positions
        mask = cache.prompt_mask(positions, self.spec.num_kv_heads) if positions > 1 else cache.step_mask()
        this = _Pass(cache, rows, positions, first, self._rotation(cache, first))
        x_NH = F.embedding(tokens_BP.flatten(), self._weights.embedding)
        for index, layer in enumerate(self._weights.layers):
            qkv = layer.qkv(F.rms_norm(x_NH, hidden, layer.input_norm, eps))
            query, keys, values = self._rotate_and_cache(qkv, layer, index, this)
            if positions > 1 and index == self.spec.num_layers - 1:
                # Nothing after the last layer looks at earlier positions: only their keys and values matter.
                x_NH = x_NH.view(rows, positions, -1)[:, -1].contiguous()
                query, mask = query[:, :, :, -1:], cache.step_mask()
            x_NH = layer.output.plus(_attend(query, keys, values, mask), x_NH)
            h_NH = F.rms_norm(x_NH, hidden, layer.post_norm, eps)
            x_NH = self._mixture(h_NH, layer, x_NH) if layer.router is not None else layer.mlps[0].plus(h_NH, x_NH)
        return self._weights.head(F.rms_norm(x_NH, hidden, self._weights.norm, eps))

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
            rotated = F.rms_norm(rotated, (c.head_dim,), None, c.rms_eps).mul_(layer.qk_norm)
        query, key = rotated.split_with_sizes((c.num_heads, c.num_kv_heads), dim=2)
        keys = cache.keys[index, : this.rows, :, : cache.length]
        values = cache.values[index, : this.rows, :, : cache.length]
        values[:, :, this.first :] = value.transpose(1, 2)
        torch.mul(_as_complex(key.transpose(1, 2)), this.rotation, out=_as_complex(keys[:, :, this.first :]))
        query = torch.unflatten(query, 2, (c.num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
        rotated_query = torch.empty(query.shape)
        torch.mul(_as_complex(query), this.rotation.unsqueeze(-3), out=_as_complex(rotated_query))
        return rotated_query, keys, values

    def _rotation(self, cache: KVCache, first: int) -> Tensor:
        if cache.starts is None:
            return self._rotations_SD[first : cache.length]
        positions_BP = torch.arange(first, cache.length) - cache.starts[:, None]
        return self._rotations_SD[positions_BP.clamp_(min=0)].unsqueeze(1)


def rotations(spec: ModelSpec, length: int) -> Tensor:
    """`exp(i * position * frequency)` as complex64 `[length, D/2]`, computed as Hugging Face computes cos and sin."""
    angle_SD = torch.arange(length).float()[:, None] * inverse_frequencies(spec)
    return torch.complex(angle_SD.cos(), angle_SD.sin())


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of `[B, K, G, P, D]` over `[B, K, S, D]`: `[N, K * G * D]`; causal where there is no mask."""
    rows, kv_heads, groups, positions, width = query.shape
    if positions == 1 and groups == 1:
        out = F.scaled_dot_product_attention(query.squeeze(3), keys, values, attn_mask=mask)
        return out.reshape(rows, kv_heads * width)
    if positions == 1:
        # Two batched products beat the fused kernel, which is made for many queries.
        bias = query.new_zeros(()) if mask is None else mask.expand(-1, kv_heads, -1, -1).flatten(0, 1)
        scores = torch.baddbmm(
            bias,
            query.view(-1, groups, width),
            keys.flatten(0, 1).mT,
            beta=float(mask is not None),
            alpha=width**-0.5,
        )
        return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(rows, kv_heads * groups * width)
    # Key/value heads join the batch, so that query heads share them by a stride of 0.
    out = F.scaled_dot_product_attention(
        query.flatten(0, 1),
        keys.flatten(0, 1)[:, None].expand(-1, groups, -1, -1),
        values.flatten(0, 1)[:, None].expand(-1, groups, -1, -1),
        attn_mask=mask,
        is_causal=mask is None,
    )
    out = out.view(rows, kv_heads * groups, positions, width).transpose(1, 2)
    return out.reshape(rows * positions, kv_heads * groups * width)


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(torch.unflatten(x, -1, (-1, 2)))
