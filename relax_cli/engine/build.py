"""Builds one rank of a role from the configuration; the same in a Ray worker and in one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from relax_cli.backends.rollout.targets import own_address, this_node
from relax_cli.config.held_out import sampling_of_set
from relax_cli.config.placement import processes_of, rollout_engine, threads_of
from relax_cli.config.schema import Config, RolloutSection
from relax_cli.models.lora import Lora, lora_of
from relax_cli.plugin.config_model import estimator_options, rebuild_config
from relax_cli.plugin.graph import ServiceGraph
from relax_cli.plugin.launch_plan import LaunchPlan, LoadFrom
from relax_cli.plugin.manager import load_plugins
from relax_cli.plugin.records import Estimator
from relax_cli.preflight.machine import allocator_settings, usable_cores
from relax_cli.preflight.plan import optimizer_steps
from relax_cli.roles.context import RoleContext, SampleQueue

if TYPE_CHECKING:
    from relax_cli.backends.rollout.protocol import RolloutEngine, SamplingParams

EXACT_HOST_MEMORY, EXACT_SINCE = "pinned_max_cached_size_mb:1", (2, 13)
"""Larger blocks of page-locked memory have the requested size; the first version this was read in.

Not `pinned_max_round_threshold_mb` alone: a smaller block that is kept may then be handed out (pytorch/pytorch#192722).
"""


@dataclass(frozen=True)
class WorkerSpec:
    """One rank of one role, in a form that travels between processes."""

    role: str
    rank: int
    ranks: int
    threads: int
    config: dict[str, Any]
    model_folder: Path
    run_dir: Path
    load_from: LoadFrom | None
    reference_folder: Path | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    bundle: int | None = None
    """Of the placement group; None for a worker without a device."""
    gpus: tuple[str, ...] = ()
    """The GPUs of the server that this rank starts, as CUDA_VISIBLE_DEVICES has them; empty: what the rank sees."""
    longest_prompts: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """See `LaunchPlan.longest_prompts`."""
    cwd: str = field(default_factory=os.getcwd)
    """What the paths of the configuration are relative to."""


def worker_specs(plan: LaunchPlan, role: str) -> list[WorkerSpec]:
    parallel = plan.config.parallel
    ranks = processes_of(role, plan.config)
    load_from = {"actor": plan.actor_load, "critic": plan.critic_load}.get(role)
    return [
        WorkerSpec(
            role=role,
            rank=rank,
            ranks=ranks,
            threads=threads_of(parallel, role, usable_cores()),
            config=plan.config.model_dump(mode="json"),
            model_folder=plan.model_folder,
            run_dir=plan.run_dir,
            load_from=load_from,
            reference_folder=plan.reference_folder,
            longest_prompts=plan.longest_prompts,
        )
        for rank in range(ranks)
    ]


def cpu_environment(threads: int) -> dict[str, str]:
    """Environment of a worker: waiting OpenMP threads sleep, because roles take turns on the same cores.

    And up to 256 MB of freed memory stay in the process, and tensors below that size lie in it: to get the same pages
    from the kernel in every pass costs a twentieth of a small model's step, and a sixth of one of 135 M parameters.

    torch rounds page-locked memory up to a power of two where it may keep it for later; roles keep theirs themselves.
    Left out next to settings of the user's own, and for versions of torch that refuse the option.
    """
    knows = tuple(map(int, version("torch").split(".")[:2])) >= EXACT_SINCE
    return ({} if allocator_settings() or not knows else {"PYTORCH_ALLOC_CONF": EXACT_HOST_MEMORY}) | {
        "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
        "MALLOC_MMAP_THRESHOLD_": str(256 << 20),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "TQ_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }


class RoleBuilder:
    """Resolves the configuration and the estimator once, then builds the role."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        plugins = load_plugins()
        # First, so that a node which lacks the plugin is named with it; its section would be an unknown key below.
        self.estimator: Estimator = plugins.estimator(spec.config["algorithm"]["advantage_estimator"], node=this_node())
        self.config: Config = rebuild_config(spec.config)
        self.options = estimator_options(self.config, self.estimator)
        self.graph: ServiceGraph = plugins.service_graph(self.config)
        self.rewards = {name: reward.function for name, reward in plugins.rewards().items()}
        self.envs = {name: env.environment for name, env in plugins.envs().items()}

    def build(self, queue: SampleQueue) -> Any:
        """The role, asleep."""
        import torch

        spec = self.spec
        torch.set_num_threads(spec.threads)
        context = RoleContext(
            config=self.config,
            estimator=self.estimator,
            options=self.options,
            spec=self.graph[spec.role],
            queue=queue,
            run_dir=spec.run_dir,
            rank=spec.rank,
            ranks=spec.ranks,
        )
        role = self._role(context)
        source = spec.load_from
        if source is not None:
            load = role.model.load_weights if source.weights_only else role.load_checkpoint
            load(source.folder)
        if spec.role != "advantages":
            role.sleep()
        return role

    def _role(self, context: RoleContext) -> Any:
        match self.spec.role:
            case "rollout":
                return self._rollout(context)
            case "actor":
                return self._actor(context)
            case "critic":
                from relax_cli.roles.critic import CriticRole

                return CriticRole(self._trained("value"), context)
            case "advantages":
                from relax_cli.roles.advantages import AdvantagesRole

                return AdvantagesRole(context)
            case "reference":
                from relax_cli.roles.reference import ReferenceRole

                _, frozen = self._model_classes()
                model = frozen("policy", self.spec.reference_folder or self.spec.model_folder, self._how_to_build())
                model.model.requires_grad_(False)
                return ReferenceRole(model, context)
        raise AssertionError(f"no role {self.spec.role}")

    def _trained(self, kind: Literal["policy", "value"]) -> Any:
        from relax_cli.algorithms.schedule import Schedule

        config = self.config
        assert config.batch.num_rollout is not None, "resolved before launch"
        steps, critic_steps = optimizer_steps(config, config.batch.num_rollout, has_critic="critic" in self.graph)
        lr, warmup_iters, decay_iters = config.optimizer.lr, config.optimizer.lr_warmup_iters, max(1, steps)
        if kind == "value":
            lr = config.critic.critic_lr or lr
            warmup_iters, decay_iters = config.critic.critic_lr_warmup_iters, critic_steps
        trainable, _ = self._model_classes()
        build = self._how_to_build(lora_of(config, self.spec.role))
        return trainable(kind, self.spec.model_folder, build, Schedule(config.optimizer, lr, warmup_iters, decay_iters))

    def _model_classes(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Of models that learn, and of the frozen one."""
        from relax_cli.backends.megatron.loaded import LoadedModel
        from relax_cli.backends.megatron.trainer import TrainableModel

        return TrainableModel, LoadedModel

    def _how_to_build(self, lora: Lora | None = None) -> Any:
        """Once all ranks of this role have found each other."""
        from relax_cli.backends.meeting import LOOPBACK_DEVICE, is_loopback
        from relax_cli.backends.megatron import parallel, products
        from relax_cli.backends.megatron.micro_batch import Build

        spec, section = self.spec, self.config.parallel
        if is_loopback(spec.master_addr) and not self.config.sglang.rollout_external:
            # NCCL chooses once in a process, and external servers may be on another machine.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK_DEVICE)
        device = self._device()
        seed = self.config.run.seed
        parallel.initialize(section, device, seed, spec.rank, spec.ranks, spec.master_addr, spec.master_port)
        if section.cpu_matmul_precision == "bf16" and device.backend == "gloo":
            products.install_bf16()
        return Build(
            layout=section,
            device=device,
            seed=seed,
            temperature=self.config.rollout.rollout_temperature,
            value_head_std=self.config.critic.value_head_init_std,
            lora=lora,
        )

    def _device(self) -> Any:
        from relax_cli.backends.device import select_device

        section = self.config.parallel
        is_shared = section.colocate or section.offload or section.offload_train
        device = select_device(section.device)
        return device if is_shared else replace(device, shared_memory=False)

    def _actor(self, context: RoleContext) -> Any:
        from relax_cli.backends.rollout.sglang.weights import SendOptions, WeightSender
        from relax_cli.roles.actor import ActorRole

        options = SendOptions(
            transport=self.config.sglang.update_weight_transport,
            bucket_bytes=self.config.sglang.update_weight_buffer_size,
            timeout=self.config.rollout.rollout_request_timeout,
            folder=self.spec.run_dir / "weights",
            template=self.spec.model_folder,
        )
        model = self._trained("policy")
        return ActorRole(model, context, lambda targets, device: WeightSender(targets, device, options))

    def _rollout_engine(self, tokenizer: Any, samplings: Mapping[str, SamplingParams]) -> RolloutEngine:
        config, spec = self.config, self.spec
        if rollout_engine(config) == "embedded":
            from relax_cli.backends.rollout.embedded.engine import EmbeddedEngine

            return EmbeddedEngine(spec.model_folder, decode=tokenizer.decode)
        from relax_cli.backends.rollout.protocol import Request
        from relax_cli.backends.rollout.sglang.connect import open_engine

        engine = open_engine(
            config.sglang,
            config.rollout,
            config.parallel,
            model_folder=spec.model_folder,
            run_dir=spec.run_dir,
            rank=spec.rank,
            workers=spec.ranks,
            decode=tokenizer.decode,
            host=own_address([f"{spec.master_addr}:{spec.master_port}"]),
            environment=os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(spec.gpus)} if spec.gpus else {}),
        )
        if config.episode.env is None:
            for name, (tokens, source) in spec.longest_prompts.items():
                # Which tokens does not matter for whether there is room.
                engine.check_longest(Request((0,) * tokens, 0, source), samplings[name])
        return engine

    def _rollout(self, context: RoleContext) -> Any:
        from relax_cli.backends.rollout.protocol import SamplingParams
        from relax_cli.data.envs.load import load_env
        from relax_cli.data.prompts import load_prompts
        from relax_cli.data.rewards import load_reward
        from relax_cli.data.tokenise import fitting, load_tokenizer, stop_token_ids
        from relax_cli.roles.rollout import RolloutRole

        config, folder, env = self.config, self.spec.model_folder, self.config.episode.env
        tokenizer = load_tokenizer(folder)
        stop_ids = stop_token_ids(folder, tokenizer)

        def sampling(section: RolloutSection) -> SamplingParams:
            return SamplingParams(
                max_new_tokens=section.rollout_max_response_len,
                temperature=section.rollout_temperature,
                top_p=section.rollout_top_p,
                top_k=section.rollout_top_k,
                stop_token_ids=stop_ids,
                stop=section.rollout_stop,
            )

        limit = config.rollout.rollout_max_prompt_len
        fits = None
        if limit is not None and config.rollout.overlong_prompts == "drop":
            chat = config.data.apply_chat_template
            fits = partial(fitting, tokenizer=tokenizer, limit=limit, apply_chat_template=chat)
        sets = (("", config.data.prompt_data), *config.eval.sets)
        samplings = {"": replace(sampling(config.rollout), routes=config.parallel.router_replay)} | {
            name: sampling(sampling_of_set(config.eval, name, config.rollout)) for name, _ in config.eval.sets
        }
        return RolloutRole(
            self._rollout_engine(tokenizer, samplings),
            tokenizer,
            load_reward(config.reward, self.rewards) if env is None else load_env(env, self.envs),
            {name: load_prompts(config.data, path, fits) for name, path in sets},
            samplings,
            context,
        )
