"""The script that writes pages of docs/ from the code."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "make_docs.py"


@functools.cache
def make_docs() -> ModuleType:
    """`scripts/make_docs.py` as a module."""
    spec = importlib.util.spec_from_file_location("make_docs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
