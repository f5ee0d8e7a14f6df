"""Whatever validates trains: configurations from the schema's own ranges, judged and then run for one rollout."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from rich.console import Console

from relax_cli.config.layers import Layers
from relax_cli.engine.run import train
from relax_cli.plugin.manager import Plugins, load_plugins
from relax_cli.preflight.check_run import check_run
from relax_cli.quickstart.task import prepare
from tests.support.random_configs import configurations

BASE = {
    "eval.eval_prompt_data": ["h=data/train.jsonl"],
    "eval.eval_interval": 1,
    "batch.rollout_batch_size": 4,
    "batch.num_steps_per_rollout": 1,
    "batch.micro_batch_size": 8,
    "batch.num_rollout": 1,
    "critic.num_critic_only_steps": 0,
    "parallel.launcher": "local",
    "run.run_dir": "run",
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("task")
    prepare(folder / "quickstart", seed=1, steps=1)
    data = folder / "data" / "train.jsonl"
    data.parent.mkdir()
    rows = (folder / "quickstart" / "data" / "train.jsonl").read_text().splitlines()
    data.write_text("".join(f"{row}\n" for row in rows[:8]))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TINY_DIR", "quickstart")
        yield folder


def run_once(plugins: Plugins, estimator: str, changes: dict[str, Any]) -> list[str]:
    """Ids of the errors of validation, or none where the configuration trained one rollout."""
    shutil.rmtree("run", ignore_errors=True)
    values = {**BASE, "data.prompt_data": "data/train.jsonl", **changes}
    words = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    checked = check_run(plugins, Layers([f"tiny-{estimator}-cpu"], {"TINY_DIR": "quickstart"}, words), here=True)
    assert all(problem.message and problem.fix for problem in checked.problems)
    if checked.errors:
        return [problem.id for problem in checked.errors]
    train(plugins, checked, Console(file=io.StringIO(), width=200))
    recorded = [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    # 0 is the evaluation before the first step, where there is one.
    assert recorded in ([1], [0, 1])
    return []


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(chosen=configurations())
def test_what_validates_trains(task: Path, chosen: tuple[str, dict[str, Any]]) -> None:
    note(f"refused by: {run_once(load_plugins(), *chosen)}")
