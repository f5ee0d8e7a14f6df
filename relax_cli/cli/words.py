"""The words after `train` and `validate-config`, judged before Typer stops at the first one that it does not know."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from relax_cli.config.model import flag
from relax_cli.config.names import done_otherwise, meant_option, nearest
from relax_cli.config.recipes import bundled_recipes
from relax_cli.errors import Problem, problem_kinds

declare = problem_kinds("Reading the configuration")
UNKNOWN_OPTION = declare(
    "unknown-option",
    "There is no option of that name. The nearest one is given, or the one that has another name in other trainers.",
)
UNEXPECTED_WORD = declare("unexpected-word", "A word that belongs to no option. Recipes are given as `--recipe NAME`.")
GIVEN_TWICE = declare("option-given-twice", "An option that takes one value was given two different ones.")

ONE_VALUE = ("--rm-type", "--custom-rm-path")
"""Options that look as if they could be repeated. Of all others the last one counts: scripts append them."""


def word_problems(words: Sequence[str], takes_value: Mapping[str, bool]) -> Iterator[Problem]:
    """Everything that is wrong with the names of options; `takes_value` says whether a word follows an option."""
    given: dict[str, list[str]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if takes_value.get(name):
            given.setdefault(name, []).append(value if equals or not rest else rest.pop(0))
        elif name in takes_value:
            continue
        elif is_option(word):
            yield unknown_option(name, takes_value)
            if not equals and rest and not is_option(rest[0]):
                # Its value, most likely.
                rest.pop(0)
        else:
            recipes = bundled_recipes()
            near = word if word in recipes or Path(word).is_file() else nearest(word, recipes)
            yield UNEXPECTED_WORD(
                f"{word!r} belongs to no option",
                fix=f"--recipe {near}" if near else "give it after the option that it is for; see `relax train --help`",
                got=word,
                expected="options only",
            )
    for name in ONE_VALUE:
        values = list(dict.fromkeys(given.get(name, ())))
        if len(values) > 1:
            got = ", ".join(values)
            yield GIVEN_TWICE(
                f"{name} is given twice", fix=f"keep one {name}", option=name, got=got, expected="one value"
            )


def is_option(word: str) -> bool:
    """Whether a word is an option, not a value like `-1`."""
    return word.startswith("-") and not word[1:2].isdigit()


def unknown_option(name: str, known: Collection[str]) -> Problem:
    """The problem of a flag that no option has, with the one that is probably meant."""
    fields = {option.removeprefix("--").replace("-", "_") for option in known}
    meant = meant_option(name, fields)
    fix = f"use {flag(meant)}" if meant else done_otherwise(name) or "see `relax train --help`"
    return UNKNOWN_OPTION(f"there is no option {name}", fix=fix, option=name, expected=flag(meant) if meant else "")
