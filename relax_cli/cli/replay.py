"""`relax replay`: a stored step computed again with the installed code."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from relax_cli.cli.console import Output
from relax_cli.errors import ExitCode
from relax_cli.plugin.manager import Plugins
from relax_cli.tracking.run_reader import read_run


def replay(
    output: Output,
    plugins: Plugins,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder", show_default=False)],
    step: Annotated[int | None, typer.Option(help="the step; the last one when unset")] = None,
) -> ExitCode:
    """Recompute a stored step with the installed reward and plugin, and show the first difference."""
    from relax_cli.tracking.replay import Replay  # It imports torch.

    again = Replay(read_run(run), step, plugins)
    stages = list(again.stages())
    lines = [f"step {again.step}, {len(again.samples)} samples"]
    lines += [f"  {stage.name:<13}{stage.status:<14}{stage.detail}" for stage in stages]
    differs = [stage for stage in stages if stage.status == "differs"]
    for stage in differs[:1]:
        assert stage.first is not None, "there is a difference"
        place = {"sample": stage.first.row, "token": stage.first.token, "number": stage.first.metric}
        where = ", ".join(f"{name} {value}" for name, value in place.items() if value is not None)
        lines += ["", f"first difference: {stage.name}, {where}"]
        lines += [f"  stored      {stage.first.stored!r}", f"  recomputed  {stage.first.recomputed!r}"]
    data = {"ok": not differs, "step": again.step, "stages": [asdict(stage) for stage in stages]}
    output.result(data, "\n".join(lines))
    return ExitCode.FAILED if differs else ExitCode.OK
