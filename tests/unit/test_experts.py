"""Rules about mixtures of experts: each refuses, its fix passes, and dense models are left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_cli.config.schema import Config
from tests.support.rules import problems_of

EP2 = {"expert_model_parallel_size": 2}
ON_TWO = {"resource": {"actor": (1, 2), "critic": (1, 2)}}
RULES = [
    ("moe-lora-targets", {"model": {"lora_rank": 4}}, {"model": {"lora_rank": 4, "lora_targets": ("linear_qkv",)}}),
    ("moe-lora-targets", {"critic": {"critic_lora_rank": 4}}, {}),
    ("moe-tensor-parallel", {"parallel": {"tensor_model_parallel_size": 2}}, {}),
    ("expert-parallel-size", {"parallel": EP2 | {"resource": {"actor": (1, 3)}}}, {"parallel": EP2 | ON_TWO}),
    ("expert-parallel-size", {"parallel": {"expert_model_parallel_size": 8, "resource": {"actor": (1, 8)}}}, {}),
    ("moe-transformer-engine", {"parallel": {"transformer_impl": "transformer_engine", "device": "cuda"}}, {}),
]


@pytest.mark.parametrize(("rule", "refused", "allowed"), RULES)
def test_what_experts_do_not_support_is_refused(
    tmp_path: Path, rule: str, refused: dict[str, Any], allowed: dict[str, Any]
) -> None:
    def found(family: str, given: dict[str, Any]) -> set[str]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "num_local_experts": 4}))
        model = {"hf_checkpoint": str(tmp_path)} | given.get("model", {})
        return {problem.id for problem in problems_of(Config.model_validate({**given, "model": model}))}

    assert rule in found("qwen3_moe", refused)
    assert rule not in found("qwen3_moe", allowed)
    assert (rule in found("qwen3", refused)) == (rule == "expert-parallel-size")
    assert rule not in found("qwen3", allowed | {"parallel": {}})


def test_a_loss_of_experts_does_nothing_without_them(tmp_path: Path) -> None:
    def found(family: str, coeff: float) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        config = {"model": {"hf_checkpoint": str(tmp_path)}, "parallel": {"moe_aux_loss_coeff": coeff}}
        problems = problems_of(Config.model_validate(config))
        return [problem.severity for problem in problems if problem.id == "moe-option-unused"]

    assert found("qwen3", 0.01) == ["warning"]
    assert found("qwen3", 0) == found("qwen3_moe", 0.01) == []
