"""A checked run as people and programs see it, and the bar while its files are read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from relax_cli.cli.console import Output
from relax_cli.cli.lines import wrapped
from relax_cli.cli.plan_text import plan_lines, simulation_lines
from relax_cli.cli.problem_text import problem_lines, problems_data, problems_text
from relax_cli.config.layers import Layers
from relax_cli.config.text import in_json
from relax_cli.engine.simulate import simulate
from relax_cli.errors import ConfigError, ExitCode
from relax_cli.plugin.manager import Plugins
from relax_cli.preflight.check_run import CheckedRun, check_run
from relax_cli.preflight.plan import plan_dict

if TYPE_CHECKING:
    from relax_cli.checkpoint.resume import ResumeDecision
    from relax_cli.plugin.launch_plan import LoadFrom

SHOW_PROGRESS_AFTER = 2.0


def report(
    plugins: Plugins,
    layers: Layers,
    output: Output,
    *,
    show_origin: bool = False,
    skip_files: bool = False,
    here: bool = False,
    simulates: bool = False,
) -> ExitCode:
    """Check a run, print everything that is known about it, and return the exit code.

    Args:
        simulates: run a training step of each role on tensors without memory.

    Raises:
        EnvironmentFault: that is not possible here.
    """
    try:
        with reading_progress(output) as progress:
            checked = check_run(plugins, layers, skip_files=skip_files, here=here, progress=progress)
    except ConfigError as error:
        # There is no configuration at all, but programs get the object they expect.
        empty: dict[str, Any] = {"changes": [], "config": {}, "origins": {}, "plan": None}
        output.result({"ok": False, "problems": problems_data(error.problems), **empty}, problems_text(error.problems))
        return ExitCode.USAGE
    data, more = as_dict(checked), ""
    if simulates and not checked.errors:
        with output.err.status("simulating") as screen:
            data["simulation"] = simulate(checked, screen.update)
        more = "\n".join(simulation_lines(data["simulation"], checked.plan))
    # The last lines are what a person at a terminal sees first.
    text = as_text(checked, show_origin=show_origin, problems_last=output.is_terminal)
    output.result(data, f"{more}\n\n{text}".strip() if output.is_terminal else f"{text}\n{more}".strip())
    return ExitCode.USAGE if checked.errors else ExitCode.OK


def as_dict(checked: CheckedRun) -> dict[str, Any]:
    """The object of `--format json`."""
    dump = checked.dump()
    plan = None if checked.plan is None else plan_dict(checked.plan)
    if plan is not None:
        plan["placement"]["notes"] = problems_data(checked.notes)
        start = None if checked.start is None else decision_dict(checked.start.decision)
        plan["steps"] = {**plan["steps"], "start": start}
    return {
        "ok": not checked.errors,
        "problems": problems_data(checked.problems),
        "changes": [{"option": c.option, "from": c.before, "to": c.after, "why": c.why} for c in checked.changes],
        "config": dump["config"],
        "origins": dump["origins"],
        "plan": plan,
    }


def decision_dict(decision: ResumeDecision) -> dict[str, Any]:
    """Where a run starts, as JSON."""

    def shown(source: LoadFrom | None) -> dict[str, Any] | None:
        return None if source is None else {"path": str(source.folder), "weights_only": source.weights_only}

    return {
        "verdict": decision.verdict,
        "iteration": decision.iteration,
        "next_rollout_id": None if decision.verdict == "refuse" else decision.iteration or 0,
        "actor": shown(decision.actor),
        "critic": shown(decision.critic),
        "text": decision.text,
    }


def as_text(checked: CheckedRun, *, show_origin: bool, problems_last: bool = False) -> str:
    """The report for people."""
    notes = [line for note in checked.notes for line in problem_lines(note, "note, about this machine")]
    problems = problems_text(checked.problems, verdict_last=problems_last)
    lines: list[str] = []
    if checked.changes:
        lines += ["", "changed"]
        for change in checked.changes:
            lines += wrapped(f"  - {change.option} {in_json(change.before)}")
            lines += wrapped(f"  + {change.option} {in_json(change.after)}  ({change.why})")
    if show_origin:
        lines += ["", "configuration", *as_recipe(checked.dump()["config"], checked.origins)]
    if checked.start is not None:
        lines += ["", "start", *wrapped(f"  {checked.start.decision.text}")]
    lines += ["", *plan_lines(checked.plan)] if checked.plan is not None else ["", "no plan: see the errors"]
    return "\n".join([*lines[1:], "", *notes, problems] if problems_last else [problems, *notes, *lines])


def show(plugins: Plugins, layers: Layers, output: Output) -> None:
    """Print a configuration with its origins: JSON, or YAML that is a recipe again.
    Raises ConfigError: a value cannot be read."""
    checked = check_run(plugins, layers, skip_files=True)
    if checked.unread:
        raise ConfigError(checked.problems)
    data = checked.dump()
    changes = [
        f"# changed: {c.option} from {in_json(c.before)} to {in_json(c.after)}, because {c.why}"
        for c in checked.changes
    ]
    output.result(data, "\n".join([*changes, *as_recipe(data["config"], checked.origins)]))


def as_recipe(config: dict[str, dict[str, Any]], origins: dict[str, str]) -> list[str]:
    """A configuration as lines of a recipe, with the origin of each value as a comment."""
    # JSON scalars and flow collections are YAML.
    lines = []
    for section, values in config.items():
        lines.append(f"{section}:")
        rows = [(f"  {key}: {json.dumps(value)}", origins[f"{section}.{key}"]) for key, value in values.items()]
        width = max(len(text) for text, _ in rows)
        lines += [f"{text:<{width}}  # {origin}" for text, origin in rows]
    return lines


@contextmanager
def reading_progress(output: Output) -> Iterator[Callable[[str, float], None]]:
    """Shows on stderr, on a terminal, that a run is checked, and a bar when reading takes longer than two seconds."""
    from rich.progress import Progress

    started, bar = time.monotonic(), Progress(console=output.err, transient=True, disable=not output.err.is_terminal)
    tasks: dict[str, Any] = {}

    def show(name: str, part: float) -> None:
        if time.monotonic() - started < SHOW_PROGRESS_AFTER:
            return
        if name not in tasks:
            tasks[name] = bar.add_task(f"reading {name}", total=1.0)
        bar.update(tasks[name], completed=part)

    with bar:
        bar.add_task("checking configuration, model and data", total=None)
        yield show
