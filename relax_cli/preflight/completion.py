"""What a run needs and nothing was said about: filled in, and shown as changes of the configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relax_cli.checkpoint.layout import TRACKER_FILE, list_iterations
from relax_cli.config.schema import Config
from relax_cli.plugin.graph import ServiceGraph
from relax_cli.plugin.records import Change

OPTIONAL_ROLES = ("critic", "advantages", "reference")
REFERENCE_SHAPE = "KL terms compare with a reference model, which takes the actor's shape unless --resource gives one"
CRITIC_SAVE = "actor and critic are saved as a pair, the critic next to --save"
CRITIC_LOAD = "the critic's checkpoints are next to --load"


def complete(config: Config, *, has_critic: bool) -> tuple[Config, list[Change]]:
    """The configuration with a place for the reference model and folders for the critic, where they are not set."""
    resource, critic, changes = config.parallel.resource, config.critic, list[Change]()
    if config.algorithm.needs_reference and "reference" not in resource and "actor" in resource:
        completed = {**resource, "reference": resource["actor"]}
        parallel = config.parallel.model_copy(update={"resource": completed})
        changes.append(Change("--resource", json.dumps(resource), json.dumps(completed), REFERENCE_SHAPE))
        config = config.model_copy(update={"parallel": parallel})
    if has_critic:
        given = (config.checkpoint.load, config.checkpoint.save, critic.critic_load, critic.critic_save)
        load, save = critic_folders(*given, from_actor=critic.critic_init_from_actor)
        changes += [Change("--critic-load", None, load, CRITIC_LOAD)] if load != critic.critic_load else []
        changes += [Change("--critic-save", None, save, CRITIC_SAVE)] if save != critic.critic_save else []
        critic = critic.model_copy(update={"critic_load": load, "critic_save": save})
        config = config.model_copy(update={"critic": critic})
    return config, changes


def without_unused_roles(config: Config, graph: ServiceGraph) -> tuple[Config, list[Change]]:
    """The configuration without processes and devices for roles that the run does not have."""
    resource = config.parallel.resource
    # Counts that make no sense stay, for rules to report.
    unused = [
        role
        for role, (services, devices) in resource.items()
        if role in OPTIONAL_ROLES and role not in graph and services == 1 and devices >= (role != "advantages")
    ]
    if not unused:
        return config, []
    kept = {role: counts for role, counts in resource.items() if role not in unused}
    why = f"a run of {config.algorithm.advantage_estimator} with these options has no {' and no '.join(unused)}"
    parallel = config.parallel.model_copy(update={"resource": kept})
    changed = config.model_copy(update={"parallel": parallel})
    return changed, [Change("--resource", json.dumps(resource), json.dumps(kept), why)]


def critic_folders(
    load: str | None, save: str | None, critic_load: str | None, critic_save: str | None, *, from_actor: bool = False
) -> tuple[str | None, str | None]:
    """`--critic-load` and `--critic-save` of a run with a critic, with the folders next to the actor's where they are
    not given. `from_actor`: the critic may start from the actor's backbone."""
    if load is not None and critic_load is None and not from_actor:
        # `--load X --save X` starts from nothing the first time, so that one script restarts itself.
        is_first_start = load == save and critic_save is None and not has_checkpoints(load)
        if is_first_start or has_checkpoints(beside(load)):
            critic_load = beside(load)
    if save is not None and critic_save is None:
        critic_save = beside(save)
    return critic_load, critic_save


def beside(folder: str) -> str:
    """The critic's folder next to the actor's."""
    return f"{folder.rstrip('/')}-critic"


RUN_FORMAT = 2
"""`format` in the `config.json` of a run folder. Step k is the k-th rollout; without a format, steps began at 0."""

LEFT_BY_A_START = {
    *(".lock", ".config.json.tmp", "config.json", "evals", "logs", "metrics.jsonl"),
    *("rollouts", "tb", "tokenizer.json", "weights"),
}
"""What a run writes into its folder before its first step has finished."""


def holds_a_run(run_dir: Path) -> bool:
    """Whether a run has finished a step in this folder, or something else is there."""
    names = {path.name for path in run_dir.iterdir()} if run_dir.is_dir() else set()
    return not names <= LEFT_BY_A_START or has_metrics(run_dir)


def has_metrics(run_dir: Path) -> bool:
    """Whether a run has finished a step in this folder; an evaluation before the first step is none."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file():
        return False
    with metrics.open("rb") as file:
        first, more = file.readline(), file.readline()
    evaluated_only = first.startswith(b'{"step": 0,') and b'"phase_seconds"' not in first
    return bool(more if evaluated_only else first)


def counts_from_zero(run_dir: Path) -> bool:
    """Whether the steps of this folder's files are numbered from 0, as a version before format 2 wrote them."""
    return has_metrics(run_dir) and _record_of(run_dir).get("format") != RUN_FORMAT


def run_id_of(run_dir: Path) -> str | None:
    """What tells the run of this folder from all others; a resumed run keeps it. None where nothing says so."""
    found = _record_of(run_dir).get("run_id")
    return found if isinstance(found, str) else None


def saved_by(run_dir: Path) -> str | None:
    """The save folder of the run of this folder. None where nothing says so."""
    config = _record_of(run_dir).get("config")
    section = config.get("checkpoint") if isinstance(config, dict) else None
    found = section.get("save") if isinstance(section, dict) else None
    return found if isinstance(found, str) else None


def _record_of(run_dir: Path) -> dict[str, Any]:
    """`config.json` of a run folder; empty where it cannot be read."""
    try:
        record = json.loads((run_dir / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def has_checkpoints(folder: str) -> bool:
    """Whether a save folder has a tracker that says something, or more than a kill in the first save leaves."""
    tracker = Path(folder) / TRACKER_FILE
    return (tracker.is_file() and tracker.stat().st_size > 0) or len(list_iterations(Path(folder))) > 1
