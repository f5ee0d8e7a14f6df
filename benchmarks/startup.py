"""Start-up: CPU seconds of commands that load no torch, and seconds from a command to the end of its first step.

    python benchmarks/startup.py [--runs 15] [--rounds 3]

Compares `relax --help` with a Python that only imports typer, rich and pydantic, and times `relax validate-config` on a
CPU recipe in CPU seconds. Then runs the quickstart with both launchers, from a cold start and from `relax up`, in turn,
until its first step is in metrics.jsonl: wall seconds, which need an idle machine.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE = (sys.executable, "-c", "import typer, rich, pydantic")
RELAX = (sys.executable, "-m", "relax_cli")
AIM_HELP = 2.5
AIM_VALIDATE = 1.0
AIM_FIRST_STEP = {"local": 4, "ray": 15}


def cpu_seconds(command: tuple[str, ...], folder: Path) -> float:
    """User and system seconds of one run of `command` in `folder`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def seconds_to_first_step(launcher: str, *, warm: bool, cache: Path) -> float:
    """From the command to the line of the quickstart's first step, behind that of the evaluation before it."""
    environment = os.environ | {"RELAX_CACHE": str(cache), "RELAX_WARM": str(int(warm))}
    with tempfile.TemporaryDirectory() as name:
        metrics = Path(name) / "run" / "metrics.jsonl"
        command = (*RELAX, "quickstart", name, "--launcher", launcher)
        began = time.monotonic()
        run = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not metrics.exists() or metrics.read_text("utf-8").count("\n") < 2:
            assert run.poll() is None, "the quickstart failed"
            time.sleep(0.01)
        taken = time.monotonic() - began
        run.send_signal(signal.SIGINT)
        run.wait()
    return taken


def print_first_steps(rounds: int) -> None:
    """Every case in turn, so that what else the machine does meets all of them."""
    seconds: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        environment = os.environ | {"RELAX_CACHE": name}
        subprocess.run((*RELAX, "up"), env=environment, stdout=subprocess.DEVNULL, check=True)
        for _ in range(rounds):
            for launcher in ("local", "ray"):
                for start in ("cold", "warm"):
                    taken = seconds_to_first_step(launcher, warm=start == "warm", cache=Path(name))
                    seconds.setdefault((launcher, start), []).append(taken)
        subprocess.run((*RELAX, "down"), env=environment, stdout=subprocess.DEVNULL, check=True)
    for (launcher, start), values in seconds.items():
        spread = f"{min(values):.1f} to {max(values):.1f}"
        aim = f", aim: {AIM_FIRST_STEP[launcher]}" if start == "cold" else ""
        print(f"first step, {launcher}, {start}: {statistics.median(values):.1f} s ({spread}{aim})")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print_commands(options.runs)
    print_first_steps(options.rounds)


def print_commands(runs: int) -> None:
    """Commands that load no torch."""
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
    print(f"ratio of relax --help to bare imports: {relax_help / bare:.2f} (aim: {AIM_HELP} or less)")
    print(f"validate-config: {validate:.2f} CPU-s (aim: {AIM_VALIDATE} or less)")


if __name__ == "__main__":
    main()
