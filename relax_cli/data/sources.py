"""What an item of `--prompt-data` names: files, and which of their rows with what weight."""

from __future__ import annotations

import glob
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_cli.data.formats import FILE_MISSING, UNREADABLE
from relax_cli.data.reasoning_gym import REASONING_GYM
from relax_cli.errors import ConfigError, problem_kind
from relax_cli.models.hub import PREFIX as HUB_PREFIX
from relax_cli.models.hub import dataset_files

SOURCE = problem_kind(
    "prompt-data-source",
    "Data",
    "An item of `--prompt-data` has a slice or a weight that cannot be read, or only some of several have a weight.",
    option="--prompt-data",
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
        what = "only some items of --prompt-data have a weight"
        raise _error(
            what, ", ".join(places), "a weight for each, or for none", f"--prompt-data {shlex.quote(f'{places[0]}*1')}"
        )
    return weights


def _saved_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder written by `Dataset.save_to_disk`."""
    try:
        if (folder / SPLITS).is_file():
            splits = json.loads((folder / SPLITS).read_text("utf-8"))["splits"]
            fix = f"--prompt-data {shlex.quote(str(folder / splits[0]))}"
            raise _folder(folder, f"the folder has several splits: {', '.join(splits)}", "the folder of one split", fix)
        state = json.loads((folder / SAVED).read_text("utf-8"))
        if state.get("_indices_data_files"):
            what = "the folder has an index besides its rows, as old versions of datasets wrote it"
            fix = "load_from_disk(FOLDER).flatten_indices().save_to_disk(NEW)"
            raise _folder(folder, what, "a folder without an index", fix)
        return [folder / str(file["filename"]) for file in state["_data_files"]]
    except ConfigError:
        raise
    except FileNotFoundError as error:
        what = "the folder is not a data set that datasets saved: it has no state.json"
        fix = f"--prompt-data {shlex.quote(f'{folder}/*.jsonl')}, for the files in it"
        raise _folder(folder, what, "a folder of Dataset.save_to_disk, or files", fix) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        what = f"the folder of the data set cannot be read: {type(error).__name__}: {error}"
        raise _folder(folder, what, "a folder of Dataset.save_to_disk", "save the data set again") from error


def _folder(folder: Path, message: str, expected: str, fix: str) -> ConfigError:
    return ConfigError(UNREADABLE(message, got=str(folder), expected=expected, fix=fix))


def _error(message: str, got: str, expected: str, fix: str) -> ConfigError:
    return ConfigError(SOURCE(message, got=got, expected=expected, fix=fix))
