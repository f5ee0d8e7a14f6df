"""Metrics of held-out sets: pass@k against a count of all subsets, majorities, intervals; how a set is sampled."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from relax_cli.config.held_out import EvalSection, sampling_of_set, section_of_set
from relax_cli.config.schema import RolloutSection
from relax_cli.data.rewards.answers import comparable_answer, compared_reward, majority_sizes
from relax_cli.data.rewards.types import RewardResult
from relax_cli.roles.evaluation import Outcome, eval_metrics, majority_at, pass_at


def outcomes(*prompts: str) -> list[Outcome]:
    """One response for each letter; upper case ones pass, and the letter is the answer."""
    return [
        Outcome(number, float(letter.isupper()), {"part": 0.5}, response_len=2, truncated=False, answer=letter)
        for number, letters in enumerate(prompts)
        for letter in letters
    ]


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_that_pass(samples: int) -> None:
    for passed in range(samples + 1):
        results = [True] * passed + [False] * (samples - passed)
        for k in range(1, samples + 1):
            subsets = [any(chosen) for chosen in combinations(results, k)]
            assert pass_at(k, samples, passed) == pytest.approx(sum(subsets) / len(subsets), abs=1e-15)


def test_pass_at_k_holds_for_many_samples() -> None:
    assert pass_at(512, 1024, 1) == 0.5
    assert pass_at(1, 1024, 1023) == pytest.approx(1023 / 1024)


def test_metrics_of_a_set_are_means_over_prompts() -> None:
    found = eval_metrics("h", outcomes("AAbc", "Abbc", "abcd"), 1.0)
    assert found["eval/h/reward/mean"] == pytest.approx(3 / 12)
    assert found["eval/h/pass@1"] == pytest.approx(3 / 12)
    assert found["eval/h/pass@2"] == pytest.approx((5 / 6 + 1 / 2 + 0) / 3)
    assert found["eval/h/pass@4"] == pytest.approx(2 / 3)
    # Two of four say A; in the second set b wins and fails; in the third four answers tie, and none passes.
    assert found["eval/h/majority@4"] == pytest.approx(1 / 3)
    means = [0.5, 0.25, 0.0]
    assert found["eval/h/reward/ci95"] == pytest.approx(1.959964 * 0.25 / math.sqrt(len(means)))
    assert (found["eval/h/prompts"], found["eval/h/samples"], found["eval/h/reward/part/part"]) == (3, 12, 0.5)
    assert not {"eval/h/pass@3", "eval/h/pass@8"} & found.keys()


def test_order_and_shares_change_no_metric() -> None:
    rows = outcomes("AAbc", "Abbc", "abcd")
    assert eval_metrics("h", rows[4:] + rows[:4], 1.0) == eval_metrics("h", rows, 1.0)


def test_what_passes_is_a_matter_of_the_threshold() -> None:
    rows = [Outcome(0, reward, {}, 1, truncated=False) for reward in (0.4, 0.6)]
    assert eval_metrics("h", rows, 0.5)["eval/h/pass@1"] == 0.5
    assert eval_metrics("h", rows, 0.4)["eval/h/pass@1"] == 1.0
    assert "eval/h/majority@2" not in eval_metrics("h", rows, 0.5), "answers cannot be compared"
    assert "eval/h/reward/ci95" not in eval_metrics("h", rows, 0.5), "of one prompt"


@pytest.mark.parametrize("letters", ["A", "Ab", "AAbbc", "AAAbbbcc", "Abcdefg", "AAABBBcd", "aaab", "AbbccddE"])
def test_majority_at_k_is_its_mean_over_subsets(letters: str) -> None:
    votes = [(letters.count(letter), float(letter.isupper())) for letter in sorted(set(letters))]
    for k in range(1, len(letters) + 1):
        found = []
        for subset in combinations(letters, k):
            counts = {letter: subset.count(letter) for letter in subset}
            winners = [letter for letter, count in counts.items() if count == max(counts.values())]
            found.append(sum(letter.isupper() for letter in winners) / len(winners))
        assert majority_at(k, votes) == pytest.approx(sum(found) / len(found), abs=1e-15)
    assert majority_at(1, votes) == pytest.approx(sum(letter.isupper() for letter in letters) / len(letters))


def test_majorities_of_many_samples_are_exact() -> None:
    assert majority_at(256, [(200, 1.0), (824, 0.0)]) < 1e-12 < majority_at(4, [(200, 1.0), (824, 0.0)])
    votes = [(500, 1.0), (300, 0.0), (224, 0.0)]
    assert majority_at(64, votes) + majority_at(64, [(c, 1.0 - p) for c, p in votes]) == pytest.approx(1.0, abs=1e-14)


def test_majorities_are_counted_of_powers_of_two_and_of_all() -> None:
    assert [majority_sizes(n) for n in (1, 2, 4, 6, 16)] == [[], [2], [4], [4, 6], [4, 8, 16]]
    found = eval_metrics("h", outcomes("AAAbbb", "Abbbbb"), 1.0)
    assert {name for name in found if "majority" in name} == {"eval/h/majority@4", "eval/h/majority@6"}
    assert found["eval/h/majority@6"] == 0.25, "one tie of two answers"


@pytest.mark.parametrize(
    ("reward", "response", "answer"),
    [
        ("exact", " 42\n", "exact:42"),
        ("exact=1,format=0.1", " 42\n", "exact:42"),
        ("f1", "The Eiffel tower.", "f1:eiffel tower"),
        ("multiple_choice", "The answer is (b).", "multiple_choice:B"),
        ("multiple_choice", "I do not know", "multiple_choice:"),
        ("math", "so x = 5, hence \\boxed{ \\frac{1}{2} }", "math:1/2"),
        ("math", "\\boxed{0.5}", "math:1/2"),
        ("math", "\\boxed{ x + 1 }", "math:x+1"),
        ("math", "First 3. The answer is: 1,234", "math:1234"),
        ("math", "yes", "math:yes"),
        ("math,exact", "42", None),
        ("format", "42", None),
        (None, "42", None),
    ],
)
def test_answers_are_compared_where_the_reward_says_how(reward: str | None, response: str, answer: str | None) -> None:
    wrong = RewardResult(0.0, {"exact": 0.0})
    assert comparable_answer(reward, response, "7", wrong) == answer
    assert (compared_reward(reward) is not None) is (answer is not None)


def test_all_that_is_right_is_one_answer_of_one_label() -> None:
    right = RewardResult(1.0, {"correct": 1.0})
    spellings = ["\\boxed{\\sqrt{4}}", "2"]
    assert len({comparable_answer("math", text, "2", right) for text in spellings}) == 1
    assert len({comparable_answer("math", text, ["2", "\\sqrt{4}"], right) for text in spellings}) == 2
    weighted = RewardResult(1.1, {"math": 1.0, "math/correct": 1.0, "format": 1.0})
    assert comparable_answer("math=1,format=0.1", "2", "2", weighted) == comparable_answer("math", "2", "2", right)


def test_a_set_follows_its_own_sampling_then_that_of_all() -> None:
    section = EvalSection(
        eval_temperature=0.5,
        n_samples_per_eval_prompt=2,
        eval_sampling=("a:temperature=0, n=8", "b:max_response_len=7", "b:top_p=0.9,top_k=3"),
    )
    rollout = RolloutSection(rollout_max_response_len=99)

    def sampled(name: str) -> tuple[float, float, int, int, int]:
        own = sampling_of_set(section, name, rollout)
        return (
            own.rollout_temperature,
            own.rollout_top_p,
            own.rollout_top_k,
            own.rollout_max_response_len,
            section_of_set(section, name).n_samples_per_eval_prompt,
        )

    assert sampled("a") == (1.0, 1.0, 1, 99, 8), "greedy"
    assert sampled("b") == (0.5, 0.9, 3, 7, 2)
    assert sampled("c") == (0.5, 1.0, -1, 99, 2)
    assert sampling_of_set(EvalSection(), "a", rollout) == rollout


@pytest.mark.parametrize(("value", "ok"), [(0, True), (1e-4, True), (1e-5, False), (-1, False)])
def test_a_temperature_is_zero_or_usable(value: float, ok: bool) -> None:
    if ok:
        assert EvalSection(eval_temperature=value).eval_temperature == value
    else:
        with pytest.raises(ValueError, match="eval_temperature"):
            EvalSection(eval_temperature=value)
