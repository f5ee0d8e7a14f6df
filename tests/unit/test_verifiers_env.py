"""Environments of the verifiers package: their questions are observations, their rubric's judgement is the reward."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="needs the extra: pip install 'relax-cli[verifiers]'")
pytest.importorskip("verifiers.envs.multiturn_env", reason="needs verifiers 0.1")

import verifiers as vf
from datasets import Dataset

from relax_cli.data.envs.load import EnvRow, find_env
from relax_cli.data.envs.verifiers import verifiers_env, write_rows


class Guess(vf.MultiTurnEnv):  # type: ignore[misc]
    """Says no until the answer comes."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        guess = str(messages[-1].content).strip()
        if guess == "0":
            raise vf.Error("not a guess")
        found = [{"role": "user", "content": f"no: {guess}"}]
        if guess == state["answer"]:
            state["final_env_response"] = found
        return found


async def won(state: Any, **_: Any) -> float:
    return float(state.get("final_env_response") is not None) - 0.25 * len(state["trajectory"])


@pytest.fixture
def source() -> Any:
    data = Dataset.from_list([{"question": "Guess", "answer": "7"}])
    return Guess(max_turns=3, dataset=data, rubric=vf.Rubric(funcs=[won]))


def play(source: Any, folder: Path, responses: list[str]) -> list[Any]:
    """What an episode says: the prompt, then each step."""

    async def run() -> list[Any]:
        write_rows(source, folder / "rows.jsonl")
        row = json.loads((folder / "rows.jsonl").read_text("utf-8").splitlines()[0])
        episode = verifiers_env(source)()
        said: list[Any] = [await episode.reset(EnvRow(row["input"], row["label"], row["metadata"], 0))]
        for response in responses:
            said.append(await episode.step(response))
        await episode.close()
        return said

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("responses", "reward"), [(["5", "7"], 0.5), (["7"], 0.75), (["1", "2", "3"], -0.75), (["5"], None), ([], None)]
)
def test_a_rollout_is_an_episode(source: Any, tmp_path: Path, responses: list[str], reward: float | None) -> None:
    said = play(source, tmp_path, responses)
    assert said[0] == [{"role": "user", "content": "Guess"}]
    for response, step in zip(responses, said[1:], strict=True):
        is_last = reward is not None and step is said[-1]
        observed = [{"role": "user", "content": f"no: {response}"}]
        assert step == (("", pytest.approx(reward), True) if is_last else (observed, 0.0, False))


def test_an_error_of_the_environment_is_raised(source: Any, tmp_path: Path) -> None:
    with pytest.raises(vf.Error, match="not a guess"):
        play(source, tmp_path, ["0"])


def call(text: str) -> str:
    return f"Let me see. <tool_call>\n{text}\n</tool_call>"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (['{"name": "add", "arguments": {"x": 1, "y": 2}}'], ["3"]),
        (['{"name": "add", "arguments": {"x": 1, "y": 2}}'] * 2, ["3", "3"]),
        (["add(1, 2)"], ["Expecting value: line 2 column 1 (char 1)"]),
        (['{"name": "sub", "arguments": {}}'], ["'sub'"]),
        (['["add"]'], ["''"]),
    ],
)
def test_calls_of_tools_are_read_from_responses(asked: list[str], told: list[str], tmp_path: Path) -> None:
    def add(x: int, y: int) -> int:
        """The sum."""
        return x + y

    async def right(completion: Any, answer: str, **_: Any) -> float:
        return float(str(completion[-1].content) == answer)

    data = Dataset.from_list([{"question": "1+2", "answer": "3"}])
    source = vf.ToolEnv(tools=[add], dataset=data, rubric=vf.Rubric(funcs=[right]))
    said = play(source, tmp_path, ["".join(map(call, asked)), "3"])
    assert [(m["role"], m["content"].strip()) for m in said[1][0]] == [("tool", text) for text in told]
    assert said[2] == ("", 1.0, True)
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text("utf-8").splitlines())
    (tool,) = row["tools"]
    assert (tool["type"], tool["function"]["name"], sorted(tool["function"]["parameters"]["properties"])) == (
        "function",
        "add",
        ["x", "y"],
    )


def test_an_environment_of_the_package_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(tmp_path)
    Path("env.py").write_text(
        "from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv\n"
        "from relax_cli.data.envs.verifiers import verifiers_env\n"
        "source = ReasoningGymEnv('chain_sum', num_train_examples=2, num_eval_examples=1)\n"
        "Env = verifiers_env(source)\n",
        "utf-8",
    )
    source = find_env("env.py:Env")()._environment
    answer = source.rg_dataset[0]["answer"]
    assert [play(source, tmp_path, [f"<answer>{x}</answer>"])[-1] for x in (answer, "none")] == [
        ("", 1.0, True),
        ("", 0.0, True),
    ]
