"""Rules about what this machine lacks: notes where the configuration may be meant for another machine."""

from __future__ import annotations

from pathlib import Path

from relax_cli.config.placement import object_store_bytes, rollout_engine, shared_bundles
from relax_cli.config.schema import CheckpointSection, Config, ParallelSection, SglangSection
from relax_cli.errors import MACHINE_THEME
from relax_cli.models.files import weight_bytes
from relax_cli.preflight.machine import Machine, ray_temp_trouble
from relax_cli.preflight.machine import ray_temp_folder as folder_of_ray
from relax_cli.preflight.memory.sizes import in_bytes
from relax_cli.preflight.plan import MemoryPlan
from relax_cli.preflight.rules.registry import Finding, Found, rule

RAY_USES_FILES_BELOW = 10**10
"""Where /dev/shm is too small, Ray puts a store of at most this size into files, with a warning."""


@rule("no-cuda-device", MACHINE_THEME, option="--device", needs="machine")
def no_cuda_device(parallel: ParallelSection, sglang: SglangSection, machine: Machine) -> Found:
    """`--device cuda`, but there is no GPU."""
    if machine.gpus == 0:
        yield from _lacks_gpus(parallel, sglang, machine)


@rule("too-few-gpus", MACHINE_THEME, option="--device", needs="machine")
def too_few_gpus(parallel: ParallelSection, sglang: SglangSection, machine: Machine) -> Found:
    """The largest role has more ranks than this machine has GPUs."""
    if machine.gpus > 0:
        yield from _lacks_gpus(parallel, sglang, machine)


def _lacks_gpus(parallel: ParallelSection, sglang: SglangSection, machine: Machine) -> Found:
    needed = shared_bundles(parallel, sglang)
    if parallel.device == "cuda" and not machine.ray_address and machine.gpus < needed:
        message = f"this machine has {machine.gpus or 'no'} GPU{'s' * (machine.gpus > 1)}, the run needs {needed}"
        fix = "run it where the GPUs are, or use --device cpu, or lower the counts in --resource"
        yield Finding(message, fix, f"{machine.gpus} GPUs", f"{needed} GPUs")


SLOW_BF16 = Finding(
    "bf16 products take longer on this CPU than fp32 ones", fix="--cpu-matmul-precision fp32", expected="less"
)


@rule("no-bf16-products", MACHINE_THEME, option="--cpu-matmul-precision", needs="machine")
def no_bf16_products(parallel: ParallelSection, machine: Machine) -> Found:
    """`--cpu-matmul-precision bf16`, but this CPU has neither AVX512-BF16 nor AMX, or takes longer with them. The
    second is measured at the start of each training process."""
    on_cpu = parallel.device == "cpu" or (parallel.device == "auto" and machine.gpus == 0)
    if parallel.cpu_matmul_precision == "bf16" and on_cpu and not machine.ray_address:
        found = lacking_bf16(machine.bf16_products)
        yield from () if found is None else (found,)


def lacking_bf16(has_bf16: bool) -> Finding | None:
    """What to say of a CPU, unless it has instructions for bf16 products."""
    if has_bf16:
        return None
    message, got = "this CPU has no instructions for bf16 matrix products", "neither avx512_bf16 nor amx_bf16"
    return Finding(message, "--cpu-matmul-precision fp32", f"{got} in /proc/cpuinfo", "one of them")


@rule("disk-too-small", MACHINE_THEME, option="--save", needs="machine")
def disk_too_small(checkpoint: CheckpointSection, memory: MemoryPlan | None, machine: Machine) -> Found:
    """The disk has no room for one checkpoint."""
    one, kept, free = _checkpoints(checkpoint, memory, machine)
    if free is not None and free < one:
        expected = f"{in_bytes(kept * one)}: {kept} × {in_bytes(one)}"
        yield Finding("", "make room, or choose another --save", f"{in_bytes(free)} free", expected)


@rule("disk-fills-up", MACHINE_THEME, option="--save", severity="warning", needs="machine")
def disk_fills_up(checkpoint: CheckpointSection, memory: MemoryPlan | None, machine: Machine) -> Found:
    """A warning: the disk has no room for all checkpoints that would be kept, counting that a new one is written before
    the oldest is removed."""
    one, kept, free = _checkpoints(checkpoint, memory, machine)
    if free is not None and one <= free < kept * one:
        fits, expected = free // one, f"{in_bytes(kept * one)}: {kept} × {in_bytes(one)}"
        keep = f"--keep-checkpoints {fits - 1} (a new one is written before the oldest is removed), or make room"
        fix = keep if fits > 1 else "make room, or choose another --save"
        yield Finding(f"the disk is full after {fits} checkpoints", fix, f"{in_bytes(free)} free", expected)


def _checkpoints(
    section: CheckpointSection, memory: MemoryPlan | None, machine: Machine
) -> tuple[int, int, int | None]:
    """Bytes of one checkpoint, how many are kept, and bytes free; no bytes free are known where nothing is saved."""
    if section.save is None or memory is None:
        return 0, 0, None
    return memory.checkpoint, memory.checkpoints_kept, machine.free_disk(section.save)


@rule("shared-memory-too-small", MACHINE_THEME, option="--launcher", needs="machine")
def shared_memory_too_small(config: Config, machine: Machine) -> Found:
    """Ray refuses to start with an object store above 10 GB that `/dev/shm` has no room for. Embedded engines get their
    weights through it: 6 × the size of the model. With SGLang it has 2 GB."""
    needed = object_store_bytes(rollout_engine(config), weight_bytes(Path(config.model.hf_checkpoint or "")))
    free = machine.shared_memory
    own_ray = config.parallel.launcher == "ray" and not machine.ray_address
    if own_ray and free is not None and needed > max(free, RAY_USES_FILES_BELOW):
        fix = f"docker run --shm-size={-(-needed // (1 << 30))}g, or --launcher local"
        yield Finding("/dev/shm has no room for Ray's object store", fix, f"{in_bytes(free)} free", in_bytes(needed))


@rule("expandable-segments", MACHINE_THEME, option="--rollout-engine", needs="machine")
def expandable_segments(config: Config, machine: Machine) -> Found:
    """`PYTORCH_CUDA_ALLOC_CONF` or `PYTORCH_ALLOC_CONF` sets `expandable_segments:True`, which SGLang's memory saver
    and CUDA IPC do not support."""
    starts_servers = rollout_engine(config) == "sglang" and not config.sglang.rollout_external
    on_gpus = config.parallel.device == "cuda"
    if starts_servers and on_gpus and "expandable_segments:true" in machine.allocator.replace(" ", "").lower():
        message = "SGLang cannot sleep or take weights over CUDA IPC from memory in expandable segments"
        fix, where = "unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF"
        yield Finding(message, fix, machine.allocator, "no expandable_segments:True", where=where)


@rule("ray-temp-folder", MACHINE_THEME, option="--launcher", needs="machine")
def ray_temp_folder(parallel: ParallelSection, machine: Machine) -> Found:
    """Ray keeps its sockets and logs in `RAY_TMPDIR`, `TMPDIR` or `/tmp`. That path is too long for a socket, or it
    cannot be written."""
    trouble = ray_temp_trouble()
    if parallel.launcher == "ray" and not machine.ray_address and trouble:
        message = f"Ray cannot start with this temporary folder: {trouble}"
        fix = "export RAY_TMPDIR=/tmp (or another short folder), or use --launcher local"
        yield Finding(message, fix, str(folder_of_ray()), "a short path that can be written")
