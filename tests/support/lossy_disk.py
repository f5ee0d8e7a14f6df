"""A disk that may lose, at a power cut, whatever was not flushed: finds what is done too early."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class LossyDisk:
    """Watches the calls of this process that make files and names durable.

    A rename may reach the disk before the content of what was renamed, unless that was flushed first; and a name may
    be lost until its folder is flushed. `last` is the name that must come last: when it arrives, nothing may be lost.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
        self.last = last
        self.wrong: list[str] = []
        self.flushed: set[Path] = set()
        self.unsure_names: set[Path] = set()
        """Folders with names that a power cut may take."""
        self._real: dict[str, Callable[..., Any]] = {}
        for name, watch in (("fsync", self._fsync), ("rename", self._move), ("replace", self._move)):
            self._real[name] = getattr(os, name)
            monkeypatch.setattr(os, name, self._watched(name, watch))

    def _watched(self, name: str, watch: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            watch(*args)
            self._real[name](*args)

        return call

    def _fsync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.flushed.add(path)
        self.unsure_names.discard(path)

    def _move(self, source: Path, target: Path) -> None:
        source, target = Path(source).absolute(), Path(target).absolute()
        parts = [source, *source.rglob("*")]
        self.wrong += [f"{p.name} got its name before its content" for p in parts if p not in self.flushed]
        if target.name == self.last:
            self.wrong += [f"{self.last} came before the names in {folder.name}" for folder in self.unsure_names]
        self.flushed |= {target / path.relative_to(source) for path in parts}
        self.unsure_names.add(target.parent)

    def faults(self) -> list[str]:
        """What a power cut could have broken, now that all is done."""
        return self.wrong + [f"names in {folder.name} may be lost" for folder in self.unsure_names]
