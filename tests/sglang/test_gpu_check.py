"""The stages of `scripts/gpu_check.sh --servers`, on a CPU with the contract server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.sglang.fake_package import ROOT, write_package
from tests.support.sglang.faults import Faults, to_json


def stages(tmp_path: Path, faults: Faults) -> tuple[int, dict[str, Any]]:
    """The exit code of the script, and what it found."""
    path = os.pathsep.join([str(write_package(tmp_path / "packages")), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "CONTRACT_FAULTS": json.dumps(to_json(faults))}
    # The script takes the python3 that it finds.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", ROOT / "scripts" / "gpu_check.sh", "--servers", "--device", "cpu", "--out", tmp_path / "out"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    found: dict[str, Any] = json.loads((tmp_path / "out" / "servers.json").read_text())["stages"]
    verdicts = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith(("ok", "FAIL"))]
    assert verdicts == [["ok" if stage["ok"] else "FAIL", name] for name, stage in found.items()], done.stderr
    return done.returncode, found


def test_all_stages_pass_on_a_server_that_is_right(tmp_path: Path) -> None:
    code, found = stages(tmp_path, Faults())
    assert code == 0
    assert list(found) == ["build", "start", "publish", "gap", "sleep", "checksum", "ppo"]
    assert found["gap"]["tokens"] > 32
    assert [step["reward/mean"] >= 0 for step in found["ppo"]["steps"]] == [True, True]


def test_other_weights_after_a_sleep_end_the_check(tmp_path: Path) -> None:
    code, found = stages(tmp_path, Faults(changed_weights=1))
    assert code == 1
    assert list(found)[-1] == "checksum"
    assert "weights that were sent twice differ" in found["checksum"]["error"]
