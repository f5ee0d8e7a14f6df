"""Does what the `fix` of a problem says, as a person would who pastes it."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Sequence

Run = Callable[..., object]


def follow(fix: str, words: Sequence[str], relax: Run) -> list[str]:
    """Run the command that a fix begins with, or change a command line by its options.

    Args:
        words: the command line that got the problem.
        relax: runs `relax` with words.

    Returns:
        the command line to try again.
    """
    first = re.split(r"; |, if |, to |, the | says ", fix)[0]
    if first.startswith("relax "):
        command = shlex.split(first)[1:]
        if command[:2] == list(words[:2]):
            return command  # The same command, with other words.
        relax(*command)
        return list(words)
    if first.startswith("echo "):
        subprocess.run(["sh", "-c", first], check=True)
        return list(words)
    assert first.startswith("--"), f"neither a command nor an option: {fix}"
    option, *values = shlex.split(first.removesuffix(" if the run makes this folder"))
    assert not any(re.fullmatch(r"[A-Z_]+", value) for value in values), f"something to fill in: {fix}"
    return [*_without(words, option), option, *values]


def _without(words: Sequence[str], option: str) -> list[str]:
    kept, rest = [], iter(words)
    for word in rest:
        if word == option:
            next(rest)
        else:
            kept.append(word)
    return kept
