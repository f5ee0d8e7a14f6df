"""`relax quickstart`: write a small model, a task and a recipe into a folder, then train it with PPO."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.console import Console

from relax_cli.engine.run import FinishedRun, train
from relax_cli.engine.summary import before_and_after
from relax_cli.plugin.manager import Plugins
from relax_cli.preflight.resolve import resolve
from relax_cli.quickstart.task import prepare


def quickstart(
    plugins: Plugins, folder: Path, *, seed: int, steps: int, launcher: str, console: Console
) -> FinishedRun:
    """Prepare `folder` and run its recipe, exactly as `relax train --recipe FOLDER/recipe.yaml` would."""
    prepare(folder, seed=seed, steps=steps)
    recipe = str(folder / "recipe.yaml")
    resolved = resolve(plugins, [recipe], os.environ, [], {"launcher": launcher})
    return train(plugins, resolved, console)


def result(run: FinishedRun) -> dict[str, Any]:
    """The object that `--format json` prints."""
    rewards = run.report.rewards
    pairs = before_and_after(run)
    return {
        "ok": run.ended_by is None,
        "run_dir": str(run.run_dir),
        "steps": run.report.steps,
        "seconds": round(run.report.seconds, 2),
        "reward_before": rewards[0] if rewards else None,
        "reward_after": rewards[-1] if rewards else None,
        "eval_before": pairs[0][0].reward.mean if pairs else None,
        "eval_after": pairs[0][1].reward.mean if pairs else None,
    }
