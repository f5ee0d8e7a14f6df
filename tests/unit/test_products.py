"""Matrix products of training on AMD CPUs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from relax_cli.backends.megatron import cpu_support, products
from relax_cli.errors import EnvironmentFault
from relax_cli.preflight.machine import has_bf16_products


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
    called: list[bool] = []
    monkeypatch.setattr(products, "is_amd", lambda: amd)
    monkeypatch.setattr(products, "product", lambda a, b: called.append(True) or products.plain(a, b))
    cpu_support.install()
    ones = torch.ones(2, 2)
    assert torch.equal(ones @ ones, 2 * ones)
    assert bool(called) is amd
    products.install.cache_clear()


@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False)])
def test_a_bf16_product_is_near_float64s(transposed: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(300, 256), torch.randn(256, 130)
    if transposed[0]:
        a = a.t().contiguous().t()
    if transposed[1]:
        b = b.t().contiguous().t()
    result, expected = products.bf16_product(a, b), a.double() @ b.double()
    assert result.dtype is torch.float32
    # Three roundings to 8 bits, of random sign.
    assert 5e-4 < float((result - expected).norm() / expected.norm()) < 5e-3


def test_logits_and_small_products_stay_exact() -> None:
    torch.manual_seed(0)
    for rows, columns in ((300, 16 * 128), (4, 8)):
        a, b = torch.randn(rows, 128), torch.randn(128, columns)
        torch.testing.assert_close(products.bf16_product(a, b), (a.double() @ b.double()).float(), atol=2e-4, rtol=1e-5)


def test_a_cpu_without_bf16_products_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags : avx512f avx512_vnni\n", encoding="utf-8")
    assert not has_bf16_products(tmp_path / "cpuinfo")
    monkeypatch.setattr(products, "has_bf16_products", lambda: False)
    with pytest.raises(EnvironmentFault) as caught:
        products.install_bf16()
    (problem,) = caught.value.problems
    assert (problem.id, problem.fix) == ("no-bf16-products", "--cpu-matmul-precision fp32")
    (tmp_path / "cpuinfo").write_text("flags : avx512f avx512_bf16\n", encoding="utf-8")
    assert has_bf16_products(tmp_path / "cpuinfo")


def test_bf16_products_must_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[products.Product] = []
    monkeypatch.setattr(products, "has_bf16_products", lambda: True)
    monkeypatch.setattr(products, "install", installed.append)
    for seconds in (0.5, 2.0):
        taken = {products.bf16_product: seconds}
        monkeypatch.setattr(products, "cpu_seconds", lambda kernel, taken=taken: taken.get(kernel, 1.0))
        with nullcontext() if seconds < 1 else pytest.raises(EnvironmentFault, match="take longer"):
            products.install_bf16()
    assert installed == [products.bf16_product]
    monkeypatch.undo()
    assert products.cpu_seconds(products.plain) > 0
