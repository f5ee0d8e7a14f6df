"""Does what the `fix` of a problem says, as a person would who pastes it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from relax_cli.config.model import base_type, flag, options_by_name
from relax_cli.config.schema import Config
from relax_cli.errors import Problem

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


Flags = dict[str, Any]
"""Field name to the value of a flag."""
_WAYS = re.compile(r",? or (?=--|drop |write |add )|, or |; ")
_TO_FILL_IN = re.compile(r"[A-Z]{2,}|…")


def ways_out(problem: Problem, flags: Mapping[str, Any], model: type[Config]) -> Iterator[tuple[str, Flags]]:
    """Each way out that a fix states as an edit of options, with the flags as they are then.

    What has something to fill in, or only names a direction ("lower …"), is left out.
    """
    blamed = [word.split()[0] for word in problem.got.split(", ") if word.startswith("--")] or [problem.option]
    for way in _WAYS.split(re.sub(r" \([^)]*\)", "", problem.fix)):
        new = dict(flags)
        resource = json.loads(flags.get("resource", "{}"))
        if _TO_FILL_IN.search(way):
            continue
        if drop := re.match(r"drop (--\S+(?: and --\S+)*|it\b|them\b)", way):
            for option in blamed if drop[1] in ("it", "them") else drop[1].split(" and "):
                _drop(new, option.rstrip(":,"))
        elif change := re.match(r'(?:write|add) "(\w+)": (\[.*?\])', way):
            new["resource"] = json.dumps(resource | {change[1]: json.loads(change[2])})
        elif change := re.match(r'write "(\w+)" instead of "(\w+)"', way):
            new["resource"] = json.dumps({change[1] if role == change[2] else role: n for role, n in resource.items()})
        elif change := re.match(r'drop "(\w+)" from --resource', way):
            new["resource"] = json.dumps({role: n for role, n in resource.items() if role != change[1]})
        elif change := re.match(r"use (--\S+)$", way):
            _set(new, [change[1], _drop(new, blamed[0])], model)
        elif change := re.match(r"(?:add )?(--\S.*)", way):
            _set(new, shlex.split(change[1]), model)
        else:
            continue
        yield way, new


def _name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _drop(flags: Flags, option: str) -> str:
    """Take an option away; returns what it was."""
    name = _name(option)
    if name in flags or not name.startswith("sglang_"):
        return str(flags.pop(name))
    options = json.loads(flags["sglang_options"])
    value = options.pop(name.removeprefix("sglang_"))
    flags["sglang_options"] = json.dumps(options)
    return str(value)


def _set(flags: Flags, words: list[str], model: type[Config]) -> None:
    """Options as they are typed; a switch has no value."""
    fields = options_by_name(model)
    while words:
        name, values = _name(words.pop(0)), list[str]()
        while words and not words[0].startswith("--"):
            values.append(words.pop(0))
        if name.startswith("no_") and name not in fields:
            flags[name.removeprefix("no_")] = False
            continue
        if name.startswith("sglang_") and name not in fields:
            options = json.loads(flags["sglang_options"]) | {name.removeprefix("sglang_"): " ".join(values) or True}
            flags["sglang_options"] = json.dumps(options)
            continue
        kind = base_type(fields[name][1])
        assert bool(values) != (kind is bool), f"{flag(name)} {values}"
        flags[name] = True if kind is bool else ["=".join(values)] if kind is tuple else " ".join(values)
