"""Hashes files while they are written: a second thread reads what has arrived and is done soon after the writer is."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from torch.distributed.checkpoint.filesystem import FileSystem
from torch.serialization import get_crc32_options, set_crc32_options

from relax_cli.checkpoint.layout import FileEntry

BLOCK_BYTES = 1 << 20


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
        follower = _Follower(target)
        try:
            with _ReportingFile(target, follower) as stream:
                yield stream
            self._entries[target] = follower.finish(target.name)
        finally:
            follower.stop()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file, and what is known of it."""
        super().rename(path, new_path)
        entry = self._entries.pop(Path(path))
        self._entries[Path(new_path)] = FileEntry(Path(new_path).name, entry.size, entry.sha256)


@contextmanager
def without_crc32() -> Iterator[None]:
    """While this lasts, `torch.save` leaves out the check sums inside its files: the sha256 covers them whole."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


class _Follower:
    """The thread that reads behind the writer, from the page cache."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._arrived: SimpleQueue[int | None] = SimpleQueue()
        self._sha256 = hashlib.sha256()
        self._done = 0
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._follow, name="checkpoint-hash", daemon=True)
        self._thread.start()

    def report(self, size: int) -> None:
        """The file now has `size` bytes that will not change."""
        self._arrived.put(size)

    def finish(self, name: str) -> FileEntry:
        """The entry of the finished file.

        Raises:
            OSError: what was written cannot be read again.
        """
        self.stop()
        if self._failure is not None:
            raise self._failure
        return FileEntry(name, self._done, self._sha256.hexdigest())

    def stop(self) -> None:
        """Wait for the thread to end; it has hashed everything reported by then, or failed."""
        self._arrived.put(None)
        self._thread.join()

    def _follow(self) -> None:
        block = memoryview(bytearray(BLOCK_BYTES))
        size = self._arrived.get()
        if size is None:
            return
        try:
            with self._path.open("rb", buffering=0) as file:
                while size is not None:
                    while self._done < size:
                        count = file.readinto(block[: size - self._done])
                        if not count:
                            raise OSError(errno.EIO, f"{self._done} bytes arrived of {size}", str(self._path))
                        self._sha256.update(block[:count])
                        self._done += count
                    size = self._arrived.get()
        except OSError as error:
            self._failure = error


class _ReportingFile(io.BufferedWriter):
    """A file that tells how much of it has arrived whenever it is flushed."""

    def __init__(self, path: Path, follower: _Follower) -> None:
        super().__init__(io.FileIO(path, "wb"), BLOCK_BYTES)
        self._follower = follower

    def flush(self) -> None:
        """Hand everything to the operating system."""
        super().flush()
        self._follower.report(self.raw.tell())
