"""A report of runs: its plain data, and one HTML page with styles, scripts and data in it."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, get_args

import numpy as np

from relax_cli.checkpoint.layout import replace_file
from relax_cli.roles.sample_files import Folder, Sample, finite
from relax_cli.tracking.run_files import COLUMNS, RunFolder, advantage, is_trainable, token_numbers
from relax_cli.tracking.trackers import numbers

START = b"<!doctype html>"
ASSETS = files("relax_cli.tracking.report") / "assets"
STEPS_OF_SAMPLES = 8
ROWS_OF_STEP, EXTREMES = 8, 4
"""Samples shown of a step or of a held-out set: the first ones, whose groups are whole, and the best and worst."""
MOST_TOKENS = 1000
"""Of one response; the page says where it is cut."""
MOST_CHARACTERS = 4000
"""Of a prompt, and of a response, whose tokens are shown besides."""
BYTES_OF_SAMPLES = 3_000_000
"""Of all runs of a page together, about."""


def write_page(runs: Sequence[RunFolder], path: Path) -> None:
    """Write the report of some runs. Raises OSError: it cannot be written, or something else than a page is there."""
    if path.exists() and not (path.is_file() and _begins_as_a_page(path)):
        raise FileExistsError(errno.EEXIST, "there is something else", str(path))
    replace_file(path, page(runs))


def _begins_as_a_page(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(START)) == START


def names_of(runs: Sequence[RunFolder]) -> list[str]:
    """Names of their folders; their paths where those are not enough, as of `one/run` and `two/run`."""
    names = [run.path.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def page(runs: Sequence[RunFolder]) -> str:
    """The page as text."""
    room = BYTES_OF_SAMPLES // max(1, sum(bool(run.steps() or run.steps("evals")) for run in runs))
    data = {
        "runs": [run_data(run, room) | {"name": name} for run, name in zip(runs, names_of(runs), strict=True)],
        "differing": differing(runs),
        "columns": COLUMNS,
    }
    assets = {
        "plot_css": "uPlot.min.css",
        "css": "report.css",
        "licence": "uPlot.LICENSE.txt",
        "plot": "uPlot.iife.min.js",
        "script": "report.js",
    }
    texts = {name: (ASSETS / file).read_text("utf-8") for name, file in assets.items()}
    texts |= {"licence": texts["licence"].strip(), "data": inert(data)}
    return Template((ASSETS / "report.html").read_text("utf-8")).substitute(texts)


def inert(data: Any) -> str:
    """JSON that can stand inside an HTML page: nothing in it starts or ends an element."""
    text = json.dumps(finite(data), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def run_data(run: RunFolder, room: int) -> dict[str, Any]:
    """One run, whose samples may take so many bytes of `room`; none are read for 0."""
    trained = [record for record in run.metrics if "phase_seconds" in record]
    return {
        "name": run.path.resolve().name,
        "path": str(run.path),
        "command": " ".join(map(str, run.record.get("command", []))),
        "versions": run.record.get("versions", {}),
        "config": {key: [text, run.record.get("origins", {}).get(key, "")] for key, text in options_of(run).items()},
        "steps": [record["step"] for record in trained],
        "times": [record.get("time") for record in trained],
        "metrics": columns(trained),
        "evaluations": evaluations(run),
        "warnings": warnings(run.metrics),
        "samples": samples_of(run, room),
    }


def columns(records: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Every metric of the steps, None where a step has none; phases as `phase_seconds/NAME`."""
    rows = [dict(numbers(record)) for record in records]
    names = dict.fromkeys(name for row in rows for name in row if not name.startswith("eval/"))
    return {name: [short(row.get(name)) for row in rows] for name in names}


def evaluations(run: RunFolder) -> dict[str, list[dict[str, Any]]]:
    """The evaluations of each held-out set, in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for evaluation in run.evaluations:
        metrics = {name: short(value) for name, value in evaluation.metrics.items()}
        found.setdefault(evaluation.name, []).append({"step": evaluation.step, **metrics})
    return found


def warnings(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every warning with its step."""
    return [
        {"step": record["step"], **(warning if isinstance(warning, dict) else {"seen": str(warning)})}
        for record in records
        for warning in record.get("warnings", ())
    ]


def options_of(run: RunFolder) -> dict[str, str]:
    """Its options as `section.option`, with their values."""
    return {f"{section}.{key}": shown(value) for section, body in run.config.items() for key, value in body.items()}


def differing(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    """Options of which the runs have different values, with the value of each."""
    options = [options_of(run) for run in runs]
    names = dict.fromkeys(name for one in options for name in one)
    rows = [(name, [one.get(name, "unset") for one in options]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def samples_of(run: RunFolder, room: int) -> list[dict[str, Any]]:
    """Samples of a few steps and of a few evaluations, spread over the run, as many as there is room for."""
    folders = [folder for folder in get_args(Folder) if room and run.steps(folder)]
    found = [shown for folder in folders for shown in _samples_in(run, folder, room // len(folders))]
    return sorted(found, key=lambda one: int(one["step"]))


def _samples_in(run: RunFolder, folder: Folder, room: int) -> Iterator[dict[str, Any]]:
    steps = list(run.steps(folder))
    # Spread evenly, the first and the last among them.
    places = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), STEPS_OF_SAMPLES)).round().astype(int))
    for step in [steps[place] for place in places]:
        sets: dict[str | None, list[Sample]] = {}
        for sample in run.samples(step, folder):
            sets.setdefault(sample.get("set"), []).append(sample)
        for name, every in sets.items():
            share = room // len(places) // len(sets)
            kept: list[dict[str, Any]] = []
            for sample in chosen(every):
                packed = sample_data(sample, run)
                share -= len(json.dumps(packed))
                if kept and share < 0:
                    break
                kept.append(packed)
            yield {"step": step, "set": name, "of": len(every), "samples": kept}


def chosen(samples: Sequence[Sample]) -> list[Sample]:
    """The first, the worst and the best of a step, in the order of their rows."""
    by_reward = sorted(samples, key=lambda sample: sample["reward"] or 0.0)
    few = [*samples[:ROWS_OF_STEP], *by_reward[:EXTREMES], *by_reward[-EXTREMES:]]
    return sorted({int(sample["row"]): sample for sample in few}.values(), key=lambda sample: int(sample["row"]))


def sample_data(sample: Sample, run: RunFolder) -> dict[str, Any]:
    """One sample with the numbers of its tokens."""
    tokens = sample["response_token_ids"][:MOST_TOKENS]
    of_tokens = token_numbers(sample)
    return {
        **{name: sample.get(name) for name in ("row", "group", "label", "reward")},
        **{name: str(sample.get(name))[:MOST_CHARACTERS] for name in ("prompt", "response")},
        "parts": {name: short(value) for name, value in (sample.get("reward_parts") or {}).items()},
        "finish": sample.get("finish_reason"),
        "advantage": short(advantage(sample)),
        "length": len(sample["response_token_ids"]),
        "tokens": [run.token_texts[int(token)] for token in tokens],
        "masked": np.flatnonzero(~is_trainable(sample)[:MOST_TOKENS]).tolist(),
        "numbers": {name: [short(float(v), 4) for v in values[:MOST_TOKENS]] for name, values in of_tokens.items()},
    }


def short(value: Any, digits: int = 6) -> float | None:
    """A number with so many digits; None for what is not finite."""
    return float(f"{value:.{digits}g}") if isinstance(value, int | float) and math.isfinite(value) else None


def shown(value: Any) -> str:
    """A value of a configuration."""
    return value if isinstance(value, str) else "unset" if value is None else json.dumps(value)
