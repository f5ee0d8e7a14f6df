"""How much memory the processes of a run need, from the sizes in `config.json` and the batch; pure arithmetic.
Weights, gradients and Adam's moments are exact. Activations are counted for micro-batches of full length, which real
batches stay below."""

from __future__ import annotations

from collections.abc import Sequence

from relax_cli.config.placement import KV_CACHE_BYTES, MOST_ROWS, PREFILL_TOKENS, ranks_of, rollout_engine
from relax_cli.config.schema import CheckpointSection, Config
from relax_cli.models.lora import lora_of
from relax_cli.models.spec import ModelSpec
from relax_cli.preflight.memory import activations, sizes
from relax_cli.preflight.memory.gpu import server_memory
from relax_cli.preflight.memory.sizes import CPU, GRADIENTS, LIBRARIES, MIB, OBJECT_STORE, Lengths, RoleMemory

BASE_BYTES = 450 * MIB
"""Memory of a worker without a model: Python, torch, Ray and what the role imports (measured)."""
SHARED_BYTES = 120 * MIB
"""The part of it that all workers share: code of libraries (measured)."""
OTHER_PROCESSES = 1200 * MIB
"""The driver, Ray's own processes and TransferQueue's two, without what is shared (measured)."""

OFFLOADED = 16
"""Bytes of a parameter whose optimizer is in host memory: fp32 master weight, gradient and two moments."""


def roles_memory(config: Config, roles: Sequence[str], spec: ModelSpec, lengths: Lengths) -> list[RoleMemory]:
    """One process of each role, on the device of `--device` (`auto`: CPU); of its stages the one that needs most."""
    counts = config.parallel.stage_layers(spec.num_layers)
    stages = [_Sizes(config, spec, lengths, stage) for stage in range(len(counts))]
    return [max((stage.role(role) for stage in stages), key=lambda memory: memory.peak_bytes) for role in roles]


def phase_bytes(config: Config, memory: Sequence[RoleMemory]) -> dict[str, int]:
    """What each phase needs: in all processes together on a CPU, on one GPU with `--device cuda`."""
    if config.parallel.device == "cuda":
        phases = {m.role: m.model_bytes + sum(m.working.values()) for m in memory if m.model_bytes}
        publishing = sum(m.model_bytes + sum(m.publishing.values()) for m in memory if m.publishing)
        return phases | ({"publish weights": publishing} if publishing else {})
    held = _held(config, memory)
    phases = {m.role: held + m.ranks * sum(m.working.values()) for m in memory if m.working}
    return {**phases, "publish weights": held + sum(m.all_publishing_bytes for m in memory)}


def host_peak(config: Config, memory: Sequence[RoleMemory]) -> int:
    """Peak of all processes of a CPU run together."""
    held = _held(config, memory)
    if config.parallel.launcher == "local":
        return held + max(m.extra_bytes for m in memory)
    readers = sum(m.ranks for m in memory if m.role == "rollout")
    # The object store's copy of the weights is in the memory of every process that looks at it, but exists once.
    counted_again = readers * max(m.publishing.get(OBJECT_STORE, 0) for m in memory)
    working = sum(m.ranks * sum(m.working.values()) for m in memory)
    return held + working + sum(m.all_publishing_bytes for m in memory) - counted_again


def _held(config: Config, memory: Sequence[RoleMemory]) -> int:
    """What all processes together keep while none works."""
    models = sum(m.ranks * m.model_bytes for m in memory)
    if config.parallel.launcher == "local":
        return BASE_BYTES + models
    return OTHER_PROCESSES + SHARED_BYTES + sum(m.ranks * (m.base_bytes - SHARED_BYTES) for m in memory) + models


def kv_cache_bytes(spec: ModelSpec, rows: int, columns: int) -> int:
    """fp32 keys and values of `rows` samples of `columns` tokens."""
    return 2 * 4 * spec.cached_layers * spec.num_kv_heads * spec.head_dim * rows * columns


def engine_rows(spec: ModelSpec, requests: int, columns: int) -> int:
    """Rows that the embedded engine generates at a time."""
    return min(requests, MOST_ROWS, max(1, KV_CACHE_BYTES // kv_cache_bytes(spec, 1, columns)))


def checkpoint_bytes(config: Config, spec: ModelSpec) -> int:
    """One checkpoint of the actor, and of the critic if it is saved: weights, master copies and moments."""
    precision = sizes.precision_of(config)
    saves_critic = "critic" in config.parallel.resource and config.critic.critic_save is not None
    roles = ("actor", "critic") if saves_critic else ("actor",)
    parameters = sum(trained_parameters(config, spec, role) for role in roles)
    untrained = precision.weights * spec.untrained_parameters * len(roles)
    return (precision.weights + precision.master + precision.moments) * parameters + untrained


def trained_parameters(config: Config, spec: ModelSpec, role: str) -> int:
    """Parameters of the actor or critic that get a gradient, of all ranks together."""
    lora = lora_of(config, role)
    if lora is not None:
        return lora.parameters(spec) + (spec.hidden_size + 1 if role == "critic" else 0)
    return spec.parameters if role == "actor" else spec.value_parameters


def kept_checkpoints(section: CheckpointSection, rollouts: int | None) -> int:
    """Most checkpoints that are on disk at a time."""
    written = 1 if section.save_interval is None or rollouts is None else -(-rollouts // section.save_interval)
    return written if section.keep_checkpoints is None else min(written, section.keep_checkpoints + 1)


class _Sizes:
    """The arithmetic of one configuration."""

    def __init__(self, config: Config, spec: ModelSpec, lengths: Lengths, stage: int) -> None:
        self.config, self.layout, self.spec, self.lengths = config, config.parallel, spec, lengths
        self.precision = sizes.precision_of(config)
        self.tensor_parallel = config.parallel.tensor_model_parallel_size
        counts = self.layout.stage_layers(spec.num_layers)
        self.stage, self.stages, self.layers = stage, len(counts), counts[stage]
        self.experts = self._in_layers(spec.expert_parameters)
        self.experts_elsewhere = self.experts - self.experts // config.parallel.expert_model_parallel_size
        """Parameters of experts that a rank leaves to others."""
        self.on_cpu = self.precision is CPU

    def role(self, role: str) -> RoleMemory:
        """One process of `role`."""
        ranks = ranks_of(self.layout, role) if role in self.layout.resource else 1
        base = {LIBRARIES: BASE_BYTES} if self.on_cpu else {}
        if role in ("actor", "critic"):
            return self._trained(role, ranks, base)
        if role == "reference":
            return self._reference(ranks, base)
        if role != "rollout":
            return RoleMemory(role, ranks, base, {}, {}, keeps_freed=self.on_cpu)
        return self._server(ranks, base) if rollout_engine(self.config) == "sglang" else self._embedded(ranks, base)

    def _server(self, ranks: int, base: dict[str, int]) -> RoleMemory:
        """A worker that generates on an SGLang server."""
        if not self.on_cpu:
            return server_memory(self.config.sglang, self.spec, ranks)
        held = {} if self.config.sglang.rollout_external else {"weights": self.precision.weights * self.spec.parameters}
        return RoleMemory("rollout", ranks, base | held, {}, self._published(), keeps_freed=True)

    def _embedded(self, ranks: int, base: dict[str, int]) -> RoleMemory:
        """A worker that generates by itself, always on the CPU."""
        weights = CPU.weights * self.spec.parameters
        # Tied weights are held twice: rows of the embedding, and packed for the output layer.
        head = 4 * self.spec.vocab_size * self.spec.hidden_size if self.spec.tied else 0
        held, working = {"weights": weights + head}, self._generation(ranks)
        if not self.on_cpu:
            return RoleMemory("rollout", ranks, {}, {}, {}, keeps_freed=False, host=held | working)
        publishing = self._published() | {"unpacked weights": weights}
        return RoleMemory("rollout", ranks, base | held, working, publishing, keeps_freed=True)

    def _trained(self, role: str, ranks: int, base: dict[str, int]) -> RoleMemory:
        """Actor or critic: its state, its largest forward and backward pass, and what publishing adds."""
        work = self._pass(ranks)
        passes = -(-self.config.batch.samples_per_step // self._data_parallel(ranks) // max(1, int(work.samples)))
        in_flight = max(1, min(self.stages - self.stage, passes))
        of_pass = self.spec, self.layout, work, self.precision.activations
        saved = activations.activation_bytes(*of_pass, layers=self.layers, in_flight=in_flight)
        working = {"activations": saved}
        publishing: dict[str, int] = {}
        if role == "actor":
            logits = self._logits(work, entropy_grad=self.config.algorithm.entropy_coef != 0)
            # What a CPU's allocator has freed of the one is of no use to the other.
            head = activations.at_head_bytes(*of_pass, layers=self.layers)
            if logits and self.on_cpu:
                working["logits"] = logits
            elif logits and head + logits > saved:
                working = {"activations": head, "logits": logits}
            publishing = self._published()
            if self.on_cpu and lora_of(self.config, role) is not None:
                publishing["merged weights"] = self.precision.weights * self.spec.parameters
        resident, host = self._training_state(role, self._replicas(ranks))
        copied = self._copy_to_save(role, ranks)
        resident, host = (resident | copied, host) if self.on_cpu else (resident, host | copied)
        return RoleMemory(role, ranks, base | resident, working, publishing, keeps_freed=self.on_cpu, host=host)

    def _copy_to_save(self, role: str, ranks: int) -> dict[str, int]:
        """What `--async-save` writes while training continues, in host memory."""
        section, precision = self.config.checkpoint, self.precision
        if not section.async_save or section.save is None:
            return {}
        trained = self._trained_parameters(role)
        split = self.config.optimizer.use_distributed_optimizer
        shared = self._updated(role, self._replicas(ranks)) if split else trained
        updated = (precision.master + precision.moments) * shared
        return {"copy to save": precision.weights * trained + updated}

    def _training_state(self, role: str, replicas: int) -> tuple[dict[str, int], dict[str, int]]:
        """Memory of a rank of actor or critic: on its device while awake, and in host memory all the time."""
        spec, precision, section = self.spec, self.precision, self.config.optimizer
        trained = self._trained_parameters(role)
        mine = trained - (0 if lora_of(self.config, role) else self.experts_elsewhere)
        updated = self._updated(role, replicas) if section.use_distributed_optimizer else mine
        untrained = precision.weights * -(-spec.untrained_parameters // self.tensor_parallel)
        held = {"weights": precision.weights * (self._parameters(role) - self.experts_elsewhere)}
        if (lora := lora_of(self.config, role)) is not None:
            held["adapters"] = precision.weights * self._in_layers(lora.parameters(spec, self.tensor_parallel))
        held[GRADIENTS] = precision.gradients * mine
        if untrained:
            held["vision tower"] = untrained
        offloaded = {"optimizer": OFFLOADED * updated}
        if section.optimizer_cpu_offload and self.on_cpu:
            return held | offloaded, {}
        if not section.optimizer_cpu_offload:
            held["Adam moments"] = precision.moments * updated
            if precision.master:
                held["fp32 master weights"] = precision.master * updated
        if self.on_cpu:
            return held, {}
        # Asleep, a role is in page-locked host memory, which it keeps for the next time. Gradients are dropped.
        parked = {"parked": sum(held.values()) - held[GRADIENTS]}
        return held, parked | offloaded if section.optimizer_cpu_offload else parked

    def _reference(self, ranks: int, base: dict[str, int]) -> RoleMemory:
        work = self._pass(ranks)
        parameters = self._parameters("reference") - self.experts_elsewhere
        parameters += -(-self.spec.untrained_parameters // self.tensor_parallel)
        weights = self.precision.weights * parameters
        passed = activations.forward_bytes(self.spec, self.layout, work, self.precision.activations)
        working = {"activations": passed, "logits": self._logits(work, entropy_grad=False)}
        host = {} if self.on_cpu else {"parked": weights}
        resident = base | {"weights": weights}
        return RoleMemory("reference", ranks, resident, working, {}, keeps_freed=self.on_cpu, host=host)

    def _logits(self, work: activations.Pass, *, entropy_grad: bool) -> int:
        if not self._is_last:
            return 0
        return activations.logits_bytes(self.spec, self.layout, work, entropy_grad=entropy_grad)

    def _published(self) -> dict[str, int]:
        """Weights on their way from the actor to the rollout workers."""
        if not self.on_cpu:
            # One bucket is gathered while the one before it is being sent.
            return {"buckets of weights": 2 * self.config.sglang.update_weight_buffer_size}
        if self.layout.launcher == "local":
            return {}
        # In Ray's object store actor and rollout workers share them.
        return {OBJECT_STORE: self.precision.weights * self.spec.parameters}

    def _generation(self, ranks: int) -> dict[str, int]:
        spec, lengths, batch = self.spec, self.lengths, self.config.batch
        columns = lengths.generated
        requests = -(-self.config.prompts_per_round // ranks) * batch.n_samples_per_prompt
        rows = engine_rows(spec, requests, columns)
        tokens = min(max(PREFILL_TOKENS, lengths.prompt), rows * lengths.prompt)
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        width = 3 * spec.hidden_size + 2 * queries + 3 * keys + spec.mlp_numbers(1)
        return {
            "KV cache": kv_cache_bytes(spec, rows, columns),
            "activations": 4 * tokens * width,
            # Logits, log-softmax and its exponential in fp32, the cumulative sum in fp64.
            "sampling": 20 * rows * spec.vocab_size,
        }

    def _data_parallel(self, ranks: int) -> int:
        return max(1, ranks // self.layout.grid)

    def _replicas(self, ranks: int) -> int:
        """Ranks that have the same parameters, and share out the optimizer's state."""
        return self._data_parallel(ranks) * self.layout.context_parallel_size

    @property
    def _is_last(self) -> bool:
        return self.stage == self.stages - 1

    def _in_layers(self, count: int) -> int:
        """What a stage has of something that is in all layers alike."""
        return count * self.layers // self.spec.num_layers

    def _parameters(self, role: str) -> int:
        """Parameters of a role's model on one rank: a stage's layers, and what is before or after all layers."""
        spec, ranks = self.spec, self.tensor_parallel
        whole = (spec.value_parameters_of_rank if role == "critic" else spec.parameters_of_rank)(ranks)
        if self.stages == 1:
            return whole
        matrix = spec.vocabulary_of_rank(ranks) * spec.hidden_size
        head = spec.hidden_size + 1 if role == "critic" else matrix
        norm = spec.hidden_size
        outside = matrix + norm + (0 if role != "critic" and spec.tied else head)
        # The last stage has a tied matrix as well.
        here = matrix * (self.stage == 0) + (norm + head) * self._is_last
        return self._in_layers(whole - outside) + here

    def _trained_parameters(self, role: str) -> int:
        """Those of them that get a gradient."""
        lora = lora_of(self.config, role)
        if lora is None:
            return self._parameters(role)
        head = self.spec.hidden_size + 1 if role == "critic" and self._is_last else 0
        return self._in_layers(lora.parameters(self.spec, self.tensor_parallel)) + head

    def _updated(self, role: str, replicas: int) -> int:
        """Those that a rank updates for all that have them; tensor-parallel ranks have the same experts."""
        experts = 0 if lora_of(self.config, role) else self.experts
        others = self._trained_parameters(role) - experts
        return -(-others // replicas) - (-experts // (replicas * self.tensor_parallel))

    def _pass(self, ranks: int) -> activations.Pass:
        batch, replicas = self.config.batch, self._data_parallel(ranks)
        packed = self.on_cpu if batch.pack_sequences is None else batch.pack_sequences
        return activations.largest_pass(batch, self.lengths, replicas, packed=packed, layout=self.layout)
