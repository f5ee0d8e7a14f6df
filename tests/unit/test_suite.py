"""How the tests themselves are arranged."""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.processes import listening, started_by

TESTS = Path(__file__).parents[1]
LONGEST_NAME = 60


def trees() -> Iterator[tuple[str, ast.Module]]:
    """Every file of the tests by its place in the repository."""
    for path in sorted(TESTS.rglob("*.py")):
        yield str(path.relative_to(TESTS.parent)), ast.parse(path.read_text("utf-8"))


def test_names_of_tests_are_short() -> None:
    names = {
        f"{file}::{node.name}"
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and len(node.name) > LONGEST_NAME
    }
    assert names == set()


def test_tests_import_from_tests_support_and_from_no_other_test() -> None:
    wrong = set()
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                if node.level or (module.startswith("tests") and not module.startswith("tests.support")):
                    wrong.add(f"{file}:{node.lineno} imports {module}")
            elif isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path.append":
                wrong.add(f"{file}:{node.lineno} changes sys.path")
    assert wrong == set()


def test_a_process_that_ends_while_one_looks_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    process = psutil.Process(ended.pid)
    ended.wait()
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [process])
    assert started_by(os.getpid()) == []
    assert all(name for name in listening(os.getpid()).values())
