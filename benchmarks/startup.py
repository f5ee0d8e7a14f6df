"""Start-up of the command line, in CPU seconds: medians of alternating runs.

    python benchmarks/startup.py [--runs 15]

Compares `relax --help` with a Python that only imports typer, rich and pydantic, and times `relax validate-config` on a
CPU recipe. CPU seconds, since wall time on a shared machine says more about the others.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BARE = (sys.executable, "-c", "import typer, rich, pydantic")
RELAX = (sys.executable, "-m", "relax_cli")
AIM_HELP = 2.5
AIM_VALIDATE = 1.0


def cpu_seconds(command: tuple[str, ...], folder: Path) -> float:
    """User and system seconds of one run of `command` in `folder`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run((*RELAX, "quickstart", "--prepare-only"), cwd=folder, stdout=subprocess.DEVNULL, check=True)
        commands = {
            "python -c 'import typer, rich, pydantic'": BARE,
            "relax --help": (*RELAX, "--help"),
            "relax train --help": (*RELAX, "train", "--help"),
            "relax validate-config --recipe tiny-ppo-cpu": (*RELAX, "validate-config", "--recipe", "tiny-ppo-cpu"),
        }
        seconds: dict[str, list[float]] = {title: [] for title in commands}
        for run in range(runs + 1):
            for title, command in commands.items():
                measured = cpu_seconds(command, folder)
                if run:  # The first writes byte code and warms the disk cache.
                    seconds[title].append(measured)
    medians = {title: statistics.median(values) for title, values in seconds.items()}
    for title, median in medians.items():
        print(f"{median:7.3f} s  {title}")
    bare, relax_help, _, validate = medians.values()
    print(f"relax --help / bare imports: {relax_help / bare:.2f} (aim: {AIM_HELP} or less)")
    print(f"validate-config: {validate:.2f} CPU-s (aim: {AIM_VALIDATE} or less)")


if __name__ == "__main__":
    main()
