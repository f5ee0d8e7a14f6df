"""Rules about prompts. What is wrong in the rows is found while they are read (`relax_cli.preflight.inputs`)."""

from __future__ import annotations

from relax_cli.config.schema import DataSection
from relax_cli.preflight.rules.registry import Finding, Found, rule


@rule("prompt-data-missing", "Data", option="--prompt-data", needs="files")
def prompt_data_missing(data: DataSection) -> Found:
    """`--prompt-data` is required."""
    if not data.prompt_data:
        fix = "add --prompt-data FILE.jsonl, or --prompt-data reasoning-gym:chain_sum?size=512"
        yield Finding("no prompts to train on are given", fix)
