"""Rules about the model's family and sizes, and what is known of families that go through Megatron-Bridge."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_cli.config.schema import Config
from relax_cli.errors import ConfigError, Problem, is_about_machine
from relax_cli.models.hybrid import HybridSpec, language_config, read_any_spec
from relax_cli.models.spec import BRIDGE_FAMILIES, FAMILIES, read_spec
from relax_cli.preflight.rules import model as model_checks
from tests.support.rules import WITH_GPUS, problems_of

QWEN3 = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 100,
}  # fmt: skip
TEXT = QWEN3 | {
    "model_type": "qwen3_5_text", "num_hidden_layers": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
}  # fmt: skip
QWEN3_5 = {"model_type": "qwen3_5", "text_config": TEXT, "tie_word_embeddings": False}


def write(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def problems(folder: Path, model: dict[str, Any], **changes: Any) -> list[Problem]:
    """Of all rules about the model except those about the other files of its folder."""
    values: dict[str, dict[str, Any]] = {"model": {"hf_checkpoint": str(write(folder, model))}}
    for path, value in changes.items():
        section, _, key = path.partition("__")
        values.setdefault(section, {})[key] = value
    config = Config.model_validate(values)
    others = {"model-tokenizer-missing", "model-weights-missing", "sglang-missing"}
    found = problems_of(config, machine=WITH_GPUS)
    return [p for p in found if p.option in MODEL_OPTIONS and p.id not in others]


MODEL_OPTIONS = {"--hf-checkpoint", "--device", "--rollout-engine", "--tensor-model-parallel-size",
                 "--rollout-max-response-len"}  # fmt: skip


@pytest.fixture
def has_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "version", lambda name: "0.6.0")


def ids(found: list[Problem]) -> list[str]:
    return [problem.id for problem in found]


def test_our_own_families_need_no_bridge(tmp_path: Path) -> None:
    for family in FAMILIES:
        assert problems(tmp_path, QWEN3 | {"model_type": family}) == []


@pytest.mark.parametrize("model", [QWEN3_5, TEXT])
def test_a_bridge_family_is_valid_and_a_missing_bridge_a_note(tmp_path: Path, model: dict[str, Any]) -> None:
    (found,) = problems(tmp_path, model, parallel__device="cuda")
    assert found.id == "bridge-missing"
    assert is_about_machine(found)
    needed = "Python 3.12" if sys.version_info < (3, 12) else "pip install"
    assert needed in found.fix


@pytest.mark.usefixtures("has_bridge")
def test_a_family_of_the_bridge_with_the_bridge_has_no_problem(tmp_path: Path) -> None:
    assert problems(tmp_path, QWEN3_5, parallel__device="cuda") == []


def test_an_unknown_family_names_both_lists(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, QWEN3 | {"model_type": "gemma3"})
    assert (found.id, found.got) == ("model-family-unsupported", "gemma3")
    assert all(family in found.expected for family in (*FAMILIES, *BRIDGE_FAMILIES))


@pytest.mark.usefixtures("has_bridge")
@pytest.mark.parametrize(
    ("rule", "changes", "near_miss"),
    [
        ("bridge-needs-cuda", {"parallel__device": "cpu"}, {}),
        ("embedded-engine-family", {"rollout__rollout_engine": "embedded"}, {"rollout__rollout_engine": "sglang"}),
        ("embedded-engine-family", {"parallel__device": "auto"}, {}),
    ],
)
def test_a_bridge_model_is_refused_and_the_near_miss_passes(
    tmp_path: Path, rule: str, changes: dict[str, Any], near_miss: dict[str, Any]
) -> None:
    assert rule in ids(problems(tmp_path, QWEN3_5, **{"parallel__device": "cuda", **changes}))
    assert problems(tmp_path, QWEN3_5, parallel__device="cuda", **near_miss) == []


def test_bridge_refusals_pass_for_our_own_converter(tmp_path: Path) -> None:
    assert problems(tmp_path, QWEN3, parallel__device="cpu", rollout__rollout_engine="embedded") == []


def test_the_mlp_is_split_evenly_and_the_vocabulary_is_padded(tmp_path: Path) -> None:
    odd = QWEN3 | {"intermediate_size": 97}
    (found,) = problems(tmp_path, odd, parallel__tensor_model_parallel_size=2)
    assert (found.id, found.expected) == ("tensor-parallel-indivisible", "a divisor of 97")
    assert problems(tmp_path, odd) == []
    assert problems(tmp_path, QWEN3 | {"vocab_size": 101}, parallel__tensor_model_parallel_size=2) == []
    padded = read_spec(tmp_path)
    whole = read_spec(write(tmp_path, QWEN3 | {"vocab_size": 102}))
    assert padded.parameters_of_rank(2) == whole.parameters_of_rank(2)


def test_linear_attention_heads_are_shared_out_too(tmp_path: Path) -> None:
    even = TEXT | {"num_key_value_heads": 4}
    found = problems(tmp_path, QWEN3_5 | {"text_config": even}, parallel__tensor_model_parallel_size=4)
    heads = [problem.message for problem in found if problem.id == "heads-not-divisible"]
    assert len(heads) == 1
    assert "linear_num_key_heads" in heads[0]


@pytest.mark.usefixtures("has_bridge")
def test_positions_of_a_nested_config_are_found(tmp_path: Path) -> None:
    cuda = {"parallel__device": "cuda"}
    assert ids(problems(tmp_path, QWEN3_5, rollout__rollout_max_response_len=5000, **cuda)) == ["longer-than-positions"]
    assert problems(tmp_path, QWEN3_5, rollout__rollout_max_response_len=4096, **cuda) == []


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["linear_attention"] * 8 + ["full_attention"]},
        {"layer_types": ["mamba"] * 8},
        {"linear_num_key_heads": "2"},
        {"hidden_size": None},
    ],
)
def test_a_nested_config_that_makes_no_sense_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = write(tmp_path, QWEN3_5 | {"text_config": TEXT | change})
    with pytest.raises(ConfigError) as caught:
        read_any_spec(folder)
    assert caught.value.problems[0].id == "model-unsupported"


def test_our_converter_never_takes_a_model_of_the_bridge(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read_spec(write(tmp_path, QWEN3_5))
    assert read_any_spec(write(tmp_path, QWEN3)) == read_spec(tmp_path)


def test_tied_embeddings_are_read_outside_the_nested_part() -> None:
    assert language_config({"tie_word_embeddings": True, "text_config": {"a": 1}})["tie_word_embeddings"]
    assert language_config({"text_config": {"tie_word_embeddings": True}})["tie_word_embeddings"]
    assert not language_config({"text_config": {}})["tie_word_embeddings"]


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({}, id="9B"),
        pytest.param(
            {
                "num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                "linear_key_head_dim": 24, "linear_value_head_dim": 16, "vocab_size": 100,
            },
            id="odd sizes",
        ),
    ],
)  # fmt: skip
def test_parameter_counts_equal_the_transformers_model(tmp_path: Path, sizes: dict[str, Any]) -> None:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

    config = Qwen3_5Config(text_config=Qwen3_5TextConfig(**sizes).to_dict())
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = Qwen3_5ForConditionalGeneration(config)
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    vision = sum(count for name, count in counts.items() if ".visual." in name)
    found = read_any_spec(tmp_path)
    assert isinstance(found, HybridSpec)
    assert found.parameters == sum(counts.values()) - vision
    assert found.untrained_parameters == vision
    assert found.cached_layers == config.text_config.num_hidden_layers // 4
