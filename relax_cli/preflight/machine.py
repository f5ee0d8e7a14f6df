"""What this machine has, read without torch."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from relax_cli.data.sandbox.outside import sandbox_fault

UNLIMITED = 1 << 60
"""A control group's limit above this is none."""
NVIDIA_SMI_SECONDS = 20
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def free_disk(path: str) -> int | None:
    """Bytes free where `path` is or would be created; None where that cannot be found out."""
    here = Path(os.path.abspath(path))
    try:
        usage = shutil.disk_usage(next(place for place in (here, *here.parents) if place.exists()))
    except OSError:
        return None
    return usage.free if usage.total else None


def free_shared_memory() -> int | None:
    """Bytes free in /dev/shm; None where the system has none."""
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None


def total_memory() -> int:
    """Bytes of memory this process may use: the machine's, or less in a container."""
    limits = [int(psutil.virtual_memory().total)]
    for path in CGROUP_LIMITS:
        with suppress(OSError):
            text = Path(path).read_text("ascii").strip()
            limits += [int(text)] if text.isdigit() and int(text) < UNLIMITED else []
    return min(limits)


RAY_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
"""What Ray appends to its temporary folder for the longest of its sockets."""
MOST_SOCKET_BYTES = 107


def ray_temp_folder() -> Path:
    """Where a Ray of the run's own puts sockets and logs."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")


def ray_address() -> str:
    """The cluster that a run on Ray joins; empty where it starts a Ray of its own."""
    address = os.environ.get("RAY_ADDRESS", "").strip()
    return "" if address == "local" else address


def ray_temp_trouble() -> str:
    """Why Ray cannot start with its temporary folder; empty where it can."""
    folder = ray_temp_folder()
    length = len(os.fsencode(f"{folder}{RAY_SOCKET}"))
    if length > MOST_SOCKET_BYTES:
        return f"its sockets there have paths of {length} bytes, and Linux takes at most {MOST_SOCKET_BYTES}"
    place = next(place for place in (folder / "ray", folder, *folder.parents) if place.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return f"this user cannot write {place}"
    return ""


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_bf16_products(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has instructions for matrix products of bf16 numbers."""
    return cpuinfo.exists() and bool({"avx512_bf16", "amx_bf16"} & set(cpuinfo.read_text("utf-8").split()))


def gpu_count() -> int:
    """NVIDIA devices that this machine shows, whether or not torch can use them."""
    devices = Path("/dev")
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.iterdir()) if devices.is_dir() else 0


@functools.cache
def smallest_gpu() -> int | None:
    """Bytes of the smallest GPU that nvidia-smi shows; None where it cannot be asked."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.check_output(
            command, stderr=subprocess.DEVNULL, encoding="utf-8", timeout=NVIDIA_SMI_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return min((int(line) << 20 for line in answer.split() if line.isdigit()), default=None)


def allocator_settings() -> str:
    """Settings of torch's allocator of device memory, under their new and their old name."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return ",".join(value for name in names if (value := os.environ.get(name, "")))


@dataclass(frozen=True)
class Machine:
    """What the rules are told of this machine."""

    memory: int | None = field(default_factory=total_memory)
    gpus: int = field(default_factory=gpu_count)
    cores: int = field(default_factory=usable_cores)
    bf16_products: bool = field(default_factory=has_bf16_products)
    free_disk: Callable[[str], int | None] = free_disk
    shared_memory: int | None = field(default_factory=free_shared_memory)
    gpu_memory: Callable[[], int | None] = smallest_gpu
    """Bytes of its smallest GPU, read only where a run uses GPUs."""
    ray_address: str = field(default_factory=ray_address)
    """A cluster that the run would join: its GPUs and memory are not those of this machine."""
    sandbox_fault: Callable[[], str] = sandbox_fault
    """Why programs cannot be judged on it, found out only where a run does so."""
    allocator: str = field(default_factory=allocator_settings)
