"""Memory of runs on GPUs: SGLang's share, what each phase needs of one GPU, host memory of a node, what to lower first.
None of the constants here has been measured on a GPU yet; all are shown with the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relax_cli.config.placement import shared_bundles
from relax_cli.config.schema import Config, ParallelSection, SglangSection
from relax_cli.models.spec import ModelSpec
from relax_cli.preflight.memory.sizes import GIB, GRADIENTS, Lengths, RoleMemory, in_bytes

COMMON_GPUS = (80 * 10**9, 141 * 10**9)
"""Sizes that a plan is shown against where the GPU is not known (H100, H200)."""
DEFAULT_FRACTION = 0.85
"""SGLang's own `mem_fraction_static` is between 0.8 and 0.9 on such GPUs."""
CONTEXT_BYTES = GIB
"""What a sleeping process leaves on its GPU: CUDA context and NCCL buffers (assumed)."""
SERVER_OVERHEAD = 4 * GIB
"""What a server takes outside of its static part: activations and CUDA graphs (assumed)."""
HOST_BASE_BYTES = 3 * GIB
"""Host memory of a process that uses CUDA: Python and libraries (assumed)."""
NODE_GPUS = 8
"""GPUs of a node, where the run is meant for another machine."""


@dataclass(frozen=True)
class Cache:
    """SGLang's KV cache on a GPU of one size."""

    gpu: int
    size: int
    """Bytes of the cache; below 0 where the weights alone are too large."""
    sequences: int
    """Samples of full length that fit at a time in one server."""


@dataclass(frozen=True)
class Fit:
    """A phase on a GPU of one size."""

    phase: str
    gpu: int
    needed: int

    @property
    def fits(self) -> bool:
        """Whether the phase fits."""
        return self.needed <= self.gpu


@dataclass(frozen=True)
class GpuMemory:
    """The plan of one GPU and of the host memory of a node."""

    fits: tuple[Fit, ...]
    """Every phase on every GPU size."""
    caches: tuple[Cache, ...]
    """Empty without a server of our own."""
    fraction: float
    """Of the GPU, for SGLang's weights and KV cache."""
    wanted: int
    """Samples that one server is given in a rollout."""
    host: int
    host_gpus: int
    advice: dict[str, tuple[str, ...]]
    """For each phase that does not fit the smallest size: what to lower first, in that order."""


def server_memory(section: SglangSection, spec: ModelSpec, ranks: int) -> RoleMemory:
    """One GPU's part of an SGLang server, unless it runs elsewhere; its KV cache is in `GpuMemory`."""
    if section.rollout_external:
        return RoleMemory("rollout", ranks, {}, {}, {}, keeps_freed=False)
    # New weights are received one bucket at a time, before there is a KV cache.
    received = {"received weights": section.update_weight_buffer_size}
    return RoleMemory("rollout", ranks, {"weights": server_weights(section, spec)}, {}, received, keeps_freed=False)


def server_weights(section: SglangSection, spec: ModelSpec) -> int:
    """Bytes of the weights, bf16, on one GPU of a server."""
    ranks = section.rollout_num_gpus_per_engine
    return 2 * (spec.parameters_of_rank(ranks) + -(-spec.untrained_parameters // ranks))


def server_sleeps(layout: ParallelSection) -> bool:
    """Whether a server of the run gives its GPU memory up while others work."""
    return layout.colocate or layout.offload or layout.offload_rollout


def gpu_memory(
    config: Config, spec: ModelSpec, memory: Sequence[RoleMemory], lengths: Lengths, gpu: int | None, gpus_here: int
) -> GpuMemory:
    """What the phases need of GPUs of `gpu` bytes, or of the common sizes where that is None."""
    sizes = COMMON_GPUS if gpu is None else (gpu,)
    has_server = any(m.role == "rollout" for m in _on_gpu(memory))
    chosen = config.sglang.sglang_mem_fraction_static
    fraction = DEFAULT_FRACTION if chosen is None else chosen
    node = min(shared_bundles(config.parallel, config.sglang), gpus_here or NODE_GPUS)
    fits: list[Fit] = []
    for size in sizes:
        taken = 0 if server_sleeps(config.parallel) or not has_server else int(fraction * size) + SERVER_OVERHEAD
        needs = {m.role: _needed(m, memory, size, chosen) for m in _on_gpu(memory)}
        needs = {role: need + (0 if role == "rollout" else taken) for role, need in needs.items()}
        if has_server:
            needs["publish weights"] = taken + _publishing(memory)
        fits += (Fit(phase, size, need) for phase, need in needs.items())
    smallest = {fit.phase for fit in fits if fit.gpu == sizes[0] and not fit.fits}
    return GpuMemory(
        fits=tuple(fits),
        caches=tuple(_cache(config.sglang, spec, lengths, size, fraction) for size in sizes) if has_server else (),
        fraction=fraction,
        wanted=_requests_of_server(config, memory),
        host=host_bytes(memory, node, shared_bundles(config.parallel, config.sglang)),
        host_gpus=node,
        advice={m.role: what_to_lower(config, spec, m, lengths) for m in memory if m.role in smallest},
    )


def certain_bytes(memory: RoleMemory) -> int:
    """What a training role keeps on its GPU for any batch."""
    return memory.model_bytes + CONTEXT_BYTES


def host_bytes(memory: Sequence[RoleMemory], gpus: int, bundles: int) -> int:
    """Host memory of a node with `gpus` of the run's `bundles` GPUs."""
    processes = [(-(-m.ranks * gpus // bundles), m) for m in memory]
    return sum(count * (m.host_bytes + HOST_BASE_BYTES) for count, m in processes)


def what_to_lower(config: Config, spec: ModelSpec, memory: RoleMemory, lengths: Lengths) -> tuple[str, ...]:
    """Options that make a phase smaller, the one that costs least first."""
    layout = config.parallel
    if memory.role == "rollout":
        more = 2 * config.sglang.rollout_num_gpus_per_engine
        return ("a lower --sglang-mem-fraction-static", f"--rollout-num-gpus-per-engine {more}")
    state, work = _state_options(config, memory), _batch_options(config, lengths)
    mostly_work = sum(memory.working.values()) > memory.model_bytes - memory.resident.get(GRADIENTS, 0)
    ranks = 2 * layout.tensor_model_parallel_size
    grid = 2 * layout.grid
    split = [f"--tensor-model-parallel-size {ranks}"] if spec.num_kv_heads % ranks == 0 == memory.ranks % grid else []
    return (*(work + state if mostly_work else state + work), *split, "a lower --rollout-max-response-len")


def _state_options(config: Config, memory: RoleMemory) -> list[str]:
    if memory.role == "reference":
        return []
    layout, optimizer = config.parallel, config.optimizer
    several = memory.ranks > layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size
    found = ["--use-distributed-optimizer"] if several and not optimizer.use_distributed_optimizer else []
    return found if optimizer.optimizer_cpu_offload else [*found, "--optimizer-cpu-offload"]


def _batch_options(config: Config, lengths: Lengths) -> list[str]:
    layout, batch = config.parallel, config.batch
    found = []
    if layout.recompute_granularity != "full":
        found.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    if layout.tensor_model_parallel_size > 1 and not layout.sequence_parallel:
        found.append("--sequence-parallel")
    longest = layout.tokens_of_rank(lengths.prompt + lengths.response)
    if batch.use_dynamic_batch_size and (batch.max_tokens_per_gpu or 0) >= 2 * longest:
        found.append(f"--max-tokens-per-gpu {longest}")
    elif not batch.use_dynamic_batch_size and batch.micro_batch_size > 1:
        found.append(f"--micro-batch-size {batch.micro_batch_size // 2}")
    return found


def assumptions(config: Config) -> list[str]:
    """What the estimate takes for granted."""
    found = [
        "sleeping roles are parked in host memory, which they keep; gradients are dropped",
        f"a sleeping process leaves {in_bytes(CONTEXT_BYTES)} on its GPU (assumed, not measured)",
        f"host memory: {in_bytes(HOST_BASE_BYTES)} of libraries for each process (assumed, not measured)",
    ]
    if not config.sglang.rollout_external:
        found.append(
            f"SGLang needs {in_bytes(SERVER_OVERHEAD)} besides its static part (assumed, not measured); asleep, it has"
            " neither weights nor KV cache, also not in host memory"
            if server_sleeps(config.parallel)
            else "SGLang never sleeps (no --colocate or --offload-rollout): its part of a GPU is taken all the time"
        )
    if config.sglang.sglang_mem_fraction_static is None:
        found.append(f"without --sglang-mem-fraction-static SGLang chooses about {DEFAULT_FRACTION} of a GPU")
    return found


def _on_gpu(memory: Sequence[RoleMemory]) -> list[RoleMemory]:
    return [m for m in memory if m.model_bytes]


def _needed(role: RoleMemory, memory: Sequence[RoleMemory], gpu: int, fraction: float | None) -> int:
    """Of one GPU while `role` works: its own memory, and what every sleeping process leaves."""
    sleeping = CONTEXT_BYTES * (len(_on_gpu(memory)) - 1)
    if role.role != "rollout":
        return sleeping + certain_bytes(role) + sum(role.working.values())
    others = sleeping + SERVER_OVERHEAD
    # Left to itself, SGLang takes no more than there is.
    static = min(int(DEFAULT_FRACTION * gpu), gpu - others) if fraction is None else int(fraction * gpu)
    return others + max(static, role.model_bytes)


def _publishing(memory: Sequence[RoleMemory]) -> int:
    """The actor is awake, and the server has the weights it receives, but no KV cache yet."""
    here = [m for m in memory if m.publishing]
    return CONTEXT_BYTES * len(_on_gpu(memory)) + sum(m.model_bytes + sum(m.publishing.values()) for m in here)


def _cache(section: SglangSection, spec: ModelSpec, lengths: Lengths, gpu: int, fraction: float) -> Cache:
    ranks = section.rollout_num_gpus_per_engine
    size = int(fraction * gpu) - server_weights(section, spec)
    heads = -(-spec.num_kv_heads // ranks)
    token = 2 * 2 * spec.cached_layers * heads * spec.head_dim
    sequence = token * lengths.generated + -(-spec.state_bytes // ranks)
    return Cache(gpu, size, max(0, size // sequence))


def _requests_of_server(config: Config, memory: Sequence[RoleMemory]) -> int:
    ranks = next((m.ranks for m in memory if m.role == "rollout"), 1)
    servers = max(1, ranks // config.sglang.rollout_num_gpus_per_engine)
    return min(config.sglang.sglang_server_concurrency, -(-config.batch.samples_per_rollout // servers))
