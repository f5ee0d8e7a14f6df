"""Commands that look at runs: `relax report`, `rollouts` and `replay`."""

from __future__ import annotations

import operator
import random
import re
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from relax_cli.cli.console import Output, path_argument, path_option
from relax_cli.config.text import table
from relax_cli.errors import ConfigError, ExitCode, problem_kinds
from relax_cli.plugin.manager import Plugins
from relax_cli.roles.sample_files import Sample, finite
from relax_cli.tracking import sample_text
from relax_cli.tracking.numbers import curve, number_text, sparkline
from relax_cli.tracking.report.page import columns, differing, evaluations, names_of, run_data, warnings, write_page
from relax_cli.tracking.run_files import RunFolder, advantage, read_run
from relax_cli.tracking.view import WATCHED

declare = problem_kinds("Folders and checkpoints")
REPORT_UNWRITABLE = declare(
    "report-unwritable", "The page of `relax report --out` cannot be written there.", option="--out"
)
CURVE_WIDTH, CURVE_HEIGHT, SPARK_WIDTH = 72, 6, 30
BAD_FILTER = declare(
    "rollouts-filter",
    "`relax rollouts --filter` is not FIELD, one of `= != < <= > >= ~`, and a value, or no sample has that field.",
    option="--filter",
)
NO_SUCH_SAMPLE = declare(
    "rollouts-sample", "`relax rollouts --sample` or `--group` names one that the step does not have."
)
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le, ">=": operator.ge, "!=": operator.ne, "=": operator.eq, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
SHOWN = 10
Run = Annotated[Path, path_argument("RUN", "a run folder")]


def report(
    output: Output,
    runs: Annotated[list[Path], path_argument("RUN...", "run folders")],
    out: Annotated[Path | None, path_option("--out", "also write an HTML page that needs no network", "FILE")] = None,
    shows: Annotated[
        bool, typer.Option("--open", help="write the page, RUN/report.html unless --out, and open it in a browser")
    ] = False,
) -> None:
    """Show the curves, evaluations and warnings of runs and what they differ in; also as one HTML page."""
    found = [read_run(path) for path in runs]
    page = out or (runs[0] / "report.html" if shows else None)
    if page is not None:
        try:
            write_page(found, page)
        except OSError as error:
            raise ConfigError(
                REPORT_UNWRITABLE(
                    f"the page cannot be written: {error.strerror}",
                    where=str(page),
                    got=str(error),
                    expected="a new file, or a page to replace, in a folder that exists",
                    fix="--out report.html",
                )
            ) from error
    lines = [line for run in found for line in _run_lines(run)]
    different = differing(found)
    if len(found) > 1:
        header = ("option", *names_of(found))
        lines += ["Differences of the configurations", table(header, [(key, *values) for key, values in different])]
    if page is not None:
        lines += ["", f"Page      {page}"]
    shown = {
        "page": None if page is None else str(page),
        "runs": [run_data(run, 0) | {"samples": sorted(run.steps())} for run in found] if output.is_json else [],
        "differing": dict(different),
    }
    output.result(shown, "\n".join(lines))
    if shows and page is not None:
        webbrowser.open(page.resolve().as_uri())


def _run_lines(run: RunFolder) -> Iterator[str]:
    trained = [record for record in run.metrics if "phase_seconds" in record]
    estimator = run.config.get("algorithm", {}).get("advantage_estimator", "")
    yield f"{run.path}  {estimator}, {len(trained)} steps"
    metrics = columns(trained)
    if len(trained) > 1 and "reward/mean" in metrics:
        yield from ["", "Mean reward per step", *curve(metrics["reward/mean"], CURVE_WIDTH, CURVE_HEIGHT)]
    rows = []
    for name in WATCHED:
        if known := [value for value in metrics.get(name, ()) if value is not None]:
            ends = [number_text(value) for value in (known[0], known[-1], min(known), max(known))]
            rows.append((name, sparkline(metrics[name], SPARK_WIDTH), *ends))
    if rows:
        yield from ["", table(("metric", "course", "first", "last", "least", "most"), rows)]
    for name, points in evaluations(run).items():
        yield from ["", f"Held-out set {name}"]
        for point in points:
            interval = f" ± {number_text(point['reward/ci95'])}" if point.get("reward/ci95") is not None else ""
            yield f"  step {point['step']:>5}  reward {number_text(point.get('reward/mean'))}{interval}"
    if found := warnings(run.metrics):
        yield from ["", "Warnings", *(f"  step {one['step']:>5}  {one.get('seen', '')}" for one in found)]
    yield ""


def rollouts(
    output: Output,
    run: Run,
    step: Annotated[int | None, typer.Option(help="the step; the last one when unset")] = None,
    evals: Annotated[bool, typer.Option("--evals", help="samples of the held-out sets instead")] = False,
    worst: Annotated[int | None, typer.Option(min=1, metavar="K", help="the K with the lowest reward")] = None,
    best: Annotated[int | None, typer.Option(min=1, metavar="K", help="the K with the highest reward")] = None,
    chosen_by_chance: Annotated[int | None, typer.Option("--random", min=1, metavar="K", help="any K")] = None,
    conditions: Annotated[
        list[str] | None,
        typer.Option(
            "--filter", metavar="COND", help="FIELD=VALUE; also != < <= > >=, and ~ for a regular expression (repeats)"
        ),
    ] = None,
    group: Annotated[int | None, typer.Option(metavar="G", help="the samples of one prompt side by side")] = None,
    sample: Annotated[int | None, typer.Option(metavar="ROW", help="one sample, token by token")] = None,
) -> None:
    """Read the samples of a run: texts, rewards, and every number of every token.

    Fields of --filter: reward, length, advantage, finish_reason, prompt, response, label, group, row, source, set, and
    reward_parts.NAME.
    """
    folder = read_run(run)
    every = folder.samples(step, "evals" if evals else "rollouts")
    for found in every:
        found |= {"length": len(found["response_token_ids"]), "advantage": advantage(found)}
    kept = [found for found in every if all(_holds(found, text, every) for text in conditions or [])]
    if sample is not None:
        (only,) = _named(kept, "row", sample)[:1]
        output.show(as_json(only, folder), *sample_text.one_sample(only, folder.token_texts))
        return
    if group is not None:
        members = _named(kept, "group", group)
        output.show([as_json(member) for member in members], *sample_text.side_by_side(members))
        return
    chosen = _chosen(kept, worst, best, chosen_by_chance, len(kept) if output.is_json else SHOWN)
    output.show([as_json(found) for found in chosen], *sample_text.overview(every, kept, chosen))


def as_json(sample: Sample, run: RunFolder | None = None) -> dict[str, Any]:
    """A sample for a program, with the texts of its tokens where a run is given."""
    texts = {} if run is None else {"tokens": [run.token_texts[int(i)] for i in sample["response_token_ids"]]}
    plain: dict[str, Any] = finite(sample | texts)
    return plain


def _chosen(kept: list[Sample], worst: int | None, best: int | None, by_chance: int | None, first: int) -> list[Sample]:
    by_reward = sorted(kept, key=lambda found: (found["reward"] is not None, found["reward"] or 0.0))
    if worst is not None:
        return by_reward[:worst]
    if best is not None:
        return by_reward[::-1][:best]
    if by_chance is not None:
        return random.Random(0).sample(kept, min(by_chance, len(kept)))
    return kept[:first]


def _named(samples: Sequence[Sample], field: str, number: int) -> list[Sample]:
    """The samples with that number. Raises ConfigError: there are none."""
    found = [sample for sample in samples if sample[field] == number]
    if not found:
        there = sorted({sample[field] for sample in samples})
        what = "sample" if field == "row" else "group"
        option = f"--{what}"
        raise ConfigError(
            NO_SUCH_SAMPLE(
                f"the step has no {what} of that number",
                option=option,
                got=str(number),
                expected=f"from {there[0]} to {there[-1]}" if there else "a step with samples",
                fix=f"{option} {there[0]}" if there else "choose another step with --step",
            )
        )
    return found


def _holds(sample: Mapping[str, Any], condition: str, every: Sequence[Sample]) -> bool:
    match = re.fullmatch(r"\s*([\w.]+?)\s*(<=|>=|!=|=|<|>|~)\s*(.*)", condition, re.DOTALL)
    if match is None:
        raise _bad_filter(condition, "it has no operator")
    field, sign, wanted = match.groups()
    name, _, part = field.partition(".")
    known = {key for found in every for key in found}
    if name not in known:
        raise _bad_filter(condition, f"no sample has a field {name}")
    value = sample.get(name)
    if part:
        value = value.get(part) if isinstance(value, Mapping) else None
    if sign == "~":
        try:
            return re.search(wanted, str(value)) is not None
        except re.error as error:
            raise _bad_filter(condition, f"{wanted!r} is not a regular expression: {error}") from None
    if isinstance(value, int | float):
        try:
            return OPERATORS[sign](value, float(wanted))
        except ValueError:
            raise _bad_filter(condition, f"{field} is a number") from None
    return value is not None and OPERATORS[sign](str(value), wanted)


def _bad_filter(condition: str, why: str) -> ConfigError:
    return ConfigError(
        BAD_FILTER(
            f"--filter cannot be applied: {why}",
            got=condition,
            expected="FIELD, an operator and a value",
            fix="--filter 'reward<0.5', or --filter 'response~wait'",
        )
    )


def replay(
    output: Output,
    plugins: Plugins,
    run: Run,
    step: Annotated[int | None, typer.Option(help="the step; the last one when unset")] = None,
) -> ExitCode:
    """Recompute a stored step with the installed reward and plugin, and show the first difference."""
    from relax_cli.tracking.replay import Replay  # It imports torch.

    again = Replay(read_run(run), step, plugins)
    stages = list(again.stages())
    lines = [f"step {again.step}, {len(again.samples)} samples"]
    lines += [f"  {stage.name:<13}{stage.status:<14}{stage.detail}" for stage in stages]
    differs = [stage for stage in stages if stage.status == "differs"]
    for stage in differs[:1]:
        assert stage.first is not None, "there is a difference"
        place = {"sample": stage.first.row, "token": stage.first.token, "number": stage.first.metric}
        where = ", ".join(f"{name} {value}" for name, value in place.items() if value is not None)
        lines += ["", f"first difference: {stage.name}, {where}"]
        lines += [f"  stored      {stage.first.stored!r}", f"  recomputed  {stage.first.recomputed!r}"]
    data = {"ok": not differs, "step": again.step, "stages": [asdict(stage) for stage in stages]}
    output.result(data, "\n".join(lines))
    return ExitCode.FAILED if differs else ExitCode.OK
