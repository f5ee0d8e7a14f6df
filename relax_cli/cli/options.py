"""The words after a command: options made from the configuration model, a flag per field, a panel per section."""

from __future__ import annotations

import inspect
import json
import os
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperCommand, TyperOption

from relax_cli.cli.checked_text import show
from relax_cli.cli.console import (
    Format,
    FormatOption,
    Function,
    Output,
    as_typer_reads_it,
    layers_option,
    output_of,
    own_parameters,
)
from relax_cli.cli.recipes import summary_of
from relax_cli.cli.text import shown_default
from relax_cli.config.layers import Layers
from relax_cli.config.model import base_type, choices, flag, options_by_name, section_model
from relax_cli.config.names import done_otherwise, meant_option, nearest
from relax_cli.config.recipes import bundled_recipes
from relax_cli.config.schema import Config
from relax_cli.data.rewards import BUILTIN_REWARDS
from relax_cli.errors import ConfigError, ExitCode, Problem, problem_kinds
from relax_cli.plugin.config_model import config_model
from relax_cli.plugin.manager import Plugins, installed_plugins, load_plugins

Recipes = Annotated[
    list[str] | None,
    layers_option(
        "--recipe",
        metavar="NAME|FILE",
        help="bundled recipe or YAML file (repeatable)",
        autocompletion=lambda: list(bundled_recipes()),
    ),
]
Overrides = Annotated[
    list[str] | None, layers_option("--set", metavar="SECTION.KEY=VALUE", help="YAML value (repeatable)")
]
ShowConfig = Annotated[
    bool,
    layers_option("--show-config", help="print the configuration, a recipe with the origin of each value, then stop"),
]
ShowOrigin = Annotated[
    bool,
    layers_option("--show-origin", help="print every value and its origin with the plan; `train` stops then"),
]
COMPLETIONS: dict[str, Callable[[], list[str]]] = {
    "advantage_estimator": lambda: [entry.name for entry in installed_plugins()],
    "rm_type": lambda: sorted({*BUILTIN_REWARDS, *load_plugins().rewards()}),
}
PAIR_OPTION = "--eval-prompt-data"
SERVER_PREFIX = "--sglang-"
SERVER_OPTIONS = "--sglang-options"
declare = problem_kinds("Reading the configuration")
UNKNOWN_OPTION = declare(
    "unknown-option",
    "There is no option of that name. The nearest one is given, or the one that has another name in other trainers.",
)
VALUE_MISSING = declare(
    "value-missing", "An option that takes a value is followed by another option, or by nothing: `--save --colocate`."
)
UNEXPECTED_WORD = declare("unexpected-word", "A word that belongs to no option. Recipes are given as `--recipe NAME`.")
GIVEN_TWICE = declare("option-given-twice", "An option that takes one value was given two different ones.")
ONE_VALUE = ("--rm-type", "--custom-rm-path")
"""Options that look as if they could be repeated. Of all others the last one counts: scripts append them."""


class ConfigCommand(TyperCommand):
    """A command with the options of the configuration."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Put into a form that Typer has what it has no form for: pairs, and options with names of SGLang's."""
        takes_value = {
            name: not getattr(option, "is_flag", False)
            for option in self.get_params(ctx)
            for name in (*option.opts, *option.secondary_opts)
        }
        words = join_pairs(gather_server_options(args, takes_value))
        if {"-h", "--help"} & set(words):
            # Wherever it stands, also where a value is due.
            words = ["--help"]
        elif not ctx.resilient_parsing and (problems := list(word_problems(words, takes_value))):
            is_json = "--format=json" in words or ("--format", "json") in pairwise(words)
            ctx.find_root().obj = Output(Format.JSON if is_json else Format.TEXT)
            raise ConfigError(problems)
        return super().parse_args(ctx, words)

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """A section per panel; unlike Typer's own columns, these never cut a long flag off."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        panels: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            assert isinstance(option, TyperOption)
            assert record is not None
            names, text = record
            if option.secondary_opts:
                names = f"--[no-]{option.opts[0].removeprefix('--')}"
            panels.setdefault(str(option.rich_help_panel or "General"), []).append((names, text))
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def join_pairs(args: Sequence[str]) -> list[str]:
    """`--eval-prompt-data NAME PATH` as `--eval-prompt-data NAME=PATH`; one word with `=` stays as it is."""
    joined, words = list[str](), list(args)
    while words:
        joined.append(words.pop(0))
        is_pair = joined[-1] == PAIR_OPTION and len(words) > 1 and "=" not in words[0]
        if is_pair and not words[1].startswith("--"):
            joined.append("=".join(words[:2]))
            del words[:2]
    return joined


def gather_server_options(args: Sequence[str], own: Collection[str]) -> list[str]:
    """`--sglang-NAME VALUE`, `--sglang-NAME=VALUE` and `--sglang-NAME` of an SGLang server as one `--sglang-options`;
    `own` options of the command stay as they are."""
    kept, given, words = list[str](), dict[str, Any](), list(args)
    json_text = ""
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name == SERVER_OPTIONS and (equals or words):
            json_text = value if equals else words.pop(0)
        elif name in own or not name.startswith(SERVER_PREFIX) or name == SERVER_PREFIX:
            kept.append(word)
        else:
            values = [value] if equals else list(takewhile(lambda word: not is_option(word), words))
            del words[: 0 if equals else len(values)]
            key = name.removeprefix(SERVER_PREFIX).replace("-", "_")
            given[key] = True if not values else values[0] if len(values) == 1 else values
    if not given:
        return list(args)
    with suppress(ValueError):
        before = json.loads(json_text or "{}")
        # What is no JSON object is reported by the layers.
        json_text = json.dumps(before | given) if isinstance(before, dict) else json_text
    return [*kept, SERVER_OPTIONS, json_text]


def config_command(function: Function, plugins: Plugins) -> Callable[..., None]:
    """The command of a function that takes `layers`, `output` and `plugins`."""
    model = _model(plugins)
    annotation = inspect.signature(function, eval_str=True).parameters["layers"].annotation
    chosen = getattr(annotation, "__metadata__", (options_by_name(model),))[0]

    def command(
        ctx: typer.Context,
        *,
        recipe: Recipes = None,
        set_values: Overrides = None,
        fmt: FormatOption = Format.TEXT,
        show_config: ShowConfig = False,
        **given: Any,
    ) -> None:
        output = output_of(ctx, fmt)
        flags = {name: given.pop(name, None) for name in options_by_name(model)}
        layers = Layers(recipe or (), os.environ, set_values or (), flags)
        if show_config:
            show(plugins, layers, output)
        else:
            raise typer.Exit(function(layers=layers, output=output, plugins=plugins, **given) or ExitCode.OK)

    *shared, _ = inspect.signature(command, eval_str=True).parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(option, kind, default=None, annotation=_annotation(option, field, panel))
        for section in model.model_fields
        for panel in [f"{section.capitalize()} ({summary_of(model, section)})"]
        for option, field in section_model(model, section).model_fields.items()
        if option in chosen
    ]
    return as_typer_reads_it(command, [*shared, *own_parameters(function), *options], function)


def _model(plugins: Plugins) -> type[Config]:
    try:
        return config_model(plugins.estimators().values())
    except ConfigError:
        # Two plugins clash: the command raises this when it runs, so that it is shown in the form of --format.
        return Config


def _annotation(name: str, field: FieldInfo, panel: str) -> Any:
    """Numbers and choices stay text here: the loader validates every layer alike and reports all problems."""
    default = field.get_default(call_default_factory=True)
    said = "" if default in (None, "", (), {}) else f" [default: {shown_default(default)}]"
    kind = base_type(field)
    allowed = choices(field)
    metavar = {int: "INTEGER", float: "FLOAT", dict: "JSON", str: "TEXT", tuple: "TEXT"}
    names = f"{flag(name)}/{flag(f'no_{name}')}" if kind is bool else flag(name)
    value: Any = {bool: bool, tuple: list[str]}.get(kind, str)
    option = typer.Option(
        names,
        help=f"{field.description or ''}{said}",
        rich_help_panel=panel,
        show_default=False,
        metavar="NAME PATH" if flag(name) == PAIR_OPTION else "|".join(allowed) or metavar.get(kind),
        autocompletion=COMPLETIONS.get(name, (lambda: list(allowed)) if allowed else None),
    )
    return Annotated[value | None, option]


def word_problems(words: Sequence[str], takes_value: Mapping[str, bool]) -> Iterator[Problem]:
    """Everything that is wrong with the names of options; `takes_value` says whether a word follows an option."""
    given: dict[str, list[str]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if takes_value.get(name) and not equals and (not rest or rest[0].partition("=")[0] in takes_value):
            got = rest[0] if rest else ""
            yield VALUE_MISSING(f"{name} has no value", fix=f"give {name} a value, or drop it", option=name, got=got)
        elif takes_value.get(name):
            given.setdefault(name, []).append(value if equals or not rest else rest.pop(0))
        elif name in takes_value:
            continue
        elif is_option(word):
            yield unknown_option(name, takes_value)
            if not equals and rest and not is_option(rest[0]):
                # Its value, most likely.
                rest.pop(0)
        else:
            fix = _option_of(word, takes_value) or "give it after the option that it is for; see `relax train --help`"
            yield UNEXPECTED_WORD(f"{word!r} belongs to no option", fix=fix, got=word, expected="options only")
    for name in ONE_VALUE:
        values = list(dict.fromkeys(given.get(name, ())))
        if len(values) > 1:
            got = ", ".join(values)
            yield GIVEN_TWICE(
                f"{name} is given twice", fix=f"keep one {name}", option=name, got=got, expected="one value"
            )


def _option_of(word: str, known: Collection[str]) -> str:
    """The words that say what a word alone was to say: a recipe, or `name=value` as in Hydra."""
    name, equals, value = word.partition("=")
    section, _, key = name.rpartition(".")
    if equals and flag(key) in known and section in ("", *Config.model_fields):
        return shlex.join(["--set", word] if section else [flag(name), value])
    recipes = bundled_recipes()
    near = word if word in recipes or Path(word).is_file() else nearest(word, recipes)
    return f"--recipe {near}" if near else ""


def is_option(word: str) -> bool:
    """Whether a word is an option, not a value like `-1`; also with the dash that a text processor made of `--`."""
    return word.startswith(("-", "–", "—")) and not word[1:2].isdigit()


def unknown_option(name: str, known: Collection[str]) -> Problem:
    """The problem of a flag that no option has, with the one that is probably meant."""
    fields = {option.removeprefix("--").replace("-", "_") for option in known}
    meant = meant_option(name, fields)
    fix = f"use {flag(meant)}" if meant else done_otherwise(name) or "see `relax train --help`"
    return UNKNOWN_OPTION(f"there is no option {name}", fix=fix, option=name, expected=flag(meant) if meant else "")
