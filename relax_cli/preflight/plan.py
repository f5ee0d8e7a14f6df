"""What a run will do: roles, placement, batches and steps, memory and disk. Pure, and known before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relax_cli.config.placement import needed_cpus, processes_of, ranks_of, shared_bundles, takes_bundles, threads_of
from relax_cli.config.schema import Config, ParallelSection
from relax_cli.models.lora import lora_of
from relax_cli.models.spec import ModelSpec
from relax_cli.plugin.graph import RoleSpec
from relax_cli.preflight.inputs import ASSUMED_PROMPT, RunInputs
from relax_cli.preflight.machine import Machine
from relax_cli.preflight.memory import estimate
from relax_cli.preflight.memory.gpu import GpuMemory, assumptions, gpu_memory
from relax_cli.preflight.memory.sizes import Lengths, RoleMemory, precision_of


@dataclass(frozen=True)
class RolePlan:
    """One role of the run."""

    spec: RoleSpec
    processes: int
    threads: int
    bundles: tuple[int, ...]
    """Bundles of the placement group it sits in; none for a service without a device."""
    idle_bundles: int
    """Bundles that wait while this role works."""


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of the run's processes, and its checkpoints."""

    roles: tuple[RoleMemory, ...]
    phases: dict[str, int]
    """Bytes in each phase: of all processes together on a CPU, of one GPU on GPUs."""
    peak: int
    """Peak bytes of all processes of a CPU run; 0 on GPUs."""
    gpu: GpuMemory | None
    """How the phases fit GPUs; None on a CPU."""
    checkpoint: int
    """Bytes of one checkpoint (of the pair); 0 where nothing is saved."""
    checkpoints_kept: int


def plan_memory(config: Config, roles: Sequence[str], inputs: RunInputs, machine: Machine) -> MemoryPlan | None:
    """The estimates for these roles; None where the model is not known, or its layers cannot be shared out."""
    spec, on_gpu = inputs.model, config.parallel.device == "cuda"
    if spec is None or min(config.parallel.stage_layers(spec.num_layers)) < 1:
        return None
    lengths, saves = inputs.lengths_for(config), config.checkpoint.save is not None
    memory = tuple(estimate.roles_memory(config, roles, spec, lengths))
    gpu_size = machine.gpu_memory() if on_gpu and machine.gpus else None
    return MemoryPlan(
        roles=memory,
        phases=estimate.phase_bytes(config, memory),
        peak=0 if on_gpu else estimate.host_peak(config, memory),
        gpu=gpu_memory(config, spec, memory, lengths, gpu_size, machine.gpus) if on_gpu else None,
        checkpoint=estimate.checkpoint_bytes(config, spec) if saves else 0,
        checkpoints_kept=estimate.kept_checkpoints(config.checkpoint, inputs.rollouts(config)) if saves else 0,
    )


@dataclass(frozen=True)
class Plan:
    """The whole plan."""

    config: Config
    machine: Machine
    roles: tuple[RolePlan, ...]
    first_rollout: int
    """0, or the next rollout of a resumed run."""
    rollouts: int | None
    """Of the whole run; None where it depends on data that were not read."""
    prompts: int | None
    lengths: Lengths
    assumptions: tuple[str, ...]
    parameters: dict[str, int]
    """Empty where the model is not known."""
    memory: MemoryPlan | None

    @property
    def optimizer_steps(self) -> dict[str, int]:
        """Of the whole run, by trained role."""
        if self.rollouts is None:
            return {}
        has_critic = any(role.spec.name == "critic" for role in self.roles)
        actor, critic = optimizer_steps(self.config, self.rollouts, has_critic=has_critic)
        return {"critic": critic, "actor": actor} if has_critic else {"actor": actor}

    @property
    def most_tokens(self) -> int:
        """Tokens of a rollout whose samples are all as long as they can be."""
        return self.config.batch.samples_per_rollout * (self.lengths.prompt + self.lengths.response)

    @property
    def bundles(self) -> int:
        """Bundles of the placement group."""
        return shared_bundles(self.config.parallel, self.config.sglang)

    @property
    def gpus(self) -> int:
        """GPUs that the run needs."""
        return self.bundles if self.config.parallel.device == "cuda" else 0

    @property
    def gpus_why(self) -> str:
        """The count in words."""
        if not self.gpus:
            return "none: every role runs on the CPU"
        shared = ", ".join(f"{role.spec.name} {len(role.bundles)}" for role in self.roles if role.bundles)
        return f"the roles share them and take turns, so the largest decides ({shared})"

    @property
    def logical_cpus(self) -> int:
        """Of Ray; more than cores is fine, roles take turns."""
        return needed_cpus(self.config.parallel, self.config.sglang)

    @property
    def disk_free(self) -> int | None:
        """Bytes free where checkpoints go."""
        return self.machine.free_disk(self.config.checkpoint.save or ".")


def optimizer_steps(config: Config, rollouts: int, *, has_critic: bool) -> tuple[int, int]:
    """Optimizer steps of a run of `rollouts`: of the actor, which rests in critic-only steps, and of the critic."""
    per_rollout, critic = config.batch.steps_per_rollout, config.critic
    resting = critic.num_critic_only_steps if has_critic else 0
    actor = max(0, rollouts - resting) * per_rollout
    return actor, rollouts * per_rollout * critic.critic_updates_per_step


def build_plan(
    config: Config,
    graph: Sequence[RoleSpec],
    inputs: RunInputs,
    machine: Machine,
    *,
    cores: int,
    first_rollout: int = 0,
) -> Plan:
    """The plan of a configuration whose roles are all in `--resource`."""
    names = tuple(role.name for role in graph)
    return Plan(
        config=config,
        machine=machine,
        roles=tuple(_role(config, role, cores) for role in graph),
        first_rollout=first_rollout,
        rollouts=inputs.rollouts(config),
        prompts=inputs.prompts,
        lengths=inputs.lengths_for(config),
        assumptions=tuple(_assumptions(config, inputs)),
        parameters={} if inputs.model is None else _parameters(config, inputs.model, has_critic="critic" in names),
        memory=plan_memory(config, names, inputs, machine),
    )


def plan_dict(plan: Plan) -> dict[str, Any]:
    """The JSON form: roles, placement, gpus, steps, memory."""
    parallel, batch = plan.config.parallel, plan.config.batch
    return {
        "roles": [_attributes(role.spec, "name summary reads writes") for role in plan.roles],
        "placement": {
            **_attributes(parallel, "launcher device"),
            **_attributes(plan, "bundles logical_cpus"),
            "processes": {r.spec.name: r.processes for r in plan.roles},
            "threads": {r.spec.name: r.threads for r in plan.roles},
            "role_bundles": {r.spec.name: list(r.bundles) for r in plan.roles},
            "idle_bundles": {r.spec.name: r.idle_bundles for r in plan.roles if r.idle_bundles},
        },
        "gpus": {"needed": plan.gpus, "here": plan.machine.gpus, "why": plan.gpus_why},
        "steps": {
            "prompts_per_rollout": batch.rollout_batch_size,
            "samples_per_prompt": batch.n_samples_per_prompt,
            **_attributes(batch, "samples_per_rollout steps_per_rollout samples_per_step"),
            **_attributes(plan, "first_rollout rollouts optimizer_steps prompts"),
            "longest_prompt": plan.lengths.prompt,
            "longest_response": plan.lengths.response,
            "most_tokens_per_rollout": plan.most_tokens,
        },
        "memory": _memory_dict(plan),
    }


def _memory_dict(plan: Plan) -> dict[str, Any]:
    memory = plan.memory or MemoryPlan((), {}, 0, None, 0, 0)
    return {
        "parameters": plan.parameters,
        "per_process": [
            {**_attributes(m, "role resident working publishing host peak_bytes"), "processes": m.ranks}
            for m in memory.roles
        ],
        "phases": {"of": "one GPU" if plan.gpus else "all processes", "bytes": memory.phases},
        "peak_bytes": memory.peak or max(memory.phases.values(), default=None),
        "parked_on_host_bytes": sum(m.ranks * m.host_bytes for m in memory.roles),
        "gpu": None if memory.gpu is None else _gpu_dict(memory.gpu),
        "host_bytes_here": plan.machine.memory,
        "checkpoint_bytes": memory.checkpoint,
        "checkpoints_kept": memory.checkpoints_kept,
        "disk_bytes_needed": memory.checkpoint * memory.checkpoints_kept,
        "disk_bytes_free": plan.disk_free,
        "assumptions": list(plan.assumptions),
    }


def _attributes(record: object, names: str) -> dict[str, Any]:
    values = ((name, getattr(record, name)) for name in names.split())
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values}


def _parameters(config: Config, spec: ModelSpec, *, has_critic: bool) -> dict[str, int]:
    found = {"policy": spec.parameters}
    if spec.active_parameters < spec.parameters:
        found["used by a token"] = spec.active_parameters
    if has_critic:
        found["critic"] = spec.value_parameters
    for role, name in (("actor", "policy"), ("critic", "critic")):
        if name in found and lora_of(config, role) is not None:
            found[f"trained of the {name}"] = estimate.trained_parameters(config, spec, role)
    if spec.untrained_parameters:
        found["vision tower, not trained"] = spec.untrained_parameters
    return found


def _gpu_dict(gpu: GpuMemory) -> dict[str, Any]:
    return {
        "phases": [
            {"phase": fit.phase, "gpu_bytes": fit.gpu, "needed_bytes": fit.needed, "fits": fit.fits} for fit in gpu.fits
        ],
        "sglang": {
            "static_fraction": gpu.fraction,
            "sequences_wanted": gpu.wanted,
            "caches": [
                {"gpu_bytes": c.gpu, "cache_bytes": c.size, "full_length_sequences": c.sequences} for c in gpu.caches
            ],
        },
        "host_bytes_of_a_node": gpu.host,
        "gpus_of_a_node": gpu.host_gpus,
        "lower_first": {phase: list(options) for phase, options in gpu.advice.items()},
    }


def _role(config: Config, role: RoleSpec, cores: int) -> RolePlan:
    parallel = config.parallel
    ranks = ranks_of(parallel, role.name)
    has_bundle = role.uses_device and takes_bundles(role.name, parallel, config.sglang) and parallel.launcher == "ray"
    bundles = tuple(range(ranks)) if has_bundle else ()
    idle = shared_bundles(parallel, config.sglang) - ranks if has_bundle else 0
    threads = threads_of(parallel, role.name, cores)
    return RolePlan(role, processes_of(role.name, config), threads, bundles, idle)


def _assumptions(config: Config, inputs: RunInputs) -> list[str]:
    section = config.rollout
    if section.rollout_max_prompt_len is not None:
        prompts = f"prompts of {section.rollout_max_prompt_len} tokens (--rollout-max-prompt-len)"
    elif inputs.longest_prompt is not None:
        prompts = f"prompts of {inputs.longest_prompt} tokens, the longest of {len(inputs.prompt_lens):,}"
    else:
        prompts = f"prompts of {ASSUMED_PROMPT} tokens, as none could be counted"
    found = [f"{prompts}; every response as long as allowed", f"numbers: {precision_of(config).name}"]
    if config.parallel.recompute_granularity is not None:
        found.append(_recomputation(config.parallel))
    if config.parallel.pipeline_model_parallel_size > 1:
        found.append(f"of {config.parallel.pipeline_model_parallel_size} pipeline stages the one that needs the most")
    spec, ranks = inputs.model, config.parallel.tensor_model_parallel_size
    if spec is not None and spec.expert_parameters:
        found.append("experts get equally many tokens")
    if spec is not None and spec.vocab_size % ranks:
        found.append(f"vocabulary of {spec.vocab_size}, padded to {spec.vocabulary_of_rank(ranks) * ranks}")
    if config.parallel.device == "cuda":
        return found + assumptions(config)
    found.append("sleeping roles keep weights, gradients and moments")
    found.append("memory that a phase frees mostly stays with its process")
    if config.parallel.device == "auto":
        found.append("--device auto is decided at launch; it is taken as cpu here")
    return found


def _recomputation(layout: ParallelSection) -> str:
    if layout.recompute_granularity == "selective":
        return f"selective recomputation of {', '.join(layout.recompute_modules) or 'core_attn'}"
    count = layout.recompute_num_layers or 1
    layers = "1 layer" if count == 1 else f"{count} layers"
    which = f"of the first {layers}" if layout.recompute_method == "block" else f"{layers} at a time"
    return f"full recomputation, {which}"
