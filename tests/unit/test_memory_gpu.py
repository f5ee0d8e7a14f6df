"""The memory plan of runs on GPUs: recomputation, parallelism, offload, the share of SGLang, what to lower first."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from relax_cli.config.schema import Config
from relax_cli.models.hybrid import read_any_spec
from relax_cli.models.spec import ModelSpec
from relax_cli.preflight import machine
from relax_cli.preflight.memory import estimate as memory
from relax_cli.preflight.memory import gpu as memory_gpu
from relax_cli.preflight.memory.sizes import GRADIENTS, Lengths, RoleMemory
from tests.support.standins import QWEN3_4B, QWEN3_5_9B

LENGTHS = Lengths(1000, 3000)
TOKENS = 3999
ROLES = {"actor": [1, 8], "critic": [1, 8], "rollout": [1, 8], "advantages": [1, 0]}
GB = 10**9
NAMES = ("rollout", "critic", "advantages", "actor")


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    return read_any_spec(tmp_path)


def config(**changes: Any) -> Config:
    values: dict[str, dict[str, Any]] = {
        "batch": {"num_rollout": 4, "micro_batch_size": 1},
        "parallel": {"resource": ROLES, "device": "cuda", "colocate": True},
    }
    for path, value in changes.items():
        section, _, key = path.partition("__")
        values.setdefault(section, {})[key] = value
    return Config.model_validate(values)


def role(spec: ModelSpec, name: str = "actor", **changes: Any) -> RoleMemory:
    (found,) = memory.roles_memory(config(**changes), (name,), spec, LENGTHS)
    return found


def activations(spec: ModelSpec, **changes: Any) -> int:
    return role(spec, "critic", **changes).working["activations"]


FULL = {
    "parallel__recompute_granularity": "full",
    "parallel__recompute_method": "uniform",
    "parallel__recompute_num_layers": 1,
}


def test_full_recomputation_keeps_layer_inputs_and_one_layer(spec: ModelSpec) -> None:
    kept, whole = activations(spec, **FULL), activations(spec)
    in_flight = 2 * TOKENS * (4 * spec.ffn_hidden_size + 4 * spec.hidden_size)
    inputs = 2 * TOKENS * spec.num_layers * spec.hidden_size
    # Within the rounding of a thirty-sixth part.
    assert kept == pytest.approx(inputs + (whole - in_flight) / spec.num_layers + in_flight, abs=4)
    assert kept < whole / 5


def test_larger_chunks_keep_fewer_inputs_and_more_layers(spec: ModelSpec) -> None:
    one, six, all_layers = (activations(spec, **FULL | {"parallel__recompute_num_layers": n}) for n in (1, 6, 36))
    assert one < six < all_layers
    assert all_layers == activations(spec) + 2 * TOKENS * spec.hidden_size


def test_recomputing_some_layers_is_between_all_and_none(spec: ModelSpec) -> None:
    block = FULL | {"parallel__recompute_method": "block"}
    counts = [activations(spec, **block | {"parallel__recompute_num_layers": n}) for n in (1, 18, 36)]
    assert activations(spec) > counts[1] > counts[2] == activations(spec, **FULL)
    # One layer that is computed again saves nothing: it is there again when its turn comes.
    assert counts[0] == activations(spec) + 2 * TOKENS * spec.hidden_size


@pytest.mark.parametrize(
    ("modules", "saved"),
    [
        ((), 36 * TOKENS * (2 * 4096 + 1024)),
        (("core_attn",), 36 * TOKENS * (2 * 4096 + 1024)),
        (("mlp",), 3 * 9728 * (35 * TOKENS + 3000)),
        (("mlp", "core_attn"), 3 * 9728 * (35 * TOKENS + 3000) + 36 * TOKENS * (2 * 4096 + 1024)),
    ],
)
def test_selective_recomputation_drops_what_its_modules_keep(
    spec: ModelSpec, modules: tuple[str, ...], saved: int
) -> None:
    selective = {"parallel__recompute_granularity": "selective", "parallel__recompute_modules": modules}
    assert activations(spec) - activations(spec, **selective) == 2 * saved


def test_sequence_parallelism_splits_between_matrix_products(spec: ModelSpec) -> None:
    split = {"parallel__tensor_model_parallel_size": 4}
    without, with_it = activations(spec, **split), activations(spec, **split, parallel__sequence_parallel=True)
    states = 2 * (36 * TOKENS + 35 * TOKENS + 3000) + 2 * 3000
    assert without - with_it == 2 * states * (2560 - 2560 // 4)
    # Of the layer inputs that full recomputation keeps, a rank has its share only.
    full = activations(spec, **split, **FULL) - activations(spec, **split, **FULL, parallel__sequence_parallel=True)
    assert full > 2 * TOKENS * 36 * (2560 - 2560 // 4)


def test_a_token_budget_decides_the_samples_of_a_micro_batch(spec: ModelSpec) -> None:
    dynamic = {"batch__use_dynamic_batch_size": True, "batch__micro_batch_size": 7, "parallel__resource": {**ROLES,
               "actor": [1, 1], "critic": [1, 1]}}  # fmt: skip
    one, three = (activations(spec, **dynamic, batch__max_tokens_per_gpu=budget) for budget in (4000, 15999))
    assert one == activations(spec)
    assert three == 3 * one
    # Packed, the budget is filled whatever the lengths are.
    packed = activations(spec, **dynamic, batch__max_tokens_per_gpu=15999, batch__pack_sequences=True)
    assert packed == pytest.approx(3.99975 * one, rel=1e-4)


def test_moments_and_masters_are_split_over_data_parallel_ranks(spec: ModelSpec) -> None:
    split = {"parallel__tensor_model_parallel_size": 2}
    parameters = spec.parameters_of_rank(2)
    alone, shared = role(spec, **split), role(spec, **split, optimizer__use_distributed_optimizer=True)
    assert alone.model_bytes == 18 * parameters
    assert shared.model_bytes == 6 * parameters + 12 * -(-parameters // 4)
    assert shared.host == {"parked": shared.model_bytes - 4 * parameters}


def test_a_pipeline_stage_has_its_layers_for_several_batches(spec: ModelSpec) -> None:
    split: dict[str, Any] = {"parallel__pipeline_model_parallel_size": 4}
    matrix = spec.vocab_size * spec.hidden_size
    layers = spec.parameters - matrix - spec.hidden_size
    critic, actor = role(spec, "critic", **split), role(spec, **split, **FULL)
    # The first stage has the embedding, and its layers keep the activations of four micro-batches.
    assert critic.resident["weights"] == 2 * (layers // 4 + matrix)
    assert critic.working["activations"] == pytest.approx(activations(spec), rel=0.01)
    # Where those are computed again, the last needs more: the tied matrix again, the final norm and the logits.
    assert actor.resident["weights"] == 2 * (layers // 4 + matrix + spec.hidden_size)
    assert actor.working["logits"] == role(spec).working["logits"]
    uneven = role(spec, "critic", **split, parallel__decoder_first_pipeline_num_layers=3)
    assert uneven.resident["weights"] < critic.resident["weights"]
    recomputed = activations(spec, **split, **FULL)
    assert recomputed < activations(spec, **split) / 5
    fewer = role(spec, "critic", **split, batch__rollout_batch_size=2)
    assert fewer.working["activations"] < critic.working["activations"] / 3


def test_context_parallel_ranks_share_tokens_and_the_optimizer(spec: ModelSpec) -> None:
    split: dict[str, Any] = {"parallel__context_parallel_size": 2}
    chunked = {"parallel__log_probs_chunk_size": 500}
    whole, part = role(spec, **chunked), role(spec, **split, **chunked)
    assert part.resident == whole.resident
    assert part.working["activations"] == pytest.approx(whole.working["activations"] / 2, rel=0.05)
    # A quarter of a sample of 3,999 tokens is a piece, and the response of 3,000 fills three of them.
    assert role(spec, **split).working["logits"] * 3000 == role(spec).working["logits"] * (1000 + 1000)
    shared = {"optimizer__use_distributed_optimizer": True}
    assert role(spec, **split, **shared).resident == role(spec, **shared).resident
    dynamic = {**split, "batch__use_dynamic_batch_size": True, "batch__max_tokens_per_gpu": 4000}
    assert activations(spec, **dynamic) == pytest.approx(activations(spec), rel=0.05)


def test_adapters_alone_have_gradients_masters_and_moments(spec: ModelSpec) -> None:
    layers, hidden, ffn, queries, keys = 36, 2560, 9728, 4096, 1024
    qkv, fc2 = hidden + queries + 2 * keys, ffn + hidden
    chosen = {"model__lora_rank": 8, "model__lora_targets": ("linear_fc2", "linear_qkv")}
    adapters = layers * 8 * (qkv + fc2)
    assert role(spec, **chosen).model_bytes == 2 * spec.parameters + 18 * adapters
    assert role(spec, "critic", **chosen).model_bytes == 18 * spec.value_parameters
    critic = role(spec, "critic", critic__critic_lora_rank=8, model__lora_targets=("linear_qkv",))
    trained = layers * 8 * qkv + hidden + 1
    assert critic.model_bytes == 2 * spec.value_parameters + 2 * layers * 8 * qkv + 16 * trained
    half = role(spec, **chosen, parallel__tensor_model_parallel_size=2).resident[GRADIENTS]
    assert half == 4 * layers * 8 * (hidden + (queries + 2 * keys) // 2 + ffn // 2 + hidden)


def test_an_offloaded_optimizer_keeps_weights_on_the_gpu(spec: ModelSpec) -> None:
    found = role(spec, optimizer__optimizer_cpu_offload=True)
    assert found.resident == {"weights": 2 * spec.parameters, GRADIENTS: 4 * spec.parameters}
    # Master weight, gradient and two moments, fp32, all the time; the weights when the role sleeps.
    assert found.host == {"parked": 2 * spec.parameters, "optimizer": 16 * spec.parameters}
    on_cpu = role(spec, optimizer__optimizer_cpu_offload=True, parallel__device="cpu")
    assert on_cpu.model_bytes == (4 + 4 + 16) * spec.parameters
    assert on_cpu.host == {}


def test_a_copy_to_save_is_in_host_memory(spec: ModelSpec) -> None:
    saved = {"checkpoint__save": "actor", "checkpoint__async_save": True}
    for device, parameter in (("cuda", 2 + 12), ("cpu", 4 + 8)):
        on = {"parallel__device": device}
        without, found = role(spec, **on), role(spec, **on, **saved)
        copy = found.model_bytes + found.host_bytes - without.model_bytes - without.host_bytes
        assert copy == parameter * spec.parameters
        assert (found.host_bytes == without.host_bytes) == (device == "cpu")
    assert role(spec, checkpoint__async_save=True) == role(spec)


def gpu_plan(spec: ModelSpec, gpu: int | None = 80 * GB, gpus_here: int = 8, **changes: Any) -> memory_gpu.GpuMemory:
    settings = config(**changes)
    roles = memory.roles_memory(settings, NAMES, spec, LENGTHS)
    return memory_gpu.gpu_memory(settings, spec, roles, LENGTHS, gpu, gpus_here)


def needed(plan: memory_gpu.GpuMemory, phase: str) -> int:
    (found,) = (fit.needed for fit in plan.fits if fit.phase == phase)
    return found


def test_sglang_takes_its_fraction_and_caches_in_the_rest(spec: ModelSpec) -> None:
    plan = gpu_plan(spec, sglang__sglang_mem_fraction_static=0.5)
    sleeping = 2 * memory_gpu.CONTEXT_BYTES
    assert needed(plan, "rollout") == 40 * GB + sleeping + memory_gpu.SERVER_OVERHEAD
    (cache,) = plan.caches
    assert cache.size == 40 * GB - 2 * spec.parameters
    # Keys and values, bf16, 36 layers of 8 heads of 128.
    assert cache.sequences == cache.size // (2 * 2 * 36 * 8 * 128 * 4000)
    assert plan.wanted == 32 // 8


def test_servers_of_two_gpus_halve_weights_and_cache_of_each(spec: ModelSpec) -> None:
    one, two = (gpu_plan(spec, sglang__rollout_num_gpus_per_engine=n) for n in (1, 2))
    assert two.caches[0].size > one.caches[0].size
    assert two.caches[0].sequences > 2 * one.caches[0].sequences
    assert two.wanted == 2 * one.wanted


def test_linear_attention_keeps_a_state_per_sequence_and_no_keys(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_5_9B))
    hybrid = read_any_spec(tmp_path)
    plan = gpu_plan(hybrid, sglang__sglang_mem_fraction_static=0.6)
    weights = 2 * (hybrid.parameters + hybrid.untrained_parameters)
    assert plan.caches[0].size == 48 * GB - weights
    # 24 layers of 32 heads of 128 x 128 fp32, and a window of three tokens of 8192 channels.
    state = 24 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)
    assert hybrid.state_bytes == state
    assert plan.caches[0].sequences == plan.caches[0].size // (2 * 2 * 8 * 4 * 256 * 4000 + state)


def test_all_tokens_pass_the_last_layer_of_the_bridge(spec: ModelSpec) -> None:
    class Late(ModelSpec):
        answers_early = False

    late = Late(**vars(spec))
    prompts = TOKENS - LENGTHS.response
    assert activations(late) - activations(spec) == 2 * prompts * (2 * 2560 + 3 * 9728 + 2 * 2560)


def test_a_model_whose_weights_fill_the_fraction_has_no_cache(spec: ModelSpec) -> None:
    (cache,) = gpu_plan(spec, sglang__sglang_mem_fraction_static=0.05).caches
    assert cache.size < 0
    assert cache.sequences == 0


def test_a_server_that_never_sleeps_counts_in_every_phase(spec: ModelSpec) -> None:
    half = {"sglang__sglang_mem_fraction_static": 0.5}
    sleeps, stays = gpu_plan(spec, **half), gpu_plan(spec, **half, parallel__colocate=False)
    assert needed(stays, "rollout") == needed(sleeps, "rollout")
    for phase in ("critic", "actor", "publish weights"):
        assert needed(stays, phase) - needed(sleeps, phase) == 40 * GB + memory_gpu.SERVER_OVERHEAD
    # Asleep, it has nothing: weights are sent again.
    assert sleeps.host == stays.host
    assert gpu_plan(spec, **half, parallel__colocate=False, parallel__offload_rollout=True) == sleeps


def test_external_servers_take_nothing_of_our_gpus(spec: ModelSpec) -> None:
    plan = gpu_plan(spec, sglang__rollout_external=True)
    assert plan.caches == ()
    assert {fit.phase for fit in plan.fits} == {"critic", "actor"}


def test_publishing_needs_actor_and_server_weights_but_no_cache(spec: ModelSpec) -> None:
    plan = gpu_plan(spec, optimizer__optimizer_cpu_offload=True)
    bucket = 512 << 20
    assert needed(plan, "publish weights") == (
        6 * spec.parameters + 2 * spec.parameters + 3 * bucket + 3 * memory_gpu.CONTEXT_BYTES
    )


def test_an_unknown_gpu_is_shown_against_common_sizes(spec: ModelSpec) -> None:
    plan = gpu_plan(spec, gpu=None, gpus_here=0)
    assert {fit.gpu for fit in plan.fits} == {80 * GB, 141 * GB}
    assert [cache.gpu for cache in plan.caches] == [80 * GB, 141 * GB]
    assert plan.host_gpus == 8


def test_a_node_of_two_has_half_of_the_parked_roles(spec: ModelSpec) -> None:
    roles = {name: [1, 16] if counts[1] else counts for name, counts in ROLES.items()}
    one = gpu_plan(spec)
    of_two = gpu_plan(spec, parallel__resource=roles)
    assert (of_two.host, of_two.host_gpus) == (one.host, one.host_gpus)
    parked = 8 * 14 * (spec.parameters + spec.value_parameters)
    # Three processes on each GPU, and that of Advantages.
    assert one.host == parked + (3 * 8 + 1) * memory_gpu.HOST_BASE_BYTES


def test_what_to_lower_first_follows_what_the_memory_is_for(spec: ModelSpec) -> None:
    by_state = gpu_plan(spec, gpu=60 * GB).advice["actor"]
    assert by_state[:3] == (
        "--use-distributed-optimizer",
        "--optimizer-cpu-offload",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    )
    by_batch = gpu_plan(
        spec, gpu=60 * GB, batch__micro_batch_size=4, optimizer__optimizer_cpu_offload=True,
        parallel__tensor_model_parallel_size=2,
    ).advice["actor"]  # fmt: skip
    assert by_batch == (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--sequence-parallel",
        "--micro-batch-size 2",
        "--use-distributed-optimizer",
        "--tensor-model-parallel-size 4",
        "a lower --rollout-max-response-len",
    )


def test_only_tensor_parallel_sizes_the_heads_allow_are_offered(spec: ModelSpec) -> None:
    advice = gpu_plan(spec, gpu=10 * GB, parallel__tensor_model_parallel_size=8).advice
    assert not any("tensor-model-parallel" in option for options in advice.values() for option in options)


def test_a_budget_of_two_samples_is_lowered_to_one(spec: ModelSpec) -> None:
    dynamic = {"batch__use_dynamic_batch_size": True, "batch__max_tokens_per_gpu": 8000}
    assert "--max-tokens-per-gpu 4000" in gpu_plan(spec, gpu=10 * GB, **dynamic).advice["actor"]
    dynamic["batch__max_tokens_per_gpu"] = 4000
    assert not any("max-tokens" in option for option in gpu_plan(spec, gpu=10 * GB, **dynamic).advice["actor"])


def test_a_too_large_server_gets_a_smaller_fraction_or_more_gpus(spec: ModelSpec) -> None:
    offload = {"optimizer__optimizer_cpu_offload": True}
    advice = gpu_plan(spec, **offload, sglang__sglang_mem_fraction_static=0.97).advice
    assert advice == {"rollout": ("a lower --sglang-mem-fraction-static", "--rollout-num-gpus-per-engine 2")}
    assert gpu_plan(spec, **offload, sglang__sglang_mem_fraction_static=0.7).advice == {}
    # Left to itself, SGLang chooses what fits.
    assert "rollout" not in gpu_plan(spec, gpu=40 * GB, **offload).advice


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("81559\n81559\n", 81559 << 20), ("143771\n81559\n", 81559 << 20), ("[N/A]\n", None), ("", None)],
)
def test_nvidia_smi_says_how_large_the_smallest_gpu_is(
    monkeypatch: pytest.MonkeyPatch, answer: str, expected: int | None
) -> None:
    done = subprocess.CompletedProcess([], 0, stdout=answer)
    monkeypatch.setattr(machine.subprocess, "run", lambda *args, **kwargs: done)
    assert machine.smallest_gpu.__wrapped__() == expected


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 1)])
def test_without_nvidia_smi_the_size_is_unknown(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(machine.subprocess, "run", fail)
    assert machine.smallest_gpu.__wrapped__() is None


def test_logits_and_a_layer_computed_again_do_not_add_up(spec: ModelSpec) -> None:
    actor, critic = role(spec, "actor", **FULL).working, role(spec, "critic", **FULL).working
    assert actor["logits"] == 3 * 4 * 3000 * spec.vocab_size
    assert actor["activations"] < critic["activations"]
    chunked = role(spec, "actor", **FULL, parallel__log_probs_chunk_size=1).working
    assert chunked == critic
