"""`--max-restarts`: a run that lost a process begins again at its newest pair of checkpoints, by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from relax_cli.checkpoint import layout
from relax_cli.engine.run import FinishedRun, prepare_run, train
from relax_cli.errors import ProcessLost
from relax_cli.plugin.manager import Plugins
from relax_cli.preflight.check_run import CheckedRun

NODE_SECONDS = 600.0
"""How long a restart waits for the CPUs and GPUs of a node that was lost."""


def train_with_restarts(plugins: Plugins, checked: CheckedRun, console: Console) -> FinishedRun:
    """`run.train`, and again after a process of the run was lost, `--max-restarts` times at most.

    A failure that would come again, such as an exception of a reward, ends the run as ever.

    Raises:
        ResumeError: the checkpoints given cannot be resumed from; nothing was started or written.
        RelaxError: what made the run fail; processes are ended by then.
    """
    most = checked.config.run.max_restarts
    # One folder for all of it, also where the name is made from the time.
    checked = _with(checked, run={"run_dir": prepare_run(checked)[0].run.run_dir}) if most else checked
    patience = 0.0
    for restart in range(1, most + 1):
        try:
            return train(plugins, checked, console, patience)
        except ProcessLost as lost:
            checked, patience = from_newest_pair(checked), NODE_SECONDS
            folder = checked.config.checkpoint.load
            begin = "the start" if folder is None else f"the newest pair in {folder}"
            lines = [*(problem.message for problem in lost.problems), f"restart {restart} of {most}, from {begin}"]
            console.print("\n".join(lines), markup=False, highlight=False, style="yellow")
    return train(plugins, checked, console, patience)


def from_newest_pair(checked: CheckedRun) -> CheckedRun:
    """The same run from what it has saved; from where it started, if it has saved nothing."""
    section = checked.config.checkpoint
    if section.save is None or not (Path(section.save) / layout.TRACKER_FILE).exists():
        return checked
    return _with(checked, checkpoint={"load": section.save}, critic={"critic_load": checked.config.critic.critic_save})


def _with(checked: CheckedRun, **sections: dict[str, str | None]) -> CheckedRun:
    config = checked.config
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return replace(checked, config=config.model_copy(update=changed))
