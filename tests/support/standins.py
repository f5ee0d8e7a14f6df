"""Stand-in model folders and data for recipes that are meant for other machines: the files are really read."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from relax_cli.models.families import FAMILIES
from relax_cli.models.headers import SINGLE_FILE, expected_shapes
from relax_cli.models.hybrid import read_any_spec
from relax_cli.quickstart.task import MODEL, prepare

QWEN3_4B = {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True, "max_position_embeddings": 40960, "rope_theta": 1000000, "rms_norm_eps": 1e-6,
}  # fmt: skip
QWEN3_8B = QWEN3_4B | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
QWEN3_30B = QWEN3_8B | {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "num_hidden_layers": 48,
    "num_key_value_heads": 4,
}  # fmt: skip
QWEN3_5_9B = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    },
    "vision_config": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-4B": QWEN3_4B, "Qwen3-8B": QWEN3_8B, "Qwen3-30B-A3B": QWEN3_30B, "Qwen3.5-9B": QWEN3_5_9B,
}  # fmt: skip
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def write_weights(folder: Path) -> None:
    """`model.safetensors` with the header that `config.json` asks for; its numbers are a hole in the file, so zeros."""
    spec, header, end = read_any_spec(folder), {}, 0
    for name, shape in expected_shapes(spec).items() if spec.family in FAMILIES else ():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    with (folder / SINGLE_FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        file.truncate(8 + len(content) + end)


def write_uncounted_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a tokenizer that counts no prompt, so that no rule about lengths has its tokens to go by."""
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    monkeypatch.setattr("relax_cli.preflight.data_reader.load_light", lambda folder: None)


def model_folder(folder: Path, config: dict[str, Any]) -> Path:
    """`config.json`, a file without numbers for the weights, and the quickstart's tokenizer with a chat template."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder)
    tokenizer = json.loads((MODEL / "tokenizer_config.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"chat_template": TEMPLATE}))
    (folder / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    return folder


def chat_rows(path: Path, count: int) -> Path:
    """Rows of `prompt`, a list of chat messages, and `label`, in letters that the quickstart's tokenizer has."""
    path.parent.mkdir(parents=True)
    rows = ({"prompt": [{"role": "user", "content": f"{i}+{i}="}], "label": str(2 * i)} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare_all(root: Path) -> dict[str, str]:
    """Everything that the bundled recipes read, below `root`; the variables they name."""
    for name, config in MODELS.items():
        model_folder(root / "models" / name, config)
    chat_rows(root / "data" / "dapo-math-17k" / "dapo-math-17k.jsonl", 40)
    chat_rows(root / "data" / "aime-2024" / "aime-2024.jsonl", 30)
    prepare(root / "quickstart", seed=1, steps=2)
    return {
        "MODEL_DIR": str(root / "models"),
        "DATA_DIR": str(root / "data"),
        "EXP_DIR": str(root / "exp"),
        "TINY_DIR": str(root / "quickstart"),
    }
