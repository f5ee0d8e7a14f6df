"""Hugging Face folders and the mapping to Megatron's names and layouts; no Megatron, no transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from relax_cli.errors import ConfigError
from relax_cli.models import hf
from relax_cli.models.convert import hf_to_megatron, megatron_to_hf, merge_shards, rank_tensors
from relax_cli.models.hf import HfWeights, write_hf
from relax_cli.models.spec import ModelSpec, MoeSpec, RopeScaling, read_spec

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 10,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}


EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "mlp_only_layers": [0]}


def write_config(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def random_weights(spec: ModelSpec) -> dict[str, Tensor]:
    q, kv, hidden = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        at = f"model.layers.{layer}."
        shapes |= {at + "input_layernorm.weight": (hidden,), at + "post_attention_layernorm.weight": (hidden,)}
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{at}self_attn.{part}_proj.weight"] = (rows, hidden)
            if spec.qkv_bias:
                shapes[f"{at}self_attn.{part}_proj.bias"] = (rows,)
        shapes[at + "self_attn.o_proj.weight"] = (hidden, q)
        if spec.qk_norm:
            shapes |= {f"{at}self_attn.{part}_norm.weight": (spec.head_dim,) for part in ("q", "k")}
        mlps, size = ["mlp."], spec.ffn_hidden_size
        if isinstance(spec, MoeSpec) and layer not in spec.dense_layers:
            mlps, size = [f"mlp.experts.{expert}." for expert in range(spec.num_experts)], spec.expert_ffn_size
            shapes[at + "mlp.gate.weight"] = (spec.num_experts, hidden)
        for mlp in mlps:
            shapes |= {f"{at}{mlp}{part}_proj.weight": (size, hidden) for part in ("gate", "up")}
            shapes[f"{at}{mlp}down_proj.weight"] = (hidden, size)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return read_spec(write_config(tmp_path))


def test_spec_holds_what_config_json_says(spec: ModelSpec) -> None:
    assert spec == ModelSpec("qwen3", 2, 8, 12, 4, 2, 6, 10, False, 5e5, None, 1e-5, False, True, 64)


def test_families_differ_in_biases_and_norms(tmp_path: Path) -> None:
    qwen2, llama = (read_spec(write_config(tmp_path, model_type=family)) for family in ("qwen2", "llama"))
    assert (qwen2.qkv_bias, qwen2.qk_norm) == (True, False)
    assert (llama.qkv_bias, llama.qk_norm) == (False, False)


def test_missing_keys_follow_the_attention_heads(tmp_path: Path) -> None:
    spec = read_spec(write_config(tmp_path, num_key_value_heads=None, head_dim=None))
    assert (spec.num_kv_heads, spec.head_dim) == (4, 2)


def test_rope_settings_are_read_in_the_old_and_the_new_spelling(tmp_path: Path) -> None:
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    new = read_spec(write_config(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 7.0, **scaling}))
    old = read_spec(
        write_config(tmp_path, rope_parameters=None, rope_theta=7.0, rope_scaling={"type": "llama3", **scaling})
    )
    assert new == old
    assert new.rope_theta == 7.0
    assert new.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma2"}, "model_type"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_unsupported_features_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        read_spec(write_config(tmp_path, **changes))
    assert caught.value.problems[0].where.endswith("config.json")


@pytest.mark.parametrize("content", [None, "{not json", "[]"])
def test_an_unreadable_config_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_spec(tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_round_trip_is_exact(tmp_path: Path, family: str, tied: bool, tp_size: int) -> None:
    more = EXPERTS if family == "qwen3_moe" else {}
    spec = read_spec(write_config(tmp_path, model_type=family, tie_word_embeddings=tied, **more))
    weights = random_weights(spec)
    shards = [hf_to_megatron(weights, spec, tp_size, rank) for rank in range(tp_size)]
    full = {name: merge_shards(name, [shard[name] for shard in shards]) for name in shards[0]}
    back = dict(megatron_to_hf(full, spec))
    assert back.keys() == weights.keys()
    assert sum(tensor.numel() for tensor in back.values()) == spec.parameters
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_fused_qkv_is_ordered_by_key_value_group(spec: ModelSpec) -> None:
    weights = random_weights(spec)
    fused = hf_to_megatron(weights, spec, 1, 0)["decoder.layers.1.self_attention.linear_qkv.weight"]
    q, k, v = (weights[f"model.layers.1.self_attn.{part}_proj.weight"].split(6) for part in "qkv")
    assert torch.equal(fused, torch.cat([q[0], q[1], k[0], v[0], q[2], q[3], k[1], v[1]]))


def test_a_rank_holds_its_own_gate_before_its_own_up(spec: ModelSpec) -> None:
    weights = random_weights(spec)
    shard = hf_to_megatron(weights, spec, 2, 1)["decoder.layers.0.mlp.linear_fc1.weight"]
    gate, up = (weights[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    assert torch.equal(shard, torch.cat([gate[6:], up[6:]]))


def test_sizes_that_do_not_divide_are_all_named(spec: ModelSpec) -> None:
    with pytest.raises(ConfigError) as caught:
        hf_to_megatron(random_weights(spec), spec, 3, 0)
    assert [problem.expected for problem in caught.value.problems] == [
        "a divisor of 4",
        "a divisor of 2",
    ]


@pytest.mark.parametrize("tied", [False, True])
def test_an_uneven_vocabulary_is_padded_with_hidden_zero_rows(spec: ModelSpec, tied: bool) -> None:
    spec = replace(spec, vocab_size=9, tied=tied)
    weights = random_weights(spec)
    shards = [hf_to_megatron(weights, spec, 2, rank) for rank in range(2)]
    matrices = ["embedding.word_embeddings.weight", *([] if tied else ["output_layer.weight"])]
    assert all(shards[rank][name].shape == (5, 8) for name in matrices for rank in range(2))
    assert not any(shards[1][name][4].any() for name in matrices)
    full = {name: merge_shards(name, [shard[name] for shard in shards]) for name in shards[0]}
    back = dict(megatron_to_hf(full, spec))
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_tensors_are_read_when_they_are_asked_for(spec: ModelSpec) -> None:
    read: list[str] = []

    class Watched(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            read.append(name)
            return super().__getitem__(name)

    tensors = rank_tensors(Watched(random_weights(spec)), spec, 2, 1)
    next(tensors)
    assert read == ["model.embed_tokens.weight"]


def test_a_missing_tensor_is_named(spec: ModelSpec) -> None:
    weights = random_weights(spec)
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        hf_to_megatron(weights, spec, 1, 0)


def test_a_tensor_nobody_asked_for_is_named(spec: ModelSpec) -> None:
    with pytest.raises(ConfigError, match="extra_tensor"):
        hf_to_megatron(random_weights(spec) | {"extra_tensor": torch.zeros(1)}, spec, 1, 0)


def test_a_wrong_shape_is_named(spec: ModelSpec) -> None:
    with pytest.raises(ConfigError, match=r"model\.norm\.weight") as caught:
        hf_to_megatron(random_weights(spec) | {"model.norm.weight": torch.zeros(9)}, spec, 1, 0)
    assert (caught.value.problems[0].got, caught.value.problems[0].expected) == ("(9,)", "(8,)")


def test_a_copy_of_the_embedding_beside_tied_weights_is_ignored(spec: ModelSpec) -> None:
    tied = replace(spec, tied=True)
    weights = random_weights(tied)
    state = hf_to_megatron(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, tied, 1, 0)
    assert "output_layer.weight" not in state


@pytest.mark.parametrize("max_bytes", [1 << 30, 600])
def test_written_folders_read_back_bitwise(tmp_path: Path, max_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "MAX_SHARD_BYTES", max_bytes)
    template = tmp_path / "template"
    template.mkdir()
    write_config(template, torch_dtype="bfloat16")
    (template / "tokenizer.json").write_text("{}")
    (template / "additional_chat_templates").mkdir()
    (template / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (template / hf.SINGLE_FILE).write_bytes(b"old weights")
    weights = random_weights(read_spec(template))
    write_hf(tmp_path / "out", weights.items(), template)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in HfWeights(tmp_path / "out").items())
    assert {name for name, _ in HfWeights(tmp_path / "out").items()} == set(weights)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert (tmp_path / "out" / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"
    assert (tmp_path / "out" / hf.INDEX_FILE).exists() == (max_bytes == 600)


def test_half_precision_weights_are_read_as_fp32(tmp_path: Path) -> None:
    stored = torch.randn(4).bfloat16()
    save_file({"x": stored}, tmp_path / hf.SINGLE_FILE)
    ((_, tensor),) = HfWeights(tmp_path).items()
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, stored.float())


def test_missing_or_damaged_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=hf.SINGLE_FILE):
        list(HfWeights(tmp_path).items())
    (tmp_path / hf.SINGLE_FILE).write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=hf.SINGLE_FILE):
        list(HfWeights(tmp_path).items())
