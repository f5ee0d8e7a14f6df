"""What a reward is given, and under which names its numbers appear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from relax_cli.backends.rollout.protocol import Generation
from relax_cli.data.prompts import Prompt
from relax_cli.data.rewards import RewardInput, RewardResult
from relax_cli.data.rewards.checked import CheckedReward
from relax_cli.data.tokenise import load_tokenizer
from relax_cli.engine.step import StepRecord
from relax_cli.errors import RunError
from relax_cli.quickstart.task import MODEL
from relax_cli.roles.judging import Judge, Judged, Sampled, reward_spreads
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
        self.score = score

    def __call__(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        self.samples += samples
        return [self.score(sample) for sample in samples]

    def close(self) -> None:
        """Nothing to end."""


def sampled(
    tokenizer: Any, response: str = "46", prompt: Prompt | None = None, *, reason: Any = "stop", row: int = 0
) -> Sampled:
    tokens = tokenizer(response, add_special_tokens=False).input_ids
    prompt = prompt or Prompt("12+34=", "46", {}, "data.jsonl:1")
    return Sampled(row, row // 2, prompt, [1], Generation(tokens, [0.0] * len(tokens), reason))


def judge(tokenizer: Any, reward: Seen, samples: Sequence[Sampled], stop: Sequence[str] = ()) -> list[Judged]:
    return Judge(reward, tokenizer, stop, apply_chat_template=True, trace_file=Path("unused"))(samples)


def test_a_failed_reward_leaves_its_traceback_in_the_run_folder(tokenizer: Any, tmp_path: Path) -> None:
    def fail(samples: Sequence[RewardInput]) -> Any:
        return [1 / 0 for _ in samples]

    trace_file = tmp_path / "logs" / "reward-0.txt"
    reward = CheckedReward("mine.py:judge", fail, None)
    with pytest.raises(RunError) as caught:
        Judge(reward, tokenizer, (), apply_chat_template=True, trace_file=trace_file)([sampled(tokenizer)])
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
