"""What an item of `--prompt-data` names: files or a reasoning-gym task, and which of their rows with what weight."""

from __future__ import annotations

import glob
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import unquote

from pydantic import TypeAdapter, ValidationError

from relax_cli.config.names import nearest
from relax_cli.data.formats import FILE_MISSING, MOST_ROWS, UNREADABLE
from relax_cli.data.rows import Prompt
from relax_cli.errors import MACHINE_THEME, ConfigError, problem_kind, problem_kinds
from relax_cli.models.hub import PREFIX as HUB_PREFIX
from relax_cli.models.hub import dataset_files

declare = problem_kinds("Data", option="--prompt-data")
SOURCE = declare(
    "prompt-data-source",
    "An item of `--prompt-data` has a slice or a weight that cannot be read, or only some of several have a weight.",
)
TASK = declare("reasoning-gym-task", "There is no such reasoning-gym task, or it refuses the parameters.")
REASONING_GYM = "reasoning-gym:"
INSTALL = "pip install 'relax-cli[reasoning-gym]'"
MISSING = problem_kind(
    "reasoning-gym-missing", MACHINE_THEME, "The reasoning-gym package is not installed.", option="--prompt-data"
)
SAVED, SPLITS = "state.json", "dataset_dict.json"
"""What `datasets` writes next to the Arrow files of a data set, and next to the folders of its splits."""

_ITEM = re.compile(r"(?P<place>.+?)(?:@\[(?P<rows>[^\]]*)\])?(?:\*(?P<weight>\d+(?:\.\d*)?|\.\d+))?", re.DOTALL)
_SLICE = re.compile(r"(\d*):(\d*)(?::(\d+))?")


@dataclass(frozen=True)
class Source:
    """One item of `--prompt-data`."""

    place: str
    """A path, a glob, `hf:…` or `reasoning-gym:…`."""
    rows: tuple[int | None, int | None, int | None] = (None, None, None)
    """Of all its files together, as in a slice."""
    weight: float | None = None

    @property
    def is_task(self) -> bool:
        """Whether prompts are generated."""
        return self.place.startswith(REASONING_GYM)

    def files(self) -> list[Path]:
        """The files, in the order in which they are read; a single path need not exist.
        Raises ConfigError: no file matches a glob, a folder was not written by `datasets`, or the hub has no such
        files."""
        if self.place.startswith(HUB_PREFIX):
            return list(dataset_files(self.place))
        path = Path(self.place)
        if path.is_dir():
            return _saved_files(path)
        if path.exists() or not glob.has_magic(self.place):
            return [path]
        found = [file for name in sorted(glob.glob(self.place, recursive=True)) if (file := Path(name)).is_file()]
        if not found:
            missing = FILE_MISSING("no file matches the prompt data", got=self.place, fix="--prompt-data FILE.jsonl")
            raise ConfigError(missing)
        return found


def source_of(spec: str) -> Source:
    """`PLACE[@[START:STOP:STEP]][*WEIGHT]`; a file that has exactly this name is that file.
    Raises ConfigError: the slice or the weight has no meaning."""
    match = _ITEM.fullmatch(spec)
    if match is None or Path(spec).exists():
        return Source(spec)
    rows: tuple[int | None, ...] = (None, None, None)
    if match["rows"] is not None:
        parts = _SLICE.fullmatch(match["rows"])
        if parts is None or parts[3] == "0":
            what, fix = "the slice is not [START:STOP] or [START:STOP:STEP]", f"--prompt-data {match['place']}@[0:1000]"
            raise _error(what, spec, "whole numbers from 0; a step from 1", fix)
        rows = tuple(int(part) if part else None for part in parts.groups())
    weight = None if match["weight"] is None else float(match["weight"])
    if weight == 0:
        raise _error("the weight is 0", spec, "a weight above 0", "leave that item out")
    return Source(match["place"], (rows[0], rows[1], rows[2]), weight)


def weights_of(sources: Sequence[Source]) -> list[float]:
    """The weight of each source; none where the prompts of all are used alike.
    Raises ConfigError: only some have one."""
    weights = [source.weight for source in sources if source.weight is not None]
    if weights and len(weights) < len(sources):
        places = [source.place for source in sources if source.weight is None]
        what, fix = "only some items of --prompt-data have a weight", shlex.quote(f"{places[0]}*1")
        raise _error(what, ", ".join(places), "a weight for each, or for none", f"--prompt-data {fix}")
    return weights


def _saved_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder written by `Dataset.save_to_disk`."""
    expected = "a folder of Dataset.save_to_disk"
    try:
        if (folder / SPLITS).is_file():
            splits = json.loads((folder / SPLITS).read_text("utf-8"))["splits"]
            fix = f"--prompt-data {shlex.quote(str(folder / splits[0]))}"
            what, expected = f"the folder has several splits: {', '.join(splits)}", "the folder of one split"
        else:
            state = json.loads((folder / SAVED).read_text("utf-8"))
            if not state.get("_indices_data_files"):
                return [folder / str(file["filename"]) for file in state["_data_files"]]
            what = "the folder has an index besides its rows, as old versions of datasets wrote it"
            fix, expected = "load_from_disk(FOLDER).flatten_indices().save_to_disk(NEW)", "a folder without an index"
    except FileNotFoundError:
        what = "the folder is not a data set that datasets saved: it has no state.json"
        fix = f"--prompt-data {shlex.quote(f'{folder}/*.jsonl')}, for the files in it"
        expected += ", or files"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        what = f"the folder of the data set cannot be read: {type(error).__name__}: {error}"
        fix = "save the data set again"
    raise ConfigError(UNREADABLE(what, got=str(folder), expected=expected, fix=fix))


def _error(message: str, got: str, expected: str, fix: str) -> ConfigError:
    return ConfigError(SOURCE(message, got=got, expected=expected, fix=fix))


def generate(spec: str) -> list[Prompt]:
    """The prompts of `reasoning-gym:TASK?size=N&seed=S&param=value`.
    Raises ConfigError: the package is missing, there is no such task, or it refuses the parameters."""
    task, _, query = spec.removeprefix(REASONING_GYM).partition("?")
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ConfigError(MISSING("the reasoning_gym package is not installed", got=spec, fix=INSTALL)) from error
    if task not in DATASETS:
        near = nearest(task, DATASETS, cutoff=0.0)
        what, fix = f"reasoning-gym has no task {task!r}", f"--prompt-data {REASONING_GYM}{near}"
        raise _task_error(spec, what, task, near, fix)
    parameters = dict(_parameters(spec, query, get_type_hints(DATASETS[task][1])))
    if parameters.get("size", 0) > MOST_ROWS:
        raise _task_error(spec, "too many prompts", query, f"at most {MOST_ROWS:,}", f"size={MOST_ROWS}")
    try:
        entries = list(create_dataset(task, **{"seed": 0, **parameters}))
    except Exception as error:
        message = f"reasoning-gym refuses the parameters of {task}: {error}"
        raise _task_error(spec, message, query, "", "correct the parameters") from error
    return [_prompt_of_entry(entry, f"{REASONING_GYM}{task}:{index}") for index, entry in enumerate(entries)]


def _prompt_of_entry(entry: dict[str, Any], source: str) -> Prompt:
    answer = entry["answer"]
    metadata = {**entry["metadata"], "question": entry["question"], "answer": answer}
    return Prompt(entry["question"], None if answer is None else str(answer), metadata, source)


def _parameters(spec: str, query: str, types: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for item in query.split("&") if query else ():
        name, _, value = item.partition("=")
        if name in seen:
            raise _task_error(spec, f"parameter {name!r} is given twice", query, f"one {name}", f"{name}={value}")
        seen.add(name)
        if name not in types:
            near = nearest(name, types, cutoff=0.0)
            raise _task_error(spec, f"unknown parameter {name!r}", name, ", ".join(types), f"{near}={value}")
        adapter, text = TypeAdapter(types[name]), unquote(value)
        try:
            # Numbers, booleans and words as they are typed; lists and objects as JSON.
            yield name, adapter.validate_json(text) if text[:1] in ("[", "{") else adapter.validate_strings(text)
        except ValidationError as error:
            what = f"bad value of {name!r}: {error.errors()[0]['msg']}"
            raise _task_error(spec, what, value, str(types[name]), f"{name}=…") from error


def _task_error(spec: str, message: str, got: str, expected: str, fix: str) -> ConfigError:
    return ConfigError(TASK(message, where=spec, got=got, expected=expected, fix=fix))
