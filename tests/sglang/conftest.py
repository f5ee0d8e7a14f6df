"""The tiny models and the runner of several ranks are those of the integration tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "integration"))
