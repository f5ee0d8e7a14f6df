"""Every rule has a test that names it, and every option is read by something that acts on it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import relax_cli
from relax_cli.config.model import options_by_name
from relax_cli.config.schema import Config, ParallelSection
from relax_cli.plugin.config_model import config_model
from relax_cli.plugin.manager import load_plugins
from tests.support import docs
from tests.support.rule_cases import REFUSED_AND_NEAR_MISS
from tests.support.rules import problems_of
from tests.support.unused_option_cases import UNUSED_OPTION_CASES

TESTS = Path(__file__).parent.parent
PACKAGE = Path(relax_cli.__file__).parent
SOURCES = (PACKAGE, PACKAGE.parent / "plugins")
JUDGES = re.compile(r"(preflight/.*|config/(schema|section|redact)|plugin/rules|relax_[a-z]+/rules)\.py")
"""Modules that judge options; being looked at there is no effect."""
SETTLED_BEFORE = {"critic_init_from_actor", "num_epoch", "strict"}
"""Options that decide something before the launch, so that nothing after it has to read them."""


def literals(path: Path) -> Iterator[str]:
    """Every text constant of a file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_rule_has_a_test_that_names_it() -> None:
    texts = {text for path in TESTS.rglob("*.py") for text in literals(path)}
    # Also inside a longer text, such as the line of a screen.
    words = {word for text in texts for word in re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)*", text)}
    assert sorted(set(docs.make_docs().all_kinds()) - words) == []


def test_many_rules_have_a_refusal_and_a_near_miss() -> None:
    rules = {rule for rule, _, _ in (*REFUSED_AND_NEAR_MISS, *UNUSED_OPTION_CASES)}
    assert len(rules) >= 60


REFUSED = {"fully_async": True}
"""Options that stand for what is not built, with a value that is refused."""


@pytest.mark.parametrize("option", REFUSED)
def test_options_that_are_not_built_are_refused(option: str) -> None:
    parallel = ParallelSection(**{option: REFUSED[option]})
    found = [p for p in problems_of(Config(parallel=parallel), skip_files=True) if p.severity == "error"]
    assert f"--{option.replace('_', '-')}" in {problem.option for problem in found}


def attributes_read(path: Path) -> set[str]:
    """Names of attributes that a file reads."""
    tree = ast.parse(path.read_text("utf-8"))
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}


def test_every_option_is_read_by_something_that_acts_on_it() -> None:
    files = [
        path for root in SOURCES for path in root.rglob("*.py") if not JUDGES.fullmatch(str(path.relative_to(root)))
    ]
    read = {name for path in files for name in attributes_read(path)}
    # Properties of the sections read the options behind them.
    for name in ("schema", "section", "held_out"):
        sections = ast.parse((PACKAGE / "config" / f"{name}.py").read_text("utf-8"))
        for function in (n for n in ast.walk(sections) if isinstance(n, ast.FunctionDef) and n.name in read):
            read |= {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)}
    options = options_by_name(config_model(load_plugins().estimators().values()))
    assert sorted(set(options) - read - set(REFUSED) - SETTLED_BEFORE) == []
