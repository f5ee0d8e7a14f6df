"""Code of users, tried in a process of its own: it may print, exit, crash or never end, and nothing is left of it."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from relax_cli.errors import EnvironmentFault, Problem, RelaxError, problem_kind
from relax_cli.plugin.user_code import slowness_told

DEADLINE = 120.0
"""Seconds for a module of a user and what it imports, torch included."""
FEW_THREADS = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "2"}
"""Every thread reserves address space."""


HELPER_PROCESS = problem_kind(
    "helper-process-failed",
    "This machine",
    "A process in which code or files of others are tried before a launch could not be started: the temporary folder "
    "cannot be written, or the machine is out of processes or memory.",
)


class Unanswered(Exception):
    """The process ended or was ended before it said anything; the text is a predicate: `ended with exit code 3`."""


def run_apart(
    function: str, *arguments: Any, what: str, deadline: float | None = None, most_bytes: int | None = None
) -> list[Problem]:
    """The problems that `"module:function"`, called with these values of JSON, raises as a `RelaxError`.

    Args:
        what: is waited for; told where it takes long.
        deadline: seconds; None: enough to import torch.
        most_bytes: address space of the process; for one that reads files and starts no threads.

    Raises:
        Unanswered: there was no answer in time.
        EnvironmentFault: the process could not be started.
    """
    seconds = DEADLINE if deadline is None else deadline
    try:
        with tempfile.TemporaryDirectory(prefix="relax-") as folder:
            answer = Path(folder, "answer.json")
            asked = [str(answer), str(most_bytes or 0), function, json.dumps(arguments)]
            # -P: the working folder is not on the path of a run's processes either.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, *asked],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ if most_bytes is None else os.environ | FEW_THREADS,
            )
            try:
                with slowness_told(what, seconds):
                    code = process.wait(seconds)
            except subprocess.TimeoutExpired as error:
                raise Unanswered(f"takes more than {seconds:g} s") from error
            finally:
                # Children of the user's code as well; there are none in most cases.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if not answer.exists():
                raise Unanswered(f"ended its process with {f'exit code {code}' if code >= 0 else signal_name(-code)}")
            found = json.loads(answer.read_text("utf-8"))
    except OSError as error:
        what = f"a helper process could not be started: {error.strerror}"
        where, fix = str(error.filename or sys.executable), "set TMPDIR to such a folder, or end other processes"
        expected = "a temporary folder that can be written, and room for one more process"
        raise EnvironmentFault(HELPER_PROCESS(what, where=where, expected=expected, fix=fix)) from error
    return [Problem(**{**fields, "places": tuple(fields["places"])}) for fields in found]


def main(answer: str, most_bytes: str, function: str, arguments: str) -> None:
    """The process of `run_apart`."""
    if limit := int(most_bytes):
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    problems: tuple[Problem, ...] = ()
    try:
        resolve_name(function)(*json.loads(arguments))
    except RelaxError as error:
        problems = error.problems
    Path(answer).write_text(json.dumps([asdict(problem) for problem in problems]), "utf-8")
    # Threads that the user's code started must not keep the process.
    os._exit(0)


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; real-time signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


if __name__ == "__main__":
    main(*sys.argv[1:])
