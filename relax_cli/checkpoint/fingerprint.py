"""What a run is made of - model, tokenizer, data, estimator - as every checkpoint records it and a resume compares it.

Knows no torch: both are decided before anything is launched.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from relax_cli.checkpoint.layout import CheckpointMeta, sha256_of
from relax_cli.config.redact import scrubbed
from relax_cli.config.schema import Config
from relax_cli.data.sources import REASONING_GYM, source_of
from relax_cli.errors import ConfigError, Problem, problem_kinds
from relax_cli.models.files import read_json
from relax_cli.models.hybrid import read_any_spec
from relax_cli.models.lora import Lora, lora_from_meta, lora_of
from relax_cli.models.packages import PREFIX, converted_folder, default_cache_dir

declare = problem_kinds("Folders and checkpoints")
OTHER_MODEL = declare(
    "resume-other-model",
    "The checkpoint belongs to a model of another shape. Only the model of the run can resume it.",
    option="--hf-checkpoint",
)
OTHER_TOKENIZER = declare(
    "resume-other-tokenizer",
    "The checkpoint was trained with another tokenizer. Only the model folder of the run can resume it.",
    option="--hf-checkpoint",
)
OTHER_REFERENCE = declare(
    "resume-other-reference",
    "A warning: the reference model of the KL terms has other weights than when the checkpoint was saved.",
    option="--ref-load",
    severity="warning",
)
OTHER_ESTIMATOR = declare(
    "resume-other-estimator",
    "The checkpoint was trained with another estimator. To change it, begin a new run with the weights: `relax "
    "checkpoint export-hf` writes a folder for `--hf-checkpoint`.",
    option="--advantage-estimator",
)
OTHER_DATA = declare(
    "resume-other-data",
    "The training prompts are not those of the checkpoint, so its position in them means nothing. To train on other "
    "prompts, begin a new run with the weights: `relax checkpoint export-hf` writes a folder for `--hf-checkpoint`.",
    option="--prompt-data",
)
DATA_ORDER = declare(
    "resume-data-order",
    "A warning: `--rollout-batch-size`, `--rollout-seed`, `--shuffle`, `--dynamic-sampling`, `--partial-rollout` or "
    "`--curriculum` is not that of the checkpoint, so prompts of the current epoch will be repeated or left out.",
    severity="warning",
)
OTHER_GROUPS = declare(
    "resume-other-groups",
    "Responses that `--partial-rollout` carries over belong to groups of the checkpoint's `--n-samples-per-prompt`.",
    option="--n-samples-per-prompt",
)
OTHER_ADAPTERS = declare(
    "resume-other-adapters",
    "The checkpoint was trained with other low-rank adapters, or with none where the run has some.",
    option="--lora-rank",
)
OTHER_BASE = declare(
    "resume-other-base",
    "A checkpoint of low-rank adapters means something only on the weights that they were trained on, and "
    "`--hf-checkpoint` has others.",
    option="--hf-checkpoint",
)

FOLDERS = {
    "tokenizer": (
        OTHER_TOKENIZER,
        "hf_checkpoint",
        "the tokenizer is another, so token ids mean other texts than before",
    ),
    "reference": (OTHER_REFERENCE, "reference", "the KL terms will compare with other weights than before"),
    "base": (OTHER_BASE, "hf_checkpoint", "the adapters were trained on other weights"),
}
"""What is known by the fingerprint of a folder, where the folder's name is recorded, and what a difference means."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja")
"""Files that decide which ids a text becomes, and how chat messages are rendered."""
TOKENIZER_KEYS = ("chat_template", "bos_token", "eos_token", "add_bos_token", "add_eos_token", "add_prefix_space")
"""Keys of tokenizer_config.json that do; the others follow the version of transformers that wrote it."""
SAMPLED_BLOCKS, BLOCK_BYTES = 16, 4096
"""How much of a file of weights tells it from another one, besides its size and header."""
NO_SHAPE = frozenset({"max_positions"})
"""Facts of a model that no weight depends on."""

Identity: TypeAlias = Mapping[str, Any]
"""What `relax.json` says of a run at every iteration; a part that was not read is None."""


def identify(config: Config, model_folder: Path | None, prompts: int | None = None) -> dict[str, Any]:
    """The identity of a run with this many training prompts; its names have no secrets. Reads the model's small files,
    where it is known which folder that is, and the whole prompt file."""
    name, curriculum = config.model.ref_load, config.data.curriculum
    limit = config.rollout.rollout_max_prompt_len
    dropped = f" up to {limit} tokens" if limit and config.rollout.overlong_prompts == "drop" else ""
    dataset = dataset_fingerprint(config.data.prompt_data)
    adapters = {role: lora.meta() for role in ("actor", "critic") if (lora := lora_of(config, role)) is not None}
    reference = (model_folder if name is None else folder_of_model(name)) if config.algorithm.needs_reference else None
    shape = None if model_folder is None else model_shape(model_folder)
    return {
        "estimator": config.algorithm.advantage_estimator,
        "fingerprints": {
            "model": None if shape is None else _hash(shape),
            "tokenizer": None if model_folder is None else tokenizer_fingerprint(model_folder),
            "dataset": None if dataset is None else dataset + dropped,
            # Of the weights that KL terms compare with, and of those below adapters.
            "reference": None if reference is None else weights_fingerprint(reference),
            **({"base": None if model_folder is None else weights_fingerprint(model_folder)} if adapters else {}),
        },
        "adapters": adapters,
        "model_shape": shape,
        "origin": {
            "hf_checkpoint": scrubbed(config.model.hf_checkpoint),
            "prompt_data": "\n".join(map(scrubbed, config.data.prompt_data)),
            "reference": scrubbed(name or config.model.hf_checkpoint),
        },
        "prompts": prompts,
        "shuffle": config.data.shuffle,
        **({"curriculum": curriculum} if curriculum else {}),
        "seeds": {"seed": config.run.seed, "rollout_seed": config.rollout.rollout_seed},
    }


def data_position(iteration: int, seen: int, prompts: int | None) -> dict[str, int | None]:
    """Where in the data a run is after `iteration` rollouts; the epoch is None where nobody counted the prompts."""
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


def weights_fingerprint(folder: Path) -> str | None:
    """Hash of size, header and samples of every file of weights; None where none can be read."""
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    try:
        for path in files:
            size = path.stat().st_size
            with path.open("rb") as file:
                digest.update(f"{path.name} {size} ".encode() + file.read(1 << 20))
                for block in range(SAMPLED_BLOCKS):
                    file.seek(max(0, size - BLOCK_BYTES) * block // (SAMPLED_BLOCKS - 1))
                    digest.update(file.read(BLOCK_BYTES))
    except OSError:
        return None
    return digest.hexdigest() if files else None


def dataset_fingerprint(specs: Sequence[str]) -> str | None:
    """Hash of the files' contents, or the words that generate the prompts; None where there is no such file."""
    try:
        parts: list[list[Any]] = []
        for source in map(source_of, specs):
            found = [source.place] if source.is_task else [f"sha256:{sha256_of(file)}" for file in source.files()]
            chosen = [source.rows, source.weight] if source.weight or source.rows != (None, None, None) else []
            parts.append([*found, *chosen])
    except (OSError, ConfigError):
        return None
    if len(parts) == 1 == len(parts[0]):
        return str(parts[0][0])
    return f"sha256:{_hash(parts)}" if parts else None


def adapters_in(meta: CheckpointMeta) -> Lora | None:
    """The low-rank adapters that a checkpoint has instead of weights."""
    return lora_from_meta(meta.extra.get("adapters", {}).get(meta.role))


def differences(config: Config, run: Identity, meta: CheckpointMeta, where: Path) -> Iterator[Problem]:
    """Why the checkpoint `meta` is not one of `run`; what either side does not know is not held against it.
    Warnings are about the order of the data and the reference, errors about everything else."""
    yield from _other_estimator(run, meta, where)
    yield from _other_model(run, meta, where)
    yield from _other_folders(run, meta, where)
    yield from _other_dataset(run, meta, where)
    yield from _other_order(config, meta, where)
    yield from _other_groups(config, meta, where)
    yield from _other_adapters(run, meta, where)


def folder_differences(folder: Path, meta: CheckpointMeta, where: Path, given: str) -> Iterator[Problem]:
    """Why the model in `folder`, named as `given`, is not that of the checkpoint `meta`."""
    base = None if adapters_in(meta) is None else weights_fingerprint(folder)
    run = {
        "fingerprints": {"tokenizer": tokenizer_fingerprint(folder), "base": base},
        "model_shape": model_shape(folder),
        "origin": {"hf_checkpoint": given},
    }
    yield from _other_model(run, meta, where)
    yield from _other_folders(run, meta, where)


def _other(run: Identity, meta: CheckpointMeta, part: str) -> tuple[str, str] | None:
    """The fingerprints of a part now and in the checkpoint, where they are known to differ."""
    now, saved = run["fingerprints"].get(part), meta.recorded("fingerprints", part)
    return None if now is None or saved is None or now == saved else (now, saved)


def _as_before(option: str, original: str | None, given: str, otherwise: str) -> str:
    """The option with the name that the checkpoint's run was given, where that is not the name given now."""
    return f"{option} {shlex.quote(original) if original and original != given else otherwise}"


def _new_run(run: Identity, where: Path) -> str:
    """What to do with other data or another estimator: export the weights of the checkpoint as a model folder."""
    model = run["origin"]["hf_checkpoint"]
    export = shlex.join(["relax", "checkpoint", "export-hf", str(where.parent), "NEW_DIR", "--hf-checkpoint", model])
    return f"; or begin a new run with its weights: {export}, then --hf-checkpoint NEW_DIR without --load"


def _other_estimator(run: Identity, meta: CheckpointMeta, where: Path) -> Iterator[Problem]:
    saved, now = meta.extra.get("estimator"), run["estimator"]
    if saved not in (None, now):
        yield OTHER_ESTIMATOR(
            "the checkpoint was trained with another estimator, whose optimizer state and schedule it has",
            where=str(where),
            got=now,
            expected=str(saved),
            fix=f"--advantage-estimator {saved}" + _new_run(run, where),
        )


def _other_model(run: Identity, meta: CheckpointMeta, where: Path) -> Iterator[Problem]:
    given, original = run["origin"]["hf_checkpoint"], meta.recorded("origin", "hf_checkpoint")
    fix = _as_before("--hf-checkpoint", original, given, "of the run that saved it")
    shape, saved_shape = run["model_shape"] or {}, meta.extra.get("model_shape") or {}
    # Names that one side lacks were not known to the version of relax that wrote it.
    if other := [name for name in shape if name in saved_shape and saved_shape[name] != shape[name]]:
        yield OTHER_MODEL(
            "the checkpoint belongs to a model of another shape",
            where=str(where),
            got=", ".join(f"{name} {shape[name]}" for name in other),
            expected=", ".join(f"{name} {saved_shape[name]}" for name in other),
            fix=fix,
        )


def _other_folders(run: Identity, meta: CheckpointMeta, where: Path) -> Iterator[Problem]:
    for part, (kind, place, message) in FOLDERS.items():
        if found := _other(run, meta, part):
            given, original = run["origin"][place], meta.recorded("origin", place)
            yield kind(
                message,
                where=str(where),
                got=f"{part} {found[0][:12]} in {given}",
                expected=f"{part} {found[1][:12]}" + (f" in {original}" if original else ""),
                fix=_as_before(kind.option, original, given, "with the folder as it was"),
            )


def _other_dataset(run: Identity, meta: CheckpointMeta, where: Path) -> Iterator[Problem]:
    if found := _other(run, meta, "dataset"):
        now, saved = found
        given, original = run["origin"]["prompt_data"], meta.recorded("origin", "prompt_data")
        items = " ".join(f"--prompt-data {shlex.quote(item)}" for item in str(original).split("\n"))
        yield OTHER_DATA(
            "the prompts are not those of the checkpoint, so its position in them means nothing",
            where=str(where),
            got=now if given.startswith(REASONING_GYM) else f"{given} ({now[:19]})",
            expected=f"{original or 'the prompts of the run'} ({saved[:19]})",
            fix=("give the data as they were" if original in (None, given) else items) + _new_run(run, where),
        )


def _other_order(config: Config, meta: CheckpointMeta, where: Path) -> Iterator[Problem]:
    saved, curriculum, seed = meta.extra, config.data.curriculum, config.rollout.rollout_seed
    draws_on = config.batch.dynamic_sampling or config.carries_over
    other: list[tuple[str, str]] = []
    if (in_flight := saved.get("prompts_in_flight")) is not None and not config.carries_over:
        other.append(("--no-partial-rollout", f"--partial-rollout --over-sampling-batch-size {in_flight}"))
    elif "prompts_drawn" in saved and not draws_on:
        other.append(("--no-dynamic-sampling", "--dynamic-sampling"))
    if curriculum != (before := saved.get("curriculum")):
        got = f"--curriculum {curriculum}" if curriculum else "no --curriculum"
        other.append((got, f"--curriculum {before}" if before else "drop --curriculum"))
    seen, size = saved.get("data_position", {}).get("prompts_seen"), config.batch.rollout_batch_size
    # Otherwise it continues at the prompt that the checkpoint names, or rows are drawn by their past.
    in_order = not draws_on and curriculum is None and "prompts_drawn" not in saved
    if in_order and seen is not None and seen != meta.iteration * size and meta.iteration:
        other.append((f"--rollout-batch-size {size}", f"--rollout-batch-size {seen // meta.iteration}"))
    if (saved_seed := meta.seeds.get("rollout_seed", seed)) != seed:
        other.append((f"--rollout-seed {seed}", f"--rollout-seed {saved_seed}"))
    if (shuffled := saved.get("shuffle", config.data.shuffle)) is not config.data.shuffle:
        other.append(("--no-shuffle", "--shuffle") if shuffled else ("--shuffle", "--no-shuffle"))
    if other:
        now, then = (" ".join(words) for words in zip(*other, strict=True))
        yield DATA_ORDER(
            "prompts of this epoch will be repeated or left out: their order or place is not the checkpoint's",
            option=next(word for word in now.split() if word.startswith("--")),
            where=str(where),
            got=now,
            expected=then,
            fix=then,
        )


def _other_groups(config: Config, meta: CheckpointMeta, where: Path) -> Iterator[Problem]:
    now = config.batch.n_samples_per_prompt
    saved = meta.extra.get("carried_samples_per_prompt", now)
    if config.carries_over and saved != now:
        what, fix = "the checkpoint has unfinished groups of another size", f"--n-samples-per-prompt {saved}"
        yield OTHER_GROUPS(what, where=str(where), got=str(now), expected=str(saved), fix=fix)


def _other_adapters(run: Identity, meta: CheckpointMeta, where: Path) -> Iterator[Problem]:
    saved, now = adapters_in(meta), lora_from_meta(run["adapters"].get(meta.role))
    if saved != now:
        rank = "--critic-lora-rank" if meta.role == "critic" else "--lora-rank"
        yield OTHER_ADAPTERS(
            f"the {meta.role}'s checkpoint has other adapters than the run",
            option=rank,
            where=str(where),
            got=_lora_options(rank, now),
            expected=_lora_options(rank, saved),
            fix=_lora_options(rank, saved),
        )


def _lora_options(rank: str, lora: Lora | None) -> str:
    if lora is None:
        return f"{rank} 0"
    targets = " ".join(f"--lora-targets {target}" for target in lora.targets)
    return f"{rank} {lora.rank} --lora-alpha {lora.alpha:g} {targets}"


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
