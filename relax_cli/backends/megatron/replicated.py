"""Gradients of parameters that every tensor-parallel rank has whole, but uses for its own heads or channels only.

A rank then computes the part of the gradient that comes from its share, and the parts must be added up. Megatron-core
does that for norms of queries and keys, which it knows by name, and under sequence parallelism
(NVIDIA/Megatron-LM#7452). Other such parameters would drift apart silently, for example the output norm of linear
attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.nn import Module, Parameter

from relax_cli.backends.megatron import parallel


def partly_used(model: Module, config: Any) -> list[Parameter]:
    """Trained, whole parameters between a column-parallel and a row-parallel layer that Megatron-core leaves out."""
    by_megatron = {
        id(parameter)
        for name, parameter in model.named_parameters()
        if (config.qk_layernorm and any(part in name for part in ("q_layernorm", "k_layernorm")))
        or (config.sequence_parallel and getattr(parameter, "sequence_parallel", False))
    }
    found = {id(parameter): parameter for module in model.modules() for parameter in _between(module)}
    found |= {id(p): p for p in model.parameters() if getattr(p, "partly_used", False)}  # of adapters, see `lora`
    return [p for key, p in found.items() if p.requires_grad and key not in by_megatron]


def sum_gradients(parameters: Sequence[Parameter]) -> None:
    """Add up their gradients over tensor-parallel ranks; every rank calls this with the same parameters."""
    if parallel.TENSOR.size > 1:
        grads = [parameter.main_grad for parameter in parameters]  # type: ignore[attr-defined]
        for work in [dist.all_reduce(grad, group=parallel.TENSOR.group, async_op=True) for grad in grads]:
            work.wait()


def _between(module: Module) -> Iterator[Parameter]:
    """Whole parameters of a module that splits its input over ranks and joins its output again."""
    dimensions = {child: _split_dimension(child) for child in module.children()}
    if {0, 1} <= set(dimensions.values()):
        inner = [parameter for child, split in dimensions.items() if split is None for parameter in child.parameters()]
        yield from (p for p in [*module.parameters(recurse=False), *inner] if not _is_split(p))


def _split_dimension(module: Module) -> int | None:
    """0 for a column-parallel layer, 1 for a row-parallel one, None for others."""
    split = {int(parameter.partition_dim) for parameter in module.parameters(recurse=False) if _is_split(parameter)}  # type: ignore[attr-defined]
    return max(split, default=None)


def _is_split(parameter: Parameter) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))
