"""What `config.json` may say: transformers' defaults of each model family, and which keys are understood.

A key changes the model or it does not. Keys that do and that we implement are read; keys that do not are listed as
harmless; every other key is refused by name, unless its value switches nothing on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from relax_cli.config.text import in_json
from relax_cli.errors import ConfigError
from relax_cli.models.files import declare

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Values of `model_type` that our own exact converter covers."""
MOE_FAMILIES = ("qwen3_moe",)
"""Those of them with mixtures of experts."""
BRIDGE_FAMILIES = ("qwen3_5", "qwen3_5_text")
"""Values of `model_type` that go through Megatron-Bridge (`backends/megatron/bridge.py`)."""

UNSUPPORTED = declare(
    "model-unsupported",
    "`config.json` has a value that cannot be right, asks for a feature that is not implemented (quantised weights, a"
    " sliding window, biases, another activation, YaRN), or has a key that relax does not know and that may change what"
    " the model computes.",
)

_COMMON = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": None,
}
_QWEN = _COMMON | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "head_dim": None,
    "max_position_embeddings": 32768,
}
_HYBRID = _COMMON | {
    "vocab_size": 248320,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _COMMON
    | {
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "qwen3_moe": _QWEN
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        # --moe-aux-loss-coeff says what is used.
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    },
    "qwen3_5": _HYBRID,
    "qwen3_5_text": _HYBRID,
}
"""What transformers takes for a key that is left out. None: from the attention heads, or see `rotary`."""

FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1.0, None),
}
"""Keys of features with one implementation, and the values that mean it."""

_READ = {"model_type", "rope_scaling", "rope_parameters", "layer_types"}

_ABOUT_FILES = """architectures attn_implementation dtype is_llama_config keys_to_ignore_at_inference name_or_path
torch_dtype torchscript transformers_version transformers.js_config use_cache"""
# Dropout is off here.
_ABOUT_PRETRAINING = """attention_dropout embd_pdrop gradient_checkpointing hidden_dropout initializer_range
max_sequence_length model_max_length pretraining_tp resid_pdrop"""
# Read only together with `use_sliding_window`.
_ABOUT_WINDOWS = "max_window_layers sliding_window"
# generation_config.json and the options say what is used.
_ABOUT_GENERATION = """begin_suppress_tokens bos_token_id decoder_start_token_id diversity_penalty do_sample
early_stopping eos_token_id length_penalty max_length min_length num_beam_groups num_beams
num_return_sequences pad_token_id repetition_penalty sep_token_id suppress_tokens temperature
tokenizer_class top_k top_p typical_p unk_token_id"""
_ABOUT_OTHER_HEADS = """chunk_size_feed_forward classifier_dropout finetuning_task id2label label2id output_attentions
output_hidden_states prefix problem_type return_dict task_specific_params"""
_HARMLESS = frozenset(
    f"{_ABOUT_FILES} {_ABOUT_PRETRAINING} {_ABOUT_WINDOWS} {_ABOUT_GENERATION} {_ABOUT_OTHER_HEADS}".split()
)
_HARMLESS_PREFIXES = ("_", "unsloth_")

LARGEST = 1 << 31
MOST_LAYERS = 10_000


def completed(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` of a family in `DEFAULTS` with all values that the family's defaults give, each of its type.
    Raises ConfigError: a value is not usable, or a key is not understood."""
    family = config["model_type"]
    if family in MOE_FAMILIES:
        # transformers 5 writes `num_local_experts`.
        new, old = "num_local_experts", "num_experts"
        if {new, old} <= config.keys() and config[new] != config[old]:
            raise unsupported(path, new, config[new], f"absent, or the same as {old}")
        config = {old if key == new else key: value for key, value in config.items()}
    if config.get("quantization_config"):
        raise unsupported(path, "quantization_config", config["quantization_config"], "absent: weights in bf16 or fp32")
    if family in FAMILIES:
        _refuse_unknown(path, config)
    full = {**DEFAULTS[family], **config}
    full["num_key_value_heads"] = full["num_key_value_heads"] or full["num_attention_heads"]
    sizes = [key for key, default in DEFAULTS[family].items() if type(default) is int and key != "head_dim"]
    require_counts(path, full, [*sizes, "num_key_value_heads"])
    if family in MOE_FAMILIES:
        _check_experts(path, full)
    require, hidden = requirement(path, full), full["hidden_size"]
    heads, groups = full["num_attention_heads"], full["num_key_value_heads"]
    require(heads % groups == 0, "num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    require(full["head_dim"] or hidden % heads == 0, "hidden_size", f"a multiple of num_attention_heads ({heads})")
    full["head_dim"] = full["head_dim"] or hidden // heads
    require_counts(path, full, ["head_dim"])
    require(full["head_dim"] % 2 == 0, "head_dim", "even, as rotary positions need it")
    require(full["num_hidden_layers"] <= MOST_LAYERS, "num_hidden_layers", f"at most {MOST_LAYERS}")
    full["rms_norm_eps"] = positive(path, "rms_norm_eps", full["rms_norm_eps"])
    require(type(full["tie_word_embeddings"]) is bool, "tie_word_embeddings", "true or false")
    return full


def _check_experts(path: Path, full: dict[str, Any]) -> None:
    require, chosen = requirement(path, full), full["num_experts_per_tok"]
    experts, layers, dense = full["num_experts"], full["num_hidden_layers"], full["mlp_only_layers"]
    require(chosen <= experts, "num_experts_per_tok", f"at most num_experts ({experts})")
    require(type(full["norm_topk_prob"]) is bool, "norm_topk_prob", "true or false")
    # Every weight would be 1, whatever the router says.
    require(chosen > 1 or not full["norm_topk_prob"], "norm_topk_prob", "false, where num_experts_per_tok is 1")
    is_list = isinstance(dense, list | None) and all(type(layer) is int for layer in dense or ())
    require(is_list, "mlp_only_layers", "a list of layers")
    full["mlp_only_layers"] = dense = sorted({layer for layer in dense or () if 0 <= layer < layers})
    step = full["decoder_sparse_step"]
    has_experts = not all(layer in dense for layer in range(step - 1, layers, step))
    require(has_experts, "decoder_sparse_step", "one that leaves a layer with experts")


def requirement(path: Path, values: Mapping[str, Any], prefix: str = "") -> Callable[[object, str, str], None]:
    """What refuses the value of a key of `config.json`, unless a condition on it holds; it says what is expected."""

    def require(holds: object, key: str, expected: str) -> None:
        if not holds:
            raise unsupported(path, prefix + key, values.get(key), expected)

    return require


def positive(path: Path, key: str, value: object) -> float:
    """The number `value`. Raises ConfigError: it is not a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise unsupported(path, key, value, "a finite number above 0")
    return float(value)


def require_counts(path: Path, config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises ConfigError where one of the named values is not a positive integer of a sensible size."""
    for key in names:
        if type(config.get(key)) is not int or not 1 <= config[key] < LARGEST:
            raise unsupported(path, key, config.get(key), "a positive integer below 2^31")


def unsupported(path: Path, key: str, got: object, expected: str) -> ConfigError:
    """The error that a value of `config.json` is not one that can be trained."""
    shown = in_json(got, 80)
    what, fix = f"this model cannot be trained: {key} is {shown}", f"use a model whose {key} is {expected}"
    return ConfigError(UNSUPPORTED(what, fix=fix, where=str(path), got=shown, expected=expected))


def _refuse_unknown(path: Path, config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if key in FIXED:
            if value not in FIXED[key]:
                raise unsupported(path, key, value, " or ".join(map(repr, FIXED[key][:1])))
        elif key in _READ or key in DEFAULTS[config["model_type"]] or key in _HARMLESS:
            continue
        elif value and not key.startswith(_HARMLESS_PREFIXES):
            what = f"config.json sets {key}, which may change what the model computes and which relax does not know"
            fix = f"use a model without {key}; delete the line only if transformers also ignores it"
            got, expected = f"{key} = {in_json(value, 80)}", f"keys of {config['model_type']} in transformers"
            raise ConfigError(UNSUPPORTED(what, fix=fix, where=str(path), got=got, expected=expected))
