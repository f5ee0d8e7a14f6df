"""Write docs/configuration.md from the option models, and docs/rules.md from the kinds of problems."""

from __future__ import annotations

import pkgutil
import textwrap
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path

from pydantic.fields import FieldInfo

import relax_cli
from relax_cli.cli.recipes import summary_of
from relax_cli.config.model import base_type, choices, flag, is_optional, section_model
from relax_cli.config.schema import Config
from relax_cli.errors import ProblemKind, declared_kinds
from relax_cli.plugin.config_model import config_model
from relax_cli.plugin.manager import GROUP, Plugins

BUILT_IN = ("ppo", "grpo", "gspo", "cispo", "sapo")
DOCS = Path(__file__).parent.parent / "docs"
CONFIGURATION, RULES = DOCS / "configuration.md", DOCS / "rules.md"

WIDTH = 120
OPTIONS_INTRODUCTION = """\
# Configuration

Every option of `relax train` and `relax validate-config`. This page is written by `python scripts/make_docs.py` from
`relax_cli/config/schema.py` and the option models of the built-in estimators; a test checks that it is current.

An option `batch.rollout_batch_size` is

- the flag `--rollout-batch-size 32` (`--x` and `--no-x` for what is on or off),
- the recipe key `batch: {rollout_batch_size: 32}`,
- `--set batch.rollout_batch_size=32`,
- the environment variable `RELAX_ROLLOUT_BATCH_SIZE=32`.

Later ones win: default < recipes, left to right < environment < `--set` < flags. `relax validate-config --show-origin`
shows where each value came from.

A later layer also ends what earlier ones say against it: `--custom-rm-path` replaces a recipe's `rm_type`,
`--num-epoch` its `num_rollout`, `--micro-batch-size` its token budget, `--advantage-estimator grpo` its options of PPO
and the critic (`relax_cli/config/replaced.py` has the list).
`null` unsets an option: `--set reward.rm_type=null`, `RELAX_SAVE=null`, or `--critic-lr null` for an option with one
value. An empty `RELAX_SAVE=` is refused. Values of the environment and of `--set` are YAML, but for texts, which stay
as they are typed unless they stand in quotes.

In options that are paths, `~` and `$VAR` are expanded in every layer.

Recipes are sparse YAML 1.2: only what differs from the defaults. `${VAR}` and `${VAR:-default}` expand,
`${RECIPE_DIR}` is the folder of the recipe, `$${` is a plain `${`. An unknown key, a key that stands twice or a
variable that is not set is an error with file and line. `relax recipes schema` prints a JSON schema for editors.

The `config.json` of a run folder is also a recipe, without its `run_dir`: `relax train --recipe RUN/config.json` runs
it again in a new folder. It also records the command line and the versions of the libraries.

What must hold between options is in [rules.md](rules.md).

Secrets are never printed or written: values of options that are named like one (`…_key`, `…_token`, `…password…`,
`…secret…`), passwords in URLs, and tokens in their queries show as `<redacted>`. In the command that continues a run, a
variable like `${RELAX_RM_URL:?…}` stands for the option's value, and the shell says so where it is not set.
"""

TYPES = {bool: "on/off", int: "integer", float: "number", str: "text", tuple: "list of text", dict: "JSON object"}
LIMITS = (("ge", ">= "), ("gt", "> "), ("le", "<= "), ("lt", "< "))
INTRODUCTION = """# Rules

<!-- Written by scripts/make_docs.py from the rules and kinds of problems in the code. -->

Every problem that relax reports has an id in square brackets, and this page has a heading for each. An id never changes
its meaning. Problems come in four parts: what is wrong, where (option and the layer that gave the value), got and
expected, and a fix to type. `relax validate-config` reports all of them together and starts nothing; `relax train` runs
the same checks first.

Warnings do not stop a run, except with `--strict`. What this machine lacks ([below](#this-machine)) is a note in
`validate-config`, and an error in `train` and with `--here`. `--skip-files` leaves out what needs files or this
machine.
"""
THEMES = {
    "Reading the configuration": "",
    "Plugins": "",
    "Roles, devices, parallelism": "",
    "PPO": "",
    "Objective": "",
    "Options without effect": """
These are warnings about options that were set, in a recipe or otherwise, and change nothing in this run. An option that
is left at its default, or set to off or 0, is never reported.
""",
    "Batches and length of the run": "",
    "Model": "",
    "Data": "",
    "Reward": "",
    "Episodes": "",
    "SGLang servers": "",
    "Folders and checkpoints": "",
    "Trackers": "",
    "This machine": "",
    "During a run": "",
}
"""Headings of the page in their order, with what stands below them."""


def render_configuration() -> str:
    """The page of options; plugins that happen to be installed here do not change it."""
    plugins = Plugins([EntryPoint(name, f"relax_{name}", GROUP) for name in BUILT_IN])
    return configuration_markdown(config_model(plugins.estimators().values()))


def configuration_markdown(model: type[Config]) -> str:
    """`docs/configuration.md`."""
    sections = (line for section in model.model_fields for line in _section(model, section))
    return "\n".join([OPTIONS_INTRODUCTION, *sections])


def _section(model: type[Config], section: str) -> Iterator[str]:
    yield f"## {section}"
    yield ""
    yield f"{summary_of(model, section)}."
    yield ""
    yield "| option | type | default | |"
    yield "|---|---|---|---|"
    for name, field in section_model(model, section).model_fields.items():
        cells = (f"`{flag(name)}`", _type(field), _default(field), field.description or "")
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _type(field: FieldInfo) -> str:
    if allowed := choices(field):
        return ", ".join(f"`{name}`" for name in allowed)
    limits = [
        f"{sign}{getattr(item, name):g}" for item in field.metadata for name, sign in LIMITS if hasattr(item, name)
    ]
    return " ".join([TYPES[base_type(field)], *([", ".join(limits)] if limits else [])])


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value in (None, "", ()):
        return "unset" if is_optional(field) or value == "" else "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return ", ".join(f"`{role}` {list(counts)}" for role, counts in value.items())
    return f"`{value}`"


def all_kinds() -> dict[str, ProblemKind]:
    """Every kind of problem that relax and its plugins declare, by id."""
    packages = [relax_cli, *(import_module(f"relax_{name}") for name in BUILT_IN)]
    for package in packages:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                import_module(module.name)
    unknown = {kind.id: kind.theme for kind in declared_kinds() if kind.theme not in THEMES}
    assert not unknown, f"themes that the page does not have: {unknown}"
    return {kind.id: kind for kind in declared_kinds()}


def render_rules() -> str:
    """The page of rules; within a theme, ids are in the order of the alphabet."""
    kinds, page = all_kinds().values(), [INTRODUCTION]
    for theme, introduction in THEMES.items():
        page.append(f"\n## {theme}\n{introduction}")
        of_theme = sorted((kind for kind in kinds if kind.theme == theme), key=lambda kind: kind.id)
        page += [f"\n### `{kind.id}`\n{filled(kind.summary)}\n" for kind in of_theme]
    return "".join(page)


def filled(text: str) -> str:
    """One paragraph in lines of the page's width."""
    return textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    CONFIGURATION.write_text(render_configuration(), encoding="utf-8")
    RULES.write_text(render_rules(), encoding="utf-8")
    print(f"wrote {CONFIGURATION} and {RULES}")
