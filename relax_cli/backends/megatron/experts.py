"""Mixture of experts (arXiv:1701.06538): Megatron's MoE layer, one MLP after another, routed as Hugging Face routes.

The best experts of a token are those with the largest softmax probabilities, which weigh what they compute. Of any
number of tokens none is dropped.

With `--router-replay` a token goes to the experts that it was generated with (rollout routing replay,
arXiv:2510.11370): they are weighed by the router as it is now, so that it still learns. Routes belong to a micro-batch.
They travel through the layers in the place of Megatron's padding mask, because that reaches the experts, also where
layers are recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import Tensor

from relax_cli.backends.megatron import parallel
from relax_cli.backends.megatron.micro_batch import MicroBatch
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
        "moe_router_load_balancing_type": "aux_loss" if layout.moe_aux_loss_coeff else "none",
        "moe_aux_loss_coeff": layout.moe_aux_loss_coeff,
        "moe_enable_routing_replay": layout.router_replay,
        "expert_model_parallel_size": layout.expert_model_parallel_size,
        "expert_tensor_parallel_size": 1,
        # Layers that differ are not stored as one tensor.
        "moe_layer_freq": [int(spec.experts_in(i) > 0) for i in range(spec.num_layers)] if spec.dense_layers else 1,
    }


class ExpertRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router; its own matrix product needs CUDA or TransformerEngine.

    Its auxiliary loss (arXiv:2101.03961) is `experts · Σ f·P` over the experts of a layer: `f` is the part of a
    micro-batch's assignments that an expert got, `P` its mean probability. Padding does not count.
    """

    share = 0.0
    """Part of the optimizer step's tokens, over all ranks, in the micro-batch that comes next."""
    reported: Tensor | float = 0.0
    """The auxiliary losses of an optimizer step, weighted by their shares."""
    routes_Nk: Tensor | None = None
    """Experts that the tokens of the next pass go to; negative where the router chooses."""
    other_routes: Tensor | float = 0.0
    """How many tokens of an optimizer step the router would have sent to other experts."""
    replayed: Tensor | float = 0.0
    """How many had routes."""
    in_turn = False
    """Whether tokens go to the next experts whatever the scores are, so that all experts get equally many."""

    def gating(self, input: Tensor) -> Tensor:
        """Scores of the experts `[S, B, experts]` in the router's type."""
        dtype = {"fp32": torch.float32, "fp64": torch.float64}[self.config.moe_router_dtype]
        return F.linear(input.to(dtype), self.weight.to(dtype))

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights `[N, experts]`, 0 of experts that are not chosen, and which are chosen."""
        if self.routes_Nk is not None:
            return self._replayed(self.routes_Nk, logits, padding_mask)
        if not self.in_turn:
            return super().routing(logits, padding_mask)  # type: ignore[no-any-return]
        probs_NE = logits.flatten(0, -2).softmax(-1)
        tokens, experts = probs_NE.shape
        next_Nk = torch.arange(tokens * self.topk).view(tokens, self.topk) % experts
        chosen_NE = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, next_Nk, torch.ones_like(next_Nk) > 0)
        return probs_NE * chosen_NE, chosen_NE

    def _replayed(self, routes_Nk: Tensor, logits: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        own_Nk = logits.detach().flatten(0, -2).topk(self.topk).indices
        known_N = routes_Nk[:, 0] >= 0
        if torch.is_grad_enabled():  # once, also where layers are recomputed
            other_N = (own_Nk.sort().values != routes_Nk.sort().values).any(-1) & known_N
            self.other_routes, self.replayed = self.other_routes + other_N.sum(), self.replayed + known_N.sum()
        replay = self.router_replay
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        replay.set_target_indices(torch.where(known_N[:, None], routes_Nk, own_Nk))
        try:
            return super().routing(logits, padding_mask)  # type: ignore[no-any-return]
        finally:
            replay.clear_indices()
            replay.clear_router_replay_action()

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        """Has the backward pass add the gradient of `aux_loss`; losses here carry their denominators themselves."""
        self.reported = self.reported + aux_loss.detach() * (self.share / aux_loss_coeff)
        return MoEAuxLossAutoScaler.apply(activation, aux_loss * self.share)  # type: ignore[no-any-return]


def accept_routes(decoder: torch.nn.Module) -> None:
    """Let the layers of a model take `routes` as `with_routes` makes them; each router finds its own in them."""

    def carry(_: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        routes = given.pop("routes", None)
        return args, given if routes is None else given | {"padding_mask": routes}

    def take(layer: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        carried, layer.router.routes_Nk = given.get("padding_mask"), None
        if carried is None or carried.dim() == 2:
            return args, given
        if layer.config.sequence_parallel:
            carried = carried.chunk(parallel.TENSOR.size, 1)[parallel.TENSOR.rank]
        first = 1 + layer.router.topk * (layer.layer_number - 1)
        routes_BSk = carried[..., first : first + layer.router.topk]
        layer.router.routes_Nk = routes_BSk.transpose(0, 1).flatten(0, 1).long()
        return args, given | {"padding_mask": carried[..., 0]}

    decoder.register_forward_pre_hook(carry, with_kwargs=True)
    for module in decoder.modules():
        if isinstance(module, MoELayer):
            module.register_forward_pre_hook(take, with_kwargs=True)


def with_routes(routes_BSr: Tensor, positions: int, padding_BS: Tensor | None) -> Tensor:
    """Which of the positions are padding, and the routes of all layers `[B, S, 1 + layers·k]`."""
    routes_BSr = F.pad(routes_BSr, (1, 0, 0, positions - routes_BSr.size(1)), value=-1)
    routes_BSr[..., 0] = 0 if padding_BS is None else padding_BS
    return routes_BSr


def picked_routes(carried: Tensor | None, states_N: Tensor) -> Tensor | None:
    """What `with_routes` made, of some states; none of them is padding."""
    if carried is None or carried.dim() == 2:
        return None
    picked_Nr = carried.transpose(0, 1).flatten(0, 1).index_select(0, states_N)
    # The first state, again and again at the end, is what makes equal shares under sequence parallelism.
    others_N = (states_N != 0).flip(0).cumsum(0).flip(0)
    picked_Nr[1:][others_N[1:] == 0] = -1
    return picked_Nr[None]


def other_routes(model: torch.nn.Module) -> float:
    """Part of the routes since the last call, over layers and ranks, that the model's routers would not have chosen."""
    routers = _routers(model)
    counts = [float(sum(r.other_routes for r in routers)), float(sum(r.replayed for r in routers))]
    other, replayed = parallel.all_reduce(counts, group=dist.group.WORLD)
    for router in routers:
        router.other_routes = router.replayed = 0.0
    return other / max(replayed, 1.0)


def _routers(model: torch.nn.Module) -> list[ExpertRouter]:
    return [module for module in model.modules() if isinstance(module, ExpertRouter)]


def route_in_turn(model: torch.nn.Module) -> None:
    """Give all experts of a model on the CPU equally many tokens from now on, where numbers mean nothing."""
    for router in _routers(model):
        router.in_turn = True


class Balance:
    """The auxiliary losses of a model in one optimizer step."""

    def __init__(self, model: torch.nn.Module, batches: Sequence[MicroBatch]) -> None:
        """Every rank makes one, where any does."""
        self._routers = _routers(model)
        self._total = max(1.0, parallel.all_reduce([sum(map(_tokens, batches))])[0])
        for router in self._routers:
            router.reported = 0.0

    def weigh(self, batch: MicroBatch | None) -> None:
        """Say which micro-batch goes through the layers now; None: one that does not count."""
        for router in self._routers:
            router.share = 0.0 if batch is None else _tokens(batch) / self._total

    def mean(self) -> float:
        """Over layers and this rank's tokens; those of all ranks add up."""
        return float(sum(router.reported for router in self._routers)) / len(self._routers)


def padding(states_N: Tensor, samples: int, positions: int) -> Tensor:
    """Positions `[B, S]` of right-padded samples behind the last state that predicts a response token."""
    last_B = states_N.new_zeros(samples).scatter_reduce(0, states_N % samples, states_N // samples, "amax")
    return torch.arange(positions, device=states_N.device) > last_B[:, None]


def _tokens(batch: MicroBatch) -> float:
    # The last token of a sample predicts nothing.
    return float((batch.prompt_lens_B + batch.response_lens_B - 1).sum())


def number_over_all_ranks(name: str, spec: ModelSpec) -> str:
    """The name of a parameter on this rank, with the number that its expert has among all experts."""
    layer, number, part = _of_expert(name)
    return name if number is None else f"{layer}{EXPERTS}{_experts_here(spec)[number]}.{part}"


def of_an_expert_here(name: str, spec: ModelSpec) -> str:
    """The name, over all ranks, of the same parameter of an expert that this rank has."""
    layer, _, part = _of_expert(name)
    return f"{layer}{EXPERTS}{_experts_here(spec)[0]}.{part}"


def owner_of(name: str, spec: ModelSpec) -> int | None:
    """The expert-parallel rank that has a parameter, by its name over all ranks; None where each has it."""
    _, number, _ = _of_expert(name)
    return None if number is None or parallel.EXPERT.size == 1 else number // len(_experts_here(spec))


def _of_expert(name: str) -> tuple[str, int | None, str]:
    layer, found, rest = name.partition(EXPERTS)
    number, _, part = rest.partition(".")
    return layer, int(number) if found else None, part


def _experts_here(spec: ModelSpec) -> range:
    assert isinstance(spec, MoeSpec), "only these have experts"
    count = spec.num_experts // parallel.EXPERT.size
    return range(parallel.EXPERT.rank * count, (parallel.EXPERT.rank + 1) * count)
