"""What Megatron-core needs to train models on a CPU. The only place that changes Megatron's modules.

Some of its modules create small tensors and buffers on "the current CUDA device" by name. In a process whose models
are on the CPU, the name `torch` inside these modules is replaced by a view of torch in which the CUDA device is the
CPU, and the functions that read and set the generator of the CUDA device do nothing. Everything else a CPU needs goes
through public extension points: `use_cpu_initialization`, the layer spec (`layers.py`), the steps of saving and loading
(`checkpointing.py`), and our own optimizer (`optimizer.py`).
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import torch

from relax_cli.backends.megatron import products
from relax_cli.config.versions import CPU_MEGATRON, NEWEST_MEGATRON
from relax_cli.errors import MACHINE_THEME, EnvironmentFault, problem_kind

UNTESTED = problem_kind(
    "megatron-version-untested",
    MACHINE_THEME,
    "megatron-core runs without CUDA only in the versions that relax was written for.",
)

PATCHED_MODULES = (
    "megatron.core.distributed.param_and_grad_buffer",  # gradient buffers
    "megatron.core.pipeline_parallel.p2p_communication",  # what pipeline stages receive
    "megatron.core.pipeline_parallel.schedules",  # the token counter
    "megatron.core.tensor_parallel.layers",  # sequence parallelism
    "megatron.core.tensor_parallel.mappings",  # sequence parallelism
    "megatron.core.utils",  # the buffer that sequence parallelism gathers into
)

FACTORIES = ("tensor", "zeros", "ones", "empty", "full")
"""Functions of torch these modules call with `device="cuda"`."""


def install() -> None:
    """Make Megatron-core's training stack run on the CPU, in this process for good. Does nothing when already done.
    Raises EnvironmentFault: a megatron-core version that this was not written for."""
    version = importlib.import_module("megatron.core").__version__
    if version not in CPU_MEGATRON:
        raise EnvironmentFault(
            UNTESTED(
                f"megatron-core {version} has not been tested on a CPU",
                fix=f"pip install megatron-core=={NEWEST_MEGATRON}",
                got=version,
                expected=" or ".join(CPU_MEGATRON),
            )
        )
    cuda = _view(torch.cuda, current_device=lambda: torch.device("cpu"), synchronize=_nothing, current_stream=_nothing)
    view = _view(torch, cuda=cuda, **{name: _on_cpu(getattr(torch, name)) for name in FACTORIES})
    for name in PATCHED_MODULES:
        module = importlib.import_module(name)
        if module.torch is torch:
            module.torch = view  # type: ignore[attr-defined]
    # It saves and restores the CUDA generator around activations that are computed again. Models here draw nothing.
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.empty(0, dtype=torch.uint8)  # type: ignore[attr-defined]
    random._set_cuda_rng_state = _nothing  # type: ignore[attr-defined]
    # It copies counts of tokens from the CUDA device to the host, on a stream of its own.
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher").MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = object()
    dispatcher._maybe_dtoh_and_synchronize = _counts_as_lists
    products.install_fp32()
    # The tracker for inference has no states of its own, so that "with the generator of this region" means nothing.
    random.initialize_rng_tracker(inference_rng_tracker=True)


def _counts_as_lists(self: Any, _: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
    """Counts of tokens are on the CPU already, but collectives want numbers."""
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        counts = getattr(self, name)
        if isinstance(counts, torch.Tensor):
            setattr(self, name, counts.numpy())
    return tokens_per_expert


def _nothing(*_: Any, **__: Any) -> None:
    """No work of a device is under way, and it has no generator."""


def _view(module: types.ModuleType, **changed: Any) -> types.ModuleType:
    """A module with some of its names changed."""
    view = types.ModuleType(module.__name__)
    vars(view).update(vars(module) | changed)
    return view


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def create(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return factory(*args, device="cpu" if device == "cuda" else device, **kwargs)

    return create
