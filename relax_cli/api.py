"""relax from Python: the same code as `relax validate-config`, `relax train` and the commands that look at runs.

    config = load_config("tiny-ppo-cpu", num_rollout=3)
    problems = check("tiny-ppo-cpu", num_rollout=3).problems
    result = train("tiny-ppo-cpu", num_rollout=3, run_dir="runs/one")
    frame = to_pandas(read_run("runs/one").metrics)

Options have the names of the flags, with `_` for `-`; recipes and `RELAX_*` variables are layers below them, as on the
command line. `"null"` unsets an option of a recipe.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_cli.cli.options import unknown_option
from relax_cli.cli.train import cluster_gpus
from relax_cli.config.layers import Layers
from relax_cli.config.model import flag, options_by_name
from relax_cli.config.schema import Config
from relax_cli.errors import ConfigError
from relax_cli.plugin.config_model import config_model
from relax_cli.plugin.manager import Plugins, load_plugins
from relax_cli.preflight.check_run import CheckedRun, check_run
from relax_cli.roles.sample_files import finite
from relax_cli.tracking.run_files import RunFolder, read_run

if TYPE_CHECKING:
    import pandas

__all__ = ["Result", "RunFolder", "check", "load_config", "read_run", "to_pandas", "train"]


@dataclass(frozen=True)
class Result:
    """The outcome of a run."""

    completed: bool
    """False when Ctrl-C or SIGTERM ended it early."""
    summary: dict[str, Any]
    """What `relax train --format json` prints."""
    resume: str | None
    """Command that continues it from its last checkpoint; None if there is none."""
    run: RunFolder
    """Metrics and samples, as `read_run` reads them."""


def load_config(*recipes: str | Path, **options: Any) -> Config:
    """The configuration of a run as `relax train` would use it, without looking at model and data files.

    Raises:
        ConfigError: a recipe, a name or a value cannot be read; has every problem.
    """
    checked = check_run(*_layers(recipes, options), skip_files=True)
    if not checked.is_read:
        raise ConfigError(checked.problems)
    return checked.config


def check(*recipes: str | Path, here: bool = True, **options: Any) -> CheckedRun:
    """Everything that can be known before a launch: `problems`, `config`, `plan`, `start`.

    Args:
        here: what this machine lacks is a problem, not a note.

    Raises:
        ConfigError: an option does not exist.
    """
    return check_run(*_layers(recipes, options), here=here, cluster_gpus=cluster_gpus)


def train(*recipes: str | Path, progress: bool = True, **options: Any) -> Result:
    """Check a run, then train. It takes Ctrl-C and SIGTERM as `relax train` does.

    Args:
        progress: show it on stderr.

    Raises:
        RelaxError: the run may not start, or it failed; its `problems` say why.
        RuntimeError: this is not the main thread, which alone gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("api.train belongs in the main thread; start another process to train next to something")
    from rich.console import Console

    from relax_cli.engine.run import train_with_restarts
    from relax_cli.engine.summary import summary_dict

    plugins, layers = _layers(recipes, options)
    checked = check_run(plugins, layers, cluster_gpus=cluster_gpus).require_valid()
    console = Console(stderr=True) if progress else Console(file=io.StringIO())
    finished = train_with_restarts(plugins, checked, console)
    return Result(
        completed=finished.ended_by is None,
        summary=summary_dict(finished),
        resume=finished.resume,
        run=read_run(finished.run_dir),
    )


def to_pandas(records: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """Records as a table: one row each, nested objects as `outer/inner`, numbers per token as lists. Needs pandas."""
    import pandas

    return pandas.json_normalize([finite(record) for record in records], sep="/")


def _layers(recipes: Iterable[str | Path], options: Mapping[str, Any]) -> tuple[Plugins, Layers]:
    plugins = load_plugins()
    known = options_by_name(config_model(plugins.estimators().values()))
    if problems := [unknown_option(flag(name), [flag(n) for n in known]) for name in options if name not in known]:
        raise ConfigError(problems)
    flags = {name: _plain(value) for name, value in options.items()}
    return plugins, Layers([str(Path(recipe)) for recipe in recipes], os.environ, (), flags)


def _plain(value: Any) -> Any:
    """A value in the types of YAML: paths are texts, numbers of numpy and torch Python's own."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value.tolist() if hasattr(value, "tolist") else value
