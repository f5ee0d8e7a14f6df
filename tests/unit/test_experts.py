"""Rules about mixtures of experts: each refuses, its fix passes, and dense models are left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_cli.config.schema import Config
from relax_cli.models.spec import MoeSpec, read_spec
from relax_cli.preflight.memory.estimate import checkpoint_bytes, roles_memory
from relax_cli.preflight.memory.sizes import GRADIENTS, Lengths, RoleMemory
from tests.support.rules import problems_of
from tests.support.standins import QWEN3_30B

EP2 = {"expert_model_parallel_size": 2}
ON_TWO = {"resource": {"actor": (1, 2), "critic": (1, 2)}}
RULES = [
    ("moe-lora-targets", {"model": {"lora_rank": 4}}, {"model": {"lora_rank": 4, "lora_targets": ("linear_qkv",)}}),
    ("moe-lora-targets", {"critic": {"critic_lora_rank": 4}}, {}),
    (
        "moe-tensor-parallel",
        {"parallel": {"tensor_model_parallel_size": 2}},
        {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
    ),
    (
        "expert-parallel-size",
        {"parallel": EP2 | {"resource": {"actor": (1, 2)}, "pipeline_model_parallel_size": 2}},
        {"parallel": EP2 | {"resource": {"actor": (1, 4)}, "pipeline_model_parallel_size": 2}},
    ),
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


def test_ranks_keep_their_share_of_the_experts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    spec = read_spec(tmp_path)
    assert isinstance(spec, MoeSpec)
    each, layers = 3 * 2048 * 768, 48
    assert spec.expert_parameters == 128 * layers * each
    assert spec.active_parameters == spec.parameters - 120 * layers * each == 3_353_032_704

    def memory(**parallel: Any) -> tuple[Config, RoleMemory]:
        layout = {"device": "cuda", "resource": {"actor": (1, 8)}} | parallel
        config = Config.model_validate({"parallel": layout, "optimizer": {"use_distributed_optimizer": True}})
        return config, roles_memory(config, ("actor",), spec, Lengths(100, 100))[0]

    (whole, alone), (split, shared) = memory(), memory(expert_model_parallel_size=8)
    here = spec.parameters - 112 * layers * each
    assert (alone.resident["weights"], alone.resident[GRADIENTS]) == (2 * spec.parameters, 4 * spec.parameters)
    assert (shared.resident["weights"], shared.resident[GRADIENTS]) == (2 * here, 4 * here)
    # Of every parameter one rank has the moments, however the experts are shared out.
    assert shared.resident["Adam moments"] == alone.resident["Adam moments"] == 8 * -(-spec.parameters // 8)
    # Tensor-parallel ranks have whole experts; all eight share out their moments, four those of half of the rest.
    _, halved = memory(expert_model_parallel_size=8, tensor_model_parallel_size=2, sequence_parallel=True)
    rest = spec.parameters_of_rank(2) - spec.expert_parameters
    assert halved.resident["weights"] == 2 * (rest + spec.expert_parameters // 8)
    assert halved.resident["Adam moments"] == 8 * (-(-rest // 4) + spec.expert_parameters // 8)
    assert checkpoint_bytes(split, spec) == checkpoint_bytes(whole, spec) == 14 * spec.parameters


def test_a_dense_model_has_no_routes_to_replay(tmp_path: Path) -> None:
    def found(family: str, replay: bool) -> set[str]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        config = {"model": {"hf_checkpoint": str(tmp_path)}, "parallel": {"router_replay": replay}}
        return {problem.id for problem in problems_of(Config.model_validate(config))}

    assert "router-replay-dense" in found("qwen3", True)
    assert "router-replay-dense" not in found("qwen3", False) | found("qwen3_moe", True)


@pytest.mark.parametrize("change", [{"mlp_only_layers": [3]}, {"decoder_sparse_step": 2}, {}])
def test_sglang_needs_experts_in_every_layer(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B | change))

    def found(engine: str) -> set[str]:
        given = {"model": {"hf_checkpoint": str(tmp_path)}, "rollout": {"rollout_engine": engine}}
        return {problem.id for problem in problems_of(Config.model_validate(given))}

    assert ("moe-sglang-dense-layers" in found("sglang")) == bool(change)
    assert "moe-sglang-dense-layers" not in found("embedded")
