"""Hashes files while they are written: a second thread reads what has arrived and is done soon after the writer is."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystem

from relax_cli.checkpoint.layout import FileEntry

BLOCK_BYTES = 1 << 20
THREAD = "checkpoint-hash"


class HashingFileSystem(FileSystem):
    """torch's file system that knows size and sha256 of every file written through it."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[Path, FileEntry] = {}

    def entries(self) -> list[FileEntry]:
        """Every file written so far."""
        return list(self._entries.values())

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file to be written from its beginning to its end; its hash is known when the context is left."""
        assert mode == "wb", "only for writing"
        target = Path(path)
        with ThreadPoolExecutor(1, thread_name_prefix=THREAD) as reader:
            with _FollowedFile(target, reader) as stream:
                yield stream
            self._entries[target] = stream.entry()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file, and what is known of it."""
        super().rename(path, new_path)
        self._entries[Path(new_path)] = replace(self._entries.pop(Path(path)), path=Path(new_path).name)


class _FollowedFile(io.BufferedWriter):
    """A file that `reader` hashes from the page cache, as far as it was flushed."""

    def __init__(self, path: Path, reader: Executor) -> None:
        super().__init__(io.FileIO(path, "wb"), BLOCK_BYTES)
        self._path = path
        self._reader = reader
        self._hashing: list[Future[None]] = []
        self._sha256 = hashlib.sha256()
        self._done = 0

    def flush(self) -> None:
        """Hand everything to the operating system."""
        super().flush()
        self._hashing.append(self._reader.submit(self._hash_up_to, self.raw.tell()))

    def entry(self) -> FileEntry:
        """Size and hash of the closed file. Raises OSError: what was written cannot be read again."""
        for part in self._hashing:
            part.result()
        return FileEntry(self._path.name, self._done, self._sha256.hexdigest())

    def _hash_up_to(self, size: int) -> None:
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._done)
            while self._done < size:
                block = file.read(min(BLOCK_BYTES, size - self._done))
                if not block:
                    raise OSError(errno.EIO, f"{self._done} bytes arrived of {size}", str(self._path))
                self._sha256.update(block)
                self._done += len(block)
            if sys.platform == "linux":
                # The disk begins now, not at the fsync that ends the file.
                os.posix_fadvise(file.fileno(), 0, self._done, os.POSIX_FADV_DONTNEED)
