"""Parameter counts, memory and disk, batch arithmetic and placement of a plan."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_cli.cli.checked_text import plan_lines
from relax_cli.config.schema import Config, ParallelSection
from relax_cli.errors import ConfigError
from relax_cli.models.spec import ModelSpec, read_spec
from relax_cli.plugin.graph import RoleSpec, ServiceGraph, base_graph
from relax_cli.preflight.inputs import RunInputs
from relax_cli.preflight.machine import Machine
from relax_cli.preflight.memory import estimate as memory
from relax_cli.preflight.memory.activations import Pass, logits_bytes
from relax_cli.preflight.memory.sizes import Lengths
from relax_cli.preflight.plan import build_plan, plan_dict
from tests.support.rules import machine_problems

QWEN3_4B = {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_8B = QWEN3_4B | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
QWEN25_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip

ROLES = {"actor": [1, 1], "critic": [1, 1], "rollout": [1, 1], "advantages": [1, 0]}
CRITIC = RoleSpec("critic", (), ("values",), uses_device=True)
ADVANTAGES = RoleSpec("advantages", ("values",), ("advantages",), uses_device=False)
GRAPH = base_graph().with_role(CRITIC).with_role(ADVANTAGES)
SPACIOUS = Machine(memory=1 << 40, gpus=8, free_disk=lambda _: 1 << 50, gpu_memory=lambda: 1 << 40, ray_address="")


def spec(folder: Path, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return read_spec(folder)


def config(**changes: Any) -> Config:
    values: dict[str, dict[str, Any]] = {
        "batch": {"num_rollout": 4},
        "parallel": {"resource": ROLES, "device": "cpu", "colocate": True},
    }
    for path, value in changes.items():
        section, _, key = path.partition("__")
        values.setdefault(section, {})[key] = value
    return Config.model_validate(values)


@pytest.mark.parametrize(
    ("facts", "policy"),
    [
        # 151936*2560 + 36*(2*2560*4096 + 2*2560*1024 + 3*2560*9728 + 2*2560 + 2*128) + 2560
        (QWEN3_4B, 4_022_468_096),
        # 2*151936*4096 + 36*(2*4096*4096 + 2*4096*1024 + 3*4096*12288 + 2*4096 + 2*128) + 4096
        (QWEN3_8B, 8_190_735_360),
        # 2*152064*3584 + 28*(2*3584*3584 + 2*3584*512 + 3584+2*512 + 3*3584*18944 + 2*3584) + 3584
        (QWEN25_7B, 7_615_616_512),
        # 2*128256*4096 + 32*(2*4096*4096 + 2*4096*1024 + 3*4096*14336 + 2*4096) + 4096
        (LLAMA3_8B, 8_030_261_248),
    ],
)
def test_parameters_of_known_models_are_exact(tmp_path: Path, facts: dict[str, Any], policy: int) -> None:
    found = spec(tmp_path, facts)
    assert found.parameters == policy
    head = 0 if found.tied else found.vocab_size * found.hidden_size
    assert found.value_parameters == policy - head + found.hidden_size + 1


def test_tensor_parallel_ranks_share_matrices_and_repeat_norms(tmp_path: Path) -> None:
    found = spec(tmp_path, LLAMA3_8B)
    norms = (2 * found.num_layers + 1) * found.hidden_size
    assert 4 * found.parameters_of_rank(4) == found.parameters + 3 * norms


@pytest.mark.parametrize(
    "change",
    [{"hidden_size": "4096"}, {"num_hidden_layers": True}, {"vocab_size": 0}, {"rope_scaling": {"type": "linear"}}],
)
def test_a_config_that_makes_no_sense_is_refused_in_four_parts(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        spec(tmp_path, LLAMA3_8B | change)
    assert caught.value.problems[0].id == "model-unsupported"


def test_training_state_takes_16_or_18_bytes_a_parameter(tmp_path: Path) -> None:
    found = spec(tmp_path, QWEN3_4B)
    for device, per_parameter in (("cpu", 16), ("cuda", 18)):
        (actor,) = memory.roles_memory(config(parallel__device=device), ("actor",), found, memory.Lengths(8, 8))
        assert actor.model_bytes == per_parameter * found.parameters


def test_activations_grow_with_the_micro_batch_not_the_batch(tmp_path: Path) -> None:
    found = spec(tmp_path, QWEN3_4B)

    def working(**changes: Any) -> int:
        (actor,) = memory.roles_memory(config(**changes), ("actor",), found, memory.Lengths(100, 100))
        return sum(actor.working.values())

    assert working(batch__micro_batch_size=8) == 2 * working(batch__micro_batch_size=4)
    assert working(batch__micro_batch_size=4, batch__rollout_batch_size=64) == working(batch__micro_batch_size=4)
    # No more samples than an optimizer step gives each data-parallel rank.
    ranks = {**ROLES, "actor": [1, 4]}
    few = {"batch__rollout_batch_size": 32, "batch__num_steps_per_rollout": 4, "parallel__resource": ranks}
    assert working(batch__micro_batch_size=32, **few) == working(batch__micro_batch_size=2)


def test_the_engine_cache_is_bounded_unless_a_row_needs_more(tmp_path: Path) -> None:
    found = spec(tmp_path, QWEN3_4B)
    one = memory.kv_cache_bytes(found, 1, 1000)
    assert one == 2 * 4 * 36 * 8 * 128 * 1000
    assert memory.engine_rows(found, 1000, 1000) == (1 << 30) // one
    assert memory.engine_rows(found, 2, 1000) == 2
    assert memory.engine_rows(found, 1000, 1_000_000) == 1


def test_the_engine_has_room_for_the_longest_of_evaluations(tmp_path: Path) -> None:
    found, seen = spec(tmp_path, QWEN3_4B), RunInputs(prompt_lens=(50,), longest_by_set={"b": (90, "b:1")})
    sets = {"eval__eval_prompt_data": ["a=a.jsonl", "b=b.jsonl"]}
    limits = {"rollout__rollout_max_prompt_len": 60, "rollout__rollout_max_response_len": 100}

    def cache(**changes: Any) -> int:
        settings = config(**limits, rollout__rollout_engine="embedded", **changes)
        lengths = seen.lengths_for(settings)
        (rollout,) = memory.roles_memory(settings, ("rollout",), found, lengths)
        rows = rollout.working["KV cache"] // memory.kv_cache_bytes(found, 1, lengths.generated)
        assert rollout.working["KV cache"] == memory.kv_cache_bytes(found, rows, lengths.generated)
        assert (lengths.prompt, lengths.response) == (60, 100)
        return lengths.generated

    assert cache() == cache(eval__eval_max_response_len=500) == 160, "there are no sets"
    assert cache(**sets) == 190, "the longest prompt of b"
    assert cache(**sets, eval__eval_max_response_len=50) == 160
    assert cache(**sets, eval__eval_max_response_len=500) == 590
    assert cache(**sets, eval__eval_sampling=["a:max_response_len=300"]) == 360
    assert cache(**sets, eval__eval_sampling=["a:nonsense"]) == 190


def test_a_checkpoint_has_weights_and_both_moments(tmp_path: Path) -> None:
    found = spec(tmp_path, QWEN3_4B)
    assert memory.checkpoint_bytes(config(checkpoint__save="a"), found) == 12 * found.parameters
    pair = config(checkpoint__save="a", critic__critic_save="c")
    assert memory.checkpoint_bytes(pair, found) == 12 * (found.parameters + found.value_parameters)
    adapted = config(checkpoint__save="a", critic__critic_save="c", model__lora_rank=4)
    adapters = memory.trained_parameters(adapted, found, "actor")
    assert 0 < adapters < found.parameters / 100
    assert memory.checkpoint_bytes(adapted, found) == 12 * (adapters + found.value_parameters)


def plan_of(settings: Config, facts: RunInputs, graph: ServiceGraph = GRAPH) -> dict[str, Any]:
    shown = plan_dict(build_plan(settings, graph.roles, facts, SPACIOUS, cores=2))
    assert json.loads(json.dumps(shown)) == shown
    return shown


def test_prompts_become_samples_become_optimizer_steps() -> None:
    settings = config(
        batch__rollout_batch_size=16, batch__n_samples_per_prompt=4, batch__global_batch_size=32,
        batch__num_rollout=None, batch__num_epoch=3, critic__num_critic_only_steps=5,
        critic__critic_updates_per_step=2, rollout__rollout_max_response_len=10,
    )  # fmt: skip
    steps = plan_of(settings, RunInputs(prompts=100, prompt_lens=(3, 7, 5)))["steps"]
    assert (steps["samples_per_rollout"], steps["steps_per_rollout"], steps["samples_per_step"]) == (64, 2, 32)
    # 3 passes over 100 prompts are 18 whole rollouts of 16.
    assert steps["rollouts"] == 18
    assert steps["optimizer_steps"] == {"critic": 18 * 2 * 2, "actor": (18 - 5) * 2}
    assert (steps["longest_prompt"], steps["most_tokens_per_rollout"]) == (7, 64 * 17)


def test_rollouts_are_unknown_where_the_data_were_not_read() -> None:
    steps = plan_of(config(batch__num_rollout=None, batch__num_epoch=1), RunInputs())["steps"]
    assert (steps["rollouts"], steps["optimizer_steps"]) == (None, {})


def test_roles_share_bundles_and_smaller_ones_leave_some_idle() -> None:
    shown = plan_of(config(parallel__resource={**ROLES, "actor": [1, 4], "rollout": [1, 2]}), RunInputs())
    placement = shown["placement"]
    assert (placement["bundles"], placement["logical_cpus"]) == (4, 4 + 1 + 2)
    assert placement["role_bundles"] == {"rollout": [0, 1], "critic": [0], "advantages": [], "actor": [0, 1, 2, 3]}
    assert placement["idle_bundles"] == {"rollout": 2, "critic": 3}
    assert [role["name"] for role in shown["roles"]] == ["rollout", "critic", "advantages", "actor"]
    assert shown["gpus"]["needed"] == 0


def test_gpus_are_those_of_the_largest_role(tmp_path: Path) -> None:
    roles = {"actor": [1, 8], "critic": [1, 8], "rollout": [1, 4], "advantages": [1, 0]}
    settings = config(parallel__resource=roles, parallel__device="cuda", parallel__tensor_model_parallel_size=2)
    facts = RunInputs(model=spec(tmp_path, QWEN3_4B))
    shown = plan_of(settings, facts)
    assert shown["gpus"]["needed"] == 8
    of_one = shown["memory"]["phases"]["bytes"]
    assert shown["memory"]["phases"]["of"] == "one GPU"
    half = facts.model.parameters_of_rank(2)  # type: ignore[union-attr]
    assert of_one["actor"] > 18 * half
    # 14 bytes a parameter: gradients are not kept.
    trained = half + facts.model.value_parameters_of_rank(2)  # type: ignore[union-attr]
    assert shown["memory"]["parked_on_host_bytes"] == 8 * 14 * trained
    assert shown["memory"]["gpu"]["gpus_of_a_node"] == 8


def test_a_run_in_one_process_needs_less_than_one_on_ray(tmp_path: Path) -> None:
    facts = RunInputs(model=spec(tmp_path, QWEN3_4B), prompt_lens=(8,))
    local, ray = (plan_of(config(parallel__launcher=launcher), facts)["memory"] for launcher in ("local", "ray"))
    assert local["peak_bytes"] < ray["peak_bytes"]


GB = 10**9


@pytest.mark.parametrize(
    ("machine", "changes", "ids"),
    [
        ({}, {}, []),
        # Actor and critic: 32 bytes for each of 4.02e9 parameters, rollout 4: about 145 GB.
        ({"memory": 100 * GB}, {}, ["memory-too-small"]),
        ({"memory": 150 * GB}, {}, ["memory-tight"]),
        ({"memory": 100 * GB, "ray_address": "auto"}, {}, []),
        # Parked: 14 bytes of each trained parameter and SGLang's weights, about 121 GB, and the libraries.
        ({"memory": 140 * GB}, {"parallel__device": "cuda"}, []),
        ({"memory": 100 * GB}, {"parallel__device": "cuda"}, ["host-memory-too-small"]),
        ({"memory": 100 * GB, "gpus": 0}, {"parallel__device": "cuda"}, ["no-cuda-device"]),
        ({"gpu_memory": lambda: 140 * GB}, {"parallel__device": "cuda"}, []),
        ({"gpu_memory": lambda: 60 * GB, "ray_address": "auto"}, {"parallel__device": "cuda"}, []),
        ({"gpu_memory": lambda: None}, {"parallel__device": "cuda"}, []),
        # Weights, gradients and optimizer take 72 GB, without them 24.
        ({"gpu_memory": lambda: 60 * GB}, {"parallel__device": "cuda"}, ["gpu-memory-too-small"] * 3),
        (
            {"gpu_memory": lambda: 60 * GB},
            {"parallel__device": "cuda", "optimizer__optimizer_cpu_offload": True, "batch__micro_batch_size": 1},
            [],
        ),
        (
            {"gpu_memory": lambda: 40 * GB},
            {"parallel__device": "cuda", "optimizer__optimizer_cpu_offload": True, "batch__micro_batch_size": 32},
            ["gpu-memory-tight"] * 2,
        ),
        (
            {"gpu_memory": lambda: 60 * GB},
            {
                "parallel__device": "cuda",
                "optimizer__optimizer_cpu_offload": True,
                "batch__micro_batch_size": 1,
                "sglang__sglang_mem_fraction_static": 0.95,
            },
            ["gpu-memory-tight"],
        ),
        (
            {"gpu_memory": lambda: 60 * GB},
            {
                "parallel__device": "cuda",
                "optimizer__optimizer_cpu_offload": True,
                "batch__micro_batch_size": 1,
                "sglang__sglang_mem_fraction_static": 0.1,
            },
            ["sglang-cache-too-small"],
        ),
        ({"gpus": 0}, {"parallel__device": "cuda"}, ["no-cuda-device"]),
        ({"gpus": 0, "ray_address": "auto"}, {"parallel__device": "cuda"}, []),
        ({"bf16_products": False}, {"parallel__cpu_matmul_precision": "bf16"}, ["no-bf16-products"]),
        ({"bf16_products": False, "ray_address": "auto"}, {"parallel__cpu_matmul_precision": "bf16"}, []),
        ({"bf16_products": True}, {"parallel__cpu_matmul_precision": "bf16"}, []),
        ({"free_disk": lambda _: 40 * GB}, {"checkpoint__save": "a"}, ["disk-too-small"]),
        ({"free_disk": lambda _: 40 * GB}, {}, []),
        ({"free_disk": lambda _: 100 * GB}, {"checkpoint__save": "a"}, []),
        (
            {"free_disk": lambda _: 100 * GB},
            {"checkpoint__save": "a", "checkpoint__save_interval": 1},
            ["disk-fills-up"],
        ),
        (
            {"free_disk": lambda _: 100 * GB},
            {"checkpoint__save": "a", "checkpoint__save_interval": 1, "checkpoint__keep_checkpoints": 1},
            [],
        ),
    ],
)
def test_what_a_machine_lacks(tmp_path: Path, machine: dict[str, Any], changes: dict[str, Any], ids: list[str]) -> None:
    facts = RunInputs(model=spec(tmp_path, QWEN3_4B), prompt_lens=(8,))
    found = machine_problems(config(**changes), facts, replace(SPACIOUS, **machine))
    assert [problem.id for problem in found] == ids
    assert all(problem.fix for problem in found)


def test_too_few_gpus_is_told_from_none(tmp_path: Path) -> None:
    roles = {"actor": [1, 9], "rollout": [1, 8]}
    settings = config(parallel__resource=roles, parallel__device="cuda")
    assert [p.id for p in machine_problems(settings, RunInputs(), SPACIOUS)] == ["too-few-gpus"]
    assert machine_problems(settings, RunInputs(), replace(SPACIOUS, gpus=9)) == []


def text_of(settings: Config, facts: RunInputs, machine: Machine) -> list[str]:
    lines = plan_lines(build_plan(settings, GRAPH.roles, facts, machine, cores=2))
    assert max(len(line) for line in lines) <= 80
    return lines


def joined(lines: list[str], start: str) -> str:
    """The paragraph that begins with `start`."""
    first = next(i for i, line in enumerate(lines) if line.startswith(start))
    rest = itertools.takewhile(lambda line: line.startswith("    "), lines[first + 1 :])
    return " ".join(line.strip() for line in [lines[first], *rest])


def test_the_text_names_the_phase_that_does_not_fit_and_a_fix(tmp_path: Path) -> None:
    settings = config(parallel__device="cuda", batch__micro_batch_size=1, sglang__sglang_mem_fraction_static=0.5)
    facts = RunInputs(model=spec(tmp_path, QWEN3_4B), prompt_lens=(8,))
    lines = text_of(settings, facts, replace(SPACIOUS, gpu_memory=lambda: 60 * GB))
    header = next(line for line in lines if line.startswith("  one GPU in phase"))
    assert header.split()[-2:] == ["60", "GB"]
    actor = next(line for line in lines if line.startswith("  actor  ") and "%" in line)
    assert int(actor.split()[-1].removesuffix("%")) > 100
    assert joined(lines, "  actor does not fit 60 GB").startswith(
        "actor does not fit 60 GB; lower first: --optimizer-cpu-offload; then --recompute-granularity full"
    )
    assert "22.0 GB" in joined(lines, "  SGLang's cache on 60 GB")
    assert "this machine has 1.1 TB" in joined(lines, "  host memory of a node of 1 GPU")
    assert not any("lower first" in line for line in text_of(settings, facts, SPACIOUS))


def test_the_text_shows_common_sizes_where_the_gpu_is_not_known(tmp_path: Path) -> None:
    settings = config(parallel__device="cuda", parallel__recompute_granularity="selective")
    facts = RunInputs(model=spec(tmp_path, QWEN3_4B), prompt_lens=(8,))
    lines = text_of(settings, facts, replace(SPACIOUS, gpus=0))
    assert any("of 80 GB  of 141 GB" in line for line in lines)
    assert any(line.startswith("  - selective recomputation of core_attn") for line in lines)
    assert not any("this machine has" in line for line in lines)


def test_the_text_of_a_cpu_run_has_one_peak(tmp_path: Path) -> None:
    lines = text_of(config(), RunInputs(model=spec(tmp_path, QWEN3_4B), prompt_lens=(8,)), SPACIOUS)
    assert any(line.startswith("  at their peaks: ") and "this machine has 1.1 TB" in line for line in lines)
    assert not any("GPU in phase" in line for line in lines)


def test_an_uneven_vocabulary_is_padded_and_the_plan_says_so(tmp_path: Path) -> None:
    odd = spec(tmp_path, QWEN3_4B | {"vocab_size": 151937})
    ranks = {"actor": [1, 2], "critic": [1, 2], "rollout": [1, 1], "advantages": [1, 0]}
    settings = config(parallel__resource=ranks, parallel__tensor_model_parallel_size=2)
    lines = text_of(settings, RunInputs(model=odd, prompt_lens=(8,)), SPACIOUS)
    assert "  - vocabulary of 151937, padded to 151938" in lines


def test_chunks_of_logits_lower_the_peak_of_the_actor_alone(tmp_path: Path) -> None:
    def logits(chunk: int | None) -> dict[str, int]:
        layout = ParallelSection(log_probs_chunk_size=chunk)
        work = Pass(2, Lengths(prompt=8, response=512))
        model = spec(tmp_path, QWEN3_4B)
        return {str(grad): logits_bytes(model, layout, work, entropy_grad=grad) for grad in (False, True)}

    assert logits(256) == {name: size // 4 for name, size in logits(None).items()}
    assert logits(5000) == logits(None)
