"""The ranks of a role as Ray actors: what runs in their processes, and how this process calls them."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray

from relax_cli.backends.ports import free_port
from relax_cli.backends.rollout.targets import this_node
from relax_cli.engine.build import RoleBuilder, WorkerSpec
from relax_cli.engine.imports import MEGATRON, ROLLOUT, import_quickly
from relax_cli.engine.ray.queue_keys import QueueKeys
from relax_cli.engine.ray.watch import WORKER_FAILED, ProcessWatch, Whereabouts, children_named
from relax_cli.engine.session import Call, Ranks, Result, Role, recorded
from relax_cli.errors import RelaxError, RunError, way_out

if TYPE_CHECKING:
    from torch import Tensor

ANSWER_SIGNALS = 0.1
"""Seconds of waiting for a worker after which this process looks whether it got a signal."""

QUEUE_PROCESSES = ("ray::TransferQueue", "ray::SimpleStorage")
"""How the titles of TransferQueue's processes begin."""


class RoleWorker:
    """Runs one rank of a role inside a Ray actor; its output goes to `logs/<role>-<rank>.log` of the run."""

    def __init__(self, spec: WorkerSpec) -> None:
        if Path(spec.cwd).is_dir():  # The workers of a cluster start in the folder where it was started.
            os.chdir(spec.cwd)
        with log_of(spec.run_dir, spec.role, spec.rank).open("a", encoding="utf-8") as log:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(log.fileno(), stream.fileno())
        faulthandler.enable(sys.stderr)
        self.spec = spec
        self.role: Any = None
        node_id = ray.get_runtime_context().get_node_id()
        self._note(f"rank {spec.rank} of {spec.role} on node {this_node()} ({node_id}), process {os.getpid()}")

    def whereabouts(self) -> Whereabouts:
        return Whereabouts(this_node(), ray.get_runtime_context().get_node_id(), os.getpid())

    def queue_processes(self) -> list[tuple[str, int]]:
        """The processes of TransferQueue on this node, which Ray started next to this one."""
        raylet = psutil.Process().parent()
        return [] if raylet is None else children_named(raylet, *QUEUE_PROCESSES)

    def meeting_point(self) -> tuple[str, int]:
        """Address and port where the ranks of this role find each other."""
        return ray.util.get_node_ip_address(), free_port()

    def open_queue(self, keys: QueueKeys) -> None:
        """Start TransferQueue, owned by this worker."""
        from relax_cli.engine.transfer import open_transfer_queue

        open_transfer_queue(keys)

    def prepare(self) -> None:
        """Import what the role needs while other things start, and look whether this node has the run's plugins.
        Raises ConfigError: it does not."""
        self.builder = RoleBuilder(self.spec)
        if self.spec.role != "advantages":
            import_quickly(ROLLOUT if self.spec.role == "rollout" else MEGATRON)

    def build(self, addr: str, port: int, keys: QueueKeys) -> None:
        from relax_cli.engine.transfer import TransferQueueStore

        with self._logged("build"):
            builder = self.builder
            builder.spec = replace(self.spec, master_addr=addr, master_port=port)
            queue = TransferQueueStore(builder.graph, builder.config.run.queue_timeout, keys)
            self.role = builder.build(queue)

    def run(self, call: Call) -> Any:
        with self._logged(call.method):
            return getattr(self.role, call.method)(*call.args)

    @contextmanager
    def _logged(self, doing: str) -> Iterator[None]:
        """Tell the log what is done, so that it says what a process did that was killed."""
        self._note(doing)
        try:
            yield
        except RelaxError:
            raise
        except SystemExit as error:
            traceback.print_exc()
            raise RuntimeError(f"SystemExit({error.code!r}): some code called sys.exit") from error
        except Exception:
            traceback.print_exc()
            raise

    def _note(self, text: str) -> None:
        print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)

    def export_weights(self) -> list[ray.ObjectRef]:
        """The actor's weights in the object store; empty on ranks without a full copy."""
        named = self.role.export_weights()
        return [] if named is None else [ray.put(as_arrays(named))]

    def load_weights(self, refs: list[ray.ObjectRef], version: int) -> None:
        self.role.load_weights(as_tensors(ray.get(refs[0])), version)


class RayRanks(Ranks[Role]):
    def __init__(self, name: str, workers: list[Any], run_dir: Path, watch: ProcessWatch) -> None:
        super().__init__(name)
        self.workers = workers
        self.run_dir = run_dir
        self.watch = watch
        self.places: list[Whereabouts] = []

    def watch_all(self) -> None:
        """Have every rank watched from now on."""
        self.places = self.collect(self.ask("whereabouts"), "whereabouts")
        for rank, place in enumerate(self.places):
            self.watch.add(f"rank {rank} of {self.name}", place, log_of(self.run_dir, self.name, rank))

    def ask(self, method: str, *args: Any) -> list[Any]:
        """Begin a method of every worker."""
        return [getattr(worker, method).remote(*args) for worker in self.workers]

    def start(self, request: Callable[[Role], Result]) -> Callable[[], list[Result]]:
        call = recorded(request)
        refs = self.ask("run", call)
        return lambda: self.collect(refs, call.method)

    def on(self, rank: int, request: Callable[[Role], Result]) -> Result:
        call = recorded(request)
        result: Result = self.collect([self.workers[rank].run.remote(call)], call.method, first=rank)[0]
        return result

    def tell(self, request: Callable[[Role], object]) -> None:
        disregard(self.ask("run", recorded(request)))

    def collect(self, refs: list[Any], doing: str, first: int = 0) -> list[Any]:
        """Results of calls to the ranks from `first` on, as soon as all have one or any has failed.
        Raises RelaxError: what the role raised, or a `RunError` naming role, rank and log file."""
        waiting = {ref: first + i for i, ref in enumerate(refs)}
        results: dict[int, Any] = {}
        try:
            while waiting:
                # Ray looks for signals about once a second: short waits let Ctrl-C be answered immediately.
                done, _ = ray.wait(list(waiting), num_returns=1, timeout=ANSWER_SIGNALS)
                if done:
                    rank = waiting.pop(done[0])
                    results[rank] = self._result(done[0], rank, doing)
                else:
                    self.watch.look(f"`{doing}` of {self.name}")
        except BaseException:
            disregard(refs)
            raise
        return [results[first + i] for i in range(len(refs))]

    def _result(self, ref: ray.ObjectRef, rank: int, doing: str) -> Any:
        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RelaxError):
                raise error.cause from None
            # The connection to a process that died may break before Ray knows of its death.
            self.watch.settle(f"`{doing}` of {self.name}")
            log, reason = log_of(self.run_dir, self.name, rank), str(error.cause) or repr(error.cause)
            advice = way_out(reason)
            raise RunError(
                WORKER_FAILED(
                    f"rank {rank} of {self.name} failed in `{doing}`",
                    where=str(log),
                    got=reason.splitlines()[0][:300],
                    expected="the call to return",
                    fix=f"{advice}; tail -n 40 {log}" if advice else f"tail -n 40 {log}",
                )
            ) from error
        except ray.exceptions.RayError as error:
            raise self.watch.died(f"rank {rank} of {self.name}", f"its `{doing}`", error) from error


def log_of(run_dir: Path, role: str, rank: int) -> Path:
    return run_dir / "logs" / f"{role}-{rank}.log"


def disregard(refs: Iterable[ray.ObjectRef]) -> None:
    """Tell Ray that these results, which may still fail, are not needed: it prints errors that nothing has read."""
    for ref in refs:
        ref.future()


def as_arrays(named: Mapping[str, Tensor]) -> dict[str, tuple[str, Any]]:
    """Name to type name and bytes of each tensor: Ray copies arrays once and shares them, where it pickles tensors."""
    import torch

    return {
        name: (str(tensor.dtype).removeprefix("torch."), tensor.contiguous().view(torch.uint8).numpy())
        for name, tensor in named.items()
    }


def as_tensors(arrays: Mapping[str, tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors again, over the same memory, which is read-only: they are to be copied from."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for name, (dtype, array) in arrays.items():
            yield name, torch.from_numpy(array).view(getattr(torch, dtype))
