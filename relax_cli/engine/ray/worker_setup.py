"""What every process of a Ray of our own does first."""

from __future__ import annotations

from importlib import import_module

MARKERS = ("allow_in_graph", "assume_constant_result")
"""Functions of `torch.compiler` that load the compiler to mark a function for it."""

HOOK = f"{__name__}.import_transfer_queue"


def import_transfer_queue() -> None:
    """Import TransferQueue a second faster: its tensordict marks functions for a compiler that no run uses for them."""
    compiler = import_module("torch.compiler")
    kept = {name: vars(compiler)[name] for name in MARKERS}
    try:
        for name in MARKERS:
            setattr(compiler, name, lambda function: function)
        import_module("transfer_queue")
    finally:
        for name, marker in kept.items():
            setattr(compiler, name, marker)
