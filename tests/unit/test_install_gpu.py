"""What docs/gpu.md tells people to install is what the script does, in an order in which pip can build it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "install_gpu.sh"


def printed(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", SCRIPT, *words], capture_output=True, text=True, timeout=30, check=False)


def test_the_page_calls_the_script_with_words_it_knows() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text("utf-8")
    calls = re.findall(r"^scripts/install_gpu\.sh (\w+) (\S+)", page, re.MULTILINE)
    assert {kind for kind, _ in calls} == {"sglang", "bridge"}
    assert [printed(kind, venv, "--print").returncode for kind, venv in calls] == [0] * len(calls)


def test_torch_is_there_before_what_imports_it_while_built() -> None:
    torch, bridge = (line for line in printed("bridge", "v", "--print").stdout.splitlines() if " install " in line)
    assert " torch " in torch
    # Without isolation pip builds relax itself with what is installed.
    backend = re.search(r'requires = \["(\w+)"\]', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert backend is not None
    assert f" {backend.group(1)} " in torch
    assert bridge.endswith("install --no-build-isolation -e .[bridge]")


def test_sglang_is_installed_with_the_pins() -> None:
    (line,) = (line for line in printed("sglang", "v", "--print").stdout.splitlines() if " install " in line)
    assert line.endswith("install -c constraints-gpu.txt -e .[sglang]")


@pytest.mark.parametrize("words", [(), ("sglang",), ("other", "v"), ("sglang", "v", "--dry-run")])
def test_anything_else_shows_the_usage_and_installs_nothing(words: tuple[str, ...]) -> None:
    done = printed(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "install_gpu.sh bridge .venv" in done.stderr
