"""Sending a tiny policy's weights from one or two ranks; importable by spawned processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from relax_cli.backends.device import select_device
from relax_cli.backends.rollout.sglang.weights import SendOptions, WeightSender
from relax_cli.backends.rollout.targets import WeightTarget
from relax_cli.errors import RunError
from relax_cli.models import hf
from tests.support.sglang.faults import Faults
from tests.support.sglang.server import ContractServer
from tests.support.training_runs import Run, build

LIMIT = 10_000
"""Bytes of a bucket: more than any tensor of the tiny models (12288 for the embedding) but one."""


def sender(targets: Sequence[WeightTarget], transport: Any, folder: Path, timeout: float = 60.0) -> WeightSender:
    """A sender of this process's ranks, on the CPU; weights on disk go beside the model."""
    options = SendOptions(transport, LIMIT, timeout, folder.with_name("weights"), folder)
    return WeightSender(targets, select_device("cpu"), options)


def send(
    rank: int, ranks: int, port: int, folder: Path, jobs: list[tuple[str, WeightTarget]], stages: int
) -> tuple[list[str], dict[str, Any] | None]:
    """Change the weights on every rank alike and send them as version 3, one job after the other.

    Returns:
        what went wrong in each job, and the export that servers should have, from rank 0.
    """
    run = Run("policy", folder, tensor_parallel=ranks // stages, pipeline_parallel=stages)
    model = build(run, rank, ranks, port)
    change(model)
    failures = []
    for transport, target in jobs:
        try:
            sender([target], transport, folder).send(model.hf_buckets, 3)
            failures.append("")
        except RunError as error:
            failures.append(error.problems[0].message)
    state = model.hf_state()
    # Arrays: tensors would stay in the memory of this process, which ends.
    return failures, None if state is None else {name: tensor.numpy() for name, tensor in state.items()}


def die_writing(folder: Path, target: WeightTarget, port: int) -> None:
    """Be killed in the middle of writing version 3 for a server; to be started as a process."""
    model = build(Run("policy", folder), 0, 1, port)
    hf.save_file = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    sender([target], "disk", folder).send(model.hf_buckets, 3)


def change(model: Any) -> None:
    """Weights that are in no file."""
    for parameter in model.model.parameters():
        parameter.data.mul_(1.25)


class DyingServer(ContractServer):
    """A process that ends in the middle of its second bucket."""

    taken = 0

    async def _update(self, needs_session: str | None, body: dict[str, Any], take: Callable[[], None]) -> Any:
        self.taken += 1
        if self.taken == 2:
            os._exit(9)
        return await super()._update(needs_session, body, take)


def serve_dying(folder: Path, port: int) -> None:
    """Run a `DyingServer`; to be started as a process."""
    uvicorn.run(DyingServer(folder, Faults()), host="127.0.0.1", port=port, log_level="critical", lifespan="off")


@contextmanager
def no_slower_than(seconds: float) -> Any:
    """Fails where the block takes longer, so that a hang is a failure and not a timeout of the whole run."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds
    assert threading.active_count() < 200
