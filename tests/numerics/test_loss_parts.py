"""GAE with a lambda for each row, entropy, importance weights, rejection, KL and value loss, by first principles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from relax_cli.algorithms.gae import gae
from relax_cli.algorithms.kl import kl_estimate
from relax_cli.algorithms.surrogate import tis_weight
from relax_cli.algorithms.value_loss import clipped_value_loss
from relax_cli.backends.device import select_device
from relax_cli.backends.megatron import parallel
from relax_cli.backends.megatron.heads import log_probs_and_entropy
from relax_cli.config.schema import ParallelSection
from tests.support.estimators import LENGTH, ROWS, SEEDS, Variant, random_inputs, some
from tests.support.tiny_models import on_ranks

# -- GAE -------------------------------------------------------------------------------------------


@given(seed=SEEDS, length=st.sampled_from([1, 7, 127, 129, 300]), holes=st.booleans(), bootstrap=st.booleans())
@some
def test_a_rows_own_lambda_gives_the_bits_of_a_batch_with_it(
    seed: int, length: int, holes: bool, bootstrap: bool
) -> None:
    g = torch.Generator().manual_seed(seed)
    rewards_BT, values_BT = torch.randn(2, 4, length, generator=g)
    mask_BT = torch.arange(length) < torch.randint(0, length + 1, (4, 1), generator=g)
    if holes:
        mask_BT &= torch.rand(4, length, generator=g) < 0.6
    end_B = torch.randn(4, generator=g) if bootstrap else None
    lam_B = torch.tensor([0.0, 0.31, 0.95, 1.0], dtype=torch.float64)
    mixed = gae(rewards_BT, values_BT, mask_BT, gamma=0.99, lam=lam_B, bootstrap=end_B)
    for b, lam in enumerate(lam_B.tolist()):
        alone = gae(rewards_BT, values_BT, mask_BT, gamma=0.99, lam=lam, bootstrap=end_B)
        assert all(torch.equal(x_BT[b], y_BT[b]) for x_BT, y_BT in zip(mixed, alone, strict=True))


# -- entropy ---------------------------------------------------------------------------------------

TOKENS = (0, 7, 3, 4, 6, 1)


def logits_NV() -> Tensor:
    """Ordinary ones, nearly certain ones, far from zero, equal ones."""
    g = torch.Generator().manual_seed(3)
    rows = [torch.randn(8, generator=g), 4 * torch.randn(8, generator=g), torch.full((8,), -2.0)]
    certain = torch.zeros(8)
    certain[4] = 60.0
    return torch.stack([*rows, certain, torch.randn(8, generator=g) + 1000.0, torch.randn(8, generator=g) - 1000.0])


def entropy_run(rank: int, ranks: int, port: int) -> dict[str, np.ndarray]:
    """Values and gradients on the vocabulary slice of `rank`."""
    layout = ParallelSection(tensor_model_parallel_size=ranks)
    parallel.initialize(layout, select_device("cpu"), seed=1, rank=rank, ranks=ranks, port=port)
    slice_NV = logits_NV().chunk(ranks, dim=-1)[rank].clone().requires_grad_()
    log_probs_N, entropy_N = log_probs_and_entropy(slice_NV, torch.tensor(TOKENS), entropy_grad=True)
    weight_N = torch.linspace(0.5, 2.0, len(TOKENS))
    results = {"log_probs": log_probs_N, "entropy": entropy_N}
    for name, value_N in tuple(results.items()):
        (results[f"{name} gradient"],) = torch.autograd.grad((weight_N * value_N).sum(), slice_NV, retain_graph=True)
    _, without = log_probs_and_entropy(slice_NV, torch.tensor(TOKENS), entropy_grad=False)
    results |= {"without gradient": without, "has a gradient": torch.tensor(without.requires_grad)}
    if ranks > 1:
        parallel.shutdown()
    return {name: value.detach().numpy() for name, value in results.items()}


def float64_entropy() -> dict[str, np.ndarray]:
    wide_NV = logits_NV().double().requires_grad_()
    p_NV = wide_NV.softmax(-1)
    results = {
        "log_probs": p_NV.log().gather(-1, torch.tensor(TOKENS)[:, None]).squeeze(-1),
        "entropy": -(p_NV * p_NV.log()).sum(-1),
    }
    weight_N = torch.linspace(0.5, 2.0, len(TOKENS), dtype=torch.float64)
    for name, value_N in tuple(results.items()):
        (results[f"{name} gradient"],) = torch.autograd.grad((weight_N * value_N).sum(), wide_NV, retain_graph=True)
    return {name: value.detach().numpy() for name, value in results.items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_log_probs_and_entropy_equal_float64_at_any_tp_size(ranks: int) -> None:
    expected = float64_entropy()
    shares = [entropy_run(0, 1, 0)] if ranks == 1 else on_ranks(ranks, entropy_run)
    for share in shares:
        # Logits around 1000 have seven digits, four of them before the point.
        np.testing.assert_allclose(share["log_probs"], expected["log_probs"], rtol=1e-6, atol=2e-6)
        np.testing.assert_allclose(share["entropy"], expected["entropy"], rtol=1e-6, atol=2e-6)
        np.testing.assert_array_equal(share["without gradient"], share["entropy"])
        assert not share["has a gradient"]
    for name in ("log_probs gradient", "entropy gradient"):
        whole = np.concatenate([share[name] for share in shares], axis=-1)
        np.testing.assert_allclose(whole, expected[name], rtol=1e-5, atol=2e-6, err_msg=name)


# -- importance weights and rejection --------------------------------------------------------------


@given(seed=SEEDS, low=st.sampled_from([0.0, 0.5]), high=st.sampled_from([1.0, 2.0]))
@some
def test_tis_scales_each_tokens_gradient_by_its_truncated_weight(seed: int, low: float, high: float) -> None:
    inputs = random_inputs(seed, Variant.of("grpo").options, dtype=torch.float32)
    g = torch.Generator().manual_seed(seed + 1)
    rollout_BT = inputs.old_logp + torch.randn(ROWS, LENGTH, generator=g)
    weight_BT = tis_weight(inputs.old_logp, rollout_BT, low=low, high=high)
    loss_BT = Variant.of("grpo").estimator.load_policy_loss()(inputs).loss_per_token
    weighted_BT = torch.where(inputs.mask, loss_BT * torch.where(inputs.mask, weight_BT, 1.0), 0.0)
    (plain_BT,) = torch.autograd.grad(loss_BT.sum(), inputs.logp, retain_graph=True)
    (grad_BT,) = torch.autograd.grad(weighted_BT.sum(), inputs.logp)
    for b, t in inputs.mask.nonzero().tolist():
        ratio = math.exp(inputs.old_logp[b, t].item() - rollout_BT[b, t].item())
        assert weight_BT[b, t].item() == pytest.approx(min(max(ratio, low), high), rel=1e-5)
        assert grad_BT[b, t].item() == pytest.approx(plain_BT[b, t].item() * weight_BT[b, t].item(), rel=1e-5)
    assert not grad_BT[~inputs.mask].any()


def test_equal_log_probs_have_a_tis_weight_of_exactly_one() -> None:
    logp_BT = torch.tensor([[-0.1, -7.3, -30.0]])
    assert tis_weight(logp_BT, logp_BT, low=0.0, high=2.0).tolist() == [[1.0, 1.0, 1.0]]


# -- KL and value loss -----------------------------------------------------------------------------


@given(seed=SEEDS)
@some
def test_k1_and_k3_are_unbiased_and_none_but_k1_is_negative(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    logp_V, ref_V = torch.randn(2, 9, generator=g, dtype=torch.float64).log_softmax(-1)
    exact = (logp_V.exp() * (logp_V - ref_V)).sum().item()
    kinds = {kind: kl_estimate(logp_V[None], ref_V[None], kind)[0] for kind in ("k1", "k2", "k3", "low_var_kl")}
    for kind in ("k1", "k3"):
        assert (logp_V.exp() * kinds[kind]).sum().item() == pytest.approx(exact, rel=1e-9)
    assert all((kinds[kind] >= -1e-15).all() for kind in ("k2", "k3", "low_var_kl"))
    assert all(not kl_estimate(logp_V[None], logp_V[None], kind).any() for kind in kinds)


@given(seed=SEEDS)
@some
def test_the_value_loss_is_at_least_the_squared_error(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    old_BT, returns_BT = torch.randn(2, 3, 5, generator=g, dtype=torch.float64)
    values_BT = (old_BT + 0.5 * torch.randn(3, 5, generator=g, dtype=torch.float64)).requires_grad_()
    terms = clipped_value_loss(values_BT, old_BT, returns_BT, value_clip=0.2)
    columns = (x.flatten().tolist() for x in (terms.loss_per_token, values_BT, old_BT, returns_BT))
    for loss, v, old, r in zip(*columns, strict=True):
        assert loss == pytest.approx(max((min(max(v, old - 0.2), old + 0.2) - r) ** 2, (v - r) ** 2), rel=1e-12)
    plain_BT = (values_BT - returns_BT) ** 2
    assert (terms.loss_per_token >= plain_BT).all()
    near_BT = (values_BT - old_BT).abs() <= 0.2
    assert torch.equal(terms.metrics["value_clip_frac"] == 0, near_BT)
    assert torch.equal(terms.loss_per_token[near_BT], plain_BT[near_BT])
    assert torch.autograd.gradcheck(
        lambda x: clipped_value_loss(x, old_BT, returns_BT, value_clip=0.2).loss_per_token, (values_BT,)
    )
