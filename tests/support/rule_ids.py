"""Finds the id of every `Problem` in the sources: what `docs/rules.md` must explain."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import relax_cli

PACKAGE = Path(relax_cli.__file__).parent
SOURCES = (PACKAGE, PACKAGE.parent / "plugins")
RULE_PARAMETERS = ("rule", "rule_id", "id")
"""Names of the first parameter of helpers that make problems."""


def rule_ids() -> dict[str, str]:
    """Id, or pattern of an id that is put together, to the place of its first use."""
    found: dict[str, str] = {}
    for root in SOURCES:
        for path in sorted(root.rglob("*.py")):
            for rule, line in _ids(ast.parse(path.read_text("utf-8"))):
                found.setdefault(rule, f"{path.name}:{line}")
    return found


def _ids(tree: ast.Module) -> Iterator[tuple[str, int]]:
    helpers = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.args.args and node.args.args[0].arg in RULE_PARAMETERS
    }
    named = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id == "problem_kind":
            values = node.args[:1]
        elif node.func.id == "Problem":
            values = [keyword.value for keyword in node.keywords if keyword.arg == "id"] or node.args[:1]
        elif node.func.id in helpers:
            values = node.args[:1]
        else:
            continue
        for value in values:
            if isinstance(value, ast.Name):
                value = named.get(value.id, value)
            yield from ((text, node.lineno) for text in _texts(value))


def _texts(value: ast.expr) -> Iterator[str]:
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    elif isinstance(value, ast.IfExp):
        yield from _texts(value.body)
        yield from _texts(value.orelse)
    elif isinstance(value, ast.JoinedStr):
        parts = (re.escape(p.value) if isinstance(p, ast.Constant) else "[a-z]+" for p in value.values)
        yield "".join(str(part) for part in parts)
