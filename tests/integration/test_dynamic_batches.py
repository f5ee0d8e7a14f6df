"""`--use-dynamic-batch-size` changes how samples are packed, and no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.local_runs import deployed, train

GROUPS = ("batch.rollout_batch_size=8", "batch.n_samples_per_prompt=4", "batch.num_rollout=1")
FORWARDS = (
    "algorithm.use_rollout_logprobs=false",
    "algorithm.use_kl_loss=true",
    "algorithm.kl_loss_coef=0.1",
    "algorithm.kl_loss_type=k3",
)
PPO = ("batch.rollout_batch_size=32", "critic.num_critic_only_steps=0", "batch.num_rollout=1")
NOT_COMPARED = ("time", "seconds", "memory", "tokens_per_second", "logprob_diff/max")
"""Parts of names of what is measured, and of the largest rounding error, which is nothing but rounding."""


def budget(tokens: int, packed: bool) -> tuple[str, ...]:
    return (
        "batch.use_dynamic_batch_size=true",
        f"batch.max_tokens_per_gpu={tokens}",
        f"batch.pack_sequences={str(packed).lower()}",
    )


def numbers(record: dict[str, Any]) -> dict[str, float]:
    return {name: x for name, x in record.items() if isinstance(x, float) and not any(t in name for t in NOT_COMPARED)}


@pytest.mark.parametrize(
    ("recipe", "overrides"), [("tiny-grpo-cpu", (*GROUPS, *FORWARDS)), ("tiny-ppo-cpu", PPO)], ids=["grpo", "ppo"]
)
def test_metrics_are_the_same_for_any_budget(
    recipe: str, overrides: tuple[str, ...], task: Path, tmp_path: Path
) -> None:
    one_step = (*overrides, "batch.num_steps_per_rollout=1")
    whole = ("batch.micro_batch_size=32", "batch.pack_sequences=false")
    plain = train(task, tmp_path / "plain", recipe, *one_step, *whole)
    expected = numbers(plain.metrics[0])
    assert {"pg_loss", "actor/grad_norm", "response_len/mean"} < expected.keys()
    for tokens, packed in ((12, False), (45, True), (10_000, False), (10_000, True)):
        run = train(task, tmp_path / f"{tokens}-{packed}", recipe, *one_step, *budget(tokens, packed))
        found = numbers(run.metrics[0])
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert value == pytest.approx(expected[name], rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize("packed", [False, True])
def test_micro_batches_keep_to_the_token_budget(
    packed: bool, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relax_cli.backends.megatron.trainer import TrainableModel

    sizes: dict[str, list[int]] = {"forward": [], "train_step": []}
    for method, seen in sizes.items():
        original = getattr(TrainableModel, method)

        def recording(
            self: Any, batches: Any, *args: Any, _original: Any = original, _seen: Any = seen, **kw: Any
        ) -> Any:
            assert all(batch.packed is packed for batch in batches)
            _seen += [batch.laid_out()[0].numel() for batch in batches]
            return _original(self, batches, *args, **kw)

        monkeypatch.setattr(TrainableModel, method, recording)
    with deployed(task, tmp_path / "run", "tiny-ppo-cpu", *PPO, *budget(45, packed)) as (_, roles):
        roles["rollout"].generate(0)
        roles["critic"].predict(0)
        roles["critic"].update()
    for seen in sizes.values():
        assert len(seen) > 4
        assert max(seen) <= 45
        # Full, not merely small.
        assert max(seen) > 30
