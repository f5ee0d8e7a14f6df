"""What a reward is given, and under which names its numbers appear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_cli.backends.rollout.protocol import Generation
from relax_cli.config.schema import Config
from relax_cli.data.prompts import Prompt
from relax_cli.data.rewards import RewardInput, RewardResult
from relax_cli.data.rewards.checked import CheckedReward
from relax_cli.data.tokenise import load_tokenizer
from relax_cli.engine.step import StepRecord
from relax_cli.errors import RunError
from relax_cli.quickstart.task import MODEL
from relax_cli.roles.judging import Judge, Judged, Sampled, Trace, for_training, reward_spreads
from relax_cli.roles.spread import Spread

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = load_tokenizer(MODEL)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class Seen:
    """A reward that keeps what it was given and gives `score`."""

    def __init__(self, score: Callable[[RewardInput], RewardResult] = lambda _: RewardResult(0.0)) -> None:
        self.samples: list[RewardInput] = []
        self.begun: list[tuple[RewardInput, Sequence[RewardInput]]] = []
        self.score = score

    def __call__(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        self.samples += samples
        return [self.score(sample) for sample in samples]

    def ahead(self, sample: RewardInput, group: Sequence[RewardInput]) -> None:
        self.begun.append((sample, list(group)))

    def close(self) -> None:
        """Nothing to end."""


def sampled(
    tokenizer: Any, response: str = "46", prompt: Prompt | None = None, *, reason: Any = "stop", row: int = 0
) -> Sampled:
    tokens = tokenizer(response, add_special_tokens=False).input_ids
    prompt = prompt or Prompt("12+34=", "46", {}, "data.jsonl:1")
    return Sampled(row, row // 2, prompt, [1], Generation(tokens, [0.0] * len(tokens), reason))


def judge(tokenizer: Any, reward: Seen, samples: Sequence[Sampled], stop: Sequence[str] = ()) -> list[Judged]:
    return Judge(reward, tokenizer, stop, trace_file=Path("unused"))(samples)


def test_responses_go_to_the_reward_as_they_end(tokenizer: Any) -> None:
    reward = Seen(lambda given: RewardResult(float(given.response)))
    judge = Judge(reward, tokenizer, (), trace_file=Path("unused"))
    batch = [sampled(tokenizer, str(row), row=row) for row in range(4)]
    # A batch that was not completed leaves nothing behind, though it had the same rows.
    judge.listens(2)(sampled(tokenizer, "9", row=0))
    reward.begun.clear()
    ended = judge.listens(2)
    for row in (1, 2, 0):
        ended(batch[row])
    assert [(given.response, [each.response for each in group]) for given, group in reward.begun] == [
        ("1", []),
        ("2", []),
        ("0", ["1", "0"]),
    ]
    assert [judged.result.reward for judged in judge(batch)] == [0, 1, 2, 3]
    assert all(any(given is begun for given in reward.samples) for begun, _ in reward.begun)
    later = [sampled(tokenizer, str(row + 4), row=row) for row in range(4)]
    assert [judged.result.reward for judged in judge(later)] == [4, 5, 6, 7]


def test_a_failed_reward_leaves_its_traceback_in_the_run_folder(tokenizer: Any, tmp_path: Path) -> None:
    def fail(samples: Sequence[RewardInput]) -> Any:
        return [1 / 0 for _ in samples]

    trace_file = tmp_path / "logs" / "reward-0.txt"
    reward = CheckedReward("mine.py:judge", fail, None)
    with pytest.raises(RunError) as caught:
        Judge(reward, tokenizer, (), trace_file=trace_file)([sampled(tokenizer)])
    assert str(trace_file) in caught.value.problems[0].fix
    text = trace_file.read_text()
    assert "return [1 / 0 for _ in samples]" in text
    assert "ZeroDivisionError" in text


@pytest.mark.parametrize(
    ("stop", "text", "judged"),
    [
        ((), "46+", "46+"),
        (("+",), "46+", "46"),
        (("=", "+"), "46+", "46"),
        (("6+", "+"), "46+", "4"),
        # The last token may contain more than the stop string.
        (("4",), "846", "8"),
        (("+",), "46", "46"),
    ],
)
def test_the_stop_string_is_not_judged(tokenizer: Any, stop: tuple[str, ...], text: str, judged: str) -> None:
    reward = Seen()
    (result,) = judge(tokenizer, reward, [sampled(tokenizer, text)], stop)
    assert reward.samples[0].response == result.response == judged
    assert result.generation.tokens == tokenizer(text).input_ids


def test_a_response_at_the_length_limit_is_judged_whole(tokenizer: Any) -> None:
    reward = Seen()
    judge(tokenizer, reward, [sampled(tokenizer, "46+", reason="length")], ["+"])
    assert (reward.samples[0].response, reward.samples[0].truncated) == ("46+", True)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("12+34=", "12+34="),
        ([{"role": "user", "content": "1+2="}], "u:1+2=;a:"),
        ([{"role": "system", "content": "7"}, {"role": "user", "content": "1+2="}], "s:7;u:1+2=;a:"),
    ],
)
def test_a_reward_sees_chats_as_the_model_does(tokenizer: Any, content: Any, text: str) -> None:
    reward = Seen()
    judge(tokenizer, reward, [sampled(tokenizer, prompt=Prompt(content, None, {}, ""))])
    assert reward.samples[0].prompt == text


@pytest.mark.parametrize(
    "change",
    [
        lambda metadata: metadata.pop("tests"),
        lambda metadata: metadata.update(more=1),
        lambda metadata: metadata["tests"].reverse(),
        lambda metadata: metadata["nested"]["list"].append(1),
        lambda metadata: metadata.clear(),
    ],
)
def test_what_a_reward_changes_stays_with_its_sample(tokenizer: Any, change: Callable[[Any], Any]) -> None:
    def metadata() -> dict[str, Any]:
        return {"tests": ["a", "b"], "nested": {"list": []}}

    prompt = Prompt("12+34=", "46", metadata(), "")
    seen = []

    def score(sample: RewardInput) -> RewardResult:
        seen.append(sample.metadata == metadata())
        change(sample.metadata)
        return RewardResult(1.0)

    for _ in range(2):
        judge(tokenizer, Seen(score), [sampled(tokenizer, prompt=prompt, row=row) for row in range(3)])
    assert seen == [True] * 6
    assert prompt.metadata == metadata()


@pytest.mark.parametrize("name", ["mean", "std", "min", "max", "reward/mean", "", "a/b", "response_len", "loss"])
def test_a_part_never_replaces_a_metric_of_the_trainer(tokenizer: Any, name: str) -> None:
    def record(parts: dict[str, float]) -> dict[str, float]:
        judged = judge(tokenizer, Seen(lambda _: RewardResult(1.0, parts)), [sampled(tokenizer)])
        record = StepRecord(0, lambda _: None)
        others = {other: Spread.of([3.0]) for other in ("response_len", "prompt_len", "truncated")}
        record.add_rollout([{**reward_spreads(judged), **others}])
        return record.metrics

    plain = record({})
    assert plain["reward/mean"] == plain["reward/max"] == 1.0
    assert record({name: -5.0}) == {**plain, f"reward/part/{name}": -5.0}


def for_options(judged: Judged, **changes: Any) -> Judged:
    """The sample as it trains under options written `section__key`."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        section, _, key = name.partition("__")
        sections.setdefault(section, {})[key] = value
    return for_training(judged, Config.model_validate(sections))


def test_truncated_and_dropped_samples_do_not_train(tokenizer: Any) -> None:
    failed = Seen(lambda sample: RewardResult(0.0, failed=sample.response == "7"))
    samples = [sampled(tokenizer, "46"), sampled(tokenizer, "46", reason="length"), sampled(tokenizer, "7")]
    judged = judge(tokenizer, failed, samples)
    drop, mask = {"reward__reward_on_error": "drop"}, {"algorithm__mask_truncated": True}
    for options, trains in [({}, [1, 1, 1]), (drop, [1, 1, 0]), (mask, [1, 0, 1]), (drop | mask, [1, 0, 0])]:
        found = [for_options(one, **options) for one in judged]
        assert [one.trains for one in found] == trains
        assert [max(one.mask) for one in found] == trains
        assert reward_spreads(found)["reward"].count == (2 if drop.items() <= options.items() else 3)


def test_the_overlong_penalty_is_a_part_of_the_reward(tokenizer: Any) -> None:
    (judged,) = judge(tokenizer, Seen(lambda _: RewardResult(1.0, {"a": 2.0})), [sampled(tokenizer, "4+6")])
    options = {"reward__overlong_penalty": 0.5, "reward__overlong_buffer_len": 2}
    length = len(judged.generation.tokens)
    late = for_options(judged, **options, rollout__rollout_max_response_len=length + 1)
    assert late.result == RewardResult(0.75, {"a": 2.0, "overlong": -0.25})
    early = for_options(judged, **options, rollout__rollout_max_response_len=length + 2)
    assert early.result == RewardResult(1.0, {"a": 2.0, "overlong": 0.0})
    assert for_options(judged) == judged


def test_an_episode_pays_the_penalty_on_its_last_own_token(tokenizer: Any) -> None:
    (judged,) = judge(tokenizer, Seen(), [sampled(tokenizer, "4+6")])
    length = len(judged.generation.tokens)
    assert length == 3
    episode = replace(judged, trace=Trace([1, 1, 0], [0.0, 2.0, 0.0]))
    options = {"reward__overlong_penalty": 0.5, "reward__overlong_buffer_len": 2}
    late = for_options(episode, **options, rollout__rollout_max_response_len=length)
    assert late.trace is not None
    assert late.trace.rewards == [0.0, 1.5, 0.0]
