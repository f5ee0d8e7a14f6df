"""Rows of JSON Lines, Parquet and Arrow files, plain or compressed; what a file is, its first bytes say."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import shlex
import stat
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

from relax_cli.config.text import DoubleKey, unique_keys
from relax_cli.data.rows import bad_row
from relax_cli.data.values import printable
from relax_cli.errors import MACHINE_THEME, ConfigError, Problem, problem_kinds

MOST_LINE_BYTES = 32 << 20
"""Parsed, a line takes up to sixty times its size in memory."""
MOST_ROWS = 5_000_000
"""The run keeps all prompts in memory, some 500 bytes each."""
MOST_ROWS_PER_BYTE = 100
"""Of a Parquet file with more than a million rows; no prompts are that alike."""
ROWS_PER_REPORT = 2048
"""Rows between two calls of `progress`."""
BATCH_ROWS = 1024
MOST_FLOAT_DIGITS = 17

Progress = Callable[[str, float], None]
Row = tuple[str, dict[str, Any]]
"""`file:line` and the row."""

declare = problem_kinds("Data", option="--prompt-data")
UNREADABLE = declare(
    "prompt-data-unreadable",
    "The file is damaged, not a regular file, in another encoding than UTF-8, or of a kind that is not read.",
)
TOO_LARGE = declare(
    "prompt-data-too-large",
    f"The file has more than {MOST_ROWS:,} rows, or is a Parquet file that unfolds to far more rows than it has bytes.",
)
declare_machine = problem_kinds(MACHINE_THEME, option="--prompt-data")
FILE_MISSING = declare_machine(
    "prompt-data-file-missing", "The file of `--prompt-data` or `--eval-prompt-data` does not exist."
)
PARQUET_MISSING = declare_machine("parquet-missing", "pyarrow, which reads Parquet and Arrow files, is not installed.")

_COMPRESSED: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": lambda raw: gzip.GzipFile(fileobj=raw),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": lambda raw: _zstandard(raw),
}
LFS = b"version https://git-lfs"
_REFUSED = {
    (b"PK",): ("a zip file", "unzip it first"),
    (b"\xff\xfe", b"\xfe\xff"): ("UTF-16", "iconv -f UTF-16 -t UTF-8 FILE > NEW.jsonl"),
    (LFS,): ("a pointer of Git LFS", "git lfs pull"),
    (b"<!DOCTYPE", b"<!doctype", b"<html"): ("a web page", "download the file itself"),
    (b"[",): ("a JSON array", "jq -c '.[]' FILE > NEW.jsonl"),
    (b"{\n ", b"{\r\n ", b"{\n\t"): ("JSON with objects of several lines", "jq -c . FILE > NEW.jsonl"),
}
_TABLES = {".csv": ("CSV", "excel"), ".tsv": ("TSV", "excel-tab")}
_TABLE_TO_LINES = (
    "python3 -c 'import csv, json, sys; [print(json.dumps(row)) for row in csv.DictReader("
    'open(sys.argv[1], encoding="utf-8-sig", newline=""), dialect="{}")]\' FILE > NEW.jsonl'
)
PARQUET = b"PAR1"
ARROW_FILE = b"ARROW1"
ARROW_STREAM = b"\xff\xff\xff\xff"
"""What `datasets` writes."""


def read_rows(
    path: Path, needed: Sequence[str], optional: Sequence[str], progress: Progress | None
) -> Iterator[Row | Problem]:
    """Every row of a file, one after the other in memory. Raises ConfigError: the file cannot be read.

    Args:
        needed: the keys that every row must have; with the optional ones all that is read where a format allows it.
        progress: called now and then with the file's name and the part of it that is read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            kind = "a folder" if path.is_dir() else "not a regular file"
            raise _unreadable(path, f"prompt data cannot be read: it is {kind}", "give a file")
        with path.open("rb") as file:
            head = file.read(64)
        if head.startswith((PARQUET, ARROW_FILE, ARROW_STREAM)) or path.suffix.lower() in (".parquet", ".arrow"):
            if head.startswith(LFS):
                _refuse(path, head)
            yield from _columns(path, head, {*needed}, {*optional}, progress)
        else:
            _refuse(path, head)
            yield from _json_lines(path, head, progress)
    except FileNotFoundError as error:
        missing = FILE_MISSING("the prompt data does not exist", got=str(path), fix="--prompt-data FILE.jsonl")
        raise ConfigError(missing) from error
    # What decompressors raise of damaged files is in part not an OSError.
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _unreadable(path, f"prompt data cannot be read: {reason}", "--prompt-data FILE.jsonl") from error


def _json_lines(path: Path, head: bytes, progress: Progress | None) -> Iterator[Row | Problem]:
    size = max(1, path.stat().st_size)
    opener = next((opener for magic, opener in _COMPRESSED.items() if head.startswith(magic)), nullcontext)
    with path.open("rb") as raw, opener(raw) as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE_BYTES), b""), 1):
            if progress is not None and number % ROWS_PER_REPORT == 0:
                progress(str(path), raw.tell() / size)
            if len(line) == MOST_LINE_BYTES:
                got = f"more than {MOST_LINE_BYTES >> 20} MiB without a line break"
                yield bad_row(f"{path}:{number}", "line is too long", got, "one JSON object a line")
                return
            if number > MOST_ROWS:
                raise _too_large(path, f"more than {MOST_ROWS:,} lines")
            if line.strip():
                yield _parsed(line, f"{path}:{number}")


def _parsed(line: bytes, where: str) -> Row | Problem:
    try:
        row = json.loads(line, object_pairs_hook=unique_keys, parse_float=_number)
    except DoubleKey as error:
        return bad_row(where, f"the key {printable(error.name)!r} is given twice", _start(line), "each key once")
    except UnicodeDecodeError:
        return bad_row(where, "line is not UTF-8", _start(line), "one JSON object a line")
    except (ValueError, RecursionError) as error:
        return bad_row(where, "line is not JSON", f"{_start(line)} ({error})", "one JSON object a line")
    if not isinstance(row, dict):
        return bad_row(where, "line is not a JSON object", _start(line), '{"input": …}')
    return where, row


def _number(text: str) -> float | Decimal:
    """With all digits of the file, where it has more than those that writers of floats need: a label may have them."""
    digits = text.lstrip("-0.").replace(".", "")
    return float(text) if len(digits) <= MOST_FLOAT_DIGITS or "e" in text.lower() else Decimal(text)


def _columns(path: Path, head: bytes, needed: set[str], optional: set[str], progress: Progress | None) -> Iterator[Row]:
    pyarrow = _pyarrow(str(path), "Parquet and Arrow files")
    from pyarrow import ipc, parquet

    size = path.stat().st_size
    try:
        with ExitStack() as stack:
            if head.startswith((ARROW_FILE, ARROW_STREAM)):
                mapped = stack.enter_context(pyarrow.memory_map(str(path)))
                table = (ipc.open_file if head.startswith(ARROW_FILE) else ipc.open_stream)(mapped).read_all()
                total, wanted = table.num_rows, _wanted(path, table.schema.names, needed, optional)
                batches = (table if wanted is None else table.select(wanted)).to_batches(BATCH_ROWS)
            else:
                file = stack.enter_context(parquet.ParquetFile(path))
                total, wanted = file.metadata.num_rows, _wanted(path, file.schema_arrow.names, needed, optional)
                batches = file.iter_batches(BATCH_ROWS, columns=wanted)
            if total > MOST_ROWS or (total > 1_000_000 and total > MOST_ROWS_PER_BYTE * size):
                raise _too_large(path, f"{total:,} rows in {size:,} bytes")
            number = 0
            for batch in batches:
                short = [(field.name, field.type) for field in batch.schema if "float" in str(field.type)]
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row | {name: _as_written(row[name], kind) for name, kind in short}
                if progress is not None:
                    progress(str(path), number / max(1, total))
    except ConfigError:
        raise
    # ValueError: a value that Python's types do not have, such as a date after the year 9999.
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        what = f"prompt data cannot be read: {printable((str(error).splitlines() or [''])[0])}"
        raise _unreadable(path, what, "--prompt-data FILE.parquet") from error


def _as_written(value: Any, kind: Any) -> Any:
    """A value with its numbers of two and four bytes as people write them: 0.1, where Python has 0.10000000149."""
    if isinstance(value, float):
        kind = getattr(kind, "value_type", kind)  # of a dictionary
        return float(str(kind.to_pandas_dtype()(value))) if str(kind) in ("float", "halffloat") else value
    if isinstance(value, dict):
        return {field.name: _as_written(value[field.name], field.type) for field in kind}
    if isinstance(value, list) and hasattr(kind, "item_type"):
        return [(key, _as_written(item, kind.item_type)) for key, item in value]
    is_list = isinstance(value, list) and hasattr(kind, "value_type")
    return [_as_written(item, kind.value_type) for item in value] if is_list else value


def _wanted(path: Path, names: list[str], needed: set[str], optional: set[str]) -> list[str] | None:
    """The columns to read; None for all: a row that lacks a key shows the ones that it has."""
    if twice := next((name for name in names if names.count(name) > 1), None):
        what = f"prompt data cannot be read: the column {printable(twice)!r} is there twice"
        raise _unreadable(path, what, "rename or remove one of the two columns")
    if not all({key, key.partition(".")[0]} & {*names} for key in needed):
        return None
    columns = {key if key in names else key.partition(".")[0] for key in needed | optional}
    return [name for name in names if name in columns]


def _refuse(path: Path, head: bytes) -> None:
    start = head.removeprefix(BOM_UTF8).lstrip()
    found = next((known for magics, known in _REFUSED.items() if start.startswith(magics)), None)
    if found is None and path.suffix.lower() in _TABLES and not start.startswith((b"{", *_COMPRESSED)):
        kind, dialect = _TABLES[path.suffix.lower()]
        found = kind, _TABLE_TO_LINES.format(dialect)
    if found is not None:
        raise _unreadable(path, f"the data file is {found[0]}", found[1].replace("FILE", shlex.quote(str(path))))
    if b"\x00" in head and not any(head.startswith(magic) for magic in _COMPRESSED):
        fix = f"iconv -f UTF-16 -t UTF-8 {shlex.quote(str(path))} > NEW.jsonl, if it is UTF-16"
        raise _unreadable(path, "the data file is not UTF-8 text: it contains NUL bytes", fix)


def _zstandard(raw: IO[bytes]) -> IO[bytes]:
    pyarrow = _pyarrow(raw.name, "zstandard")
    stream: IO[bytes] = io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), "zstd"))
    return stream


def _pyarrow(path: str, reads: str) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        what = f"the pyarrow package, which reads {reads}, is not installed"
        raise ConfigError(PARQUET_MISSING(what, got=path, fix="pip install 'relax-cli[parquet]'")) from error
    return pyarrow


def _start(line: bytes) -> str:
    return printable(line[:240].decode(errors="replace").strip()[:80])


def _unreadable(path: Path, message: str, fix: str) -> ConfigError:
    return ConfigError(UNREADABLE(message, got=str(path), expected="a file of JSON Lines, Parquet or Arrow", fix=fix))


def _too_large(path: Path, got: str) -> ConfigError:
    fix = "split the file, and give the part to train on"
    expected = f"at most {MOST_ROWS:,} rows, and a Parquet file of prompts that differ"
    return ConfigError(TOO_LARGE("the data file is too large", where=str(path), got=got, expected=expected, fix=fix))
