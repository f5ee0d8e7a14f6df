"""The quickstart tasks, and the folder `relax quickstart` trains in.

`addition`: `37+58=` -> `95`. `tool`: `374+589=` with a calculator that the model may ask, see `tool/calculator.py`.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from relax_cli.errors import ConfigError, problem_kind

UNWRITABLE = problem_kind("quickstart-folder", "Folders and checkpoints", "The quickstart folder cannot be written.")
IN_USE = problem_kind(
    "quickstart-folder-in-use", "Folders and checkpoints", "The quickstart folder contains something else."
)

HELDOUT_SIZE = 500
SPLIT_SEED = 1234
TaskName = Literal["addition", "tool"]
Pairs = list[tuple[int, int]]


@dataclass(frozen=True)
class Task:
    """What is learned, and what comes with it."""

    folder: Path
    split: Callable[[], tuple[Pairs, Pairs]]
    """Numbers to add: for training, and held out."""
    files: tuple[str, ...] = ()
    """Further files of the folder."""

    @property
    def model(self) -> Path:
        """The tiny warm-started model, made by `scripts/make_tiny_model.py`."""
        return self.folder / "model"

    def recipe(self, steps: str, seed: str) -> str:
        """The recipe, or a pattern of it."""
        text = (self.folder / "recipe.yaml").read_text("utf-8")
        return text.replace("STEPS", steps).replace("SEED", seed)

    def contents(self) -> dict[str, bytes]:
        """Relative path to content of all files but the recipe."""
        data = {}
        for name, pairs in zip(("train", "heldout"), self.split(), strict=True):
            rows = (json.dumps({"input": prompt(x, y), "label": str(x + y)}) for x, y in pairs)
            data[f"data/{name}.jsonl"] = "".join(f"{row}\n" for row in rows).encode()
        paths = [*(self.folder / name for name in self.files), *self.model.iterdir()]
        return data | {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}


def split() -> tuple[Pairs, Pairs]:
    """All pairs of two-digit numbers as (7600 for training, 500 held out); the same on every machine."""
    pairs = [(x, y) for x in range(10, 100) for y in range(10, 100)]
    random.Random(SPLIT_SEED).shuffle(pairs)
    return pairs[HELDOUT_SIZE:], pairs[:HELDOUT_SIZE]


def tool_split() -> tuple[Pairs, Pairs]:
    """Pairs of three-digit numbers as (7600 for training, 500 held out); the same on every machine."""
    numbers = random.Random(SPLIT_SEED).sample(range(900 * 900), 7600 + HELDOUT_SIZE)
    pairs = [(100 + number // 900, 100 + number % 900) for number in numbers]
    return pairs[HELDOUT_SIZE:], pairs[:HELDOUT_SIZE]


def prompt(x: int, y: int) -> str:
    """What the model sees."""
    return f"{x}+{y}="


TASKS: dict[TaskName, Task] = {
    "addition": Task(Path(__file__).parent, split),
    "tool": Task(Path(__file__).parent / "tool", tool_split, ("calculator.py",)),
}
MODEL = TASKS["addition"].model


def prepare(folder: Path, *, seed: int, steps: int, task: TaskName = "addition") -> None:
    """Write `folder/{model,data,recipe.yaml}`, all or nothing. A folder that was prepared before gets a new recipe.

    Raises:
        ConfigError: the folder contains something else, or cannot be written.
    """
    chosen = TASKS[task]
    recipe = chosen.recipe(str(steps), str(seed))
    try:
        if folder.is_dir() and any(folder.iterdir()):
            _require_untouched(folder, chosen)
            (folder / "recipe.yaml").write_text(recipe, "utf-8")
        else:
            _write(folder, chosen, recipe)
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


def _write(folder: Path, task: Task, recipe: str) -> None:
    """An empty folder is filled and never replaced: it may be a link, a mount, or the one a shell is in."""
    is_new = not folder.exists()
    where = folder.parent if is_new else folder
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=where, prefix=".quickstart-") as scratch:
        new = Path(scratch) / "new"
        for name, content in (task.contents() | {"recipe.yaml": recipe.encode()}).items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(content)
        if is_new:
            new.rename(folder)
        else:
            for path in sorted(new.iterdir()):
                path.rename(folder / path.name)


def _require_untouched(folder: Path, task: Task) -> None:
    expected = task.contents()
    found = {str(file.relative_to(folder)): file for file in folder.rglob("*") if not file.is_dir()}
    strangers = sorted(set(found) - set(expected) - {"recipe.yaml"})
    missing = sorted((set(expected) | {"recipe.yaml"}) - set(found))
    changed = [name for name in expected if name in found and found[name].read_bytes() != expected[name]]
    # Any number of steps and any seed may have been used before.
    pattern = re.escape(task.recipe("STEPS", "SEED")).replace("STEPS", r"\d+").replace("SEED", r"\d+")
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
                f"relax train --recipe {shlex.quote(str(folder / 'recipe.yaml'))} "
                "--run-dir NEW/run --save NEW/actor --critic-save NEW/critic",
            )
        )
