"""Runs and roles of the quickstart task inside the test's process."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from relax_cli.config.layers import Layers
from relax_cli.config.schema import Config
from relax_cli.engine.local import LocalSession
from relax_cli.engine.run import prepare_run
from relax_cli.engine.run import train as run_training
from relax_cli.engine.run_folder import claimed, written_folders
from relax_cli.plugin.launch_plan import LaunchPlan
from relax_cli.plugin.manager import load_plugins
from relax_cli.preflight.check_run import check_run
from relax_cli.roles.sample_files import finite, read_samples, sample_files

SMALL = ("eval.eval_prompt_data=[]", "eval.eval_interval=null", "batch.num_rollout=2", "parallel.launcher=local")


@dataclass(frozen=True)
class Finished:
    """What a run left behind."""

    metrics: list[dict[str, Any]]
    samples: list[list[dict[str, Any]]]
    """One list of sample records per step."""
    screen: str


def train(task: Path, out: Path, recipe: str, *overrides: str) -> Finished:
    """A whole run of a bundled recipe on the task's files, shortened to two steps unless overridden."""
    plugins, screen = load_plugins(), io.StringIO()
    words = [*SMALL, *overrides, f"run.run_dir={out}"]
    resolved = check_run(plugins, Layers([recipe], {"TINY_DIR": str(task)}, words)).require_valid()
    run_training(plugins, resolved, Console(file=screen, width=1000))
    return Finished(
        metrics=[json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()],
        samples=[[finite(sample) for sample in read_samples(paths)] for paths in sample_files(out).values()],
        screen=screen.getvalue(),
    )


def train_small(task: Path, out: Path, *overrides: str) -> Finished:
    """The run that `cli_runs.start` starts, inside the test's process."""
    small = ("batch.rollout_batch_size=32", "batch.micro_batch_size=16", "critic.num_critic_only_steps=1")
    folders = (f"checkpoint.save={out / 'actor'}", f"critic.critic_save={out / 'critic'}")
    return train(task, out / "run", str(task / "recipe.yaml"), *small, *folders, *overrides)


@contextmanager
def deployed(task: Path, out: Path, recipe: str, *overrides: str) -> Iterator[tuple[Config, dict[str, Any]]]:
    """The roles of a run, awake and before their first step, for a test to call one by one."""
    plugins = load_plugins()
    words = [*SMALL, *overrides, f"run.run_dir={out}"]
    config, run_dir = prepare_run(check_run(plugins, Layers([recipe], {"TINY_DIR": str(task)}, words)).require_valid())
    graph = plugins.service_graph(config)
    plan = LaunchPlan(
        config=config,
        graph=graph,
        model_folder=Path(config.model.hf_checkpoint),
        run_dir=run_dir,
        actor_load=None,
        critic_load=None,
        status=lambda _: None,
        reference_folder=Path(config.model.ref_load) if config.model.ref_load and "reference" in graph else None,
    )
    with claimed(written_folders(config)):
        session = LocalSession(plan)
        roles = {name: getattr(session.roles, name).ranks.role for name in graph.names}
        for name in roles:
            if name != "advantages":
                roles[name].wake()
        yield config, roles
        session.close()
