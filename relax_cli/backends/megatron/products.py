"""Matrix products of training on a CPU: by oneDNN instead of MKL on AMD's, and of numbers rounded to bf16 on request.

torch computes float32 products with MKL, which has no AVX-512 kernels for AMD: oneDNN, which torch has for other types,
takes half the time there. Both sum in float32, in another order.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.library import Library

from relax_cli.errors import EnvironmentFault
from relax_cli.preflight.machine import has_bf16_products
from relax_cli.preflight.rules.machine import SLOW_BF16, lacking_bf16, no_bf16_products

LEAST_NUMBERS = 1 << 14
"""Of the left factor. Below, oneDNN's preparations cost more than its kernels save."""
WIDE = 16
"""Results with so many columns for each number of a sum are logits. They keep their digits: as bf16 they would double
the error of log-probabilities, and to convert them would cost most of what is saved."""

Product = Callable[[Tensor, Tensor], Tensor]


def is_amd(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's CPU is by AMD and has AVX-512, and torch offers oneDNN's product."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return wide and cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text("utf-8")


@functools.lru_cache(maxsize=1)
def install(kernel: Product) -> Library:
    """Compute `torch.mm` by `kernel`, wherever it is called from, until another is installed or this is forgotten."""
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # That there was another kernel before is the purpose.
        warnings.simplefilter("ignore", UserWarning)
        library.impl("mm", kernel, "CPU")  # type: ignore[no-untyped-call]
    return library


def install_fp32() -> None:
    """Compute `torch.mm` of fp32 numbers by what is fastest here."""
    if is_amd():
        install(product)
    else:
        install.cache_clear()


def install_bf16() -> None:
    """Compute `torch.mm` of fp32 numbers from their bf16 roundings.
    Raises EnvironmentFault: this CPU has no instructions for it, or takes longer with them."""
    found = lacking_bf16(has_bf16_products())
    if found is None and (longer := cpu_seconds(bf16_product) / cpu_seconds(fp32_kernel())) > 1:
        found = replace(SLOW_BF16, got=f"{longer:.2f} times the CPU time")
    if found is not None:
        raise EnvironmentFault(no_bf16_products.problem(found))
    install(bf16_product)


def plain(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` by torch's own kernel."""
    return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`."""
    return _by_onednn(a, b) if _is_large(a, b) else plain(a, b)


def bf16_product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of fp32 numbers rounded to bf16: sums in fp32, results rounded to bf16, but for logits."""
    if not _is_large(a, b) or b.shape[1] >= WIDE * b.shape[0]:
        return fp32_kernel()(a, b)
    kernel = _by_onednn if torch.ops.mkldnn._is_mkldnn_bf16_supported() else plain
    return kernel(a.bfloat16(), b.bfloat16()).float()


def cpu_seconds(kernel: Product) -> float:
    """Of a product of the size of a small model's layer: the least of several, as other work only adds to them."""
    a, b = torch.randn(256, 512), torch.randn(512, 1024)
    taken = []
    for _ in range(8):
        began = time.process_time()
        kernel(a, b)
        taken.append(time.process_time() - began)
    return min(taken)


@functools.cache
def fp32_kernel() -> Product:
    """What this machine computes fp32 products by."""
    return product if is_amd() else plain


def _is_large(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype is torch.float32 and a.numel() >= LEAST_NUMBERS and b.numel() > 0


def _by_onednn(a: Tensor, b: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return out
