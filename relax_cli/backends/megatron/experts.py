"""Mixture of experts (arXiv:1701.06538): Megatron's MoE layer, one MLP after another, routed as Hugging Face routes.

The best experts of a token are those with the largest softmax probabilities, which weigh what they compute. Of any
number of tokens none is dropped.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from relax_cli.backends.megatron import parallel
from relax_cli.config.schema import ParallelSection
from relax_cli.models.convert import EXPERTS
from relax_cli.models.spec import ModelSpec, MoeSpec


def expert_settings(spec: ModelSpec, layout: ParallelSection) -> dict[str, Any]:
    """Megatron's description of the experts of `spec`; nothing for a dense model."""
    if not isinstance(spec, MoeSpec):
        return {}
    return {
        "num_moe_experts": spec.num_experts,
        "moe_ffn_hidden_size": spec.expert_ffn_size,
        "moe_router_topk": spec.experts_per_token,
        # The softmax over the best experts alone is the one over all, divided by the sum of the best.
        "moe_router_pre_softmax": not spec.normalized_routing,
        "moe_router_dtype": layout.moe_router_dtype,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": layout.expert_model_parallel_size,
        # Layers that differ are not stored as one tensor.
        "moe_layer_freq": [int(spec.experts_in(i) > 0) for i in range(spec.num_layers)] if spec.dense_layers else 1,
    }


class ExpertRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router; its own matrix product needs CUDA or TransformerEngine."""

    def gating(self, input: Tensor) -> Tensor:
        """Scores of the experts `[S, B, experts]` in the router's type."""
        dtype = {"fp32": torch.float32, "fp64": torch.float64}[self.config.moe_router_dtype]
        return F.linear(input.to(dtype), self.weight.to(dtype))


def number_over_all_ranks(name: str, spec: ModelSpec) -> str:
    """The name of a parameter on this rank, with the number that its expert has among all experts."""
    layer, number, part = _of_expert(name)
    return name if number is None else f"{layer}{EXPERTS}{_first_expert(spec) + number}.{part}"


def of_an_expert_here(name: str, spec: ModelSpec) -> str:
    """The name, over all ranks, of the same parameter of an expert that this rank has."""
    layer, _, part = _of_expert(name)
    return f"{layer}{EXPERTS}{_first_expert(spec)}.{part}"


def owner_of(name: str, spec: ModelSpec) -> int | None:
    """The expert-parallel rank that has a parameter, by its name over all ranks; None where each has it."""
    _, number, _ = _of_expert(name)
    ranks = parallel.expert_parallel_size()
    return None if number is None or ranks == 1 else number * ranks // _experts(spec)


def _of_expert(name: str) -> tuple[str, int | None, str]:
    layer, found, rest = name.partition(EXPERTS)
    number, _, part = rest.partition(".")
    return layer, int(number) if found else None, part


def _first_expert(spec: ModelSpec) -> int:
    return parallel.expert_parallel_rank() * _experts(spec) // parallel.expert_parallel_size()


def _experts(spec: ModelSpec) -> int:
    assert isinstance(spec, MoeSpec), "only these have experts"
    return spec.num_experts
