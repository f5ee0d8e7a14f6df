"""Tiny Hugging Face models on disk, and a runner for functions on several gloo ranks."""

from __future__ import annotations

import json
import shutil
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import transformers

from relax_cli.quickstart.task import MODEL

VOCAB = 96
# Ranks are forks of one process that has imported all this and computed nothing.
_FORKS = mp.get_context("forkserver")
_FORKS.set_forkserver_preload(["relax_cli.backends.megatron.trainer", "relax_cli.checkpoint.store", "transformers"])


def save_tiny_model(
    folder: Path,
    family: str,
    *,
    tied: bool = False,
    layers: int = 2,
    vocab: int = VOCAB,
    rope: dict[str, Any] | None = None,
    **more: Any,
) -> Any:
    """Write a random model of `family` (all weights random, norms and biases too); returns the transformers model."""
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    }[family]
    if family == "qwen3_moe":
        more = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True} | more
    config = config_class(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0} | (rope or {}),
        **more,
    )
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model


def save_experts_for_task(folder: Path, **more: Any) -> Path:
    """A random mixture of experts that reads the quickstart's tokens."""
    sizes = json.loads((MODEL / "config.json").read_text())
    save_tiny_model(folder, "qwen3_moe", vocab=sizes["vocab_size"], **more)
    for source in MODEL.iterdir():
        if source.suffix != ".safetensors" and source.name != "config.json":
            shutil.copy(source, folder / source.name)
    return folder


def on_ranks(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, ranks, port, *args)` in `ranks` new processes; their results in rank order."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = _FORKS.Queue()
    workers = [
        _FORKS.Process(target=_work, args=(queue, function, rank, ranks, port, args), daemon=True)
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    try:
        results = dict(queue.get(timeout=300) for _ in workers)
    finally:
        for worker in workers:
            worker.join(timeout=10)
            worker.kill()
    failures = [value for value in results.values() if isinstance(value, _Failure)]
    assert not failures, failures[0].text
    return [results[rank] for rank in range(ranks)]


class _Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _work(queue: Any, function: Callable[..., Any], rank: int, ranks: int, port: int, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        result = function(rank, ranks, port, *args)
    except Exception:  # noqa: BLE001 - the text crosses the process border, where the test fails with it
        result = _Failure(traceback.format_exc())
    queue.put((rank, result))
