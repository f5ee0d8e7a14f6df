"""The inside of the sandbox of `--rm-type code`, which `outside.py` starts; of the standard library alone.

Four processes, each the parent of the next. This one is started once, holds nothing, and forks for every grading the
*keeper*, which enters namespaces of its own; the *grader*, process 1 in them, which sees a file system of Python's
libraries and an empty folder, and has no privilege; and for each run the *program*, which has limits and a filter
of system calls as well. The program runs the response. It never sees an expected value: output is compared outside, and
tests run in the grader, on plain data, whatever objects the program has.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from relax_cli.data.sandbox.confined import NAMESPACES, call, die_with_parent, drop_privileges, enter_root
from relax_cli.data.sandbox.program import Program, run_on


def main() -> None:
    """Fork a keeper for every grading, without reading a byte, so that no grading leaves anything behind."""
    die_with_parent()
    asked, told = Connection(0, writable=False), Connection(1, readable=False)
    while asked.poll(None):
        if (keeper := os.fork()) == 0:
            in_child(told, lambda: keep(asked, told))
        if os.waitpid(keeper, 0)[1]:
            return


def tell(told: Connection, **found: Any) -> None:
    """Send a finding to the process outside."""
    told.send_bytes(json.dumps(found).encode())


def in_child(told: Connection, function: Callable[[], None]) -> None:
    """Call, report what fails, and end the process."""
    status = 1
    try:
        function()
        status = 0
    except EOFError:
        pass
    except BaseException as error:  # noqa: BLE001 - it is told
        with suppress(OSError):
            tell(told, error=str(error))
    finally:
        os._exit(status)


def keep(asked: Connection, told: Connection) -> None:
    """Enter namespaces, which the process outside gives their users, and wait for the grader."""
    die_with_parent()
    asked.recv_bytes()
    if os.geteuid() == 0:
        # Where this root may not, it has no groups of the machine.
        with suppress(PermissionError):
            os.setgroups([])
    call("unshare", NAMESPACES)
    die_with_parent()
    tell(told, pid=os.getpid())
    paths = json.loads(asked.recv_bytes())
    sys.path += paths["packages"]
    alive, held = os.pipe()
    if (grader := os.fork()) == 0:
        os.close(held)
        in_child(told, lambda: grade(asked, told, alive, paths["visible"]))
    os.waitpid(grader, 0)


def grade(asked: Connection, told: Connection, alive: int, paths: list[str]) -> None:
    """Run the response on every input, then the tests, and tell of each.

    Args:
        alive: a pipe whose other end the keeper alone has.
    """
    enter_root(paths)
    drop_privileges()
    if select.select([alive], [], [], 0)[0]:
        return  # The keeper ended before it could take this process along.
    job = json.loads(asked.recv_bytes())
    for text in job["inputs"]:
        tell(told, output=run_on(job["code"], text))
    # The tests come when the program is a process of its own, which has no copy of them.
    if job["tested"]:
        program = Program(job["code"])
        for test in json.loads(asked.recv_bytes()):
            tell(told, passed=program.passes(test))
