"""Rows of a Parquet file as dictionaries; needs the `parquet` extra."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from relax_cli.errors import ConfigError, Problem

BATCH_ROWS = 1024


def read_parquet(path: Path, progress: Callable[[str, float], None] | None) -> Iterator[dict[str, Any]]:
    """One dictionary per row, a batch of rows in memory at a time.

    Raises:
        ConfigError: pyarrow is not installed, or the file is missing or damaged.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError(
            Problem(
                id="parquet-missing",
                message="the pyarrow package, which reads Parquet, is not installed",
                option="--prompt-data",
                got=str(path),
                fix="pip install 'relax-cli[parquet]'",
            )
        ) from error
    try:
        with ParquetFile(path) as file:
            total, done = max(1, file.metadata.num_rows), 0
            for batch in file.iter_batches(BATCH_ROWS):
                yield from batch.to_pylist()
                done += batch.num_rows
                if progress is not None:
                    progress(str(path), done / total)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(
            Problem(
                id="prompt-data-unreadable",
                message=f"prompt data cannot be read: {str(error).splitlines()[0]}",
                option="--prompt-data",
                got=str(path),
                expected="a Parquet file",
                fix="--prompt-data FILE.parquet",
            )
        ) from error
