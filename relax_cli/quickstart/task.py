"""The quickstart task, two-digit addition (`37+58=` -> `95`), and the folder `relax quickstart` trains in."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from relax_cli.errors import ConfigError, problem_kind

UNWRITABLE = problem_kind("quickstart-folder", "Folders and checkpoints", "The quickstart folder cannot be written.")
IN_USE = problem_kind(
    "quickstart-folder-in-use", "Folders and checkpoints", "The quickstart folder contains something else."
)

MODEL = Path(__file__).parent / "model"
"""The tiny warm-started model, made by `scripts/make_tiny_model.py`."""
RECIPE = Path(__file__).parent / "recipe.yaml"

HELDOUT_SIZE = 500
SPLIT_SEED = 1234


def split() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All pairs of two-digit numbers as (7600 for training, 500 held out); the same on every machine."""
    pairs = [(x, y) for x in range(10, 100) for y in range(10, 100)]
    random.Random(SPLIT_SEED).shuffle(pairs)
    return pairs[HELDOUT_SIZE:], pairs[:HELDOUT_SIZE]


def prompt(x: int, y: int) -> str:
    """The six characters the model sees."""
    return f"{x}+{y}="


def jsonl(pairs: Iterable[tuple[int, int]]) -> str:
    """Prompts and labels of the pairs, one JSON object a line."""
    rows = ({"input": prompt(x, y), "label": str(x + y)} for x, y in pairs)
    return "".join(json.dumps(row) + "\n" for row in rows)


def prepare(folder: Path, *, seed: int, steps: int) -> None:
    """Write `folder/{model,data,recipe.yaml}`, all or nothing.

    A folder that was prepared before and contains nothing else only gets a new recipe.

    Raises:
        ConfigError: the folder contains something else, or cannot be written.
    """
    recipe = RECIPE.read_text("utf-8").replace("STEPS", str(steps)).replace("SEED", str(seed))
    try:
        if folder.is_dir() and any(folder.iterdir()):
            _require_untouched(folder)
            (folder / "recipe.yaml").write_text(recipe, "utf-8")
        else:
            _write(folder, recipe)
    except OSError as error:
        raise ConfigError(
            UNWRITABLE(
                f"cannot write the quickstart folder: {error.strerror or error}",
                where=str(folder),
                got=str(error.filename or folder),
                expected="a folder that can be created",
                fix="relax quickstart OTHER_DIR",
            )
        ) from error


def _write(folder: Path, recipe: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        new = Path(scratch) / "new"
        shutil.copytree(MODEL, new / "model")
        for name, text in _texts().items():
            (new / name).parent.mkdir(exist_ok=True)
            (new / name).write_text(text, "utf-8")
        (new / "recipe.yaml").write_text(recipe, "utf-8")
        os.replace(new, folder)


def _texts() -> dict[str, str]:
    train, heldout = split()
    return {"data/train.jsonl": jsonl(train), "data/heldout.jsonl": jsonl(heldout)}


def _require_untouched(folder: Path) -> None:
    expected = {name: text.encode() for name, text in _texts().items()}
    expected |= {f"model/{file.name}": file.read_bytes() for file in MODEL.iterdir()}
    # Any number of steps and any seed may have been used before.
    pattern = re.escape(RECIPE.read_text("utf-8")).replace("STEPS", r"\d+").replace("SEED", r"\d+")

    found = {str(file.relative_to(folder)): file for file in folder.rglob("*") if not file.is_dir()}
    strangers = sorted(set(found) - set(expected) - {"recipe.yaml"})
    missing = sorted((set(expected) | {"recipe.yaml"}) - set(found))
    changed = [name for name in expected if name in found and found[name].read_bytes() != expected[name]]
    if "recipe.yaml" in found and not re.fullmatch(pattern, found["recipe.yaml"].read_text("utf-8", errors="replace")):
        changed.append("recipe.yaml")
    parts = {"also contains": strangers, "has changed": changed, "lacks": missing}
    if strangers or changed or missing:
        raise ConfigError(
            IN_USE(
                "the quickstart folder is already in use",
                where=str(folder),
                got="; ".join(f"{what} {', '.join(names[:3])}" for what, names in parts.items() if names),
                expected="a new or empty folder",
                fix="relax quickstart OTHER_DIR, or train on its files: "
                f"relax train --recipe {folder / 'recipe.yaml'} --run-dir NEW_RUN_DIR",
            )
        )
