"""How a batch is cut up changes neither loss nor gradient: padding, row order, micro-batches, accumulation, ranks.

First through the formulas alone (records of a plugin in, reduced loss out) against one padded float64 batch, then
through the real model. Relative means: to the largest gradient entry, and to the mean absolute loss of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from relax_cli import AdvantageInputs, LossInputs
from relax_cli.algorithms.gae import whiten
from relax_cli.algorithms.reduce import Mode, aggregate
from relax_cli.backends.megatron import parallel
from relax_cli.backends.megatron.trainer import MicroBatch, ModelOutput, TrainableModel
from relax_cli.roles.batching import plan_rows
from tests.support.estimators import OPTIONS, Variant, every_variant, row_loss
from tests.support.tiny_models import on_ranks, save_tiny_model
from tests.support.training_runs import RESPONSE_LENS, Run, build, samples

MODES: tuple[Mode, ...] = ("sample", "token")
TOLERANCE = 1e-6
GARBAGE = (float("nan"), float("inf"), -float("inf"))

Layout = list[list[int]]
"""Rows of each micro-batch."""


# -- formulas --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """Responses of different lengths, four of each prompt; row 3 has no trainable token."""

    lengths: list[int]
    logp_N: Tensor
    """All response tokens one after the other: the leaf that gradients are taken by."""
    old_logp: list[Tensor]
    values: list[Tensor]
    mask: list[Tensor]
    rewards_B: Tensor
    group_ids_B: Tensor

    @classmethod
    def random(cls, seed: int, rows: int = 12) -> Samples:
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 40, (rows,), generator=g).tolist()
        logp_N = -torch.rand(sum(lengths), generator=g) - 0.3
        noise_N = 0.3 * torch.randn(sum(lengths), generator=g)
        mask = [torch.rand(length, generator=g) < 0.8 for length in lengths]
        mask[3][:] = False
        return cls(
            lengths,
            logp_N,
            list((logp_N + noise_N).split(lengths)),
            [torch.randn(length, generator=g) for length in lengths],
            mask,
            torch.randn(rows, generator=g),
            torch.arange(rows) // 4,
        )

    @property
    def rows(self) -> range:
        return range(len(self.lengths))

    def denominator(self, mode: Mode) -> float:
        return float(len(self.lengths)) if mode == "sample" else float(sum(int(m.sum()) for m in self.mask))


def padded(values: list[Tensor], rows: list[int], width: int, fill: float) -> Tensor:
    """The rows `[B, width]`; the padding holds `fill`."""
    return torch.stack([pad(values[row], (0, width - values[row].numel()), value=fill) for row in rows])


def advantages_of(variant: Variant, batch: Samples, rows: list[int], extra: int, whitened: bool) -> list[Tensor]:
    """Advantages of every row, computed on one batch in the order `rows`; each cut back to its length."""
    width = max(batch.lengths) + extra
    mask_BT = padded(batch.mask, rows, width, 0)
    outputs = variant.estimator.load_advantages()(
        AdvantageInputs(
            rewards=batch.rewards_B[rows],
            mask=mask_BT,
            group_ids=batch.group_ids_B[rows],
            options=variant.options,
            values=padded(batch.values, rows, width, GARBAGE[extra % 3]) if variant.estimator.needs_critic else None,
        )
    )
    grid_BT = whiten(outputs.advantages, mask_BT) if whitened else outputs.advantages
    by_row = {row: grid_BT[i, : batch.lengths[row]] for i, row in enumerate(rows)}
    return [by_row[row] for row in batch.rows]


@dataclass(frozen=True)
class Result:
    loss: float
    gradient: Tensor
    scale: float
    """Loss if no two tokens cancelled each other."""


def run_formulas(
    variant: Variant,
    batch: Samples,
    layout: Layout,
    advantages: list[Tensor],
    mode: Mode,
    *,
    extra: int = 0,
    accumulate: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Result:
    """Loss and gradient of the micro-batches of `layout`, each padded to its own longest response plus `extra`.

    `accumulate` calls backward once for each micro-batch, as a trainer does, instead of once for their sum.
    """
    leaf_N = batch.logp_N.to(dtype, copy=True).requires_grad_()
    losses, scale = [], 0.0
    for rows in layout:
        logps = list(leaf_N.split(batch.lengths))
        width = max(batch.lengths[row] for row in rows) + extra
        fill = GARBAGE[extra % 3]
        inputs = LossInputs(
            logp=padded(logps, rows, width, fill),
            old_logp=padded(batch.old_logp, rows, width, fill).to(dtype),
            advantages=padded(advantages, rows, width, fill).to(dtype),
            mask=padded(batch.mask, rows, width, 0),
            options=variant.options,
        )
        terms = variant.estimator.load_policy_loss()(inputs)
        denominator = batch.denominator(mode)
        loss = aggregate(terms.loss_per_token, inputs.mask, mode=mode, denominator=denominator)
        scale += aggregate(terms.loss_per_token.abs(), inputs.mask, mode=mode, denominator=denominator).item()
        if accumulate:
            loss.backward()
        losses.append(loss.detach() if accumulate else loss)
    if not accumulate and losses:
        torch.stack(losses).sum().backward()
    gradient_N = torch.zeros_like(leaf_N) if leaf_N.grad is None else leaf_N.grad
    return Result(sum(loss.item() for loss in losses), gradient_N.double(), scale)


def assert_same(got: Result, expected: Result) -> None:
    assert abs(got.loss - expected.loss) <= TOLERANCE * expected.scale
    assert (got.gradient - expected.gradient).abs().max() <= TOLERANCE * expected.gradient.abs().max()


def in_one_batch(variant: Variant, batch: Samples, mode: Mode, *, whitened: bool = False) -> Result:
    """The reference: one padded float64 batch in row order."""
    every_row = list(batch.rows)
    advantages = advantages_of(variant, batch, every_row, 0, whitened)
    return run_formulas(variant, batch, [every_row], advantages, mode, dtype=torch.float64)


@every_variant
@given(data=st.data(), seed=st.integers(0, 2**31 - 1), mode=st.sampled_from(MODES), whitened=st.booleans())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_padding_order_and_micro_batches_change_nothing(
    variant: str, data: st.DataObject, seed: int, mode: Mode, whitened: bool
) -> None:
    one, batch = Variant.of(variant), Samples.random(seed)
    order = data.draw(st.permutations(batch.rows))
    size = data.draw(st.integers(1, len(order)))
    extra = data.draw(st.integers(0, 150))
    layout = [order[first : first + size] for first in range(0, len(order), size)]
    advantages = advantages_of(one, batch, order, extra, whitened)
    got = run_formulas(one, batch, layout, advantages, mode, extra=extra, accumulate=data.draw(st.booleans()))
    assert_same(got, in_one_batch(one, batch, mode, whitened=whitened))


@pytest.mark.parametrize("mode", MODES)
@every_variant
def test_the_float64_batch_is_the_sum_over_scalar_samples(variant: str, mode: Mode) -> None:
    one, batch = Variant.of(variant), Samples.random(1)
    advantages = advantages_of(one, batch, list(batch.rows), 0, whitened=False)
    total = 0.0
    for row, logp_T in enumerate(batch.logp_N.split(batch.lengths)):
        logps, olds, advs = (x[batch.mask[row]].tolist() for x in (logp_T, batch.old_logp[row], advantages[row]))
        loss = row_loss(variant, one.options, [a - b for a, b in zip(logps, olds, strict=True)], logps, advs)
        total += loss / max(len(logps), 1) if mode == "sample" else loss
    expected = total / batch.denominator(mode)
    assert in_one_batch(one, batch, mode).loss == pytest.approx(expected, rel=1e-12)


# -- the real model --------------------------------------------------------------------------------

EVERY_ROW = list(range(len(RESPONSE_LENS)))


def build_still_model(folder: Path, rank: int = 0, ranks: int = 1, port: int = 0) -> TrainableModel:
    """A policy that a step leaves where it is, to the bit, and whose gradient can be read afterwards."""
    model = build(Run("policy", folder, lr=1e-30), rank, ranks, port)
    model.optimizer.clip_grad = 0.0
    return model


def estimator_batches(layout: Layout, old_logp: dict[int, Tensor], *, garbage: bool = False) -> list[MicroBatch]:
    """Micro-batches with everything a policy loss needs; token 1 of row 2 is not trainable."""
    g = torch.Generator().manual_seed(4)
    advantages = [torch.randn(1, generator=g).expand(length) for length in RESPONSE_LENS]
    batches = []
    for rows in layout:
        batch = samples(rows)
        width = int(batch.response_lens_B.max())
        mask_BT = batch.fields["mask"].clone()
        if 2 in rows:
            mask_BT[rows.index(2), 1] = False
        tokens_BS = batch.tokens_BS.clone()
        if garbage:
            lengths_B1 = (batch.prompt_lens_B + batch.response_lens_B)[:, None]
            tokens_BS[torch.arange(tokens_BS.size(1)) >= lengths_B1] = 77
            tokens_BS = pad(tokens_BS, (0, 5), value=33)
        fill = float("nan") if garbage else 0.0
        fields = {
            "mask": mask_BT,
            "old_logp": padded([old_logp[row] for row in EVERY_ROW], rows, width, fill),
            "advantages": padded(advantages, rows, width, fill),
        }
        batches.append(replace(batch, tokens_BS=tokens_BS, fields=fields))
    return batches


def estimator_loss(
    variant: Variant, mode: Mode
) -> Callable[[ModelOutput, MicroBatch], tuple[Tensor, dict[str, Tensor]]]:
    trainable = sum(RESPONSE_LENS) - 1
    denominator = float(len(EVERY_ROW)) if mode == "sample" else float(trainable)

    def loss_fn(output: ModelOutput, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        mask_BT, old_BT = batch.fields["mask"], batch.fields["old_logp"]
        inputs = LossInputs(output.log_probs_BT, old_BT, batch.fields["advantages"], mask_BT, options=variant.options)
        terms = variant.estimator.load_policy_loss()(inputs)
        loss = aggregate(terms.loss_per_token, mask_BT, mode=mode, denominator=denominator)
        ratio_BT = torch.exp(torch.where(mask_BT, output.log_probs_BT.detach() - old_BT, 0.0))
        watched = terms.metrics | {"ratio": ratio_BT, "scale": terms.loss_per_token.detach().abs()}
        means = {name: torch.where(mask_BT, value, 0.0).sum() / trainable for name, value in watched.items()}
        return loss, means | {"loss": loss.detach()}

    return loss_fn


def take_step(
    model: TrainableModel, variant: str, mode: Mode, batches: list[MicroBatch]
) -> tuple[dict[str, float], Tensor]:
    """Metrics of one step over all ranks, and the gradient by all parameters."""
    result = model.train_step(batches, estimator_loss(Variant.of(variant), mode))
    assert not result.skipped
    gradient = torch.cat([p.main_grad.flatten() for p in model.model.parameters()]).double()
    assert result.grad_norm == pytest.approx(gradient.norm().item(), rel=1e-6)
    return result.metrics, gradient.clone()


def own_log_probs(model: TrainableModel, spread: float) -> dict[int, Tensor]:
    """What the model itself says, with noise: log-probabilities of a behaviour policy."""
    output_BT = model.forward([samples(EVERY_ROW)])[0].log_probs_BT
    g = torch.Generator().manual_seed(9)
    return {row: output_BT[row, :n] + spread * torch.randn(n, generator=g) for row, n in enumerate(RESPONSE_LENS)}


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    save_tiny_model(folder, "qwen3", tied=True)
    return folder


def assert_same_step(got: tuple[dict[str, float], Any], expected: tuple[dict[str, float], Tensor]) -> None:
    (metrics, gradient), (expected_metrics, expected_gradient) = got, expected
    assert abs(metrics["loss"] - expected_metrics["loss"]) <= TOLERANCE * expected_metrics["scale"]
    difference = (torch.as_tensor(gradient) - expected_gradient).norm()
    assert difference <= TOLERANCE * expected_gradient.norm()


@pytest.mark.parametrize("mode", MODES)
@every_variant
def test_loss_and_gradient_do_not_depend_on_how_a_batch_is_cut(variant: str, mode: Mode, policy_folder: Path) -> None:
    model = build_still_model(policy_folder)
    old_logp = own_log_probs(model, spread=0.3)
    expected = take_step(model, variant, mode, estimator_batches([EVERY_ROW], old_logp))
    assert expected[1].norm() > 0
    layouts: list[Layout] = [[[row] for row in EVERY_ROW], [[5, 3], [1, 4], [0, 2]], [[4, 2, 0, 5], [3, 1]]]
    for layout in layouts:
        batches = estimator_batches(layout, old_logp, garbage=True)
        assert_same_step(take_step(model, variant, mode, batches), expected)


@every_variant
def test_before_the_first_update_ratio_is_1_and_kl_0(variant: str, policy_folder: Path) -> None:
    """Old log-probabilities from a forward pass over one batch, the step over others: as the Actor has them."""
    model = build_still_model(policy_folder)
    batches = estimator_batches([[5, 3], [1, 4, 0, 2]], own_log_probs(model, spread=0.0))
    metrics, _ = take_step(model, variant, "token", batches)
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_frac"] == 0.0


# -- two data-parallel ranks -----------------------------------------------------------------------

CASES = [(variant, mode) for variant in OPTIONS for mode in MODES]
SPLITS: list[list[Layout]] = [[[[0, 5], [2]], [[4], [1, 3]]], [[[3, 1, 2], [4, 0, 5]], []]]
"""Micro-batches of each rank; the second time one rank has nothing to do."""


def work_of_a_rank(rank: int, ranks: int, port: int, folder: Path, old_logp: Any) -> dict[str, list[Any]]:
    """What all ranks together make of their shares: formulas under gloo, and steps of the model."""
    model = build_still_model(folder, rank, ranks, port)
    old = {row: torch.tensor(values) for row, values in old_logp.items()}
    steps = []
    for split in SPLITS:
        for variant, mode in CASES:
            metrics, gradient = take_step(model, variant, mode, estimator_batches(split[rank], old))
            steps.append((metrics, gradient.numpy()))
    batch, formulas = Samples.random(0), []
    rows = plan_rows(batch.lengths, 1, ranks, rank)[0]
    layout = [rows[first : first + 4] for first in range(0, len(rows), 4)]
    for variant, mode in CASES:
        one = Variant.of(variant)
        share = run_formulas(one, batch, layout, advantages_of(one, batch, list(batch.rows), 0, False), mode)
        total = torch.cat((torch.tensor([share.loss], dtype=torch.float64), share.gradient))
        dist.all_reduce(total, group=parallel.DATA.group)
        formulas.append(total.numpy())
    parallel.shutdown()
    return {"steps": steps, "formulas": formulas}


@pytest.fixture(scope="module")
def two_ranks(policy_folder: Path) -> list[dict[str, list[Any]]]:
    """`work_of_a_rank` of both ranks."""
    old_logp = own_log_probs(build_still_model(policy_folder), spread=0.3)
    as_lists = {row: values.tolist() for row, values in old_logp.items()}
    return on_ranks(2, work_of_a_rank, policy_folder, as_lists)


def test_two_data_parallel_ranks_have_one_loss_and_gradient(two_ranks: list[dict[str, list[Any]]]) -> None:
    for results in two_ranks:
        for (variant, mode), total in zip(CASES, results["formulas"], strict=True):
            expected = in_one_batch(Variant.of(variant), Samples.random(0), mode)
            assert_same(Result(total[0], torch.from_numpy(total[1:]), expected.scale), expected)


def test_two_data_parallel_models_have_one_loss_and_gradient(
    two_ranks: list[dict[str, list[Any]]], policy_folder: Path
) -> None:
    model = build_still_model(policy_folder)
    old_logp = own_log_probs(model, spread=0.3)
    expected = [take_step(model, v, m, estimator_batches([EVERY_ROW], old_logp)) for v, m in CASES]
    for results in two_ranks:
        for got, wanted in zip(results["steps"], expected * len(SPLITS), strict=True):
            assert_same_step(got, wanted)
