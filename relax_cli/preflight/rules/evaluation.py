"""Rules about held-out evaluation."""

from __future__ import annotations

import re

from relax_cli.config.schema import EvalSection
from relax_cli.preflight.rules.batches import THEME
from relax_cli.preflight.rules.registry import Finding, Found, rule

NAME = re.compile(r"[A-Za-z0-9_.-]+")


@rule("eval-interval-without-data", THEME, option="--eval-interval")
def eval_interval_without_data(eval: EvalSection) -> Found:
    """`--eval-interval` needs `--eval-prompt-data`."""
    if eval.eval_interval is not None and not eval.eval_prompt_data:
        yield Finding(
            "--eval-interval is set, but there are no held-out prompts",
            got=str(eval.eval_interval),
            fix="add --eval-prompt-data heldout PATH, or drop --eval-interval",
        )


@rule("eval-data-unused", THEME, option="--eval-prompt-data", severity="warning")
def eval_data_unused(eval: EvalSection) -> Found:
    """A warning: there are held-out prompts, but `--eval-interval` is not set."""
    if eval.eval_interval is None and eval.eval_prompt_data:
        yield Finding("--eval-prompt-data is set, but not when to evaluate", fix="add --eval-interval 10")


@rule("eval-data-name", THEME, option="--eval-prompt-data")
def eval_data_name(eval: EvalSection) -> Found:
    """Every held-out set has a name and a path, and names differ."""
    names: list[str] = []
    for item, (name, _) in zip(eval.eval_prompt_data, eval.sets, strict=True):
        message = fix = ""
        if not NAME.fullmatch(name):
            message, fix = f"{item!r} is not a name and a path", f"--eval-prompt-data heldout {item}"
        elif name in names:
            message, fix = f"two held-out sets are called {name!r}", "give each its own name"
        if message:
            yield Finding(message, fix, got=item, expected="NAME PATH, or NAME=PATH")
        names.append(name)
