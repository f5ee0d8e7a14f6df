"""`code`: 1 if the response's Python passes every test of the label, run in a sandbox."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from itertools import chain
from textwrap import dedent
from typing import Any

from relax_cli.data.rewards.text import ANSWER_TAG
from relax_cli.data.rewards.types import RewardInput
from relax_cli.data.sandbox.outside import Sandbox, SandboxError, sandbox_fix
from relax_cli.errors import MACHINE_THEME, RunError, problem_kind

SECONDS = 10.0
"""For all tests of a response together."""
FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON_FENCE = re.compile(r"```(?:python|py)[0-9.]*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
CODE_SANDBOX = problem_kind(
    "code-sandbox",
    MACHINE_THEME,
    "`--rm-type code` runs what a model writes, which needs a sandbox that holds. This machine has none.",
    option="--rm-type",
)


@dataclass(frozen=True)
class Suite:
    """What a label asks of a program."""

    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    """Expected for each input."""
    checks: list[Any] = field(default_factory=list)
    """Python text, or a function's name, arguments and value."""


class CodeJudge:
    """Judges one sample at a time, each in a fresh sandbox."""

    def __init__(self) -> None:
        self._sandbox = Sandbox()

    def __call__(self, sample: RewardInput) -> dict[str, float]:
        """1.0 where every test passes; `passed` is the share that does, `timed_out` whether time ran out.
        Raises RunError: the label has no tests, or there is no sandbox."""
        try:
            tests = suite_of(sample.label)
            ran = self._sandbox.run(code_of(sample.response), tests.inputs, tests.checks, SECONDS)
        except ValueError as error:
            raise sample.no_label(f"the reward code needs tests, but {error}", "tests for every prompt") from error
        except SandboxError as error:
            raise RunError(CODE_SANDBOX(f"there is no sandbox: {error}", fix=sandbox_fix())) from error
        right = sum(map(same_output, ran.outputs, tests.outputs)) + sum(ran.passed)
        asked = len(tests.inputs) + len(tests.checks)
        late = float(ran.ended == "late")
        return {"reward": float(right == asked), "passed": right / asked, "timed_out": late}


def code_of(response: str) -> str:
    """The last fenced block of Python, or fenced block, or `<answer>…</answer>`, or all of it."""
    found = PYTHON_FENCE.findall(response) or FENCE.findall(response) or ANSWER_TAG.findall(response) or [response]
    # A fence below an item of a list is indented.
    return dedent(found[-1]) if found[-1].startswith((" ", "\t")) else str(found[-1])


def same_output(printed: str | None, expected: str) -> bool:
    """Whether the lines are equal but for white space, numbers by value: 1.0 is 1."""
    if printed is None:
        return False
    ours, theirs = ([line.split() for line in text.strip().splitlines()] for text in (printed, expected))
    if list(map(len, ours)) != list(map(len, theirs)):
        return False
    return all(map(_same_word, chain.from_iterable(ours), chain.from_iterable(theirs)))


def _same_word(one: str, other: str) -> bool:
    try:
        return one == other or Decimal(one) == Decimal(other)
    except InvalidOperation:
        return False


def suite_of(label: Any) -> Suite:
    """The tests of a label in one of the forms of docs/rewards.md.
    Raises ValueError: it has another form, or no test."""
    if isinstance(label, str):
        label = _parsed(label)
    if isinstance(label, dict):
        found = _of_object(label)
    elif isinstance(label, list):
        found = _of_list(label)
    else:
        raise ValueError("the label is neither text, a list nor an object")
    if not found.inputs and not found.checks:
        raise ValueError("the label has no test")
    for check in found.checks:
        if isinstance(check, str):
            try:
                tree = ast.parse(check)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise ValueError(f"a test is not Python: {error}") from error
            if not any(map(_can_fail, ast.walk(tree))):
                raise ValueError("a test asserts nothing, so that every response would pass it")
    return found


def _can_fail(node: ast.AST) -> bool:
    """Whether this part of a test says what is wrong: `assert`, `raise`, or a function such as `assertEqual`."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return isinstance(node, ast.Assert | ast.Raise) or "assert" in name.lower()


def _parsed(text: str) -> Any:
    """What JSON says, or a test in Python."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, list | dict) else [text] * bool(text.strip())


def _of_object(label: dict[str, Any]) -> Suite:
    for key in ("tests", "test_cases"):
        if key in label:
            return suite_of(label[key])
    if isinstance(test := label.get("test"), str):
        called = f"\n\ncheck({label['entry_point']})" if "entry_point" in label else ""
        return Suite(checks=[test + called])
    if "test_list" in label:
        setup = "\n".join([*label.get("test_imports", []), str(label.get("test_setup_code") or "")])
        tests = label["test_list"]
        if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
            raise ValueError("test_list is not a list of texts")
        return Suite(checks=[f"{setup}\n{test}" for test in tests])
    inputs, outputs = label.get("inputs"), label.get("outputs")
    if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs):
        name = label.get("fn_name")
        return _of_list([{"input": i, "output": o, "fn_name": name} for i, o in zip(inputs, outputs, strict=True)])
    raise ValueError(f"the label has the keys {', '.join(label) or 'of no object'}")


def _of_list(items: list[Any]) -> Suite:
    if all(isinstance(item, str) for item in items):
        return Suite(checks=items)
    found = Suite()
    for item in items:
        if not isinstance(item, dict) or not {"input", "output"} <= item.keys():
            raise ValueError("an item of the label is not an object with input and output")
        given, expected = item["input"], item["output"]
        if name := item.get("fn_name"):
            if isinstance(given, str):
                given, expected = [json.loads(line) for line in given.splitlines()], json.loads(expected)
            if not isinstance(given, list):
                raise ValueError("the input of a function is not the list of its arguments")
            found.checks.append([str(name), given, expected])
        else:
            found.inputs.append(_text(given))
            found.outputs.append(_text(expected))
    return found


def _text(value: Any) -> str:
    """A text, or the lines that a list is."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if isinstance(value, str):
        return value
    raise ValueError("an input or output is neither text nor lines")
