"""Rules about layers and allocator of the training back end: each refuses, and lets the nearest valid one pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_cli.config.schema import (
    BatchSection,
    Config,
    CriticSection,
    ModelSection,
    ParallelSection,
    RolloutSection,
    SglangSection,
)
from relax_cli.preflight.inputs import RunInputs
from relax_cli.preflight.machine import Machine, allocator_settings
from tests.support.rules import WITH_GPUS, machine_problems, problems_of

FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}


def ids(config: Config) -> set[str]:
    return {problem.id for problem in problems_of(config, machine=WITH_GPUS)}


@pytest.mark.parametrize(
    ("refused", "allowed"),
    [
        ({"transformer_impl": "transformer_engine", "device": "cpu"}, {"transformer_impl": "local", "device": "cpu"}),
        ({"transformer_impl": "transformer_engine", "device": "cpu"}, {"transformer_impl": "auto", "device": "cpu"}),
        (
            {"transformer_impl": "transformer_engine", "device": "cpu"},
            {"transformer_impl": "transformer_engine", "device": "cuda"},
        ),
    ],
)
def test_transformer_engine_needs_cuda(refused: dict[str, Any], allowed: dict[str, Any]) -> None:
    rule = "transformer-engine-needs-cuda"
    assert rule in ids(Config(parallel=ParallelSection(**refused)))
    assert rule not in ids(Config(parallel=ParallelSection(**allowed)))


def test_chunks_of_recomputed_layers_are_whole(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 6}))
    model = ModelSection(hf_checkpoint=str(tmp_path))

    def found(**parallel: Any) -> set[str]:
        return ids(Config(model=model, parallel=ParallelSection(**parallel)))

    assert "recompute-layers" in found(**FULL, recompute_num_layers=4)
    assert "recompute-layers" in found(**FULL, recompute_num_layers=7)
    assert "recompute-layers" not in found(**FULL, recompute_num_layers=3)
    stages = {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 2}
    assert "recompute-layers" in found(**FULL, recompute_num_layers=3, **stages)
    assert "recompute-layers" not in found(**FULL, recompute_num_layers=2, **stages)
    assert "recompute-layers" not in found(**FULL | {"recompute_method": "block"}, recompute_num_layers=4)
    (tmp_path / "config.json").write_text("nonsense")
    assert "recompute-layers" not in found(**FULL, recompute_num_layers=4)


@pytest.mark.parametrize(
    ("stages", "layout", "counts", "fix"),
    [
        (2, {}, [3, 3], ""),
        (6, {}, [1] * 6, ""),
        (4, {}, [1] * 4, "--decoder-last-pipeline-num-layers 3"),
        (5, {}, [1] * 5, "--decoder-last-pipeline-num-layers 2"),
        (7, {}, [0] * 7, "--pipeline-model-parallel-size 6"),
        (2, {"first": 4}, [4, 2], ""),
        (3, {"first": 1, "last": 2}, [1, 3, 2], ""),
        (2, {"first": 1, "last": 2}, [1, 2], "--decoder-last-pipeline-num-layers 5"),
        (3, {"first": 3}, [3, 1, 1], "--decoder-last-pipeline-num-layers 1"),
        (2, {"last": 6}, [0, 6], "--decoder-last-pipeline-num-layers 3"),
        (
            2,
            {"first": 9},
            [9, 0],
            "--pipeline-model-parallel-size 2, and drop --decoder-first-pipeline-num-layers",
        ),
    ],
)
def test_layers_are_shared_out_among_pipeline_stages(
    stages: int, layout: dict[str, int], counts: list[int], fix: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 6}))
    single = {f"decoder_{which}_pipeline_num_layers": count for which, count in layout.items()}
    parallel = ParallelSection(pipeline_model_parallel_size=stages, **single)
    assert parallel.stage_layers(6) == counts
    config = Config(model=ModelSection(hf_checkpoint=str(tmp_path)), parallel=parallel)
    assert [p.fix for p in problems_of(config) if p.id == "pipeline-layers"] == [fix] * bool(fix)


def test_bridged_models_are_not_split_along_the_sequence(tmp_path: Path) -> None:
    def found(family: str, ranks: int, **others: int) -> set[str]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        layout = ParallelSection(sequence_parallel=True, tensor_model_parallel_size=ranks, **others)
        return ids(Config(model=ModelSection(hf_checkpoint=str(tmp_path)), parallel=layout))

    for rule, option in (
        ("bridge-pipeline", "pipeline_model_parallel_size"),
        ("bridge-context-parallel", "context_parallel_size"),
    ):
        assert rule in found("qwen3_5", 1, **{option: 2})
        assert rule not in found("qwen3", 1, **{option: 2})
    rule = "bridge-sequence-parallel"
    assert rule in found("qwen3_5", 2)
    assert rule not in found("qwen3_5", 1)
    assert rule not in found("qwen3", 2)


def test_bridged_models_take_no_chunks_of_logits(tmp_path: Path) -> None:
    def found(family: str, chunk: int | None) -> set[str]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        layout = ParallelSection(log_probs_chunk_size=chunk)
        return ids(Config(model=ModelSection(hf_checkpoint=str(tmp_path)), parallel=layout))

    rule = "bridge-log-probs-chunk"
    assert rule in found("qwen3_5", 1024)
    assert rule not in found("qwen3_5", None)
    assert rule not in found("qwen3", 1024)


def test_bridged_models_are_not_packed(tmp_path: Path) -> None:
    def found(family: str, packed: bool | None) -> set[str]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        batch = BatchSection(pack_sequences=packed)
        return ids(Config(model=ModelSection(hf_checkpoint=str(tmp_path)), batch=batch))

    rule = "bridge-pack-sequences"
    assert rule in found("qwen3_5", True)
    assert rule not in found("qwen3_5", None)
    assert rule not in found("qwen3", True)


@pytest.mark.parametrize(
    ("family", "ranks", "blamed"),
    [
        ("qwen3_5", {"model": {"lora_rank": 4}}, ["--lora-rank"]),
        ("qwen3_5", {"critic": {"critic_lora_rank": 4}}, ["--critic-lora-rank"]),
        ("qwen3_5", {}, []),
        ("qwen3", {"model": {"lora_rank": 4}}, []),
    ],
)
def test_bridged_models_have_no_adapters(
    family: str, ranks: dict[str, dict[str, int]], blamed: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    model = ModelSection(hf_checkpoint=str(tmp_path), **ranks.get("model", {}))
    config = Config(model=model, critic=CriticSection(**ranks.get("critic", {})))
    found = [problem for problem in problems_of(config, machine=WITH_GPUS) if problem.id == "lora-bridge"]
    assert [problem.option for problem in found] == blamed


def test_sglang_does_not_go_with_expandable_segments() -> None:
    machine = Machine(memory=1 << 40, gpus=8, free_disk=lambda _: None, ray_address="")

    def found(allocator: str, device: str = "cuda", **sglang: Any) -> set[str]:
        config = Config(
            parallel=ParallelSection(device=device),  # type: ignore[arg-type]
            rollout=RolloutSection(rollout_engine="sglang"),
            sglang=SglangSection(**sglang),
        )
        return {problem.id for problem in machine_problems(config, RunInputs(), replace(machine, allocator=allocator))}

    rule = "expandable-segments"
    assert rule in found("expandable_segments:True")
    assert rule in found("max_split_size_mb:512, expandable_segments: true")
    assert rule not in found("expandable_segments:False")
    assert rule not in found("")
    assert rule not in found("expandable_segments:True", rollout_external=True, rollout_external_engine_addrs=("a:1",))


def test_settings_of_the_allocator_have_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert allocator_settings() == ""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert allocator_settings() == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert allocator_settings() == "max_split_size_mb:64,expandable_segments:True"
