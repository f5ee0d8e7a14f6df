"""The machine and the versions that figures are from, and how busy the machine is."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import psutil


def main() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    print(f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(
        ", ".join(f"{name} {version(name)}" for name in ("relax-cli", "torch", "transformers", "megatron-core", "ray"))
    )
    print("load average", " ".join(f"{load:.1f}" for load in psutil.getloadavg()))


if __name__ == "__main__":
    main()
