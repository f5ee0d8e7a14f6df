"""The commands that README and the pages of docs/ show, and a folder in which they run as they stand."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.fault_runs import Zygote

FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAVED = re.compile(r"[Ss]ave this as `([\w.-]+)`[^`\n]*:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A file that the reader is told to save: "Save this as `short.py`:" and the block below it."""
NOT_RUN = ("needs GPUs", "needs the network", "takes minutes", "with the server above", "a sketch", "as in the README")
"""Titles of blocks that are not run. The README's first two commands are what .ci/run and `nox -s quickstart` type."""
WORKING_CODES = {"bash": {0}, "console": {0, 2, 3}}
"""Exit codes; a console block may show a refusal."""


@dataclass(frozen=True)
class Block:
    """Commands of a page that are typed one after the other."""

    line: int
    kind: str
    """`bash`: every command works. `console`: commands after `$`, each with what it prints."""
    title: str
    commands: str


def blocks(text: str) -> list[Block]:
    """The blocks of commands of a page, in order."""
    found = []
    for match in FENCE.finditer(text):
        kind, title, body = match.groups()
        if kind == "console":
            body = "\n".join(line.removeprefix("$ ") for line in body.splitlines() if line.startswith("$ "))
        if kind in WORKING_CODES:
            found.append(Block(text.count("\n", 0, match.start()) + 1, kind, title or "", body))
    return found


def unmarked_commands(text: str) -> list[str]:
    """Lines that look like a command in a block that is not said to be one."""
    others = (match.group(3) for match in FENCE.finditer(text) if match.group(1) in ("", "text"))
    return [line for body in others for line in body.splitlines() if re.match(r"(\$ |\.venv/bin/|relax |pip )", line)]


def files_to_save(text: str) -> dict[str, str]:
    """The files that a page tells its reader to save, by name."""
    return dict(SAVED.findall(text))


@contextmanager
def warm_relax(zygote: Zygote, folder: Path) -> Iterator[str]:
    """The command line of a `relax` whose runs are forks of a warm process, which has imported torch."""

    def answer() -> None:
        while True:
            connection, _ = server.accept()
            with connection, connection.makefile("rw", encoding="utf-8") as stream:
                order = stream.read()
                if not order:
                    return
                argv, *place = json.loads(order)
                ended = zygote.run(folder, argv, place=place)
                json.dump([ended.code if ended.code >= 0 else 1, ended.out, ended.err], stream)

    with socket.socket(socket.AF_UNIX) as server:
        path = str(folder / "socket")
        server.bind(path)
        server.listen()
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        try:
            yield f"{sys.executable} -I -S {Path(__file__).with_name('warm_client.py')} {path}"
        finally:
            with socket.socket(socket.AF_UNIX) as last:
                last.connect(path)
            thread.join(30)


def make_environment(folder: Path, relax: str | None) -> None:
    """A virtual environment of its own that sees the packages of this one, with `relax`, `pip` and `pytest`.

    Args:
        relax: what runs `relax`; the module, in a process of this environment, when None.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    python = folder / "bin" / "python"
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    seen = dict.fromkeys([sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("-packages"))])
    (packages / "tested.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in seen), "utf-8")
    programs = {
        "relax": f'exec {relax or f"{python} -m relax_cli"} "$@"',
        "pytest": f'exec {python} -m pytest "$@"',
        "pip": f'[ "$1" = install ] && shift && exec {sys.executable} -m pip --python {python} install '
        '--quiet --no-deps --no-build-isolation "$@"',
    }
    for name, line in programs.items():
        path = folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{line}\n", "utf-8")
        path.chmod(0o755)


def run_block(block: Block, folder: Path, environment: dict[str, str]) -> str:
    """Type the commands of a block in `folder`; what was wrong, or nothing."""
    if "relax train" in block.commands:
        # Both launchers give the same numbers; starting Ray for each command would take minutes.
        environment = environment | {"RELAX_LAUNCHER": "local"}
    lines = [block.commands] if block.kind == "bash" else block.commands.splitlines()
    for commands in lines:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        if done.returncode not in WORKING_CODES[block.kind]:
            return (
                f"line {block.line}: exit code {done.returncode}\n{commands}\n{done.stdout[-800:]}{done.stderr[-1500:]}"
            )
    return ""
