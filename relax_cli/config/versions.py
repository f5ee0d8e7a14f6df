"""Which versions of the large libraries have been run together: the only list of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class VersionSet:
    """Versions that go together."""

    name: str
    python: tuple[tuple[int, int], ...]
    versions: Mapping[str, str]
    """Distribution name to a version, or the beginning of one (`0.16.` for every 0.16.x)."""
    proof: str
    """How far they were tested."""
    is_tested: bool = True
    """Whether runs were made with them; False for a set that is only known to install together."""

    @property
    def as_requirements(self) -> str:
        """What to give to pip."""
        return " ".join(
            f"{name}=={number}{'*' if number.endswith('.') else ''}" for name, number in self.versions.items()
        )

    def matches(self, python: tuple[int, int], installed: Mapping[str, str]) -> bool:
        """Whether exactly these are installed; what is not in the set does not matter."""
        return python in self.python and all(
            installed.get(name, "").partition("+")[0].startswith(version) for name, version in self.versions.items()
        )


CPU_SET = VersionSet(
    "a CPU",
    python=((3, 11),),
    versions={"torch": "2.13.0", "megatron-core": "0.16."},
    proof="the whole test suite; constraints-cpu.txt",
)
NEW_CPU_SET = VersionSet(
    "a CPU",
    python=((3, 12),),
    versions={"torch": "2.13.0", "megatron-core": "0.19.2"},
    proof="the tests that train with Megatron",
)
GPU_SET = VersionSet(
    "GPUs",
    python=((3, 12),),
    versions={"torch": "2.14.1", "megatron-core": "0.19.2", "sglang": "0.5.23"},
    proof="installs together, not run on a GPU; constraints-gpu.txt",
    is_tested=False,
)
SETS = (CPU_SET, NEW_CPU_SET, GPU_SET)

SGLANG_CONTRACTS = ("0.5.22", "0.5.23")
"""Versions of sglang whose HTTP protocol and options the client was written against."""

CPU_MEGATRON = ("0.16.0", "0.16.1", "0.19.2")
"""Versions of megatron-core that train the same numbers on a CPU, bit by bit (`backends/megatron/cpu_support.py`)."""
NEWEST_MEGATRON = CPU_MEGATRON[-1] if sys.version_info >= (3, 12) else "0.16.1"
"""The newest of them for this Python."""


def installed_version(name: str) -> str | None:
    """Version of a distribution; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
