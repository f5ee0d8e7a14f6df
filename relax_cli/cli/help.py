"""Help of commands with sub-commands: whole summaries, as wide as the terminal."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

WIDEST = 120
CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": WIDEST}
"""Settings of every application."""
EXAMPLES = """\b
Start here:
  relax quickstart                          train a tiny model on this CPU
  relax recipes list                        ready configurations
  relax train --recipe NAME --dry-run       check one and show its plan
  relax validate-config --recipe FILE       everything that is wrong
  relax checkpoint check-resume --load DIR  what a run would resume from
  relax train --hf-checkpoint DIR --prompt-data FILE.jsonl --rm-type math"""


class CommandGroup(TyperGroup):
    """Shows the whole first paragraph of each sub-command."""

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """The list of sub-commands."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, _summary(command.help or "")) for name, command in commands if command is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _summary(text: str) -> str:
    return " ".join(text.strip().partition("\n\n")[0].split())
