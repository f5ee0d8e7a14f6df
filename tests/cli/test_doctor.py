"""`relax doctor`."""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relax_cli.cli import doctor_checks as doctor
from relax_cli.cli.app import build_app
from relax_cli.cli.doctor_checks import Check, Part, check_part
from relax_cli.plugin.manager import GROUP, Plugins

from .conftest import Invoke

QUICK = ("psutil", "pluggy")
"""Parts that import at once; the whole table takes half a minute on two cores."""


@pytest.fixture
def quick_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "PARTS", tuple(Part(name, f"import {name}", True, f"pip install {name}") for name in QUICK)
    )


def test_a_part_that_works_has_its_version() -> None:
    import psutil

    assert check_part(Part("psutil", "import psutil", True, ""), 60) == Check("psutil", "ok", psutil.__version__)


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
    check = check_part(Part(distribution, code, needed, "pip install it"), timeout)
    assert check.status == status
    assert check.found.endswith(found)
    assert check.fix


def test_a_file_of_the_current_folder_does_not_stand_in_for_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "psutil.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    assert check_part(Part("psutil", "import psutil", True, ""), 60).status == "ok"


@pytest.mark.usefixtures("quick_parts")
def test_the_table_and_the_object_agree(invoke: Invoke) -> None:
    result = invoke("doctor", "--format", "json")
    shown = json.loads(result.stdout)
    assert (result.exit_code, shown["ok"]) == (0, True)
    names = [check["name"] for check in shown["checks"]]
    for name in ("Python", *QUICK, "memory", "cores", "open files", "disk, here", "plugin ppo"):
        assert name in names
    assert all(set(check) == {"name", "status", "found", "fix"} for check in shown["checks"])
    assert all(check["fix"] for check in shown["checks"] if check["status"] != "ok")
    text = invoke("doctor").stdout
    assert max(len(line) for line in text.splitlines()) <= 80
    assert f"Python {sys.version_info.major}" not in text
    for name in names:
        assert any(line.startswith(name) for line in text.splitlines())


@pytest.mark.usefixtures("quick_parts")
def test_a_needed_part_that_is_missing_is_exit_code_4(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Part("no-such-package", "", True, "pip install no-such-package")
    monkeypatch.setattr(doctor, "PARTS", (missing,))
    result = invoke("doctor")
    assert result.exit_code == 4
    assert "problems\n  no-such-package: not installed\n    fix: pip install no-such-package\n" in result.stdout


@pytest.mark.usefixtures("quick_parts")
def test_a_broken_plugin_of_someone_else_is_a_note_with_its_reason() -> None:
    app = build_app(Plugins([EntryPoint("bad", "no_such_module", GROUP)]))
    result = CliRunner().invoke(app, ["doctor", "--format", "json"])
    (row,) = (check for check in json.loads(result.stdout)["checks"] if check["name"] == "plugin bad")
    assert (result.exit_code, row["status"]) == (0, "note")
    assert "no_such_module" in row["found"]


@pytest.mark.usefixtures("quick_parts")
def test_secrets_are_in_no_output(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    leaking = Part("psutil", "raise OSError('cannot reach https://me:hunter2@proxy/?token=hunter2')", True, "pip")
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


def test_megatron_without_cuda_is_tried_with_the_versions_it_was_written_for(monkeypatch: pytest.MonkeyPatch) -> None:
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
