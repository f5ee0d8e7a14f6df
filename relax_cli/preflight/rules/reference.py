"""Rules about the model that KL terms compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_cli.config.schema import Config
from relax_cli.errors import Problem

if TYPE_CHECKING:
    from relax_cli.preflight.rules.files import Found, Surroundings


def reference_model(config: Config, around: Surroundings) -> Found:
    """`--ref-load` is a folder, or a model package, with the vocabulary of the model that is trained."""
    name = config.model.ref_load
    if name is None or not config.algorithm.needs_reference or name.startswith("package:"):
        return None
    if not Path(name).is_dir():
        return _problem(
            "reference-folder-missing",
            "the folder of the reference model does not exist",
            "give the folder of a model, or drop --ref-load to compare with --hf-checkpoint",
            got=name,
        )
    ours, theirs = _vocabulary(Path(config.model.hf_checkpoint)), _vocabulary(Path(name))
    if theirs is None:
        return _problem(
            "reference-config-unreadable",
            "config.json of the reference model has no vocab_size, or cannot be read",
            "give a folder with config.json and safetensors",
            got=f"{name}/config.json",
        )
    if ours is None or ours == theirs:
        return None
    return _problem(
        "reference-vocabulary",
        "the reference model has another vocabulary, so its log-probabilities are of other tokens",
        "give a model with the same tokenizer, or drop --ref-load",
        got=f"{theirs} tokens",
        expected=f"{ours} tokens, as in --hf-checkpoint",
    )


def _vocabulary(folder: Path) -> int | None:
    try:
        config: Any = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    size = config.get("vocab_size") if isinstance(config, dict) else None
    return size if isinstance(size, int) else None


def _problem(rule: str, message: str, fix: str, *, got: str, expected: str = "a model folder") -> Problem:
    return Problem(id=rule, message=message, fix=fix, option="--ref-load", got=got, expected=expected)
