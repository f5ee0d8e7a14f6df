"""Reads the files of a model folder, which others wrote: only regular files of bounded size and depth."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from relax_cli.config.text import unique_keys
from relax_cli.errors import ConfigError, Problem, problem_kinds

MOST_JSON_BYTES = 64 << 20
"""The largest real ones are vocabularies and weight indices of some 10 MB."""
DEEPEST_JSON = 64

MOST_TOKENIZER_BYTES = 256 << 20
"""The largest real ones have some 35 MB."""
TEXT_SUFFIXES = frozenset({".json", ".jinja", ".model", ".txt"})
CONFIG_FILE = "config.json"

declare = problem_kinds("Model", option="--hf-checkpoint")
IRREGULAR = declare(
    "model-file-irregular",
    "A tokenizer or configuration file of the model folder is not a regular file (a pipe, a device, a link to nothing),"
    " or larger than 256 MB.",
)
MODEL_FOLDER = declare("model-folder", "The tokenizer, or the ids that end a response, cannot be used with the model.")
UNREADABLE = declare(
    "model-folder-unreadable",
    "A JSON file of the model folder cannot be read: it is missing, damaged, not a regular file, larger than 64 MB,"
    " nested more than 64 deep, or has one key twice.",
)


def check_regular(path: Path, most_bytes: int | None = None) -> int:
    """Size of a regular file; links are followed.
    Raises OSError: it is missing, a device, pipe, socket or folder, or larger than `most_bytes`."""
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise OSError(f"{path.name} is not a regular file")
    if most_bytes is not None and info.st_size > most_bytes:
        raise OSError(f"{path.name} has {info.st_size:,} bytes, more than the limit of {most_bytes:,}")
    return info.st_size


def weight_bytes(folder: Path) -> int:
    """Bytes of the safetensors files of a model folder; 0 where it has none."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model folder. Raises ConfigError: it cannot be read, or is not an object."""
    try:
        check_regular(path, MOST_JSON_BYTES)
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
        _check_depth(value)
    # UnicodeDecodeError, JSONDecodeError and Python's limit on the digits of a number are ValueErrors.
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, str(error)) from error
    if not isinstance(value, dict):
        raise _unreadable(path, f"{type(value).__name__} where a JSON object belongs")
    return value


def irregular_files(folder: Path) -> list[Problem]:
    """Files, besides `config.json`, that would block the libraries that read them, or fill the memory."""
    problems = []
    for path in sorted(folder.iterdir()):
        if path.suffix not in TEXT_SUFFIXES or path.name == CONFIG_FILE:
            continue
        try:
            check_regular(path, MOST_TOKENIZER_BYTES)
        except OSError as error:
            message = f"{path.name} of the model cannot be read: {error.strerror or error}"
            problems.append(IRREGULAR(message, fix=f"download {path.name} again, or remove it", where=str(path)))
    return problems


def _check_depth(value: Any, depth: int = 0) -> None:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if inner and depth == DEEPEST_JSON:
        raise ValueError(f"nested more than {DEEPEST_JSON} deep")
    for each in inner:
        _check_depth(each, depth + 1)


def _unreadable(path: Path, reason: str) -> ConfigError:
    fix = "give a folder with config.json, safetensors and tokenizer files"
    return ConfigError(UNREADABLE(f"cannot read {path.name} of the model: {reason}", where=str(path), fix=fix))
