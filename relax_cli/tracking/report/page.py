"""One HTML page that needs nothing else: styles, scripts and data are in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from relax_cli.checkpoint.layout import replace_file
from relax_cli.roles.sample_files import finite
from relax_cli.tracking.report.data import BYTES_OF_SAMPLES, differing, run_data
from relax_cli.tracking.run_reader import RunFolder
from relax_cli.tracking.token_view import COLUMNS

ASSETS = files("relax_cli.tracking.report") / "assets"


def write_page(runs: Sequence[RunFolder], path: Path) -> None:
    """Write the report of some runs."""
    replace_file(path, page(runs))


def page(runs: Sequence[RunFolder]) -> str:
    """The page as text."""
    with_samples = sum(bool(run.steps() or run.steps("evals")) for run in runs)
    data = {
        "runs": [run_data(run, BYTES_OF_SAMPLES // max(1, with_samples)) for run in runs],
        "differing": differing(runs),
        "columns": COLUMNS,
    }
    parts = {
        "plot_css": _asset("uPlot.min.css"),
        "css": _asset("report.css"),
        "licence": _asset("uPlot.LICENSE.txt").strip(),
        "plot": _asset("uPlot.iife.min.js"),
        "script": _asset("report.js"),
        "data": inert(data),
    }
    return Template(_asset("report.html")).substitute(parts)


def inert(data: Any) -> str:
    """JSON that can stand inside an HTML page: nothing in it starts or ends an element."""
    text = json.dumps(finite(data), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (ASSETS / name).read_text("utf-8")
