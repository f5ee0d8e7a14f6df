"""`--rm-type code`: the forms of labels, what of a response is run, and verdicts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from relax_cli.config.schema import Config, RewardSection
from relax_cli.data.prompts import Prompt
from relax_cli.data.rewards import RewardInput, code, load_reward
from relax_cli.data.rewards.code import CodeJudge, Suite, code_of, same_output, suite_of
from relax_cli.data.sandbox.outside import Ran, SandboxError, sandbox_fault
from relax_cli.errors import RunError
from relax_cli.preflight import labels
from relax_cli.preflight.labels import label_check
from relax_cli.preflight.rules import rewards as rules
from tests.support.rules import UNKNOWN, problems_by

needs_sandbox = pytest.mark.skipif(bool(sandbox_fault()), reason=sandbox_fault())
PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
ADDS = "print(sum(map(int, input().split())))"
CALLS = Suite(checks=[["add", [1, 2], 3]])


def sample(response: str, label: Any) -> RewardInput:
    return RewardInput("", response, label, {}, truncated=False, group=0)


@pytest.mark.parametrize(
    ("label", "tests"),
    [
        (PAIRS, Suite(["1 2\n", "3 4\n"], ["3\n", "7\n"])),
        (json.dumps(PAIRS), Suite(["1 2\n", "3 4\n"], ["3\n", "7\n"])),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, Suite(["1\n2"], ["3"])),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], Suite(["1"], ["2"])),
        ({"test_cases": [{"type": "stdin_stdout", "input": "1", "output": "2"}]}, Suite(["1"], ["2"])),
        ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, CALLS),
        ({"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}, CALLS),
        ([{"fn_name": "add", "input": [1, 2], "output": 3}], CALLS),
        ("assert add(1, 2) == 3", Suite(checks=["assert add(1, 2) == 3"])),
        (["assert f(1)", "assert f(2)"], Suite(checks=["assert f(1)", "assert f(2)"])),
        ({"test_list": ["assert f(1)"], "test_setup_code": "import math"}, Suite(checks=["import math\nassert f(1)"])),
        ({"test_list": ["assert f(1)"], "test_imports": ["import re"]}, Suite(checks=["import re\n\nassert f(1)"])),
        ({"test": "def check(c): assert c", "entry_point": "f"}, Suite(checks=["def check(c): assert c\n\ncheck(f)"])),
    ],
)  # fmt: skip
def test_labels_have_the_forms_of_data_sets(label: Any, tests: Suite) -> None:
    assert suite_of(label) == tests


@pytest.mark.parametrize(
    ("label", "fault"),
    [
        ("", "no test"),
        ([], "no test"),
        ({"inputs": [], "outputs": []}, "no test"),
        ({"inputs": ["1"], "outputs": []}, "keys inputs, outputs"),
        ({"answer": 3}, "keys answer"),
        ("assert f(", "not Python"),
        ("35", "asserts nothing"),
        (["assert f(1) == 2", "f(2) == 3"], "asserts nothing"),
        ({"test_list": "assert f(1)"}, "not a list of texts"),
        ([{"input": "1"}], "input and output"),
        ([{"input": 1, "output": "1"}], "neither text nor lines"),
        ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "list of its arguments"),
        ({"fn_name": "f", "inputs": ["x"], "outputs": ["1"]}, "Expecting value"),
    ],
)
def test_a_label_without_tests_is_named_with_its_row(label: Any, fault: str) -> None:
    check = label_check(RewardSection(rm_type="code"), {"code"})
    problem = check(Prompt("p", label, {}, "data.jsonl:7"))
    assert problem is not None
    assert (problem.id, problem.where) == ("label-unusable", "data.jsonl:7")
    assert fault in problem.message
    with pytest.raises(RunError, match="needs tests"):
        CodeJudge()(sample("", label))


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("print(1)", "print(1)"),
        ("First:\n```python\na\n```\nBetter:\n```Python\nb\n```\nIt prints:\n```\n1\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```py\na\n``` then ```python\nb\nc", "b\nc"),
        ("1. so:\n   ```python\n   if a:\n     b\n   ```", "if a:\n  b\n"),
        ("<answer>\na = 1\n</answer>", "\na = 1\n"),
    ],
)
def test_the_last_block_of_python_is_the_program(response: str, program: str) -> None:
    assert code_of(response) == program


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1  2 \n3\n\n", "1 2\n3", True),
        ("1.0", "1", True),
        ("1e3", "1000", True),
        ("1.0000001", "1", False),
        ("yes", "YES", False),
        ("1 2 3", "1 2\n3", False),
        ("1", "1\n2", False),
        ("", "", True),
        (None, "", False),
    ],
)
def test_output_is_compared_by_lines_and_values(printed: str | None, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same


@needs_sandbox
def test_programs_are_judged_in_the_pool() -> None:
    reward = load_reward(RewardSection(rm_type="code"), {})
    half = "n = input()\nprint(3 if n == '1 2' else 'no')"
    found = reward([sample(f"So:\n```python\n{ADDS}\n```", PAIRS), sample(half, PAIRS), sample("def f(", PAIRS),
                    sample("def f(x): return x + 1", ["assert f(1) == 2", "assert f(1) == 3"])])  # fmt: skip
    reward.close()
    assert [(result.reward, result.parts["passed"]) for result in found] == [(1, 1), (0, 0.5), (0, 0), (0, 0.5)]
    assert all(result.parts["timed_out"] == result.parts["unjudged"] == 0 for result in found)


def test_tests_that_time_does_not_reach_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code.Sandbox, "run", lambda *_: Ran(["3\n"], ended="late"))
    assert CodeJudge()(sample(ADDS, PAIRS)) == {"reward": 0.0, "passed": 0.5, "timed_out": 1.0}


def test_without_a_sandbox_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise SandboxError("unshare: Operation not permitted")

    monkeypatch.setattr(code.Sandbox, "run", refuse)
    with pytest.raises(RunError) as caught:
        CodeJudge()(sample(ADDS, PAIRS))
    assert caught.value.problems[0].id == "code-sandbox"


@pytest.mark.parametrize(
    ("rm_type", "fault", "found"),
    [("code=1,format=0.1", "it leaks", True), ("code", "", False), ("math", "it leaks", False)],
)
def test_a_machine_without_a_sandbox_is_refused(rm_type: str, fault: str, found: bool) -> None:
    machine = replace(UNKNOWN, sandbox_fault=lambda: fault)
    problems = problems_by(rules.code_sandbox, Config(reward=RewardSection(rm_type=rm_type)), machine=machine)
    assert [(p.id, "it leaks" in p.message, bool(p.fix)) for p in problems] == [("code-sandbox", True, True)] * found


def test_a_row_that_needs_a_sandbox_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "sandbox_fault", lambda: "it leaks")
    row = Prompt("p", PAIRS, {}, "data.jsonl:7", reward="code")
    problem = label_check(RewardSection(rm_type="exact"), {"code", "exact"})(row)
    assert problem is not None
    assert "it leaks" in problem.message


@pytest.mark.parametrize(
    ("rm_type", "installed", "found"),
    [("reasoning_gym", False, True), ("reasoning_gym", True, False), ("math", False, False)],
)
def test_reasoning_gym_that_is_missing_is_refused(
    rm_type: str, installed: bool, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda _: object() if installed else None)
    problems = problems_by(rules.reasoning_gym_missing, Config(reward=RewardSection(rm_type=rm_type)))
    assert [p.id for p in problems] == ["reasoning-gym-missing"] * found
