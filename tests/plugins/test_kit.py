"""The conformance kit catches planted faults: each is one edit of the package that `relax plugins new` writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from relax_cli.plugin.kit import advantages as testing_advantages
from relax_cli.plugin.kit import assert_conforms, check_estimator
from relax_cli.plugin.kit import loss as testing_loss
from relax_cli.plugin.kit import package as testing_package
from relax_cli.plugin.manager import load_plugins

BUILT_IN = ("ppo", "grpo", "gspo", "cispo", "sapo")
Install = Callable[..., str]
Relax = Callable[..., Result]

LOGP = "select(inputs.logp, inputs.mask)"
ADVANTAGES = "select(inputs.advantages.detach(), inputs.mask)"
BASELINE = "baseline_B = others_BB.double() @ rewards_B / others_BB.sum(dim=1).clamp(min=1)"
LOSS = "return LossTerms(-ratio_BT * advantages_BT, "
HOOK = "@hookimpl\ndef relax_check_config"

FAULTS: dict[str, tuple[str, str, set[str]]] = {
    "multiplies_loss_inputs": (
        LOGP,
        "inputs.logp * inputs.mask",
        {"policy_loss/masked-garbage", "policy_loss/all-masked"},
    ),
    "multiplies_advantages": (
        ADVANTAGES,
        "inputs.advantages.detach() * inputs.mask",
        {"policy_loss/masked-garbage", "policy_loss/all-masked"},
    ),
    "multiplies_kl": (
        "select(inputs.kl, inputs.mask).sum(dim=1)",
        "(inputs.kl * inputs.mask).sum(dim=1)",
        {"advantages/masked-garbage"},
    ),
    "multiplies_result": (
        f"    {LOSS}",
        f"    ratio_BT = (inputs.logp - inputs.old_logp).exp() * inputs.mask\n    {LOSS}",
        {"policy_loss/masked-garbage", "policy_loss/all-masked", "policy_loss/detached"},
    ),
    "batch_mean": (
        BASELINE,
        "baseline_B = rewards_B[trained_B].mean()",
        {"advantages/groups"},
    ),
    "untrained_in_baseline": (
        "trained_B = inputs.mask.any(dim=1)",
        "trained_B = torch.ones_like(inputs.mask[:, 0])",
        {"advantages/masked-garbage"},
    ),
    "wrong_sign_of_loss": (LOSS, LOSS.replace("-ratio", "ratio"), {"policy_loss/sign", "policy_loss/ratio-one"}),
    "wrong_sign_of_advantage": ("rewards_B - baseline_B", "baseline_B - rewards_B", {"advantages/sign"}),
    "advantages_not_detached": ("inputs.advantages.detach()", "inputs.advantages", {"policy_loss/detached"}),
    "old_logp_not_detached": ("inputs.old_logp.detach()", "inputs.old_logp", {"policy_loss/detached"}),
    "weight_not_detached": (
        LOSS,
        f"return LossTerms(-ratio_BT * advantages_BT * {LOGP}, ",
        {"policy_loss/ratio-one", "policy_loss/sign"},
    ),
    "advantages_with_gradient": ("@torch.no_grad()\n", "", {"advantages/detached"}),
    "torch_on_import": (
        "from pydantic import Field\n",
        "import torch\nfrom pydantic import Field\n",
        {"fresh-process"},
    ),
    "math_on_import": (HOOK, f"import relax_math_on_import.loss\n\n{HOOK}", {"fresh-process"}),
    "misspelt_hook": ("relax_check_config", "relax_chek_config", {"hooks"}),
    "unmarked_hook": (HOOK, HOOK.removeprefix("@hookimpl\n"), {"hooks"}),
    "name_taken": ('name="name_taken"', 'name="grpo"', {"name-clash"}),
    "option_taken": ("option_taken_max_ratio", "sapo_tau_pos", {"name-clash"}),
    "core_section": ('name="core_section"', 'name="batch"', {"loads"}),
    "raises_on_import": ("@hookimpl\ndef relax_estimators", "1 / 0\n\n@hookimpl\ndef relax_estimators", {"loads"}),
    "rows_in_pairs": (
        BASELINE,
        "baseline_B = rewards_B.view(-1, 2).flip(1).flatten()",
        {"advantages/row-order", "advantages/groups"},
    ),
    "loss_by_row_number": (
        LOSS,
        "return LossTerms(-ratio_BT * advantages_BT * torch.arange(1, len(ratio_BT) + 1)[:, None], ",
        {"policy_loss/row-order", "policy_loss/micro-batch", "policy_loss/ratio-one"},
    ),
    "loss_over_batch_mean": (
        LOSS,
        "return LossTerms(-ratio_BT / ratio_BT.mean() * advantages_BT, ",
        {"policy_loss/micro-batch", "policy_loss/ratio-one", "policy_loss/padding"},
    ),
    "loss_over_columns": (
        LOSS,
        "return LossTerms(-ratio_BT * advantages_BT / ratio_BT.shape[1], ",
        {"policy_loss/padding", "policy_loss/ratio-one"},
    ),
    "loss_reduced": (
        LOSS,
        "return LossTerms((-ratio_BT * advantages_BT).sum(), ",
        {f"policy_loss/{check}" for check in ("shape", "padding", "row-order", "micro-batch", "ratio-one")},
    ),
    "float32": ("ratio_BT = diff_BT", "ratio_BT = diff_BT.float()", {"policy_loss/gradient"}),
    "hidden_ratio": (
        "diff_BT.clamp(max=",
        "(2 * diff_BT - diff_BT.data).clamp(max=",
        {"policy_loss/gradient", "policy_loss/ratio-one"},
    ),
    "ones_in_masked_slots": (
        "inputs.mask.shape), inputs.mask)",
        "inputs.mask.shape), inputs.mask) + ~inputs.mask",
        {"advantages/shape", "advantages/all-masked"},
    ),
    "advantage_by_columns": (
        "rewards_B - baseline_B",
        "(rewards_B - baseline_B) / inputs.mask.shape[1]",
        {"advantages/padding"},
    ),
    "loss_in_place": (
        "    # Capped",
        "    inputs.old_logp.mul_(inputs.mask)\n    # Capped",
        # In place on a tensor that wants a gradient, torch raises.
        {"policy_loss/pure", "policy_loss/detached"},
    ),
    "in_place": ("trained_B = ", "inputs.rewards.add_(1)\n    trained_B = ", {"advantages/pure"}),
    "by_chance": (
        "advantages_B = torch.where(others",
        "rewards_B = rewards_B + 1e-6 * torch.randn(())\n    advantages_B = torch.where(others",
        {"advantages/pure"},
    ),
    "dangling": (':policy_loss"', ':policy_los"', {"references"}),
    "no_default": ("Field(10.0, gt=1,", "Field(gt=1,", {"loads"}),
    "no_flag": ("_max_ratio: float", "_max_ratio: float | str", {"loads"}),
    "no_help": (', description="cap of the importance ratio"', "", {"options"}),
}


def checks_of(relax: Relax, name: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code and results by check of `relax plugins check`."""
    done = relax("plugins", "check", name, "--format", "json")
    data = json.loads(done.stdout)
    assert data["ok"] is (done.exit_code == 0)
    return done.exit_code, {result["check"]: result for result in data["checks"]}


def failed(results: dict[str, dict[str, Any]]) -> set[str]:
    return {check for check, result in results.items() if result["status"] == "failed"}


# -- planted faults --------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_and_explained(relax: Relax, install: Install, fault: str) -> None:
    old, new, expected = FAULTS[fault]
    code, results = checks_of(relax, install(fault, old, new))
    assert code == 1
    assert failed(results) == expected
    for check in expected:
        assert all(finding["message"] and finding["fix"] for finding in results[check]["findings"])


def test_every_rule_has_a_fault_that_breaks_it() -> None:
    rules = {f"advantages/{check}" for check in testing_advantages.CHECKS}
    rules |= {f"policy_loss/{check}" for check in testing_loss.CHECKS}
    # Only an estimator with a critic is checked row by row; it has a test below.
    rules -= {"advantages/row-by-row"}
    assert set().union(*(broken for _, _, broken in FAULTS.values())) == rules | {*testing_package.CHECKS, "references"}


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_estimator_keeps_every_rule(relax: Relax, name: str) -> None:
    code, results = checks_of(relax, name)
    assert failed(results) == set()
    assert code == 0
    unused = {"advantages/groups"} if name == "ppo" else {"advantages/row-by-row"}
    assert {check for check, result in results.items() if result["status"] == "skipped"} == unused


def test_the_new_package_keeps_every_rule(relax: Relax, install: Install) -> None:
    code, results = checks_of(relax, install("rloo"))
    assert (code, failed(results)) == (0, set())
    assert_conforms("rloo")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ppo", {"gamma": 0.99, "lambd": 0.9, "eps_clip_high": 0.28, "eps_clip_c": 3.0}),
        ("grpo", {"disable_grpo_std_normalization": True, "eps_clip_c": 1.5}),
        ("gspo", {"eps_clip": 3e-4, "eps_clip_high": 4e-4}),
        ("cispo", {"cispo_by_sign": True}),
        ("cispo", {"eps_clip": 1.0, "eps_clip_high": 4.0}),
        ("sapo", {"sapo_tau_pos": 0.5, "sapo_tau_neg": 3.0}),
    ],
)
def test_a_built_in_estimator_passes_with_other_options(name: str, options: dict[str, Any]) -> None:
    estimator = load_plugins().estimator(name)
    results = check_estimator(estimator, estimator.options(**options))
    assert [result for result in results if result.status == "failed"] == []


def test_a_documented_difference_of_the_gradient_passes(relax: Relax, install: Install) -> None:
    double = LOSS.replace("-ratio", "-2 * ratio")
    assert failed(checks_of(relax, install("doubled", LOSS, double))[1]) == {"policy_loss/ratio-one"}
    said = "needs_groups=True, ratio_one_is_policy_gradient=False"
    code, results = checks_of(relax, install("doubled_and_said", "needs_groups=True", said))
    assert code == 0
    assert results["policy_loss/ratio-one"]["status"] == "skipped"


def test_returns_that_depend_on_other_rows_are_caught() -> None:
    from relax_cli.plugin.kit.advantages import row_by_row
    from relax_cli.plugin.kit.cases import subject_of

    subject = subject_of(load_plugins().estimator("ppo"))
    assert row_by_row(subject) == []

    def whitened(inputs: Any) -> Any:
        outputs = subject.advantages(inputs)
        return type(outputs)(outputs.advantages - outputs.advantages.mean(), outputs.returns)

    (finding,) = row_by_row(type(subject)(subject.estimator, whitened, subject.policy_loss, subject.options))
    assert finding.message.startswith("advantages of row 0")


def test_a_wrong_backward_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from relax_cli.plugin.kit.cases import subject_of
    from relax_cli.plugin.kit.loss import gradient

    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x.exp())
            return x.exp()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return 1.01 * grad * ctx.saved_tensors[0]

    subject = subject_of(load_plugins().estimator("grpo"))
    assert gradient(subject) == []
    monkeypatch.setattr("relax_cli.algorithms.surrogate.torch.exp", Exp.apply)
    (finding,) = gradient(subject)
    assert "finite differences give" in finding.message


def test_assert_conforms_lists_every_finding_with_its_fix(install: Install) -> None:
    name = install("flipped", LOSS, LOSS.replace("-ratio", "ratio"))
    with pytest.raises(AssertionError, match="flipped breaks 2 rules") as caught:
        assert_conforms(name)
    assert "policy_loss/sign: " in str(caught.value)
    assert "  fix: the loss is minimised" in str(caught.value)


def test_checking_a_broken_plugin_says_why_and_skips_the_rest(relax: Relax, install: Install) -> None:
    code, results = checks_of(relax, install("sick", "from pydantic", "import no_such_module\nfrom pydantic"))
    assert code == 1
    assert "no_such_module" in results["loads"]["findings"][0]["message"]
    assert {check for check, result in results.items() if result["status"] == "skipped"} == {
        "fresh-process",
        "options",
        "name-clash",
    }


def test_an_exception_of_the_plugin_is_a_finding_with_its_line(relax: Relax, install: Install) -> None:
    name = install("raising", "    # Capped", "    raise KeyError('oops')\n    # Capped")
    code, results = checks_of(relax, name)
    assert code == 1
    message = results["policy_loss/sign"]["findings"][0]["message"]
    assert message.startswith("raised KeyError: 'oops'")
    file, line = message.split("(")[1].removesuffix(")").split(":")
    assert "raise KeyError('oops')" in Path(file).read_text().splitlines()[int(line) - 1]


def test_the_table_ends_with_the_findings_and_a_verdict(relax: Relax, install: Install) -> None:
    done = relax("plugins", "check", install("upside_down", "rewards_B - baseline_B", "baseline_B - rewards_B"))
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["check", "of", "status", "rule"]
    assert "advantages/sign of upside_down: 1 more reward takes the advantage" in done.stdout
    assert lines[-1] == "upside_down breaks 1 of 26 rules"
    good = relax("plugins", "check", "grpo")
    assert good.stdout.splitlines()[-1] == "grpo keeps all 26 rules that apply"
