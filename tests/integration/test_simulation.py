"""A training step on tensors without memory, against the memory that the same step takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from relax_cli.config.layers import Layers
from relax_cli.engine.simulate import simulate
from relax_cli.plugin.manager import load_plugins
from relax_cli.preflight.check_run import CheckedRun, check_run
from relax_cli.quickstart.task import prepare
from tests.support.real_step import ENVIRONMENT
from tests.support.tiny_models import save_experts_for_task


def checked(folder: Path, recipe: str, *overrides: str) -> CheckedRun:
    """A recipe on the quickstart's files."""
    prepare(folder, seed=1, steps=2)
    run = check_run(load_plugins(), Layers([recipe], {"TINY_DIR": str(folder)}, overrides))
    assert not run.errors
    return run


def real_peak(run: CheckedRun, role: str) -> int:
    """The most that the tensors of a real step take."""
    lengths = run.inputs.lengths_for(run.config)
    request = {
        "role": role,
        "config": run.config.model_dump(mode="json"),
        "folder": run.config.model.hf_checkpoint,
        "lengths": vars(lengths),
    }
    command = [sys.executable, "-m", "tests.support.real_step"]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found["held"] + found["step"]


def peak(phases: dict[str, dict[str, int]]) -> int:
    """The largest of the simulated ones."""
    return max(sum(parts.values()) for parts in phases.values())


@pytest.mark.parametrize("role", ["actor", pytest.param("critic", marks=pytest.mark.slow)])
def test_a_simulated_step_takes_what_a_real_one_takes(tmp_path: Path, role: str) -> None:
    run = checked(tmp_path, "tiny-ppo-cpu")
    found = simulate(run, lambda _: None, [role])[role]
    assert found["train"]["weights"] == found["train"]["gradients"] == found["train"]["Adam moments"] / 2
    assert peak(found) == pytest.approx(real_peak(run, role), rel=0.1)


@pytest.mark.slow  # Half a minute each.
@pytest.mark.parametrize(
    ("recipe", "role", "overrides"),
    [
        ("qwen3-4B-8xgpu-ppo", "critic", ()),
        ("qwen3-4B-8xgpu-ppo", "critic", ("recompute_granularity=null",)),
        ("qwen3-4B-8xgpu-ppo", "actor", ()),
        ("qwen3-4B-8xgpu-ppo", "actor", ("log_probs_chunk_size=1024",)),
        ("qwen3-4B-8xgpu-grpo", "actor", ()),
        ("qwen3-30B-A3B-8xgpu-ppo", "critic", ()),  # about two minutes
        ("qwen3-8B-16xgpu-ppo", "critic", ()),
        ("qwen3-8B-16xgpu-ppo", "actor", ()),
        pytest.param("qwen3-30B-A3B-8xgpu-ppo", "actor", (), marks=pytest.mark.timeout(900)),
    ],
)
def test_the_plan_of_a_recipe_is_within_a_tenth_of_its_step(recipe: str, role: str, overrides: tuple[str, ...]) -> None:
    """The models of these recipes are known by their `config.json`."""
    words = [f"parallel.{option}" for option in overrides]
    if "recompute_granularity=null" in overrides:
        words += ["parallel.recompute_method=null", "parallel.recompute_num_layers=null"]
    run = check_run(load_plugins(), Layers([recipe], {}, words))
    assert run.plan is not None
    (planned,) = (m.model_bytes + sum(m.working.values()) for m in run.plan.memory if m.role == role)
    assert planned == pytest.approx(peak(simulate(run, lambda _: None, [role])[role]), rel=0.1)


@pytest.mark.slow
def test_a_simulated_step_of_experts_takes_what_a_real_one_takes(tmp_path: Path) -> None:
    model = save_experts_for_task(tmp_path / "experts")
    run = checked(tmp_path / "task", "tiny-ppo-cpu", f"model.hf_checkpoint={model}")
    found = simulate(run, lambda _: None, ["actor"])["actor"]
    assert peak(found) == pytest.approx(real_peak(run, "actor"), rel=0.1)
