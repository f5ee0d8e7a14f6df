"""Imports torch, Megatron and TransferQueue in half the time: no garbage collection, and no compiler nobody calls."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FunctionType
from typing import Any

MARKERS = ("allow_in_graph", "assume_constant_result")
"""Functions of `torch.compiler` that load the compiler to mark a function for it."""

TRACKERS = ("wandb", "tensorboard")
"""Megatron imports them where they are installed, for functions that relax does not call."""

TRANSFER_QUEUE = ("transfer_queue",)
MEGATRON = ("relax_cli.backends.megatron.trainer", "torch._dynamo")
"""The latter because `torch.optim` imports it for the first optimizer."""
ROLLOUT = ("relax_cli.roles.rollout",)
LOCAL = (*MEGATRON, *ROLLOUT, "relax_cli.engine.transfer", "relax_cli.roles.actor", "relax_cli.roles.critic")
"""What a run in one process imports."""

HOOK = f"{__name__}.import_transfer_queue"


def import_transfer_queue() -> None:
    """What every process of a Ray of our own does first."""
    import_quickly(TRANSFER_QUEUE)


def import_quickly(names: Iterable[str]) -> None:
    """Import these modules; does nothing special for those that are imported already.

    Megatron decorates functions with `torch.compile`, which loads the compiler, and calls none of them here: they are
    compiled when they are called first. The objects of modules stay for good, so the garbage collector need not look
    at them, neither now nor in any pass of a later step.
    """
    missing = [name for name in names if name not in sys.modules]
    if not missing:
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        torch = import_module("torch")
        markers = dict.fromkeys(MARKERS, lambda function: function)
        hidden = {name: None for name in TRACKERS if name not in sys.modules}
        with (
            _replaced(vars(import_module("torch.compiler")), markers),
            _replaced(vars(torch), {"compile": functools.partial(_compile_later, torch.compile)}),
            _replaced(sys.modules, hidden),
        ):
            for name in missing:
                import_module(name)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _compile_later(compile_now: Callable[..., Any], model: Any = None, **options: Any) -> Any:
    """`torch.compile` as a decorator that costs nothing until the function is called."""
    if not isinstance(model, FunctionType):
        return compile_now(model, **options)

    @functools.cache
    def compiled() -> Callable[..., Any]:
        result: Callable[..., Any] = compile_now(model, **options)
        return result

    @functools.wraps(model)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


@contextmanager
def _replaced(names: dict[str, Any], values: dict[str, Any]) -> Iterator[None]:
    kept = {name: names[name] for name in values if name in names}
    names.update(values)
    try:
        yield
    finally:
        for name in values:
            if name in kept:
                names[name] = kept[name]
            else:
                names.pop(name, None)
