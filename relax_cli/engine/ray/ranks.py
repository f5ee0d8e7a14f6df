"""The ranks of a role as Ray actors: what runs in their processes, and how this process calls them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ray

from relax_cli.engine.build import RoleBuilder, WorkerSpec
from relax_cli.engine.groups import Call, Ranks, Result, Role, recorded
from relax_cli.engine.local import free_port
from relax_cli.engine.ray.object_store import as_arrays, as_tensors
from relax_cli.engine.ray.queue_keys import QueueKeys
from relax_cli.errors import RelaxError, RunError, problem_kind

ANSWER_SIGNALS = 0.1
"""Seconds of waiting for a worker after which this process looks whether it got a signal."""

WORKER_FAILED = problem_kind(
    "worker-failed",
    "While a run goes on",
    "A worker process failed or died; the message names its log.",
)


class RoleWorker:
    """Runs one rank of a role inside a Ray actor; its output goes to `logs/<role>-<rank>.log` of the run."""

    def __init__(self, spec: WorkerSpec) -> None:
        with (spec.run_dir / "logs" / f"{spec.role}-{spec.rank}.log").open("a", encoding="utf-8") as log:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(log.fileno(), stream.fileno())
        self.spec = spec
        self.role: Any = None

    def meeting_point(self) -> tuple[str, int]:
        """Address and port where the ranks of this role find each other."""
        return ray.util.get_node_ip_address(), free_port()

    def open_queue(self, keys: QueueKeys) -> None:
        """Start TransferQueue, owned by this worker."""
        from relax_cli.engine.transfer import open_transfer_queue

        open_transfer_queue(keys)

    def prepare(self) -> None:
        """Import what the role needs while other things start."""
        import torch  # noqa: F401

        if self.spec.role in ("actor", "critic", "reference"):
            from relax_cli.backends.megatron import trainer  # noqa: F401

    def build(self, addr: str, port: int, keys: QueueKeys) -> None:
        """Build the role."""
        from relax_cli.engine.transfer import TransferQueueStore

        builder = RoleBuilder(self.spec.at(addr, port))
        queue = TransferQueueStore(builder.graph, builder.config.run.queue_timeout, keys)
        self.role = builder.build(queue)

    def run(self, call: Call) -> Any:
        """Call a method of the role."""
        return getattr(self.role, call.method)(*call.args)

    def export_weights(self) -> list[ray.ObjectRef]:
        """The actor's weights in the object store; empty on ranks that hold no full copy."""
        named = self.role.export_weights()
        return [] if named is None else [ray.put(as_arrays(named))]

    def load_weights(self, refs: list[ray.ObjectRef], version: int) -> None:
        """Read exported weights from the object store into the rollout engine."""
        self.role.load_weights(as_tensors(ray.get(refs[0])), version)


class RayRanks(Ranks[Role]):
    """The ranks of a role as Ray actors."""

    def __init__(self, name: str, workers: list[Any], run_dir: Path) -> None:
        super().__init__(name, count=len(workers))
        self.workers = workers
        self.run_dir = run_dir

    def start(self, request: Callable[[Role], Result]) -> Callable[[], list[Result]]:
        """See `Ranks.start`."""
        call = recorded(request)
        refs = [worker.run.remote(call) for worker in self.workers]
        return lambda: self.collect(refs, call.method)

    def on(self, rank: int, request: Callable[[Role], Result]) -> Result:
        """See `Ranks.on`."""
        call = recorded(request)
        result: Result = self.collect([self.workers[rank].run.remote(call)], call.method)[0]
        return result

    def collect(self, refs: list[Any], doing: str) -> list[Any]:
        """Results of all ranks, as soon as all have one or any has failed.

        Raises:
            RelaxError: what the role raised, or a `RunError` naming role, rank and log file.
        """
        try:
            return self._results(refs, doing)
        except BaseException:
            disregard(refs)
            raise

    def _results(self, refs: list[Any], doing: str) -> list[Any]:
        waiting = dict(zip(refs, range(len(refs)), strict=True))
        results: dict[int, Any] = {}
        while waiting:
            # Ray looks for signals about once a second: short waits let Ctrl-C be answered at once.
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=ANSWER_SIGNALS)
            if not done:
                continue
            rank = waiting.pop(done[0])
            try:
                results[rank] = ray.get(done[0])
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, RelaxError):
                    raise error.cause from None
                raise self._failed(rank, doing, repr(error.cause)) from error
            except ray.exceptions.RayActorError as error:
                raise self._failed(rank, doing, "the worker process died") from error
        return [results[rank] for rank in range(len(refs))]

    def _failed(self, rank: int, doing: str, reason: str) -> RunError:
        log = self.run_dir / "logs" / f"{self.name}-{rank}.log"
        return RunError(
            WORKER_FAILED(
                f"rank {rank} of {self.name} failed in `{doing}`",
                where=str(log),
                got=reason.splitlines()[0][:300],
                expected="the call to return",
                fix=f"tail -n 40 {log}",
            )
        )


def disregard(refs: Iterable[ray.ObjectRef]) -> None:
    """Tell Ray that nobody will read these, which may fail yet: it prints errors that it thinks were overlooked."""
    for ref in refs:
        ref.future()
