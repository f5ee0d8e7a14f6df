"""Write docs/configuration.md from the option models, and docs/rules.md from the kinds of problems."""

from __future__ import annotations

import pkgutil
import textwrap
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path

import relax_cli
from relax_cli.cli.option_docs import configuration_markdown
from relax_cli.errors import ProblemKind, declared_kinds
from relax_cli.plugin.config_model import config_model
from relax_cli.plugin.manager import GROUP, Plugins

BUILT_IN = ("ppo", "grpo", "gspo", "cispo", "sapo")
DOCS = Path(__file__).parent.parent / "docs"
CONFIGURATION, RULES = DOCS / "configuration.md", DOCS / "rules.md"

WIDTH = 120
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
