"""Rules about prompts. What is wrong in the rows is found while they are read (`relax_cli.preflight.inputs`)."""

from __future__ import annotations

from relax_cli.config.schema import DataSection
from relax_cli.data.sources import SOURCE, source_of, weights_of
from relax_cli.errors import ConfigError
from relax_cli.preflight.rules.registry import Finding, Found, rule


@rule("prompt-data-missing", "Data", option="--prompt-data", needs="files")
def prompt_data_missing(data: DataSection) -> Found:
    """`--prompt-data` is required."""
    if not data.prompt_data:
        fix = "add --prompt-data FILE.jsonl, or --prompt-data reasoning-gym:chain_sum?size=512"
        yield Finding("no prompts to train on are given", fix)


@rule(SOURCE)
def prompt_data_source(data: DataSection) -> Found:
    """An item of `--prompt-data` has a slice or a weight that cannot be read, or only some have a weight."""
    try:
        weights_of([source_of(item) for item in data.prompt_data])
    except ConfigError as error:
        for problem in error.problems:
            yield Finding(problem.message, problem.fix, got=problem.got, expected=problem.expected)
