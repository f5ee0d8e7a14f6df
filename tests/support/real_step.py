"""A step of a role in this process, and the memory that it really takes: a process, its request in JSON.

Small allocations are mapped one by one (MALLOC_MMAP_THRESHOLD_), so that what is freed leaves the process.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from relax_cli.backends.megatron.trainer import TrainableModel
from relax_cli.engine.build import RoleBuilder, WorkerSpec
from relax_cli.engine.fake_role import longest_samples, smaller, step
from relax_cli.preflight.memory.sizes import Lengths
from relax_cli.roles import actor

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_MMAP_MAX_": "10000000", "OMP_NUM_THREADS": "1"}


def status(name: str) -> int:
    """Bytes that the kernel gives for this process: VmRSS, or VmHWM for the peak of it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def held(model: Any) -> int:
    """Bytes of parameters, and of a trained model gradients, masters and moments."""
    tensors = [*model.model.parameters()]
    if isinstance(model, TrainableModel):
        tensors += [*(b.grad_data for b in model.ddp.buffers), *model.optimizer.tensors()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def main() -> None:
    """Print the peak of a second step, once the first has loaded what it needs."""
    request = json.load(sys.stdin)
    # The queue's log-probabilities are nobody's.
    actor.check_gap = lambda *_: None
    folder = Path(request["folder"])
    spec = WorkerSpec(request["role"], request["rank"], request["ranks"], 1, request["config"], folder, folder, None)
    builder = RoleBuilder(replace(spec, master_port=request["port"]))
    lengths = Lengths(**request["lengths"])
    builder.config = smaller(builder.config, lengths, 1)
    role = builder.build(longest_samples(builder, lengths))
    role.wake()
    step(role)
    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step(role)
    print(json.dumps({"held": held(role.model), "step": status("VmHWM") - before}))


if __name__ == "__main__":
    main()
