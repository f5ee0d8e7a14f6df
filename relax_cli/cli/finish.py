"""How a run that has ended is shown, and its exit code; the same for `train` and `quickstart`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_cli.cli.console import Output
from relax_cli.errors import ExitCode

if TYPE_CHECKING:
    from relax_cli.engine.run import FinishedRun


def finish(run: FinishedRun, output: Output) -> ExitCode:
    """Print the closing summary, or the JSON object of design section 9."""
    from relax_cli.engine.summary import closing_lines, next_lines
    from relax_cli.quickstart.command import result

    output.result(result(run), "\n".join(closing_lines(run)))
    if run.ended_by is None:
        return ExitCode.OK
    if output.is_json:
        for line in next_lines(run):
            output.note(line)
    return ExitCode.INTERRUPTED if isinstance(run.ended_by, KeyboardInterrupt) else ExitCode.TERMINATED
