"""Attributes that import their module on first use. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any


def lazy_attributes(module: str, **references: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose import must be cheap.

    For example `__getattr__ = lazy_attributes(__name__, policy_loss="relax_mine.loss:policy_loss")`: torch is imported
    when `relax_mine.policy_loss` is read.
    """

    def load(name: str) -> Any:
        if name not in references:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return resolve_name(references[name])

    return load
