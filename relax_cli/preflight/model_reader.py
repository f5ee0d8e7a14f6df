"""What a run would meet in its model folders: sizes, weights, and a tokenizer that can be loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from relax_cli.checkpoint.fingerprint import folder_of_model
from relax_cli.config.layers import known
from relax_cli.config.schema import Config
from relax_cli.data.tokenizer_trial import try_tokenizer
from relax_cli.errors import ConfigError, Problem
from relax_cli.models.files import irregular_files
from relax_cli.models.headers import weight_problems
from relax_cli.models.hybrid import read_any_spec
from relax_cli.models.spec import BRIDGE_FAMILIES, FAMILIES, ModelSpec, config_of, known_folder


@dataclass(frozen=True)
class ModelFiles:
    """All fields are empty where there is no model folder."""

    spec: ModelSpec | None = None
    """What `config.json` means."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """`config.json` as it is; empty where it is missing or broken."""
    tokenizer: Path | None = None
    """The folder, where its tokenizer may be loaded into this process."""
    problems: tuple[Problem, ...] = ()


def read_model(config: Config) -> ModelFiles:
    """Look at `--hf-checkpoint`, and at `--ref-load` where the run has a KL term."""
    folder = known(lambda: folder_of_model(config.model.hf_checkpoint))
    problems = list(known(lambda: _reference_problems(config)) or ())
    if folder is None:
        described = known(lambda: known_folder(config.model.hf_checkpoint))
        spec, _ = _spec(described)
        return ModelFiles(spec, {} if described is None else config_of(described), problems=tuple(problems))
    spec, found = _spec(folder)
    chat = bool(known(lambda: config.data.apply_chat_template))
    harmful = irregular_files(folder) or try_tokenizer(folder, apply_chat_template=chat)
    problems = [*found, *weight_problems(folder, spec), *harmful, *problems]
    return ModelFiles(spec, config_of(folder), None if harmful else folder, tuple(problems))


def _reference_problems(config: Config) -> list[Problem]:
    name = config.model.ref_load
    folder = folder_of_model(name or "")
    if name in (None, config.model.hf_checkpoint) or folder is None or not config.algorithm.needs_reference:
        return []
    spec, found = _spec(folder)
    return [replace(problem, option="--ref-load") for problem in (*found, *weight_problems(folder, spec))]


def _spec(folder: Path | None) -> tuple[ModelSpec | None, list[Problem]]:
    """What `config.json` means, or why it cannot be used; rules report a broken file and an unsupported family."""
    if folder is None or config_of(folder).get("model_type") not in (*FAMILIES, *BRIDGE_FAMILIES):
        return None, []
    try:
        return read_any_spec(folder), []
    except ConfigError as error:
        return None, list(error.problems)
