"""Reward functions and what they refuse."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from relax_cli.config.schema import DataSection, RewardSection
from relax_cli.data.prompts import load_prompts
from relax_cli.data.rewards import RewardInput, RewardResult, load_reward
from relax_cli.data.rewards.math import MathReward
from relax_cli.data.rewards.reasoning_gym import extract_answer
from relax_cli.errors import ConfigError, Problem, RelaxError, RunError


def sample(response: str, label: str | None = "12", **metadata: Any) -> RewardInput:
    return RewardInput("What is 7 + 5?", response, label, metadata, truncated=False, group=4)


def problem_of(error: type[RelaxError], function: Any, *arguments: Any) -> Problem:
    with pytest.raises(error) as caught:
        function(*arguments)
    return caught.value.problems[0]


def custom(tmp_path: Path, body: str, key: str | None = None) -> Any:
    file = tmp_path / "mine.py"
    file.write_text(body)
    return load_reward(RewardSection(custom_rm_path=f"{file}:judge", reward_key=key), {})


def children() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid is not None}


def rewards(results: Sequence[RewardResult]) -> list[float]:
    return [result.reward for result in results]


def test_exact_compares_stripped_text() -> None:
    reward = load_reward(RewardSection(rm_type="exact"), {})
    assert rewards(reward([sample(" 12\n"), sample("12."), sample("1 2"), sample("a", " a ")])) == [
        1,
        0,
        0,
        1,
    ]


def test_a_reward_that_needs_labels_names_the_sample_without_one() -> None:
    problem = problem_of(RunError, load_reward(RewardSection(rm_type="exact"), {}), [sample("x", None)])
    assert problem.option == "--label-key"
    assert "group 4" in problem.where


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (RewardSection(), "no reward is given"),
        (RewardSection(rm_type="exact", custom_rm_path="a.py:b"), "exclude each other"),
        (RewardSection(rm_type="exakt"), "there is no reward 'exakt'"),
        (RewardSection(rm_type="gone"), "does not load"),
        (RewardSection(rm_type="math"), "a plugin also calls its reward 'math'"),
    ],
)
def test_a_reward_that_cannot_be_resolved_is_refused(section: RewardSection, message: str) -> None:
    named = {"gone": "relax_no_such_module:judge", "math": "builtins:len"}
    assert message in problem_of(ConfigError, load_reward, section, named).message


def test_the_nearest_reward_name_is_offered() -> None:
    assert problem_of(ConfigError, load_reward, RewardSection(rm_type="exakt"), {}).fix == "--rm-type exact"


def test_a_plugins_reward_is_found_by_name() -> None:
    reward = load_reward(RewardSection(rm_type="theirs"), {"theirs": "relax_cli.data.rewards.exact:exact"})
    assert rewards(reward([sample("12")])) == [1.0]
    reward.close()


def test_a_custom_reward_sees_the_samples(tmp_path: Path) -> None:
    reward = custom(tmp_path, "def judge(samples):\n    return [len(s.response) + s.group for s in samples]\n")
    assert reward([sample("ab"), sample("")]) == [RewardResult(6.0), RewardResult(4.0)]


def test_a_custom_file_may_hold_dataclasses(tmp_path: Path) -> None:
    reward = custom(
        tmp_path,
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Grade:\n    value: float\n"
        "def judge(samples):\n    return [Grade(2.0).value for _ in samples]\n",
    )
    assert rewards(reward([sample("a")])) == [2.0]


PARTS = "def judge(samples):\n    return [{'form': 0.5, 'right': True} for s in samples]\n"


def test_reward_key_picks_the_part_that_trains(tmp_path: Path) -> None:
    reward = custom(tmp_path, PARTS, key="form")
    assert reward([sample("a")]) == [RewardResult(0.5, {"form": 0.5, "right": 1.0})]


@pytest.mark.parametrize(("key", "message"), [(None, "several parts"), ("fomr", "no part 'fomr'")])
def test_several_parts_need_a_known_reward_key(tmp_path: Path, key: str | None, message: str) -> None:
    problem = problem_of(RunError, custom(tmp_path, PARTS, key), [sample("a")])
    assert message in problem.message
    assert problem.fix == "--reward-key form"


def test_reward_key_without_parts_is_refused(tmp_path: Path) -> None:
    reward = custom(tmp_path, "def judge(samples):\n    return [1.0]\n", key="form")
    assert "no part to pick" in problem_of(RunError, reward, [sample("a")]).message


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')", "'1.0'", "None", "{'a': float('-inf')}"])
def test_a_reward_that_is_no_finite_number_is_refused_with_its_sample(tmp_path: Path, value: str) -> None:
    reward = custom(tmp_path, f"def judge(samples):\n    return [1.0, {value}]\n")
    problem = problem_of(RunError, reward, [sample("good one"), sample("bad one")])
    assert "not a finite number" in problem.message
    assert "group 4" in problem.where
    assert "bad one" in problem.where


def test_another_number_of_scores_is_refused(tmp_path: Path) -> None:
    reward = custom(tmp_path, "def judge(samples):\n    return [1.0]\n")
    problem = problem_of(RunError, reward, [sample("a"), sample("b")])
    assert (problem.got, problem.expected) == ("1", "2")


def test_an_exception_in_a_custom_reward_names_the_file(tmp_path: Path) -> None:
    reward = custom(tmp_path, "def judge(samples):\n    return [s.no_such_field for s in samples]\n")
    message = problem_of(RunError, reward, [sample("a")]).message
    assert "mine.py" in message
    assert "no_such_field" in message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import relax_nothing\n", "fails to import"),
        ("judge = 3\n", "no function 'judge'"),
        ("(", "fails to import"),
    ],
)
def test_a_custom_file_that_does_not_load_is_refused(tmp_path: Path, body: str, message: str) -> None:
    problem = problem_of(ConfigError, custom, tmp_path, body)
    assert message in problem.message
    assert problem.where == str(tmp_path / "mine.py")


@pytest.mark.parametrize("spec", ["no/such/file.py:judge", "file.py", "", ":judge"])
def test_a_custom_path_to_nothing_is_refused(spec: str) -> None:
    problem = problem_of(ConfigError, load_reward, RewardSection(custom_rm_path=spec), {})
    assert problem.expected.startswith("FILE.py:function")


@pytest.fixture(scope="module")
def maths() -> Iterator[MathReward]:
    reward = MathReward(deadline=1.0, workers=1)
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("so x is $\\frac{1}{2}$", "0.5", 1.0),
        ("\\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("7 + 5 = 12.", "12", 1.0),
        ("$x = 13$", "12", 0.0),
        ("", "12", 0.0),
    ],
)
def test_math_compares_values(maths: MathReward, response: str, label: str, expected: float) -> None:
    assert rewards(maths([sample(response, label)])) == [expected]


def test_math_scores_zero_at_the_deadline_and_goes_on(maths: MathReward) -> None:
    stuck, fine = maths([sample("$(10^{10})!$"), sample("12")])
    assert stuck == RewardResult(0.0, {"correct": 0.0, "unjudged": 1.0})
    assert fine == RewardResult(1.0, {"correct": 1.0, "unjudged": 0.0})


def test_math_survives_a_killed_worker() -> None:
    before = children()
    reward = MathReward(workers=1)
    reward([sample("12")])
    (victim,) = children() - before
    os.kill(victim, signal.SIGKILL)
    assert rewards(reward([sample("12"), sample("13")])) == [1.0, 0.0]
    assert victim not in children()
    reward.close()


def test_math_leaves_no_process_behind() -> None:
    before = children()
    reward = load_reward(RewardSection(rm_type="math"), {})
    reward([sample("12")])
    assert children() > before
    reward.close()
    reward.close()
    assert children() == before


@pytest.mark.parametrize(
    ("response", "expected", "answer"),
    [
        ("7 + 5 = 12.", "12", "12"),
        ("12 is the sum of 7 and 5", "12", "5"),
        ("<answer> 3 </answer> no, <answer>12</answer> 99", "12", "12"),
        ("that makes 1,012.50 in all", "1012.5", "1012.50"),
        ("7-5", "2", "5"),
        ("it is -5", "-5", "-5"),
        ("=-5", "-5", "-5"),
        ("(3)-5", "2", "5"),
        ("no idea ", "12", "no idea"),
        (" the cat, 3 ", "the cat, 3", "the cat, 3"),
        ("anything", None, "anything"),
    ],
)
def test_the_answer_is_taken_from_tag_number_or_text(response: str, expected: str | None, answer: str) -> None:
    assert extract_answer(response, expected) == answer


def entry(task: str) -> dict[str, Any]:
    pytest.importorskip("reasoning_gym")
    return load_prompts(DataSection(), f"reasoning-gym:{task}?size=1&seed=1")[0].metadata


def test_reasoning_gym_rewards_full_scores_only() -> None:
    facts = entry("chain_sum")
    right, wrong = f"so it is {facts['answer']}.", f"so it is {facts['answer']}1."
    reward = load_reward(RewardSection(rm_type="reasoning_gym"), {})
    good, bad = reward([sample(right, **facts), sample(wrong, **facts)])
    assert good == RewardResult(1.0, {"score": 1.0, "correct": 1.0})
    assert (bad.reward, bad.parts["correct"]) == (0.0, 0.0)


def test_reasoning_gym_gives_partial_credit_when_asked() -> None:
    facts = entry("word_sorting")
    half = facts["answer"].rpartition(",")[0]
    plain = load_reward(RewardSection(rm_type="reasoning_gym"), {})
    partial = load_reward(RewardSection(rm_type="reasoning_gym", reward_key="score"), {})
    (result,) = plain([sample(half, **facts)])
    assert result.reward == 0.0
    assert 0.0 < result.parts["score"] < 1.0
    assert rewards(partial([sample(half, **facts)])) == [result.parts["score"]]


def test_an_answer_that_the_task_cannot_parse_is_wrong() -> None:
    reward = load_reward(RewardSection(rm_type="reasoning_gym"), {})
    assert rewards(reward([sample("hello world", **entry("prime_factorization"))])) == [0.0]


def test_a_broken_reasoning_gym_entry_is_an_error() -> None:
    facts = {**entry("prime_factorization"), "answer": "not a number"}
    reward = load_reward(RewardSection(rm_type="reasoning_gym"), {})
    assert "refuses its own answer" in problem_of(RunError, reward, [sample("x", **facts)]).message


def test_reasoning_gym_refuses_prompts_from_elsewhere() -> None:
    reward = load_reward(RewardSection(rm_type="reasoning_gym"), {})
    assert "not from reasoning-gym" in problem_of(RunError, reward, [sample("12")]).message
