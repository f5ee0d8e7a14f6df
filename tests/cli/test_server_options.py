"""Options of SGLang's own: passed through from the command line and recipes, layer by layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_cli.cli.options import gather_server_options
from relax_cli.config.layers import Layers, load_config
from relax_cli.config.schema import Config
from tests.support.cli_app import Invoke

OWN = {"--lr", "--sglang-options", "--sglang-mem-fraction-static", "--recipe"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--sglang-attention-backend", "triton"], {"attention_backend": "triton"}),
        (["--sglang-attention-backend=triton"], {"attention_backend": "triton"}),
        (["--sglang-disable-radix-cache"], {"disable_radix_cache": True}),
        (["--sglang-disable-radix-cache", "--lr", "1"], {"disable_radix_cache": True}),
        (["--sglang-a", "-1", "--sglang-b="], {"a": "-1", "b": ""}),
        (["--sglang-cuda-graph-bs", "1", "2"], {"cuda_graph_bs": ["1", "2"]}),
        (["--sglang-a", "1", "--sglang-a", "2"], {"a": "2"}),
        (["--sglang-options", '{"a": 1, "b": 2}', "--sglang-b", "3"], {"a": 1, "b": "3"}),
        (["--sglang-b", "3", '--sglang-options={"a": 1}'], {"a": 1, "b": "3"}),
    ],
)
def test_options_of_the_server_become_one_json(words: list[str], expected: dict[str, Any]) -> None:
    gathered = gather_server_options(words, OWN)
    assert json.loads(gathered[gathered.index("--sglang-options") + 1]) == expected
    assert [word for word in gathered if word in ("--lr", "1")] == [w for w in words if w in ("--lr",)] + (
        ["1"] if "--lr" in words else []
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--lr", "1", "--sglang-mem-fraction-static", "0.5"],
        ["--sglang-mem-fraction-static=0.5"],
        ["--sglang-options", '{"a": 1}'],
        ["--sglang-options", "{broken"],
        ["--sglang-"],
        ["--sglangg-a", "1"],
        ["--recipe", "sglang-a"],
    ],
)
def test_other_words_stay_as_they_are(words: list[str]) -> None:
    assert gather_server_options(words, OWN) == words


def test_layers_are_put_together_key_by_key(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("sglang:\n  sglang_options: {attention-backend: fa3, log_level: error, enable_metrics: true}\n")
    two.write_text("sglang:\n  sglang_options: {log_level: info}\n")
    sets = ["sglang.sglang_options={chunked_prefill_size: 64}"]
    flags = {"sglang_options": '{"attention_backend": "triton"}'}
    loaded = load_config(Layers([str(one), str(two)], {}, sets, flags), Config)
    assert loaded.config.sglang.sglang_options == {
        "attention_backend": "triton",
        "log_level": "info",
        "enable_metrics": True,
        "chunked_prefill_size": 64,
    }
    assert loaded.origins["sglang.sglang_options"] == "--sglang-options"


@pytest.mark.parametrize("text", ["{broken", "[1]", '{"a": 1, "a": 2}'])
@pytest.mark.parametrize(
    ("option", "id"),
    [("sglang_options", "sglang-options-json"), ("chat_template_kwargs", "chat-template-kwargs-json")],
)
def test_what_is_no_json_object_is_refused(text: str, option: str, id: str) -> None:
    (problem,) = load_config(Layers(flags={option: text}), Config).problems
    assert (problem.id, problem.option, problem.got) == (id, f"--{option.replace('_', '-')}", text)


def test_variables_of_a_chat_template_are_json() -> None:
    flags = {"chat_template_kwargs": '{"enable_thinking": false, "depth": 2}'}
    assert load_config(Layers(flags=flags), Config).config.data.chat_template_kwargs == {
        "enable_thinking": False,
        "depth": 2,
    }


def test_server_options_pass_and_a_misspelt_option_is_refused(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--rollout-engine", "sglang", "--sglang-attention-backend", "triton", "--skip-files", "--format", "json"]
    shown = json.loads(invoke("validate-config", "--recipe", "tiny-ppo-cpu", *words).stdout)
    assert shown["config"]["sglang"]["sglang_options"] == {"attention_backend": "triton"}
    assert shown["origins"]["sglang.sglang_options"] == "--sglang-options"
    failed = invoke("validate-config", "--recipe", "tiny-ppo-cpu", "--rollot-batch-size", "8")
    assert failed.exit_code == 2
    assert "--rollout-batch-size" in failed.stderr


def test_an_option_that_the_run_sets_itself_is_refused(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--rollout-engine", "sglang", "--sglang-tp-size", "2", "--skip-files", "--format", "json"]
    result = invoke("validate-config", "--recipe", "tiny-ppo-cpu", *words)
    assert result.exit_code == 2
    assert "sglang-option-reserved" in [problem["id"] for problem in json.loads(result.stdout)["problems"]]
