"""What `--device auto` means for a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from relax_cli.config.layers import Layers
from relax_cli.config.schema import Config, ParallelSection, SglangSection
from relax_cli.plugin.manager import load_plugins
from relax_cli.preflight import resolve as resolving
from relax_cli.preflight.check_run import check_run
from relax_cli.preflight.machine import Machine
from relax_cli.preflight.resolve import choose_device, installed_torch_has_cuda, settle_device

TWO = ParallelSection(resource={"actor": (1, 2), "rollout": (1, 2)})


@pytest.mark.parametrize(
    ("gpus", "has_cuda", "device", "why"),
    [
        (0, True, "cpu", "here has no GPU"),
        (1, True, "cpu", "here has 1 GPU, and the roles need 2"),
        (2, False, "cpu", "here has 2 GPUs, but torch is built without CUDA"),
        (2, True, "cuda", "here has 2 GPUs, and the roles need 2"),
        (8, True, "cuda", "here has 8 GPUs, and the roles need 2"),
    ],
)
def test_cuda_where_every_role_gets_its_gpus(gpus: int, has_cuda: bool, device: str, why: str) -> None:
    assert choose_device(TWO, SglangSection(), gpus, has_cuda, "here") == (device, why)


def test_external_servers_bring_their_own_gpus() -> None:
    more = TWO.model_copy(update={"resource": {"actor": (1, 1), "rollout": (1, 4)}})
    external = SglangSection(rollout_external=True, rollout_external_engine_addrs=("a:1",))
    assert choose_device(more, external, 1, True, "here")[0] == "cuda"
    assert choose_device(more, SglangSection(), 1, True, "here")[0] == "cpu"


def config(**parallel: Any) -> Config:
    return Config(parallel=TWO.model_copy(update=parallel))


def test_a_device_that_was_named_stays() -> None:
    for device in ("cpu", "cuda"):
        assert settle_device(config(device=device), Machine(gpus=2, ray_address=""), True, None) == (
            config(device=device),
            [],
        )


def test_the_change_says_why() -> None:
    settled, (change,) = settle_device(config(), Machine(gpus=2, ray_address=""), True, None)
    assert settled.parallel.device == "cuda"
    assert (change.option, change.before, change.after) == ("--device", "auto", "cuda")
    assert change.why == "this machine has 2 GPUs, and the roles need 2"


def test_a_cluster_is_asked_only_where_it_would_be_joined() -> None:
    elsewhere = Machine(gpus=0, ray_address="10.0.0.1:6379")
    settled, (change,) = settle_device(config(), elsewhere, True, lambda: 16)
    assert (settled.parallel.device, change.why) == ("cuda", "the Ray cluster has 16 GPUs, and the roles need 2")
    assert settle_device(config(), elsewhere, True, None)[0].parallel.device == "auto"
    local, _ = settle_device(config(launcher="local"), elsewhere, True, lambda: pytest.fail("asked"))
    assert local.parallel.device == "cpu"


@pytest.mark.parametrize(
    ("text", "has_cuda"),
    [
        ("cuda: Optional[str] = None\n", False),
        ("cuda: Optional[str] = '13.0'\n", True),
        ('cuda = "12.8"\n', True),
        ("", False),
    ],
)
def test_the_build_of_torch_is_read_from_its_version_file(
    text: str, has_cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(text)

    class Found:
        origin = str(tmp_path / "torch" / "__init__.py")

    monkeypatch.setattr(resolving.importlib.util, "find_spec", lambda name: Found)
    assert installed_torch_has_cuda() is has_cuda


def test_the_rules_see_the_device_that_will_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_cli.preflight.check_run.Machine", lambda: Machine(gpus=8, ray_address=""))
    monkeypatch.setattr("relax_cli.preflight.resolve.installed_torch_has_cuda", lambda: True)
    flags = {"overlap_updates": True, "hf_checkpoint": os.devnull}
    resolved = check_run(load_plugins(), Layers([], {}, [], flags))
    assert resolved.config.parallel.device == "cuda"
    assert "overlap-needs-cpu" in [problem.id for problem in resolved.problems]
    assert ("--device", "auto", "cuda") in [(c.option, c.before, c.after) for c in resolved.changes]
