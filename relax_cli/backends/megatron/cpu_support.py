"""What Megatron-core needs to run where CUDA is absent. The only place that changes Megatron's modules.

Three of its modules create small tensors and gradient buffers on "the current CUDA device" by name. Where there is no
CUDA, the name `torch` inside these three modules is replaced by a view of torch in which the CUDA device is the CPU.
Everything else a CPU needs goes through public extension points: `use_cpu_initialization`, the layer spec
(`layers.py`), a save strategy (`checkpointing.py`), and clipping by torch's own functions (`optimizer.py`).
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import torch

from relax_cli.errors import EnvironmentFault, Problem

TESTED_VERSIONS = ("0.16.0", "0.16.1")
"""Versions of megatron-core whose sources the patch below was written against."""

PATCHED_MODULES = (
    "megatron.core.distributed.param_and_grad_buffer",  # gradient buffers
    "megatron.core.optimizer.optimizer",  # the constant loss scale of FP32Optimizer
    "megatron.core.pipeline_parallel.schedules",  # the token counter
)

FACTORIES = ("tensor", "zeros", "ones", "empty", "full")
"""Functions of torch these modules call with `device="cuda"`."""


def install() -> None:
    """Make Megatron-core's training stack run without CUDA. Does nothing with CUDA, or when already done.

    Raises:
        EnvironmentFault: no CUDA, and a megatron-core version that this was not written for.
    """
    if torch.cuda.is_available():
        return
    version = importlib.import_module("megatron.core").__version__
    if version not in TESTED_VERSIONS:
        raise EnvironmentFault(
            Problem(
                id="megatron-version-untested",
                message=f"megatron-core {version} has not been tested without CUDA",
                fix=f"pip install megatron-core=={TESTED_VERSIONS[-1]}",
                got=version,
                expected=" or ".join(TESTED_VERSIONS),
            )
        )
    view = _TorchOnCpu("torch")
    for name in PATCHED_MODULES:
        module = importlib.import_module(name)
        if module.torch is torch:
            module.torch = view  # type: ignore[attr-defined]


class _CudaOnCpu(types.ModuleType):
    """`torch.cuda` whose current device is the CPU."""

    @staticmethod
    def current_device() -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _TorchOnCpu(types.ModuleType):
    """`torch` whose CUDA device is the CPU."""

    cuda = _CudaOnCpu("torch.cuda")

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return _on_cpu(value) if name in FACTORIES else value


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def create(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return factory(*args, device="cpu" if device == "cuda" else device, **kwargs)

    return create
