"""Text files are UTF-8 whatever the locale: every call that opens one says so."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import relax_cli

PACKAGE = Path(relax_cli.__file__).parent
SOURCES = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "plugins").rglob("*.py")]
POSITION = {"read_text": 0, "write_text": 1, "open": 3, "fdopen": 3, "TextIOWrapper": 1}
"""Where the encoding stands among the positional arguments; one less for the method `open`."""


def calls_without_encoding(source: str) -> Iterator[int]:
    """Lines of calls that take the encoding of the locale."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        is_method = isinstance(node.func, ast.Attribute)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        keywords = {keyword.arg for keyword in node.keywords}
        if name in ("run", "Popen", "check_output") and keywords & {"text", "encoding"} == {"text"}:
            yield node.lineno
        if name not in POSITION or "encoding" in keywords or (name == "open" and _opens_no_text(node)):
            continue
        is_path = is_method and name == "open" and not _is_module(node.func, "io", "os")
        place = POSITION[name] - is_path
        mode = next((k.value for k in node.keywords if k.arg == "mode"), None)
        modes = [mode, *node.args[(0 if is_path else 1) : (1 if is_path else 2)]]
        is_binary = any(isinstance(m, ast.Constant) and "b" in str(m.value) for m in modes if m is not None)
        if len(node.args) <= place and not is_binary:
            yield node.lineno


def _is_module(function: ast.expr, *names: str) -> bool:
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id in names


def _opens_no_text(node: ast.Call) -> bool:
    return _is_module(node.func, "os", "archive", "webbrowser") or (
        isinstance(node.func, ast.Attribute) and "opener" in ast.unparse(node.func)
    )


@pytest.mark.parametrize(
    ("source", "is_wrong"),
    [
        ("p.read_text()", True), ("p.read_text('utf-8')", False), ("p.write_text(x)", True),
        ("p.write_text(x, 'utf-8')", False), ("p.write_text(x, encoding='utf-8')", False), ("open(p)", True),
        ("open(p, 'rb')", False), ("open(p, encoding='ascii')", False), ("p.open()", True), ("p.open('ab')", False),
        ("p.open('a', encoding='utf-8')", False), ("os.open(p, flags)", False), ("os.fdopen(n, 'w')", True),
        ("archive.open(name, 'w')", False),
        ("subprocess.run(c, text=True)", True), ("subprocess.run(c, text=True, encoding='utf-8')", False),
    ],
)  # fmt: skip
def test_the_search_finds_calls_without_an_encoding(source: str, is_wrong: bool) -> None:
    assert bool(list(calls_without_encoding(source))) is is_wrong


def test_every_text_file_says_its_encoding() -> None:
    wrong = [f"{path}:{line}" for path in SOURCES for line in calls_without_encoding(path.read_text("utf-8"))]
    assert wrong == []
