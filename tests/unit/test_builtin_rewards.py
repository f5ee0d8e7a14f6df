"""What the built-in rewards accept and refuse; sums of them, rewards by row, and rewards that fail."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_cli.config.schema import RewardSection
from relax_cli.data.prompts import Prompt
from relax_cli.data.rewards import BUILTIN_REWARDS, RewardInput, RewardResult, load_reward, pool
from relax_cli.data.rewards.math import compare
from relax_cli.data.rewards.pool import PooledReward
from relax_cli.data.rewards.text import overlong_penalty
from relax_cli.errors import RunError
from relax_cli.preflight.labels import label_check


def sample(response: str, label: Any = "12", reward: str | None = None) -> RewardInput:
    return RewardInput("", response, label, {}, truncated=False, group=0, reward=reward)


def score(name: str, response: str, label: Any) -> RewardResult:
    return load_reward(RewardSection(rm_type=name), {})([sample(response, label)])[0]


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (" 12 ", "12", 1),
        ("12.", "12", 0),
        ("b", ["a", "b"], 1),
        ("2", [1, 2.0], 1),
        ("true", [True], 1),
        ("c", ["a"], 0),
    ],
)
def test_exact(response: str, label: Any, reward: float) -> None:
    assert score("exact", response, label).reward == reward


@pytest.mark.parametrize(
    ("response", "label", "reward", "is_exact"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0, 1.0),
        ("the big Eiffel tower", "Eiffel Tower", 0.8, 0.0),
        ("Paris", ["Rome", "Paris, France"], 2 / 3, 0.0),
        ("a a b", "a b b", 2 * 1 / 3, 0.0),
        ("London", "Paris", 0.0, 0.0),
        ("", "Paris", 0.0, 0.0),
        ("the", "a", 1.0, 1.0),
    ],
)
def test_f1(response: str, label: Any, reward: float, is_exact: float) -> None:
    result = score("f1", response, label)
    assert (result.reward, result.parts) == (pytest.approx(reward), {"exact": is_exact})


CHOSEN = ["B", "(B)", "b", "B.", "B) because it is so", "**B**", "The answer is B.", "answer: (b)", "Answer: **B**",
          "Not A. So \\boxed{B}", "\\boxed{\\text{B}}", "I weigh A and C.\n\nB", "The answer is A? No, the answer is B",
          "A long thought.\n**(B)**", "<think>A?</think><answer>B</answer>", "<answer>\n(B) 12\n</answer>", "#### B",
          "The correct option is B", "the right choice is (B).", "The answer is option B", "\\boxed{\\textbf{(B)}}",
          "\\boxed{B. 12}", "\\boxed{\\mathrm{B}}", "'B'"]  # fmt: skip
OTHERS = ["A", "The answer is C", "I think it is a bird", "", "\\boxed{A} or B", "B or C", "<answer>C</answer> B"]


@pytest.mark.parametrize("label", ["B", "(B)", "b.", ["B", "D"]])
def test_multiple_choice(label: Any) -> None:
    assert [r for r in CHOSEN if not score("multiple_choice", r, label).reward] == []
    assert [r for r in OTHERS if score("multiple_choice", r, label).reward] == []


def test_an_article_is_not_a_choice() -> None:
    assert [score("multiple_choice", f"The answer is {text}", "A").reward for text in ("a bird", "a", "A", "a.")] == [
        0,
        1,
        1,
        1,
    ]


def test_a_choice_that_is_not_found_is_a_part() -> None:
    assert score("multiple_choice", "I think it is a bird", "B").parts == {"answered": 0.0}
    assert score("multiple_choice", "A", "B").parts == {"answered": 1.0}


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>so</think><answer>12</answer>", 1),
        ("\n<think>so</think>\n<answer>12</answer> ", 1),
        ("<think>so</think>12", 0),
        ("<think></think><answer>12</answer>", 0),
        ("<answer>12</answer><think>so</think>", 0),
        ("<think>a<think>b</think></think><answer>12</answer>", 0),
        ("well <think>so</think><answer>12</answer>", 0),
        ("<think>so</think><answer>12</answer><answer>13</answer>", 0),
        ("", 0),
    ],
)
def test_format(response: str, reward: float) -> None:
    assert score("format", response, None).reward == reward


@pytest.fixture(scope="module")
def pooled() -> Iterator[Callable[[str], PooledReward]]:
    made: dict[str, PooledReward] = {}

    def get(name: str) -> PooledReward:
        if name not in made:
            made[name] = PooledReward(name, BUILTIN_REWARDS[name], deadline=2.0, workers=1)
        return made[name]

    yield get
    for reward in made.values():
        reward.close()


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("it is 42!", r"\b\d+\b", 1),
        ("none", r"\d", 0),
        ("Yes", "(?i)^yes$", 1),
        ("b", ["a", "b"], 1),
        ("a" * 60 + "b", "^(a+)+$", 0),
    ],
)
def test_regex(pooled: Any, response: str, label: Any, reward: float) -> None:
    (result,) = pooled("regex")([sample(response, label)])
    assert (result.reward, result.parts["unjudged"]) == (reward, float(label == "^(a+)+$"))


def loud(_: RewardInput) -> float:
    os.write(1, b"loud")
    return 1.0


def test_what_a_worker_prints_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    reward = PooledReward("loud", f"{__name__}:loud", workers=1)
    given = sample("1")
    reward.ahead(given)
    assert [result.reward for result in reward([given])] == [1]
    reward.close()
    out, err = capfd.readouterr()
    assert "loud" not in out
    assert "loud" in err


def test_a_pool_judges_ahead_of_the_batch_and_once(pooled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []
    of_worker = pool._Worker.judge

    def judge(self: Any, given: RewardInput) -> Any:
        judged.append(given.response)
        return of_worker(self, given)

    monkeypatch.setattr(pool._Worker, "judge", judge)
    first, second = sample("1", r"\d"), sample("none", r"\d")
    pooled("regex").ahead(second, ())
    end = time.monotonic() + 60
    while not judged and time.monotonic() < end:
        time.sleep(0.01)
    assert judged == ["none"], "before the batch is complete"
    assert [result.reward for result in pooled("regex")([first, second])] == [1, 0]
    assert judged == ["none", "1"]
    pooled("regex")([first])
    assert judged == ["none", "1", "1"]


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("response", "label", "reward", "json"),
    [
        ('{"n": 1}', SCHEMA, 1, 1),
        ('Here:\n```json\n{"n": 2}\n```\n', SCHEMA, 1, 1),
        ('```\n[]\n```\nno:\n```json\n{"n": 3}\n```', '{"type": "object"}', 1, 1),
        ('{"n": 0}', SCHEMA, 0, 1),
        ('{"n": "1"}', SCHEMA, 0, 1),
        ("{}", SCHEMA, 0, 1),
        ("n is 1", SCHEMA, 0, 0),
        ("[" * 100_000, SCHEMA, 0, 0),
    ],
)
def test_json_schema(pooled: Any, response: str, label: Any, reward: float, json: float) -> None:
    (result,) = pooled("json_schema")([sample(response, label)])
    assert (result.reward, result.parts) == (reward, {"json": json, "unjudged": 0.0})


ANSWER_LINES = {
    "34": (["so 12 + 22\nAnswer: 34", "**Answer:** $34$", "Answer: \\(34\\)\n", "Answer: 34.", "Answer: \\boxed{34}"],
           ["34 and\nAnswer: 35", "Answer: 34 or 35"]),
    "\\frac{1}{2}": (["Answer: 1/2", "Answer: $0.5$", "Answer: \\frac{2}{4}"], ["1/2\nAnswer: 2", "Answer: 1/3"]),
    "-7": (["Answer: -7", "\\boxed{-7}"], ["Answer: 7", "Answer: - 8"]),
    "007": (["\\boxed{7}"], ["\\boxed{70}"]),
}  # fmt: skip


@pytest.mark.parametrize("label", ANSWER_LINES)
def test_math_takes_the_answer_line_of_dapo(label: str) -> None:
    right, wrong = ANSWER_LINES[label]
    assert {response: compare(label, response) for response in right} == dict.fromkeys(right, "right")
    assert {response: compare(label, response) for response in wrong} == dict.fromkeys(wrong, "wrong")


def test_math_accepts_each_item_of_a_list(pooled: Any) -> None:
    results = pooled("math")([sample("\\boxed{3}", [2, 3]), sample("\\boxed{4}", [2, 3])])
    assert [result.reward for result in results] == [1.0, 0.0]


def test_a_sum_of_rewards_weighs_them_and_keeps_them_as_parts() -> None:
    reward = load_reward(RewardSection(rm_type="f1=1,format=0.5, exact = -2"), {})
    tagged, plain = reward([sample("<think>a</think><answer>b</answer>", "b"), sample("b", "b")])
    assert plain == RewardResult(1.0 - 2.0, {"f1": 1.0, "f1/exact": 1.0, "format": 0.0, "exact": 1.0})
    assert tagged.reward == tagged.parts["f1"] + 0.5


def test_a_row_chooses_its_reward() -> None:
    reward = load_reward(RewardSection(rm_type="exact"), {"mine": "tests.unit.test_builtin_rewards:lengths"})
    found = reward([sample("b", "B"), sample("b", "B", "multiple_choice"), sample("abc", None, "mine=2")])
    assert [result.reward for result in found] == [0.0, 1.0, 6.0]
    assert found[2].parts == {"mine": 3.0}


def lengths(samples: list[RewardInput]) -> list[int]:
    return [len(one.response) for one in samples]


CHECKED = {
    "exact": (["a", ["a", 1]], [" ", [], {"a": 1}, [["a"]]]),
    "f1": (["a"], [""]),
    "math": (["12", ["1/2", 3]], ["???", ["1", "#"]]),
    "multiple_choice": (["B", "(b)"], ["Bee", "1", ""]),
    "regex": (["a+", ["a", "b"]], ["(", ["a", "("], "", ["a", ""]]),
    "json_schema": ([SCHEMA, "{}"], ["[", "[]", {"type": "nothing"}, {"minimum": "x"}]),
}


@pytest.mark.parametrize("name", CHECKED)
def test_labels_are_checked_for_the_reward_of_their_row(name: str) -> None:
    good, bad = CHECKED[name]
    check = label_check(RewardSection(rm_type="remote"), BUILTIN_REWARDS)
    by_option = label_check(RewardSection(rm_type=name), BUILTIN_REWARDS)
    for label in (*good, *bad):
        found = {check(Prompt("", label, {}, "x:1", reward=name)), by_option(Prompt("", label, {}, "x:1"))}
        assert {None if problem is None else problem.id for problem in found} == (
            {None} if label in good else {"label-unusable"}
        )


@pytest.mark.parametrize(
    ("reward", "label", "message"),
    [
        ("exakt", "1", "there is no reward 'exakt'"),
        ("exact=x", "1", "not a number other than 0"),
        ("exact,exact", "1", "given twice"),
        ("remote", "1", "--rm-url is not set"),
        ("f1", None, "compares with a label"),
        ("format", None, None),
        ("mine", "1", None),
    ],
)
def test_a_rows_reward_is_checked_before_the_launch(reward: str, label: Any, message: str | None) -> None:
    check = label_check(RewardSection(custom_rm_path="mine.py:judge"), {*BUILTIN_REWARDS, "mine"})
    problem = check(Prompt("", label, {}, "data.jsonl:7", reward=reward))
    assert (problem is None) == (message is None)
    if problem is not None:
        assert message in problem.message
        assert problem.where == "data.jsonl:7"


FAILING = "def judge(samples):\n    return [1 / len(s.response) for s in samples]\n"


def failing(tmp_path: Path, on_error: Any, body: str = FAILING, seconds: float = 60.0) -> Any:
    (tmp_path / "mine.py").write_text(body)
    path = f"{tmp_path / 'mine.py'}:judge"
    return load_reward(RewardSection(custom_rm_path=path, reward_on_error=on_error, rm_timeout=seconds), {})


@pytest.mark.parametrize("on_error", ["zero", "drop"])
def test_a_reward_may_fail_on_some_samples(tmp_path: Path, caplog: pytest.LogCaptureFixture, on_error: Any) -> None:
    with caplog.at_level(logging.WARNING):
        found = failing(tmp_path, on_error)([sample("ab"), sample(""), sample("a")])
    assert [(result.reward, result.failed) for result in found] == [(0.5, False), (0.0, True), (1.0, False)]
    assert "1 of 3 samples could not be judged" in caplog.text


@pytest.mark.parametrize(
    ("on_error", "responses", "body", "seconds"),
    [
        ("stop", ["ab", ""], FAILING, 60.0),
        ("zero", ["", ""], FAILING, 60.0),
        ("drop", ["ab", ""], "import time\ndef judge(samples):\n    time.sleep(60)\n", 0.2),
    ],
)
def test_a_reward_that_fails_on_all_ends_the_run(
    tmp_path: Path, on_error: Any, responses: list[str], body: str, seconds: float
) -> None:
    with pytest.raises(RunError) as caught:
        failing(tmp_path, on_error, body, seconds)([sample(response) for response in responses])
    assert caught.value.problems[0].id == "reward-failed"


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (80, 0.0), (81, 0.05), (90, 0.5), (100, 1.0), (120, 1.0)])
def test_the_overlong_penalty_grows_in_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, longest=100, buffer=20) == pytest.approx(penalty)
