"""`--simulate`: the peak memory of a training step of each role, by running it on tensors without memory elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from relax_cli.config.placement import ranks_of
from relax_cli.errors import MACHINE_THEME, EnvironmentFault, problem_kind
from relax_cli.preflight.check_run import CheckedRun

NOT_SIMULATED = problem_kind(
    "not-simulated",
    MACHINE_THEME,
    "`validate-config --simulate` builds the model that a run would build. What cannot be built here, and models of "
    "Megatron-Bridge, whose layers are TransformerEngine's and need real memory, cannot be simulated.",
)

WITH_MODEL = ("critic", "reference", "actor")
SECONDS = 1800.0
"""Deadline of one role; a model of 8 billion parameters takes about a minute."""

Peaks = dict[str, dict[str, int]]
"""Bytes by phase, and by what they are for at its peak."""


def simulate(checked: CheckedRun, status: Callable[[str], None], roles: Sequence[str] = WITH_MODEL) -> dict[str, Peaks]:
    """The peaks of the first rank of every role with a model: of `actor`, or of `actor stage 0` and so on.
    Raises EnvironmentFault: a role cannot be simulated here."""
    if checked.graph is None or checked.inputs.model is None:
        raise _refused("it is not known what the run would build", "no model folder", "one, read without --skip-files")
    if checked.inputs.needs_bridge:
        raise _refused(
            "models of Megatron-Bridge are not simulated: TransformerEngine's kernels need memory",
            checked.inputs.model.family,
            "a model that relax builds itself",
        )
    found: dict[str, Peaks] = {}
    for role in (name for name in roles if name in checked.graph):
        status(f"simulating a step of the {role}")
        request = {
            "role": role,
            "ranks": ranks_of(checked.config.parallel, role),
            "config": checked.config.model_dump(mode="json"),
            "model": dict(checked.inputs.model_config),
            "lengths": asdict(checked.inputs.lengths_for(checked.config)),
        }
        # A process of its own: it needs torch and a process group.
        command, sent = [sys.executable, "-m", "relax_cli.engine.fake_role"], json.dumps(request)
        done = subprocess.run(command, input=sent, capture_output=True, encoding="utf-8", timeout=SECONDS)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise _refused(f"a step of the {role} does not run on tensors without memory", lines[-1], "a step")
        stages: list[Peaks] = json.loads(done.stdout.splitlines()[-1])
        names = [f"{role} stage {stage}" for stage in range(len(stages))] if len(stages) > 1 else [role]
        found |= dict(zip(names, stages, strict=True))
    return found


def _refused(what: str, got: str, expected: str) -> EnvironmentFault:
    return EnvironmentFault(
        NOT_SIMULATED(
            what,
            where="--simulate",
            got=got,
            expected=expected,
            fix="leave --simulate out: the plan is arithmetic alone",
        )
    )
