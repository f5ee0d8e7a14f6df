"""From the configuration to an engine with running servers: started here, or already there."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from relax_cli.backends.rollout.protocol import Decode
from relax_cli.backends.rollout.sglang.client import (
    API_KEY,
    CONTROL_SECONDS,
    SglangClient,
    SglangError,
    declare,
)
from relax_cli.backends.rollout.sglang.engine import SglangEngine
from relax_cli.backends.rollout.sglang.replies import folder_of, no_routes
from relax_cli.backends.rollout.sglang.server import LocalServer, launch_command, server_environment
from relax_cli.backends.rollout.targets import WeightTarget, node_of, this_node
from relax_cli.config.schema import ParallelSection, RolloutSection, SglangSection
from relax_cli.errors import EnvironmentFault, RelaxError
from relax_cli.models.hybrid import read_any_spec
from relax_cli.models.spec import ModelSpec, MoeSpec

log = logging.getLogger(__name__)

UNREACHABLE = declare(
    "sglang-external-unreachable",
    "A server of `--rollout-external-engine-addrs` does not answer, wants a key (`SGLANG_API_KEY` in the environment), "
    "or is something else than SGLang.",
    option="--rollout-external-engine-addrs",
)
OTHER_MODEL = declare(
    "sglang-external-model",
    "An external server serves another model than the one of `--hf-checkpoint`: every key of its `config.json` is "
    "compared where this machine can read its folder, else its type.",
    option="--rollout-external-engine-addrs",
)

OVERRIDES = "json_model_override_args"
"""What a server changes of its model's `config.json`."""
KEY_FIX = f"export {API_KEY}=..., in the environment of `relax train`, and of Ray where a cluster is joined"


def open_engine(
    section: SglangSection,
    rollout: RolloutSection,
    parallel: ParallelSection,
    *,
    model_folder: Path,
    run_dir: Path,
    rank: int,
    workers: int,
    decode: Decode | None = None,
    host: str = "127.0.0.1",
    environment: Mapping[str, str] = os.environ,
) -> SglangEngine:
    """The engine of rollout worker `rank` of `workers`: its own server, or its share of the external ones.

    Args:
        decode: see `EmbeddedEngine`.
        host: this machine's address for the actor, where servers of the run listen.
        environment: of a server that is started.

    Raises:
        RunError: a server does not come up.
        EnvironmentFault: an external server does not answer, or serves another kind of model.
    """
    spec = read_any_spec(model_folder)
    release_memory = parallel.offload or parallel.offload_rollout
    servers: list[LocalServer] = []
    if section.rollout_external:
        addresses = section.rollout_external_engine_addrs[rank::workers]
        targets = [_attach(address, spec, routes=parallel.router_replay) for address in addresses]
    else:
        # Without a GPU a server refuses to start with a memory saver.
        release_memory = parallel.device == "cuda" and (release_memory or parallel.colocate)
        command = launch_command(
            model_folder,
            section,
            host=host,
            seed=rollout.rollout_seed + rank,
            memory_saver=release_memory,
            routes=parallel.router_replay,
        )
        environment = server_environment(environment, other_python=section.sglang_python is not None)
        servers = [LocalServer(command, run_dir / "logs" / f"sglang-{rank}.log", host=host, environment=environment)]
        servers[0].start()
        size = section.rollout_num_gpus_per_engine
        targets = [WeightTarget(servers[0].address, this_node(), rank * size, size)]
    limits = [limits_of(target.address) for target in targets]
    return SglangEngine(
        targets,
        vocab_size=spec.vocab_size,
        max_positions=min([spec.max_positions, *(context for context, _ in limits if context is not None)]),
        max_prompt=min((prompt for _, prompt in limits if prompt is not None), default=None),
        rollout=rollout,
        concurrency=section.sglang_server_concurrency,
        release_memory=release_memory,
        servers=servers,
        decode=decode,
        experts=spec if isinstance(spec, MoeSpec) else None,
    )


def limits_of(address: str) -> tuple[int | None, int | None]:
    """What a server says of itself: most tokens of prompt and response together, and most of a prompt."""
    try:
        said = SglangClient(address).request("GET", "/server_info", timeout=CONTROL_SECONDS)
    except SglangError as fault:
        # Its replies are still checked one by one.
        log.warning("%s", fault)
        return None, None
    nested = said.get("internal_states") if isinstance(said, dict) else None
    states = [said, *(nested if isinstance(nested, list) else [])]

    def least(*names: str) -> int | None:
        found = [state.get(name) for state in states if isinstance(state, dict) for name in names]
        return min((value for value in found if type(value) is int and value > 0), default=None)

    # What it calls the longest input is one token too many, and 5 fewer than it has positions.
    longest = least("max_req_input_len")
    room = [least("context_length", "max_total_num_tokens"), None if longest is None else longest + 4]
    return min((most for most in room if most is not None), default=None), None if longest is None else longest - 1


def _attach(address: str, spec: ModelSpec, *, routes: bool) -> WeightTarget:
    """Look at a running server. Its model is compared by the folder where this machine can read that, else by type."""
    client = SglangClient(address)
    try:
        model = client.request("GET", "/model_info", timeout=CONTROL_SECONDS)
        server = client.request("GET", "/server_info", timeout=CONTROL_SECONDS)
    except SglangError as fault:
        got = fault.got or str(fault.status or fault.problems[0].message)
        if fault.status in (401, 403):
            raise _unreachable(address, "wants an API key", got, KEY_FIX) from fault
        raise _unreachable(address, "does not answer", got) from fault
    size = server.get("tp_size", 1) if isinstance(server, dict) else None
    if not isinstance(model, dict) or type(size) is not int or size < 1:
        raise _unreachable(address, "is no SGLang server: something else listens there", str(model)[:80])
    folder, ours = folder_of(model), {"family": spec.family}
    # Servers before model_type was added to their answer say nothing of it.
    theirs: dict[str, Any] = {"family": model.get("model_type") or spec.family}
    if folder is not None:
        with contextlib.suppress(RelaxError):  # a model that relax cannot read has another type
            theirs, ours = asdict(read_any_spec(folder)), asdict(spec)
    theirs, ours = theirs | {OVERRIDES: server.get(OVERRIDES) or "{}"}, ours | {OVERRIDES: "{}"}
    different = [name for name in ours if theirs.get(name) != ours[name]]
    if different:
        what = f"SGLang server {address} serves another model than --hf-checkpoint: {', '.join(different)} differ"
        got = f"{', '.join(f'{name} {theirs.get(name)}' for name in different)} ({folder or 'not read'})"
        expected = ", ".join(f"{name} {ours[name]}" for name in different)
        fix = "start the server with the folder of --hf-checkpoint as its --model-path"
        where = f"http://{address}/model_info"
        raise EnvironmentFault(OTHER_MODEL(what, where=where, got=got, expected=expected, fix=fix))
    if routes and server.get("enable_return_routed_experts") is False:
        raise EnvironmentFault(no_routes(address, "enable_return_routed_experts false"))
    return WeightTarget(address, node_of(address), None, size)


def _unreachable(address: str, what: str, got: str, fix: str = "") -> EnvironmentFault:
    what, fix = f"SGLang server {address} {what}", fix or f"curl http://{address}/model_info"
    return EnvironmentFault(UNREACHABLE(what, where=address, got=got, expected="a running SGLang server", fix=fix))
