"""Numerics tests reuse the tiny models and the runners of the integration tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "integration"))
