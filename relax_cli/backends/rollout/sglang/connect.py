"""From the configuration to an engine with running servers: started here, or already there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from relax_cli.backends.rollout.sglang.client import SglangClient, SglangError
from relax_cli.backends.rollout.sglang.engine import CONTROL_SECONDS, EngineOptions, SglangEngine
from relax_cli.backends.rollout.sglang.server import LocalServer, launch_command, server_environment
from relax_cli.backends.rollout.targets import WeightTarget, node_of, this_node
from relax_cli.config.schema import ParallelSection, RolloutSection, SglangSection
from relax_cli.errors import EnvironmentFault, problem_kind
from relax_cli.models.hybrid import read_any_spec
from relax_cli.models.spec import ModelSpec

UNREACHABLE = problem_kind(
    "sglang-external-unreachable",
    "SGLang servers",
    "A server of `--rollout-external-engine-addrs` does not answer.",
    option="--rollout-external-engine-addrs",
)
OTHER_MODEL = problem_kind(
    "sglang-external-model",
    "SGLang servers",
    "An external server serves another model type than the one of `--hf-checkpoint`.",
    option="--rollout-external-engine-addrs",
)


def open_engine(
    section: SglangSection,
    rollout: RolloutSection,
    parallel: ParallelSection,
    *,
    model_folder: Path,
    run_dir: Path,
    rank: int,
    workers: int,
    host: str = "127.0.0.1",
    environment: Mapping[str, str] = os.environ,
) -> SglangEngine:
    """The engine of rollout worker `rank` of `workers`: its own server, or its share of the external ones.

    Args:
        host: this machine's address for the actor, where servers of the run listen.
        environment: of a server that is started.

    Raises:
        RunError: a server does not come up.
        EnvironmentFault: an external server does not answer, or serves another kind of model.
    """
    spec = read_any_spec(model_folder)
    shares_memory = parallel.offload or parallel.offload_rollout
    options = EngineOptions(
        concurrency=section.sglang_server_concurrency,
        request_timeout=rollout.rollout_request_timeout,
        partial=rollout.partial_rollout,
        release_memory=shares_memory or (parallel.colocate and not section.rollout_external),
    )
    if section.rollout_external:
        targets = [_attach(address, spec) for address in section.rollout_external_engine_addrs[rank::workers]]
        return SglangEngine(targets, vocab_size=spec.vocab_size, max_positions=spec.max_positions, options=options)
    size = section.rollout_num_gpus_per_engine
    command = launch_command(
        model_folder, section, host=host, seed=rollout.rollout_seed + rank, memory_saver=options.release_memory
    )
    log_file = run_dir / "logs" / f"sglang-{rank}.log"
    server = LocalServer(
        command,
        log_file,
        host=host,
        environment=server_environment(environment, other_python=section.sglang_python is not None),
    )
    server.start()
    target = WeightTarget(server.address, this_node(), rank * size, size)
    return SglangEngine(
        [target],
        vocab_size=spec.vocab_size,
        max_positions=spec.max_positions,
        options=options,
        servers=[server],
    )


def _attach(address: str, spec: ModelSpec) -> WeightTarget:
    """Look at a running server."""
    client = SglangClient(address)
    try:
        model = client.request("GET", "/model_info", timeout=CONTROL_SECONDS)
        server = client.request("GET", "/server_info", timeout=CONTROL_SECONDS)
    except SglangError as fault:
        raise EnvironmentFault(
            UNREACHABLE(
                f"SGLang server {address} does not answer",
                where=address,
                got=fault.got or fault.problems[0].message,
                expected="a running server",
                fix=f"curl http://{address}/model_info",
            )
        ) from fault
    family = model.get("model_type") if isinstance(model, dict) else None
    # Servers before model_type was added to their answer say nothing of it.
    if family is not None and family != spec.family:
        raise EnvironmentFault(
            OTHER_MODEL(
                f"SGLang server {address} serves another kind of model than --hf-checkpoint",
                where=f"http://{address}/model_info",
                got=f"{family} ({model.get('model_path')})",
                expected=spec.family,
                fix="start the server with the folder of --hf-checkpoint as its --model-path",
            )
        )
    size = server.get("tp_size", 1) if isinstance(server, dict) else 1
    return WeightTarget(address, node_of(address), None, int(size))
