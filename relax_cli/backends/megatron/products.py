"""Matrix products of training on an AMD CPU, by oneDNN instead of MKL.

torch computes float32 products with MKL, which has no AVX-512 kernels for AMD: oneDNN, which torch has for other types,
takes half the time there. Both sum in float32, in another order.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.library import Library

LEAST_NUMBERS = 1 << 14
"""Of the left factor. Below, oneDNN's preparations cost more than its kernels save."""


def is_amd(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's CPU is by AMD and has AVX-512, and torch offers oneDNN's product."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return wide and cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text("utf-8")


@functools.cache
def install() -> Library:
    """Compute `torch.mm` by oneDNN from now on, wherever it is called from, as long as the result lives."""
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # That there was another kernel before is the purpose.
        warnings.simplefilter("ignore", UserWarning)
        library.impl("mm", product, "CPU")  # type: ignore[no-untyped-call]
    return library


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`."""
    if a.dtype is torch.float32 and b.dtype is torch.float32 and a.numel() >= LEAST_NUMBERS and b.numel():
        out: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
        return out
    return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))
