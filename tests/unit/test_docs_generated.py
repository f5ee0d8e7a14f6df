"""Pages that are written from the code: after a change, `python scripts/make_docs.py`."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support import docs

SCRIPT = Path(docs.SCRIPT)
MAKERS = {"errors.py", "plugin/apart.py"}
"""Where a `Problem` may be made without its kind: the kind itself, and answers of other processes."""


def test_the_page_of_options_is_what_the_schema_says() -> None:
    make_docs = docs.make_docs()
    assert make_docs.CONFIGURATION.read_text("utf-8") == make_docs.render_configuration()


def test_the_page_of_rules_is_what_the_kinds_say() -> None:
    make_docs = docs.make_docs()
    assert make_docs.RULES.read_text("utf-8") == make_docs.render_rules()


def test_every_problem_is_made_by_a_declared_kind() -> None:
    made = [
        f"{path.relative_to(root)}:{node.lineno}"
        for root in (SCRIPT.parent.parent / "relax_cli", SCRIPT.parent.parent / "plugins")
        for path in sorted(root.rglob("*.py"))
        if str(path.relative_to(root)) not in MAKERS
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Problem"
    ]
    assert made == []
