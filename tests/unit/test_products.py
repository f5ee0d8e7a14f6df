"""Matrix products of training on AMD CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from relax_cli.backends.megatron import cpu_support, products


@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(768, 256, 512), (130, 127, 61), (4, 8, 3), (0, 300, 5), (300, 0, 5), (300, 300, 0)]
)
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
def test_a_product_is_that_of_float64(rows: int, inner: int, columns: int, transposed: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(rows, inner), torch.randn(inner, columns)
    if transposed[0]:
        a = a.t().contiguous().t()
    if transposed[1]:
        b = b.t().contiguous().t()
    result = products.product(a, b)
    assert result.is_contiguous()
    torch.testing.assert_close(result, (a.double() @ b.double()).float(), atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_keep_their_kernels(dtype: torch.dtype) -> None:
    a, b = torch.randn(256, 128).to(dtype), torch.randn(128, 64).to(dtype)
    assert torch.equal(products.product(a, b), a @ b)


@pytest.mark.parametrize(
    ("capability", "vendor", "expected"),
    [("AVX512", "AuthenticAMD", True), ("AVX512", "GenuineIntel", False), ("AVX2", "AuthenticAMD", False)],
)
def test_only_amd_with_avx512_takes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: str, vendor: str, expected: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(f"vendor_id : {vendor}\n", encoding="utf-8")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert products.is_amd(tmp_path / "cpuinfo") is expected
    assert not products.is_amd(tmp_path / "none")


@pytest.mark.parametrize("amd", [True, False])
def test_training_processes_install_them(monkeypatch: pytest.MonkeyPatch, amd: bool) -> None:
    installed: list[bool] = []
    monkeypatch.setattr(products, "is_amd", lambda: amd)
    monkeypatch.setattr(products, "install", lambda: installed.append(True))
    cpu_support.install()
    assert bool(installed) is amd
