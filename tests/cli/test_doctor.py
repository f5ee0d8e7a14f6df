"""`relax doctor`."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from relax_cli.cli import doctor
from relax_cli.cli.app import build_app
from relax_cli.cli.doctor import Check, Part, check_part
from relax_cli.config.versions import CPU_MEGATRON, CPU_SET, GPU_SET, NEW_CPU_SET, SGLANG_CONTRACTS
from relax_cli.plugin.manager import GROUP, Plugins
from tests.support.cli_app import Invoke

QUICK = ("psutil", "pluggy")
"""Parts that import at once; the whole table takes half a minute on two cores."""


@pytest.fixture
def quick_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PARTS", tuple(Part(name, f"import {name}") for name in QUICK))


def test_a_part_that_works_has_its_version() -> None:
    import psutil

    assert check_part(Part("psutil", "import psutil"), 60) == Check("psutil", "ok", psutil.__version__)


@pytest.mark.parametrize(("needed", "status"), [(True, "problem"), (False, "note")])
@pytest.mark.parametrize(
    ("distribution", "code", "timeout", "found"),
    [
        ("no-such-package", "", 60, "not installed"),
        ("psutil", "import sys; sys.exit(3)", 60, "does not import: exit code 3"),
        ("psutil", "raise OSError('libc is gone')", 60, "does not import: OSError: libc is gone"),
        ("psutil", "import time; time.sleep(60)", 0.2, "does not import within 0.2 s"),
        ("psutil", "import os; os.kill(os.getpid(), 11)", 60, "does not import: exit code -11"),
    ],
)
def test_what_is_absent_broken_or_too_slow_is_said(
    needed: bool, status: str, distribution: str, code: str, timeout: float, found: str
) -> None:
    check = check_part(Part(distribution, code, "" if needed else "pip install it"), timeout)
    assert check.status == status
    assert check.found.endswith(found)
    assert check.fix


def test_a_file_in_the_current_folder_is_not_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "psutil.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    assert check_part(Part("psutil", "import psutil"), 60).status == "ok"


@pytest.mark.usefixtures("quick_parts")
def test_the_table_and_the_object_agree(invoke: Invoke) -> None:
    result = invoke("doctor", "--format", "json")
    shown = json.loads(result.stdout)
    assert (result.exit_code, shown["ok"]) == (0, True)
    names = [check["name"] for check in shown["checks"]]
    for name in (
        "Python",
        *QUICK,
        "memory",
        "cores",
        "open files",
        "disk, here",
        "sandbox of --rm-type code",
        "plugin ppo",
    ):
        assert name in names
    assert all(set(check) == {"name", "status", "found", "fix"} for check in shown["checks"])
    assert all(check["fix"] for check in shown["checks"] if check["status"] != "ok")
    text = invoke("doctor").stdout
    assert max(len(line) for line in text.splitlines()) <= 80
    assert not any(line.startswith(f"Python {sys.version_info.major}") for line in text.splitlines())
    for name in names:
        assert any(line.startswith(name) for line in text.splitlines())


@pytest.mark.usefixtures("quick_parts")
def test_a_needed_part_that_is_missing_is_exit_code_4(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Part("no-such-package", "")
    monkeypatch.setattr(doctor, "PARTS", (missing,))
    result = invoke("doctor")
    assert result.exit_code == 4
    assert "problems\n  no-such-package: not installed\n    fix: pip install no-such-package\n" in result.stdout


@pytest.mark.usefixtures("quick_parts")
def test_a_broken_third_party_plugin_is_a_note_with_its_reason() -> None:
    app = build_app(Plugins([EntryPoint("bad", "no_such_module", GROUP)]))
    result = CliRunner().invoke(app, ["doctor", "--format", "json"])
    (row,) = (check for check in json.loads(result.stdout)["checks"] if check["name"] == "plugin bad")
    assert (result.exit_code, row["status"]) == (0, "note")
    assert "no_such_module" in row["found"]


@pytest.mark.usefixtures("quick_parts")
def test_secrets_are_in_no_output(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    leaking = Part("psutil", "raise OSError('cannot reach https://me:hunter2@proxy/?token=hunter2')")
    monkeypatch.setattr(doctor, "PARTS", (leaking,))
    for words in ((), ("--format", "json")):
        result = invoke("doctor", *words)
        assert "cannot reach" in result.stdout
        assert "hunter2" not in result.stdout + result.stderr


def test_every_real_part_is_installed_here_or_optional_and_works() -> None:
    """The two that import quickly; the others are imported by the rest of the tests."""
    parts = {part.distribution: part for part in doctor.PARTS}
    assert {"torch", "megatron-core", "ray", "TransferQueue", "transformers", "psutil"} <= set(parts)
    for name in ("psutil", "tensordict"):
        assert check_part(parts[name], 120).status == "ok"


def test_the_cpu_patch_is_tried_with_its_megatron_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def answer(code: str, timeout: float) -> tuple[str, str | None]:
        tried.append(code)
        return (
            ('{"build": null, "devices": []}', None)
            if code == doctor.CUDA
            else ("", "megatron-core 9 has not been tested")
        )

    monkeypatch.setattr(doctor, "_try", answer)
    rows = list(doctor._devices({"torch", "megatron-core"}, 60))
    assert tried == [doctor.CUDA, doctor.CPU_SUPPORT]
    assert (rows[-1].name, rows[-1].status, rows[-1].found) == (
        "Megatron on a CPU", "problem", "megatron-core 9 has not been tested",
    )  # fmt: skip


CPU_VERSIONS = {"torch": "2.13.0+cpu", "megatron-core": "0.16.1"}
GPU_VERSIONS = {"torch": "2.14.1", "megatron-core": "0.19.2", "sglang": "0.5.23"}


@pytest.mark.parametrize(
    ("python", "installed", "status", "text"),
    [
        ((3, 11), CPU_VERSIONS, "ok", "tested for a CPU"),
        ((3, 11), CPU_VERSIONS | {"sglang": "0.5.23"}, "ok", "tested for a CPU"),
        ((3, 12), CPU_VERSIONS, "note", "not tested together"),
        ((3, 12), CPU_VERSIONS | {"megatron-core": "0.19.2"}, "ok", "tested for a CPU"),
        ((3, 11), CPU_VERSIONS | {"megatron-core": "0.19.2"}, "note", "not tested together"),
        ((3, 14), CPU_VERSIONS, "note", "Python 3.14"),
        ((3, 11), CPU_VERSIONS | {"torch": "2.13.1"}, "note", "not tested together"),
        ((3, 11), CPU_VERSIONS | {"megatron-core": "0.160.0"}, "note", "not tested together"),
        ((3, 12), GPU_VERSIONS, "note", "not run on a GPU"),
        ((3, 12), {"torch": "2.14.1", "megatron-core": "0.19.2"}, "note", "not tested together"),
        ((3, 12), {}, "note", "not tested together: Python 3.12"),
    ],
)
def test_doctor_says_whether_these_versions_ran_together(
    python: tuple[int, int], installed: dict[str, str], status: str, text: str
) -> None:
    check = doctor.tested_pair(python, installed)
    assert check.status == status
    assert text in check.found
    assert all(found.removesuffix("+cpu") in check.found for found in installed.values())
    assert bool(check.fix) == (status == "note")


def test_tested_versions_follow_the_constraints_and_the_patch() -> None:
    root = Path(__file__).parent.parent.parent
    for known, name in ((CPU_SET, "constraints-cpu.txt"), (GPU_SET, "constraints-gpu.txt")):
        pinned = dict(
            line.split("==") for line in (root / name).read_text().splitlines() if "==" in line and line[0] != "#"
        )
        for distribution, number in known.versions.items():
            assert pinned[distribution].startswith(number)
    assert GPU_SET.versions["sglang"] in SGLANG_CONTRACTS
    for number in CPU_MEGATRON:
        assert any(number.startswith(known.versions["megatron-core"]) for known in (CPU_SET, NEW_CPU_SET))


def test_an_sglang_whose_protocol_was_not_recorded_is_a_note() -> None:
    assert doctor.sglang_contract(SGLANG_CONTRACTS[0]).status == "ok"
    other = doctor.sglang_contract("0.7.0")
    assert (other.status, other.fix) == ("note", f"pip install sglang=={SGLANG_CONTRACTS[-1]}")


def test_a_requirement_that_no_longer_holds_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch==2.14.1", "psutil>=5", "no-such-package>=1", "torch<1; extra == 'old'", "not a requirement !"]
    monkeypatch.setattr(doctor, "requires", lambda name: wanted)
    found = list(doctor.broken_requirements("sglang"))
    assert [check.name for check in found] == ["sglang needs"]
    assert found[0].found.startswith("torch==2.14.1, but ")
    monkeypatch.undo()
    assert list(doctor.broken_requirements("no-such-package")) == []


@pytest.mark.parametrize(
    ("value", "has_gpu", "statuses"),
    [
        ("expandable_segments:True", True, ["problem"]),
        ("max_split_size_mb:64, expandable_segments: True", False, ["note"]),
        ("expandable_segments:False", True, []),
        ("", True, []),
    ],
)
def test_expandable_segments_are_a_known_bad_combination(value: str, has_gpu: bool, statuses: list[str]) -> None:
    found = list(doctor.allocator_conflict({"PYTORCH_CUDA_ALLOC_CONF": value}, has_gpu=has_gpu))
    assert [check.status for check in found] == statuses
    assert all(check.fix == "unset PYTORCH_CUDA_ALLOC_CONF" for check in found)


@pytest.mark.parametrize(
    ("answer", "status", "found"),
    [
        (subprocess.CompletedProcess([], 0, "580.95.05\n580.95.05\n", ""), "ok", "580.95.05"),
        (
            subprocess.CompletedProcess([], 9, "", "couldn't communicate with the NVIDIA driver"),
            "problem",
            "communicate",
        ),
        (subprocess.TimeoutExpired("nvidia-smi", 20), "problem", "does not answer"),
    ],
)
def test_the_driver_is_shown_or_what_is_wrong_with_it(
    monkeypatch: pytest.MonkeyPatch, answer: Any, status: str, found: str
) -> None:
    def run(*args: Any, **kwargs: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(doctor.subprocess, "run", run)
    check = doctor.driver_check()
    assert check is not None
    assert check.status == status
    assert found in check.found


def test_a_machine_without_nvidia_smi_has_no_row_for_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert doctor.driver_check() is None


def test_limits_of_page_locked_memory_matter_on_gpus_only() -> None:
    assert "page-locked memory" in [check.name for check in doctor._limits(has_gpu=True)]
    assert "page-locked memory" not in [check.name for check in doctor._limits(has_gpu=False)]


@pytest.mark.usefixtures("quick_parts")
def test_the_cluster_to_join_is_shown_without_its_secrets(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Ray cluster" not in invoke("doctor").stdout
    monkeypatch.setenv("RAY_ADDRESS", "ray://me:hunter2@10.0.0.1:10001")
    shown = invoke("doctor").stdout
    assert "Ray cluster" in shown
    assert "hunter2" not in shown


@pytest.mark.parametrize(
    ("distribution", "start"),
    [("torch", "torch>="), ("TransferQueue", "transferqueue>="), ("megatron-core", "megatron-core")],
)
def test_what_is_missing_is_installed_as_relax_requires_it(distribution: str, start: str) -> None:
    (fix,) = (part.fix for part in doctor.PARTS if part.distribution == distribution)
    assert fix.startswith(f"pip install '{start}")
    assert Requirement(fix.removeprefix("pip install ").strip("'")).specifier
