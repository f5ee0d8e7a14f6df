"""Global settings of this process that code of users may change, restored after it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_TORCH = (
    ("is_grad_enabled", "set_grad_enabled"),
    ("get_default_dtype", "set_default_dtype"),
    ("get_default_device", "set_default_device"),
    ("get_num_threads", "set_num_threads"),
    ("get_float32_matmul_precision", "set_float32_matmul_precision"),
    ("are_deterministic_algorithms_enabled", "use_deterministic_algorithms"),
    ("is_anomaly_enabled", "set_anomaly_enabled"),
)


@contextmanager
def settings_kept() -> Iterator[None]:
    """Restore torch's global settings and the working folder after the block, as far as it changed them."""
    folder, torch = _working_folder(), sys.modules.get("torch")
    before: dict[str, Any] = {} if torch is None else {read: getattr(torch, read)() for read, _ in _TORCH}
    try:
        yield
    finally:
        for read, write in _TORCH if torch is not None else ():
            if getattr(torch, read)() != before[read]:
                getattr(torch, write)(before[read])
        if folder is not None and _working_folder() != folder:
            os.chdir(folder)


def _working_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None
