"""The fp32 numbers that Adam updates: which of them this rank has, and where.

Parameters in fp32 are updated themselves. Parameters in lower precision have a master copy. With
`--optimizer-cpu-offload` every parameter has one, in host memory, together with its moments. With
`--use-distributed-optimizer` each data- or context-parallel rank has masters and moments of its share of the parameters
only, and sends the updated parameters to the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from torch import Tensor

from relax_cli.backends.device import host_buffer
from relax_cli.backends.megatron import parallel

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Master:
    """One parameter that this rank updates."""

    index: int
    """Place among all parameters of the model."""
    parameter: torch.nn.Parameter
    values: Tensor
    """fp32; the parameter itself where that is fp32 and stays on its device."""
    host_grad: Tensor | None
    """Where the gradient is copied to for an update in host memory."""

    @property
    def is_copy(self) -> bool:
        """Whether the parameter has to be set after an update."""
        return self.values is not self.parameter

    @property
    def is_more_exact(self) -> bool:
        """Whether the master cannot be made from the parameter again."""
        return self.parameter.dtype != torch.float32


class Masters:
    """The masters of this rank, in the order of the parameters."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, on_host: bool, shared_out: bool) -> None:
        self.on_host = on_host
        self.parameters = list(parameters)
        self.shared_out = shared_out and parallel.DATA.size * parallel.CONTEXT.size > 1
        self.owners = _owners(self.parameters, shared_out=self.shared_out)
        self.held = [
            self._master(index, parameter)
            for index, (parameter, owner) in enumerate(zip(self.parameters, self.owners, strict=True))
            if owner is None or owner == dist.get_rank()
        ]
        self._by_id = {id(master.parameter): master for master in self.held}

    def values_of(self, parameters: Sequence[torch.nn.Parameter]) -> list[Tensor]:
        """What Adam updates in the place of `parameters`; only those of this rank."""
        return [self._by_id[id(parameter)].values for parameter in parameters if id(parameter) in self._by_id]

    def take_gradients(self) -> None:
        """Hand the reduced gradients to Adam."""
        for master in self.held:
            grad: Tensor = master.parameter.main_grad  # type: ignore[attr-defined]
            on_host = master.host_grad
            master.values.grad = grad if on_host is None else on_host.copy_(grad, non_blocking=True)
        self._wait()

    def set_parameters(self) -> None:
        """Round the updated masters to the parameters, on every rank."""
        for master in self.held:
            if master.is_copy:
                master.parameter.data.copy_(master.values, non_blocking=True)
        sent = [
            dist.broadcast(parameter.data, owner, group=parallel.replica_group(parameter), async_op=True)
            for parameter, owner in zip(self.parameters, self.owners, strict=True)
            if owner is not None
        ]
        for work in sent:
            work.wait()
        self._wait()

    def refresh(self) -> None:
        """Set the masters from parameters that were changed from outside."""
        for master in self.held:
            if master.is_copy:
                master.values.copy_(master.parameter.data)

    def sharded(self, model_state: dict[str, Any], adam: torch.optim.Optimizer) -> dict[str, Any]:
        """Moments and masters as `dist_checkpointing` wants them; keys follow the parameters' names, not the ranks."""
        names = get_param_id_to_sharded_param_map(model_state, iter(self.parameters))
        moments, masters = {}, {}
        for master in self.held:
            like = names[master.index]
            if self.shared_out:
                # Every rank writes what only it has, where otherwise the first one writes for all.
                like = replace(like, replica_id=(*like.replica_id[:-1], 0))
            moments[master.index] = {
                kind: make_sharded_optimizer_tensor(like, adam.state[master.values][kind], f"optimizer.state.{kind}")
                for kind in MOMENTS
            }
            if master.is_more_exact:
                prefix = "optimizer.state.fp32_param"
                masters[master.index] = make_sharded_optimizer_tensor(like, master.values, prefix)
        return {"state": moments, "masters": masters}

    def load(self, loaded: dict[str, Any], adam: torch.optim.Optimizer) -> None:
        """Take over what `sharded` requested; the parameters are loaded already."""
        for master in self.held:
            for kind in MOMENTS:
                adam.state[master.values][kind].copy_(loaded["state"][master.index][kind])
            # What was loaded may be the master itself: it must not be set from the parameter first.
            if master.is_more_exact:
                master.values.copy_(loaded["masters"][master.index])
            elif master.is_copy:
                master.values.copy_(master.parameter.data)

    def _master(self, index: int, parameter: torch.nn.Parameter) -> Master:
        if self.on_host:
            values = host_buffer(parameter.data.float()).copy_(parameter.data)
            return Master(index, parameter, values, host_buffer(parameter.data.float()))
        values = parameter if parameter.dtype == torch.float32 else parameter.detach().float()
        return Master(index, parameter, values, None)

    def _wait(self) -> None:
        """Copies between host and device are under way when they return."""
        if self.on_host and self.parameters[0].is_cuda:
            torch.cuda.synchronize(self.parameters[0].device)


def _owners(parameters: Sequence[torch.nn.Parameter], *, shared_out: bool) -> list[int | None]:
    """The rank that updates each parameter for all that have it; None where each of them does. The same on all these
    ranks, and about equally much for each."""
    owners: list[int | None] = [None] * len(parameters)
    # Shared-out experts are counted apart: a rank does not know those of others.
    loads: dict[tuple[bool, int], int] = defaultdict(int)
    for index in sorted(range(len(parameters)), key=lambda index: -parameters[index].numel()) if shared_out else ():
        kind = parallel.is_shared_out(parameters[index])
        ranks = dist.get_process_group_ranks(parallel.replica_group(parameters[index]))
        load, owner = min((loads[kind, rank], rank) for rank in ranks)
        owners[index] = owner
        loads[kind, owner] = load + parameters[index].numel()
    return owners
