"""Multi-turn episodes: which tokens train, where rewards land, what ends an episode, what an environment may do."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from relax_ppo import PpoOptions
from relax_ppo.advantages import advantages

from relax_cli.algorithms.gae import gae, score_on_last_token
from relax_cli.algorithms.types import AdvantageInputs
from relax_cli.backends.rollout.embedded import engine as embedded
from relax_cli.backends.rollout.protocol import Generation, Opening, Request, SamplingParams, Then
from relax_cli.config.schema import Config, EpisodeSection
from relax_cli.data.envs.kit import play_example
from relax_cli.data.envs.load import USER_FILE, EnvFactory, load_env
from relax_cli.data.prompts import Prompt
from relax_cli.data.tokenise import encode_prompt, load_tokenizer
from relax_cli.errors import ConfigError, RunError
from relax_cli.plugin.graph import TOKEN_REWARDS, base_graph, completed
from relax_cli.quickstart.task import MODEL, prepare
from relax_cli.roles.episodes import Episodes, Job
from relax_cli.roles.judging import Judged, Trace
from relax_cli.roles.rollout import sample_seed
from tests.support import local_runs

END = 12
"""The stop token `$`."""
CHAT = (
    "{% for m in messages %}{{ m['role'][0] }}={{ m['content'] }}{% if m['role'] == 'assistant' %}${% endif %}+"
    "{% endfor %}{% if add_generation_prompt %}9={% endif %}"
)


class Scripted:
    """An engine that says the given responses turn by turn, and keeps what it was asked."""

    def __init__(self, tokenizer: Any, responses: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.responses = responses
        self.asked: list[list[Request]] = []

    def generate(self, requests: list[Request]) -> list[Generation]:
        text = self.responses[len(self.asked)]
        self.asked.append(requests)
        found = []
        for request in requests:
            ids = self.tokenizer(text, add_special_tokens=False).input_ids[: request.most_tokens]
            whole = ids[-1] == END or text.endswith("!")
            # It knows the experts of what it has just sampled.
            known = len(request.prompt_tokens) - 1
            routes = np.full((known + len(ids), 1, 1), len(self.asked), np.int16)
            routes[:known] = -1
            found.append(Generation(ids, [-0.5] * len(ids), "stop" if whole else "length", routes=routes))
        return found

    def converse(self, openings: Sequence[Opening], sampling: SamplingParams, then: Then) -> None:
        embedded.in_waves(openings, lambda ready: self.generate(list(ready.values())), then, ended=lambda _: None)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(MODEL)


class Env:
    """Says `turns` observations, then is done."""

    said: Any = "7+8="
    turns = 2

    def reset(self, row: Any) -> Any:
        self.count = 0
        row.metadata.clear()
        return row.prompt

    def step(self, response: str) -> tuple[Any, float, bool]:
        self.count += 1
        return self.said, float(self.count), self.count == self.turns


def play(
    tokenizer: Any,
    responses: Sequence[str],
    env: type = Env,
    *,
    chat: bool = False,
    count: int = 1,
    limit: int = 20,
    section: EpisodeSection | None = None,
) -> tuple[list[Judged], Scripted]:
    """Episodes of `env` with an engine that says `responses`."""
    prompt = Prompt("1+2=", "3", {"kept": 1}, "data.jsonl:1")
    sampling = SamplingParams(limit, 1.0, 1.0, -1, (END,), ("!",))
    encode = partial(encode_prompt, tokenizer, apply_chat_template=chat)
    episodes = Episodes(
        EnvFactory("mine.py:Env", env), section or EpisodeSection(), tokenizer, encode, apply_chat_template=chat
    )
    engine = Scripted(tokenizer, responses)
    try:
        jobs = [Job(row, row, prompt, partial(sample_seed, 1, 2, row)) for row in range(count)]
        judged = episodes(engine, jobs, sampling)  # type: ignore[arg-type]
    finally:
        episodes.close()
    assert prompt.metadata == {"kept": 1}
    return judged, engine


def test_only_sampled_tokens_train_and_turns_are_rewarded_apart(tokenizer: Any) -> None:
    (sample,), engine = play(tokenizer, ["46$", "9!"])
    text = "46$" + "7+8=" + "9!"
    assert sample.generation.tokens == tokenizer(text).input_ids
    assert sample.mask == [1] * 3 + [0] * 4 + [1] * 2
    assert sample.generation.log_probs == [-0.5] * 3 + [0.0] * 4 + [-0.5] * 2
    assert sample.trace is not None
    assert sample.trace.rewards == [0, 0, 1.0, 0, 0, 0, 0, 0, 2.0]
    assert (sample.result.reward, sample.generation.finish_reason) == (3.0, "stop")
    assert [turn["response"] for turn in sample.trace.turns] == ["46", "9"]
    first, second = (requests[0] for requests in engine.asked)
    assert second.prompt_tokens == (*first.prompt_tokens, *tokenizer("46$7+8=").input_ids)
    assert (first.most_tokens, second.most_tokens) == (20, 13)
    assert first.seed == sample_seed(1, 2, 0) != second.seed


@pytest.mark.parametrize(
    ("said", "observed"),
    [("7", "+u=7+9="), ([{"role": "tool", "content": "7"}, {"role": "user", "content": "8"}], "+t=7+u=8+9=")],
)
@pytest.mark.parametrize(("response", "end"), [("46$", ""), ("46!", "$")])
def test_the_chat_template_stands_around_observations(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, said: Any, observed: str, response: str, end: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    (sample,), engine = play(tokenizer, [response, "9$"], type("Chat", (Env,), {"said": said}), chat=True)
    assert engine.asked[0][0].prompt_tokens == tuple(tokenizer("u=1+2=+9=").input_ids)
    # The end of the turn that was sampled is not written a second time.
    assert sample.generation.tokens == tokenizer(response + end + observed + "9$").input_ids
    assert sum(sample.mask) == 5


@pytest.mark.parametrize(
    ("responses", "options", "turns", "length"),
    [
        # The environment is not done after the last turn.
        (["1$", "2$"], {"section": EpisodeSection(max_turns=2)}, 2, 8),
        # The second response is cut.
        (["1$", "2345678"], {"limit": 10}, 2, 10),
        # No room for a token behind the observation, which is left out.
        (["1$", "2$"], {"limit": 6}, 1, 2),
    ],
)
def test_a_limit_ends_an_episode_behind_a_sampled_token(
    tokenizer: Any, responses: list[str], options: dict[str, Any], turns: int, length: int
) -> None:
    (sample,), engine = play(tokenizer, responses, type("Long", (Env,), {"turns": 5}), **options)
    assert len(engine.asked) == turns
    assert (len(sample.mask), sample.mask[-1], sample.generation.finish_reason) == (length, 1, "length")
    assert sample.result.reward == sum(range(turns + 1))


def test_a_slow_environment_keeps_no_other_episode(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "GATHER_SECONDS", 0.01)
    others, made = threading.Event(), []

    class Mixed(Env):
        def __init__(self) -> None:
            made.append(self)
            self.is_slow = len(made) == 1

        def step(self, response: str) -> tuple[Any, float, bool]:
            if self.is_slow:
                assert others.wait(20)
            result = super().step(response)
            if result[2] and not self.is_slow:
                others.set()
            return result

    judged, engine = play(tokenizer, ["1$"] * 6, Mixed, count=3)
    # Had the others waited for it, it would have failed.
    assert sum(map(len, engine.asked)) == 6
    assert [sample.row for sample in judged] == [0, 1, 2]


async def _sleep_forever() -> None:
    await asyncio.sleep(3600)


def _raise(error: BaseException) -> Any:
    raise error


FAULTS: dict[str, Callable[[Any], Any]] = {
    "raises": lambda _: 1 / 0,
    "exits": lambda _: _raise(SystemExit(3)),
    "stops iterating": lambda _: _raise(StopIteration()),
    "is interrupted": lambda _: _raise(KeyboardInterrupt()),
    "hangs": lambda _: time.sleep(60),
    "never awakes": lambda _: _sleep_forever(),
    "returns nothing": lambda _: None,
    "returns two": lambda _: ("a", 1.0),
    "returns five": lambda _: ("a", 1.0, False, False, {}),
    "returns text": lambda _: "abc",
    "reward is text": lambda _: ("a", "1.0", False),
    "reward is nan": lambda _: ("a", float("nan"), False),
    "reward is huge": lambda _: ("a", 1e300, False),
    "done is text": lambda _: ("a", 1.0, "no"),
    "observation is missing": lambda _: (None, 1.0, False),
    "observation is a number": lambda _: (7, 1.0, False),
    "messages lack a role": lambda _: ([{"content": "7"}], 1.0, False),
    "no messages": lambda _: ([], 1.0, False),
    "messages without template": lambda _: ([{"role": "user", "content": "7"}], 1.0, False),
}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_an_environment_does_is_named(tokenizer: Any, fault: str, is_async: bool) -> None:
    async def later(self: Any, response: str) -> Any:
        result = FAULTS[fault](response)
        return await result if fault == "never awakes" else result

    step = later if is_async else lambda self, response: FAULTS[fault](response)
    broken = type("Broken", (Env,), {"step": step})
    started = time.monotonic()
    with pytest.raises((RunError, ConfigError)) as caught:
        play(tokenizer, ["1$", "2$"], broken, count=2, section=EpisodeSection(env_timeout=0.4))
    assert time.monotonic() - started < 50
    (problem,) = caught.value.problems
    assert problem.id == ("prompt-encoding" if fault == "messages without template" else "env-failed")
    assert "data.jsonl:1" in problem.where
    if fault == "raises":
        assert "ZeroDivisionError" in problem.message
        assert "test_episodes.py" in problem.where


@pytest.mark.parametrize("value", ["", 3, None, [], {"role": "user"}])
def test_what_is_no_prompt_is_refused(tokenizer: Any, value: Any) -> None:
    with pytest.raises((RunError, ConfigError)) as caught:
        play(tokenizer, ["1$"], type("Wrong", (Env,), {"reset": lambda self, row: value}))
    assert caught.value.problems[0].id == ("prompt-encoding" if value == "" else "env-failed")


def test_async_environments_are_closed_and_print_to_stderr(tokenizer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    closed = []

    class Talking(Env):
        async def reset(self, row: Any) -> str:  # type: ignore[override]
            print("hello")
            return super().reset(row)

        async def step(self, response: str) -> tuple[Any, float, bool]:  # type: ignore[override]
            return super().step(response)

        async def close(self) -> None:
            closed.append(self)

    judged, _ = play(tokenizer, ["1$", "2$"], Talking, count=4)
    assert (len(judged), len(closed)) == (4, 4)
    out, err = capfd.readouterr()
    assert (out, err.count("hello")) == ("", 4)


GOOD = "class Env:\n    def reset(self, row): ...\n    async def step(self, response): ...\n"


@pytest.mark.parametrize(
    ("spec", "body", "id"),
    [
        ("env.py:Env", GOOD, None),
        ("env.py:make", GOOD + "def make():\n    return Env()\n", None),
        ("env.py", GOOD, "env-syntax"),
        ("none.py:Env", GOOD, "env-file"),
        ("env.py:Env", "class Env(:\n", "env-file"),
        ("env.py:Other", GOOD, "env-class"),
        ("env.py:Env", "import sys\nsys.exit(3)\n", "env-broken"),
        ("env.py:Env", "import os\nos._exit(3)\n", "env-broken"),
        ("env.py:Env", "Env = 3\n", "env-broken"),
        ("env.py:Env", "class Env:\n    def reset(self, row): ...\n", "env-broken"),
        ("env.py:Env", GOOD.replace("self, row", "self"), "env-broken"),
        ("env.py:Env", GOOD + "    def __init__(self, size): ...\n", "env-broken"),
    ],
)
def test_an_environment_file_is_tried_before_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, body: str, id: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("env.py").write_text(body)
    assert [problem.id for problem in USER_FILE.check(spec)] == ([id] if id else [])


def test_an_environment_of_a_plugin_is_found_by_name() -> None:
    named = {"mine": f"{__name__}:Env"}
    assert load_env("mine", named).make is Env
    with pytest.raises(ConfigError, match="no environment 'mime'") as caught:
        load_env("mime", named)
    assert (caught.value.problems[0].id, caught.value.problems[0].fix) == ("env-unknown", "--env mine")


@pytest.mark.parametrize(("responses", "id"), [(["1", "2"], None), (["1"], "env-example")])
def test_an_example_is_played_to_its_end(responses: list[str], id: str | None) -> None:
    asked = "mine", f"{__name__}:Env", {"prompt": "1+2=", "responses": responses}
    if id is None:
        play_example(*asked)
        return
    with pytest.raises(ConfigError) as caught:
        play_example(*asked)
    assert caught.value.problems[0].id == id


# -- rewards of each turn --------------------------------------------------------------------------


def inputs(rewards_BT: torch.Tensor, mask_BT: torch.Tensor, *, per_token: bool) -> AdvantageInputs:
    torch.manual_seed(0)
    return AdvantageInputs(
        rewards=rewards_BT.sum(1),
        mask=mask_BT,
        group_ids=torch.zeros(len(mask_BT), dtype=torch.int64),
        options=PpoOptions(gamma=0.9, lambd=0.8),
        values=torch.randn(mask_BT.shape),
        token_rewards=rewards_BT if per_token else None,
    )


def test_gae_takes_the_reward_of_each_turn() -> None:
    mask_BT = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 0, 0, 1, 1, 0]]).bool()
    rewards_BT = torch.tensor([[0, 1.0, 0, 0, 0, 2.0], [3.0, 0, 0, 0, -1.0, 0]])
    # What lies in masked slots does not count.
    given = inputs(torch.where(mask_BT, rewards_BT, torch.nan), mask_BT, per_token=True)
    found = advantages(given)
    expected = gae(rewards_BT, given.values, mask_BT, gamma=0.9, lam=0.8)
    assert torch.equal(found.advantages, expected[0])
    assert found.returns is not None
    assert torch.equal(found.returns, expected[1])
    # Against one row computed by hand, as if observed tokens did not exist.
    kept = mask_BT[0]
    alone = gae(rewards_BT[:1, kept], given.values[:1, kept], kept[kept][None], gamma=0.9, lam=0.8)
    assert torch.allclose(found.advantages[0, kept], alone[0][0])


def test_one_reward_on_the_last_token_is_the_scalar_bitwise() -> None:
    mask_BT = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    rewards_BT = score_on_last_token(torch.tensor([0.3, -1.7]), mask_BT)
    one, other = (advantages(inputs(rewards_BT, mask_BT, per_token=p)) for p in (True, False))
    assert torch.equal(one.advantages, other.advantages)


def test_readers_of_rewards_also_read_those_of_turns() -> None:
    plain, episodes = (completed(base_graph(), Config(episode=EpisodeSection(env=e))) for e in (None, "env.py:Env"))
    assert TOKEN_REWARDS not in (*plain["rollout"].writes, *plain["actor"].reads)
    assert TOKEN_REWARDS in episodes["rollout"].writes
    assert TOKEN_REWARDS in episodes["actor"].reads


def test_a_sample_without_turns_trains_on_every_token() -> None:
    prompt = Prompt("1+2=", "3", {}, "")
    judged = Judged(0, 0, prompt, [1], Generation([1, 2], [0, 0], "stop"), "", None)  # type: ignore[arg-type]
    assert judged.mask == [1, 1]
    assert Trace().mask == []


# -- a run -----------------------------------------------------------------------------------------

CALC = '''
class Calc:
    """Answers the first response with another sum; judges both."""

    def reset(self, row):
        self.turn = 0
        return row.prompt

    async def step(self, response):
        self.turn += 1
        return ("7+8=", 0.25, False) if self.turn == 1 else (None, float(response == "15"), True)
'''


@pytest.mark.parametrize("estimator", ["ppo", "grpo"])
def test_a_run_trains_on_exactly_what_was_sampled(tmp_path: Path, estimator: str) -> None:
    task = tmp_path / "task"
    prepare(task, seed=3, steps=2)
    (tmp_path / "calc.py").write_text(CALC)
    finished = local_runs.train(
        task,
        tmp_path / "run",
        str(task / "recipe.yaml"),
        "reward.rm_type=null",
        f"episode.env={tmp_path / 'calc.py'}:Calc",
        "rollout.rollout_max_response_len=12",
        f"algorithm.advantage_estimator={estimator}",
        "batch.rollout_batch_size=8",
        "batch.n_samples_per_prompt=2",
        "critic.num_critic_only_steps=0",
        "checkpoint.save=null",
        "critic.critic_save=null",
        'parallel.resource={"actor": [1, 1], "rollout": [1, 1]}' if estimator == "grpo" else "run.seed=1",
    )
    for metrics, samples in zip(finished.metrics, finished.samples, strict=True):
        assert metrics["train_rollout_logprob_diff/max"] < 1e-4
        assert (metrics["episode/turns"], metrics["episode/observed_tokens"]) == (2.0, 4.0)
        for sample in samples:
            mask = sample["response_mask"]
            assert len(mask) == len(sample["response_token_ids"]) == len(sample["log_probs"])
            assert sample["reward"] == sum(turn["reward"] for turn in sample["turns"])
            assert all(a == 0 for a, m in zip(sample["advantages"], mask, strict=True) if not m)


def test_routes_cover_every_turn(tokenizer: Any) -> None:
    (judged,), _ = play(tokenizer, ["15!", "16!"])
    generation, first = judged.generation, len(judged.prompt_tokens) - 1
    assert generation.routes is not None
    assert len(generation.routes) == first + len(generation.tokens)
    turns = generation.routes[first:, 0, 0].tolist()
    # Of observed tokens nothing is known here.
    assert [turn > 0 for turn in turns] == [bool(sampled) for sampled in judged.mask]
    assert sorted({turn for turn in turns if turn > 0}) == [1, 2]
