"""Every hand-computed number of `vectors/*.json`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import relax_cispo
import relax_gspo
import relax_ppo
import relax_sapo
import torch
from relax_ppo.advantages import advantages as ppo_advantages
from torch import Tensor

from relax_cli import AdvantageInputs, LossInputs, LossTerms
from relax_cli.algorithms.gae import gae, score_on_last_token, whiten
from relax_cli.algorithms.groups import group_advantages
from relax_cli.algorithms.kl import kl_estimate
from relax_cli.algorithms.reduce import aggregate
from relax_cli.algorithms.surrogate import ppo_clip
from relax_cli.algorithms.value_loss import clipped_value_loss

VECTORS = Path(__file__).parent / "vectors"


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((VECTORS / f"{name}.json").read_text())
    return content


def tensor(values: list[float | None]) -> Tensor:
    """In the files null stands for NaN."""
    return torch.tensor([math.nan if value is None else float(value) for value in values])


def row(values: list[float | None]) -> Tensor:
    return tensor(values)[None]


def assert_close(got: Tensor, expected: list[float | None] | float, tol: float = 1e-6) -> None:
    expected_tensor = tensor(expected) if isinstance(expected, list) else torch.tensor(float(expected))
    torch.testing.assert_close(got.detach(), expected_tensor, rtol=0.0, atol=tol)


def case_id(case: dict[str, Any]) -> str:
    if "id" in case:
        return str(case["id"])
    return " ".join(f"{key}={value}" for key, value in case.items() if not isinstance(value, dict))


@pytest.mark.parametrize("case", load("gae")["cases"], ids=case_id)
def test_gae(case: dict[str, Any]) -> None:
    mask_BT, values_BT = row(case["mask"]), row(case["values"])
    if "rewards" in case:
        rewards_BT = row(case["rewards"])
    else:
        rewards_BT = score_on_last_token(torch.tensor([float(case["score"])]), mask_BT)
    if "kl" in case:
        rewards_BT = rewards_BT - case["kl_coef"] * row(case["kl"])
    advantages_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, gamma=case["gamma"], lam=case["lam"])
    assert_close(advantages_BT[0], case["advantages"], case.get("tol", 1e-6))
    if "returns" in case:
        assert_close(returns_BT[0], case["returns"], case.get("tol", 1e-6))


@pytest.mark.parametrize("case", [case for case in load("gae")["cases"] if "score" in case], ids=case_id)
def test_gae_through_the_ppo_plugin(case: dict[str, Any]) -> None:
    inputs = AdvantageInputs(
        rewards=torch.tensor([float(case["score"])]),
        mask=row(case["mask"]).bool(),
        group_ids=torch.tensor([0]),
        options=relax_ppo.PpoOptions(gamma=case["gamma"], lambd=case["lam"]),
        values=row(case["values"]),
        kl=case["kl_coef"] * row(case["kl"]) if "kl" in case else None,
    )
    assert_close(ppo_advantages(inputs).advantages[0], case["advantages"])


@pytest.mark.parametrize("case", load("groups")["cases"], ids=case_id)
def test_group_advantages(case: dict[str, Any]) -> None:
    got_B = group_advantages(
        tensor(case["rewards"]),
        torch.tensor(case["groups"]),
        trainable=torch.ones(len(case["rewards"]), dtype=torch.bool),
        use_std=case["use_std"],
    )
    assert_close(got_B, case["advantages"], case.get("tol", 1e-6))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_kl(kind: str) -> None:
    cases = [case for case in load("kl")["cases"] if kind in case]
    assert cases
    for case in cases:
        log_ratio = tensor(case["L"])
        assert_close(kl_estimate(log_ratio - 1.0, torch.full_like(log_ratio, -1.0), kind), case[kind])


def one_token(case: dict[str, Any], options: Any) -> LossInputs:
    logp = float(case.get("logp", -1.0))
    return LossInputs(
        logp=torch.tensor([[logp]]),
        old_logp=torch.tensor([[logp - math.log(case["ratio"])]]),
        advantages=torch.tensor([[float(case["advantage"])]]),
        mask=torch.tensor([[True]]),
        options=options,
    )


def check_policy_case(terms: LossTerms, case: dict[str, Any]) -> None:
    # Ratios are made from logarithms in float32: their error grows with the loss.
    tol = case.get("tol", 1e-6 * max(1.0, abs(case["loss"])))
    assert_close(terms.loss_per_token[0], [case["loss"]], tol)
    assert_close(terms.metrics["clip_frac"][0], [case["clip_frac"]])


@pytest.mark.parametrize("case", load("policy_losses")["ppo_clip"], ids=case_id)
def test_ppo_clip(case: dict[str, Any]) -> None:
    options = relax_ppo.PpoOptions(eps_clip_c=case.get("eps_clip_c"))
    check_policy_case(relax_ppo.policy_loss(one_token(case, options)), case)


@pytest.mark.parametrize("case", load("policy_losses")["sapo"], ids=case_id)
def test_sapo(case: dict[str, Any]) -> None:
    check_policy_case(relax_sapo.policy_loss(one_token(case, relax_sapo.SapoOptions())), case)


@pytest.mark.parametrize("case", load("policy_losses")["cispo"], ids=case_id)
def test_cispo(case: dict[str, Any]) -> None:
    check_policy_case(relax_cispo.policy_loss(one_token(case, relax_cispo.CispoOptions(cispo_by_sign=True))), case)


def test_ppo_with_nan_in_a_masked_slot() -> None:
    case = load("policy_losses")["ppo_masked_nan"]
    logp_BT = row(case["logp"]).requires_grad_()
    terms = ppo_clip(logp_BT, row(case["old"]), row(case["advantages"]), row(case["mask"]), eps_clip=0.2)
    loss = terms.loss_per_token.sum()
    loss.backward()
    assert_close(loss, case["loss"])
    assert logp_BT.grad is not None
    assert_close(logp_BT.grad[0], case["grad"])


@pytest.mark.parametrize("case", load("policy_losses")["gspo_ratio"], ids=case_id)
def test_gspo_uses_one_ratio_for_the_sequence(case: dict[str, Any]) -> None:
    mask_BT = row(case["mask"]).bool()
    # With an advantage of -1 and a ratio above 1 nothing is clipped, so the loss is the ratio.
    inputs = LossInputs(
        logp=row(case["log_ratio"]) - 1,
        old_logp=torch.full(mask_BT.shape, -1.0),
        advantages=torch.full(mask_BT.shape, -1.0),
        mask=mask_BT,
        options=relax_gspo.GspoOptions(),
    )
    expected = [case["ratio"] if on else 0.0 for on in case["mask"]]
    assert_close(relax_gspo.policy_loss(inputs).loss_per_token[0], expected)


@pytest.mark.parametrize("case", load("value_loss")["cases"], ids=case_id)
def test_value_loss(case: dict[str, Any]) -> None:
    terms = clipped_value_loss(
        row([case["value"]]), row([case["old"]]), row([case["ret"]]), value_clip=case["value_clip"]
    )
    assert_close(terms.loss_per_token[0], [case["loss"]], 1e-6 * max(1.0, case["loss"]))
    assert_close(terms.metrics["value_clip_frac"][0], [case["clip_frac"]])


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("case", load("reduce")["cases"], ids=case_id)
def test_reduction_and_its_gradient(case: dict[str, Any], micro_batch: int) -> None:
    weight = torch.zeros((), requires_grad=True)
    mask_BT = torch.arange(max(case["lengths"]))[None] < torch.tensor(case["lengths"])[:, None]
    logp_BT = torch.nn.functional.logsigmoid(weight).expand(mask_BT.shape)
    advantages_BT = tensor(case["advantages"])[:, None].expand(mask_BT.shape)
    terms = ppo_clip(logp_BT, logp_BT.detach(), advantages_BT, mask_BT, eps_clip=0.2)
    denominator = float(len(case["lengths"]) if case["mode"] == "sample" else sum(case["lengths"]))
    shares = [
        aggregate(terms.loss_per_token[rows], mask_BT[rows], mode=case["mode"], denominator=denominator)
        for rows in torch.arange(len(mask_BT)).split(micro_batch)
    ]
    loss = torch.stack(shares).sum()
    loss.backward()
    assert_close(loss, case["loss"])
    assert weight.grad is not None
    assert_close(weight.grad, case["grad_w"])


@pytest.mark.parametrize("case", [case for case in load("whiten")["cases"] if "values" in case], ids=case_id)
def test_whitening(case: dict[str, Any]) -> None:
    got_BT = whiten(row(case["values"]), row(case["mask"]))
    assert_close(got_BT[0], case["whitened"], case.get("tol", 1e-6))


def test_whitening_of_all_shards_in_one_process() -> None:
    case = next(case for case in load("whiten")["cases"] if case["id"] == "shards")
    values = [value for shard in case["shards"] for value in shard]
    got_BT = whiten(row(values), torch.ones(1, len(values)))
    assert_close(got_BT[0], [value for shard in case["whitened"] for value in shard], case["tol"])


def test_no_vector_is_forgotten() -> None:
    """A new file or list of cases must get a test of its own."""
    lists = {f"{path.stem}.{key}" for path in VECTORS.glob("*.json") for key in load(path.stem)} - {
        f"{path.stem}.about" for path in VECTORS.glob("*.json")
    }
    tested = {f"{name}.cases" for name in ("gae", "groups", "kl", "reduce", "value_loss", "whiten")}
    tested |= {f"policy_losses.{k}" for k in ("ppo_clip", "ppo_masked_nan", "sapo", "cispo", "gspo_ratio")}
    assert lists == tested
