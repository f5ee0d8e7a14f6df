"""`relax validate-config`: all that can be known about a run before anything starts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_cli.cli.console import Format, Output
from relax_cli.cli.options import with_options
from relax_cli.cli.train import PANEL, FormatOption, Overrides, Recipes, as_recipe
from relax_cli.config.redact import scrubbed
from relax_cli.config.schema import Config
from relax_cli.errors import ConfigError, ExitCode, Problem
from relax_cli.preflight.plan import Plan, build_plan, plan_dict
from relax_cli.preflight.resolve import Resolved, examine

if TYPE_CHECKING:
    from relax_cli.checkpoint.resume import ResumeDecision, ResumeReport
    from relax_cli.plugin.launch_plan import LoadFrom
    from relax_cli.plugin.manager import Plugins

ShowOrigin = Annotated[
    bool, typer.Option("--show-origin", help="print every value and where it is from", rich_help_panel=PANEL)
]
SkipFiles = Annotated[
    bool, typer.Option("--skip-files", help="leave out what needs the model and data files", rich_help_panel=PANEL)
]
Here = Annotated[
    bool, typer.Option("--here", help="what this machine lacks is an error, as for `train`", rich_help_panel=PANEL)
]
SHOW_PROGRESS_AFTER = 2.0

Layers = tuple[Sequence[str], Mapping[str, str], Sequence[str], Mapping[str, Any]]


@dataclass(frozen=True)
class Checked:
    """A configuration and everything that is known about its run."""

    resolved: Resolved
    problems: tuple[Problem, ...]
    """Those of the configuration, errors first, and those of the checkpoints it would resume from."""
    plan: Plan | None
    """None where the roles of the run are not known."""
    start: ResumeReport | None = None
    """Where the run starts; None where that was not looked at."""

    @property
    def ok(self) -> bool:
        """Whether the run may start."""
        return all(problem.severity != "error" for problem in self.problems)


def validate_command(model: type[Config], plugins: Plugins) -> Callable[..., None]:
    """The command function, with an option for every field of the model."""

    @with_options(model)
    def validate_config(
        ctx: typer.Context,
        *,
        recipe: Recipes = None,
        set_values: Overrides = None,
        fmt: FormatOption = Format.TEXT,
        show_origin: ShowOrigin = False,
        skip_files: SkipFiles = False,
        here: Here = False,
        **flags: Any,
    ) -> None:
        """Check a configuration without Ray or a GPU, and show what its run will do.

        The checks are those of `train`. All problems are reported at once; exit code 0, or 2 where there are errors.
        """
        output = Output(fmt)
        ctx.find_root().obj = output
        layers = (recipe or (), os.environ, set_values or (), flags)
        raise typer.Exit(report(plugins, layers, output, show_origin=show_origin, skip_files=skip_files, here=here))

    return validate_config


def report(
    plugins: Plugins,
    layers: Layers,
    output: Output,
    *,
    show_origin: bool = False,
    skip_files: bool = False,
    here: bool = False,
) -> ExitCode:
    """Check, print what was found, and return the exit code."""
    try:
        with reading_progress(output) as progress:
            checked = check_run(plugins, layers, skip_files=skip_files, here=here, progress=progress)
    except ConfigError as error:
        # There is no configuration at all, but programs get the object they expect.
        empty: dict[str, Any] = {"changes": [], "config": {}, "origins": {}, "plan": None}
        output.result({"ok": False, "problems": as_data(error.problems), **empty}, problems_text(error.problems))
        return ExitCode.USAGE
    output.result(as_dict(checked), as_text(checked, show_origin=show_origin))
    return ExitCode.OK if checked.ok else ExitCode.USAGE


def check_run(
    plugins: Plugins,
    layers: Layers,
    *,
    skip_files: bool,
    here: bool,
    progress: Callable[[str, float], None] | None = None,
) -> Checked:
    """Everything that is known before a launch: the configuration, where it resumes, the plan.

    Raises:
        ConfigError: no configuration comes out at all.
    """
    resolved = examine(plugins, *layers, skip_files=skip_files, here=here, progress=progress)
    config, problems = resolved.config, list(resolved.problems)
    try:
        graph = plugins.service_graph(config)
    except ConfigError as error:
        found = [p for p in error.problems if p.id not in {known.id for known in problems}]
        return Checked(resolved, (*found, *problems), None)
    start = None
    if not skip_files:
        from relax_cli.preflight.start import examine_run

        start = examine_run(config, has_critic="critic" in graph, num_rollout=resolved.inputs.rollouts(config))
        problems = sorted([*start.problems, *problems, *start.warnings], key=lambda p: p.severity != "error")
    first = 0 if start is None else start.decision.iteration or 0
    resource = config.parallel.resource
    if any(name not in resource for name in graph.names) or any(s < 0 or d < 0 for s, d in resource.values()):
        return Checked(resolved, tuple(problems), None, start)
    from relax_cli.preflight.machine import Machine, usable_cores

    plan = build_plan(config, graph.roles, resolved.inputs, Machine(), cores=usable_cores(), first_rollout=first)
    return Checked(resolved, tuple(problems), plan, start)


def as_dict(checked: Checked) -> dict[str, Any]:
    """The object of `--format json`."""
    dump = checked.resolved.dump()
    plan = None if checked.plan is None else plan_dict(checked.plan)
    if plan is not None:
        plan["placement"]["notes"] = as_data(checked.resolved.notes)
        start = None if checked.start is None else decision_dict(checked.start.decision)
        plan["steps"] = {**plan["steps"], "start": start}
    return {
        "ok": checked.ok,
        "problems": as_data(checked.problems),
        "changes": [
            {"option": c.option, "from": c.before, "to": c.after, "why": c.why} for c in checked.resolved.changes
        ],
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


def as_data(problems: Sequence[Problem]) -> list[dict[str, str]]:
    """Problems as JSON objects without secrets."""
    return [{name: scrubbed(value) for name, value in asdict(problem).items()} for problem in problems]


def as_text(checked: Checked, *, show_origin: bool) -> str:
    """The report for people."""
    from relax_cli.cli.plan_text import plan_lines, problem_lines, wrapped

    resolved = checked.resolved
    lines = problems_text(checked.problems).splitlines()
    for note in resolved.notes:
        lines += [scrubbed(line) for line in problem_lines(note, "note, about this machine")]
    if resolved.changes:
        lines += ["", "changed by the estimator"]
        for change in resolved.changes:
            lines += wrapped(f"  - {change.option} {change.before}")
            lines += wrapped(f"  + {change.option} {change.after}  ({change.why})")
    if show_origin:
        lines += ["", "configuration", *as_recipe(resolved.dump()["config"], resolved.origins)]
    if checked.start is not None:
        lines += ["", "start", *wrapped(f"  {checked.start.decision.text}")]
    lines += ["", *plan_lines(checked.plan)] if checked.plan is not None else ["", "no plan: see the errors above"]
    return "\n".join(lines)


def problems_text(problems: Sequence[Problem]) -> str:
    """The verdict, then every problem in four parts."""
    from relax_cli.cli.plan_text import problem_lines

    errors = sum(p.severity == "error" for p in problems)
    counts = [_count(errors, "error"), _count(len(problems) - errors, "warning")]
    found = ", ".join(count for count in counts if count) or "no problems"
    lines = [f"{'not valid' if errors else 'valid'}: {found}"]
    for problem in problems:
        lines += [scrubbed(line) for line in problem_lines(problem)]
    return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}" if number else ""


@contextmanager
def reading_progress(output: Output) -> Iterator[Callable[[str, float], None]]:
    """Shows a bar on stderr, on a terminal, when reading takes longer than two seconds."""
    from rich.progress import Progress

    started, bar = time.monotonic(), Progress(console=output.err, transient=True)
    tasks: dict[str, Any] = {}

    def show(name: str, part: float) -> None:
        if not output.err.is_terminal or time.monotonic() - started < SHOW_PROGRESS_AFTER:
            return
        if name not in tasks:
            bar.start()
            tasks[name] = bar.add_task(f"reading {name}", total=1.0)
        bar.update(tasks[name], completed=part)

    try:
        yield show
    finally:
        if tasks:
            bar.stop()
