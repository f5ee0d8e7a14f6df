"""What a run is made of - model, tokenizer, data, estimator - as every checkpoint records it and a resume compares it.

Knows no torch: both are decided before anything is launched.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relax_cli.checkpoint.layout import CheckpointMeta, sha256_of
from relax_cli.config.redact import scrubbed
from relax_cli.config.schema import Config
from relax_cli.data.prompts import REASONING_GYM
from relax_cli.errors import ConfigError, Problem
from relax_cli.models.files import read_json
from relax_cli.models.hybrid import read_any_spec
from relax_cli.models.packages import PREFIX, converted_folder, default_cache_dir

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja")
"""Files that decide which ids a text becomes, and how chat messages are rendered."""
TOKENIZER_KEYS = ("chat_template", "bos_token", "eos_token", "add_bos_token", "add_eos_token", "add_prefix_space")
"""Keys of tokenizer_config.json that do; the others follow the version of transformers that wrote it."""
NO_SHAPE = frozenset({"max_positions"})
"""Facts of a model that no weight depends on."""


@dataclass(frozen=True)
class RunIdentity:
    """What must stay the same for a checkpoint to be the state of a run."""

    estimator: str
    hf_checkpoint: str
    """As given, without secrets."""
    prompt_data: str
    model_shape: dict[str, Any] | None
    """What `config.json` says of sizes and arithmetic; None where it was not read."""
    tokenizer: str | None
    dataset: str | None
    prompts: int | None
    """Training prompts; None where they were not counted."""
    rollout_batch_size: int
    seeds: dict[str, int]

    def meta(self) -> dict[str, Any]:
        """What `relax.json` says of the run, at every iteration."""
        return {
            "estimator": self.estimator,
            "fingerprints": {
                "model": None if self.model_shape is None else _hash(self.model_shape),
                "tokenizer": self.tokenizer,
                "dataset": self.dataset,
            },
            "model_shape": self.model_shape,
            "origin": {"hf_checkpoint": self.hf_checkpoint, "prompt_data": self.prompt_data},
            "prompts": self.prompts,
            "seeds": self.seeds,
        }


def identify(config: Config, model_folder: Path | None, prompts: int | None = None) -> RunIdentity:
    """The identity of a run; reads the model's small files and the whole prompt file.

    Args:
        model_folder: where the model is; None where that is not known yet.
        prompts: how many training prompts there are, where they were counted.
    """
    return RunIdentity(
        estimator=config.algorithm.advantage_estimator,
        hf_checkpoint=scrubbed(config.model.hf_checkpoint),
        prompt_data=scrubbed(config.data.prompt_data),
        model_shape=None if model_folder is None else model_shape(model_folder),
        tokenizer=None if model_folder is None else tokenizer_fingerprint(model_folder),
        dataset=dataset_fingerprint(config.data.prompt_data),
        prompts=prompts,
        rollout_batch_size=config.batch.rollout_batch_size,
        seeds={"seed": config.run.seed, "rollout_seed": config.rollout.rollout_seed},
    )


def data_position(iteration: int, rollout_batch_size: int, prompts: int | None) -> dict[str, int | None]:
    """Where in the data a run is after `iteration` rollouts; the epoch is None where nobody counted the prompts."""
    seen = iteration * rollout_batch_size
    return {"rollouts": iteration, "prompts_seen": seen, "epoch": seen // prompts if prompts else None}


def folder_of_model(name: str) -> Path | None:
    """The folder of `--hf-checkpoint`; None where it is not there, or a package's model was never unpacked."""
    is_package = name.startswith(PREFIX)
    folder = converted_folder(name, default_cache_dir(os.environ)) if is_package else Path(name)
    return folder if name and folder is not None and folder.is_dir() else None


def model_shape(folder: Path) -> dict[str, Any] | None:
    """Sizes and arithmetic of a model as plain JSON; None where `config.json` is unusable, which rules report."""
    try:
        facts = asdict(read_any_spec(folder))
    except ConfigError:
        return None
    plain: dict[str, Any] = json.loads(json.dumps({name: x for name, x in facts.items() if name not in NO_SHAPE}))
    return plain


def tokenizer_fingerprint(folder: Path) -> str | None:
    """Hash of what decides token ids; None where there is no tokenizer, or it cannot be read."""
    parts: dict[str, Any] = {}
    try:
        for name in TOKENIZER_FILES:
            if (folder / name).is_file():
                parts[name] = sha256_of(folder / name)
        settings = read_json(folder / "tokenizer_config.json")
        parts["settings"] = {key: settings[key] for key in TOKENIZER_KEYS if settings.get(key) is not None}
    except (OSError, ConfigError):
        return None
    return _hash(parts)


def dataset_fingerprint(spec: str) -> str | None:
    """Hash of the prompt file's content, or the words that generate the prompts; None where there is no such file."""
    if spec.startswith(REASONING_GYM):
        return spec
    try:
        return f"sha256:{sha256_of(Path(spec))}" if spec else None
    except OSError:
        return None


def differences(run: RunIdentity, meta: CheckpointMeta, where: Path) -> list[Problem]:
    """Why the checkpoint `meta` is not one of `run`; what either side does not know is not held against it.

    Warnings are about the order of the data, errors about everything else.
    """
    found = [
        _other_estimator(run, meta, where),
        *model_differences(run.model_shape, run.tokenizer, meta, where, run.hf_checkpoint),
        _other_dataset(run, meta, where),
        _other_order(run, meta, where),
    ]
    return [problem for problem in found if problem is not None]


def model_differences(
    shape: Mapping[str, Any] | None, tokenizer: str | None, meta: CheckpointMeta, where: Path, given: str
) -> list[Problem]:
    """The part of `differences` that needs the model folder alone; `given` is how it was named."""
    original = _recorded(meta, "origin", "hf_checkpoint")
    saved_shape, saved_tokenizer = meta.extra.get("model_shape"), _recorded(meta, "fingerprints", "tokenizer")
    fix = (
        f"--hf-checkpoint {original}" if original and original != given else "--hf-checkpoint of the run that saved it"
    )
    found = []
    if shape is not None and isinstance(saved_shape, dict):
        # Names that one side lacks were not known to the version of relax that wrote it.
        other = [name for name in shape if name in saved_shape and saved_shape[name] != shape[name]]
        if other:
            found.append(
                Problem(
                    id="resume-other-model",
                    message="the checkpoint belongs to a model of another shape",
                    option="--hf-checkpoint",
                    where=str(where),
                    got=", ".join(f"{name} {shape[name]}" for name in other),
                    expected=", ".join(f"{name} {saved_shape[name]}" for name in other),
                    fix=fix,
                )
            )
    if tokenizer is not None and saved_tokenizer is not None and saved_tokenizer != tokenizer:
        found.append(
            Problem(
                id="resume-other-tokenizer",
                message="the checkpoint was trained with another tokenizer: its token ids mean other texts",
                option="--hf-checkpoint",
                where=str(where),
                got=f"tokenizer {tokenizer[:12]} in {given}",
                expected=f"tokenizer {saved_tokenizer[:12]}",
                fix=fix,
            )
        )
    return found


def parallel_problems(shape: Mapping[str, Any], tensor_parallel: int) -> list[Problem]:
    """What of a model's sizes does not divide by the tensor-parallel size."""
    sizes = {
        "attention heads": shape.get("num_heads"),
        "key-value heads": shape.get("num_kv_heads"),
        "FFN size": shape.get("ffn_hidden_size"),
        "vocabulary": shape.get("vocab_size"),
    }
    return [
        Problem(
            id="tensor-parallel-indivisible",
            message=f"the model's {what} ({size}) does not divide by the tensor-parallel size",
            option="--tensor-model-parallel-size",
            got=str(tensor_parallel),
            expected=f"a divisor of {size}",
            fix="choose a --tensor-model-parallel-size that divides it",
        )
        for what, size in sizes.items()
        if isinstance(size, int) and size % tensor_parallel
    ]


def _new_run(run: RunIdentity, where: Path) -> str:
    """The way on with other data or another estimator: the weights of a checkpoint as a model folder."""
    export = f"relax checkpoint export-hf {where.parent} NEW_DIR --hf-checkpoint {run.hf_checkpoint}"
    return f"; or begin a new run with its weights: {export}, then --hf-checkpoint NEW_DIR without --load"


def _other_estimator(run: RunIdentity, meta: CheckpointMeta, where: Path) -> Problem | None:
    saved = meta.extra.get("estimator")
    if saved is None or saved == run.estimator:
        return None
    return Problem(
        id="resume-other-estimator",
        message="the checkpoint was trained with another estimator, whose optimizer state and schedule it holds",
        option="--advantage-estimator",
        where=str(where),
        got=run.estimator,
        expected=str(saved),
        fix=f"--advantage-estimator {saved}" + _new_run(run, where),
    )


def _other_dataset(run: RunIdentity, meta: CheckpointMeta, where: Path) -> Problem | None:
    saved, original = _recorded(meta, "fingerprints", "dataset"), _recorded(meta, "origin", "prompt_data")
    if saved is None or run.dataset is None or saved == run.dataset:
        return None
    same_name = original is None or original == run.prompt_data
    return Problem(
        id="resume-other-data",
        message="the prompts are not those of the checkpoint, so its position in them means nothing",
        option="--prompt-data",
        where=str(where),
        got=f"{run.prompt_data} ({run.dataset[:19]})" if not run.prompt_data.startswith(REASONING_GYM) else run.dataset,
        expected=f"{original or 'the prompts of the run'} ({saved[:19]})",
        fix=("give the file as it was" if same_name else f"--prompt-data {original}") + _new_run(run, where),
    )


def _other_order(run: RunIdentity, meta: CheckpointMeta, where: Path) -> Problem | None:
    position = meta.extra.get("data_position")
    seen = position.get("prompts_seen") if isinstance(position, dict) else None
    saved_seed = meta.seeds.get("rollout_seed")
    got, expected = [], []
    if isinstance(seen, int) and seen != meta.iteration * run.rollout_batch_size and meta.iteration:
        got.append(f"--rollout-batch-size {run.rollout_batch_size}")
        expected.append(f"--rollout-batch-size {seen // meta.iteration}")
    if saved_seed is not None and saved_seed != run.seeds["rollout_seed"]:
        got.append(f"--rollout-seed {run.seeds['rollout_seed']}")
        expected.append(f"--rollout-seed {saved_seed}")
    if not got:
        return None
    return Problem(
        id="resume-data-order",
        message="prompts of this epoch will be repeated or left out: their order or place is not the checkpoint's",
        option=got[0].split()[0],
        where=str(where),
        got=" ".join(got),
        expected=" ".join(expected),
        fix=" ".join(expected),
        severity="warning",
    )


def _recorded(meta: CheckpointMeta, group: str, name: str) -> str | None:
    """A text in `relax.json`, which older versions did not write and anybody may have edited."""
    values = meta.extra.get(group)
    value = values.get(name) if isinstance(values, dict) else None
    return value if isinstance(value, str) else None


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
