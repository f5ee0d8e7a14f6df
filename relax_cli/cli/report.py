"""`relax report`: the curves of runs in the terminal, and as one HTML page."""

from __future__ import annotations

import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from relax_cli.cli.console import Output
from relax_cli.cli.lines import table
from relax_cli.errors import ConfigError, problem_kind
from relax_cli.tracking.numbers import number_text
from relax_cli.tracking.plots import curve, sparkline
from relax_cli.tracking.report.page import columns, differing, evaluations, run_data, warnings, write_page
from relax_cli.tracking.run_reader import RunFolder, read_run
from relax_cli.tracking.view import WATCHED

REPORT_UNWRITABLE = problem_kind(
    "report-unwritable",
    "Folders and checkpoints",
    "The page of `relax report --out` cannot be written there.",
    option="--out",
)
CURVE_WIDTH, CURVE_HEIGHT, SPARK_WIDTH = 72, 6, 30


def report(
    output: Output,
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="also write an HTML page that needs no network")
    ] = None,
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
                    expected="a file in a folder that exists",
                    fix="--out report.html",
                )
            ) from error
    lines = [line for run in found for line in _run_lines(run)]
    different = differing(found)
    if len(found) > 1:
        header = ("option", *(run.path.name for run in found))
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
    for name, points in evaluations(run.metrics).items():
        yield from ["", f"Held-out set {name}"]
        for point in points:
            interval = f" ± {number_text(point['reward/ci95'])}" if point.get("reward/ci95") is not None else ""
            yield f"  step {point['step']:>5}  reward {number_text(point.get('reward/mean'))}{interval}"
    if found := warnings(run.metrics):
        yield from ["", "Warnings", *(f"  step {one['step']:>5}  {one.get('seen', '')}" for one in found)]
    yield ""
