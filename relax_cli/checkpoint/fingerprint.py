"""What a run is made of - model, tokenizer, data, estimator - as every checkpoint records it and a resume compares it.

Knows no torch: both are decided before anything is launched.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from relax_cli.checkpoint.adapters import adapters_in, other_adapters, other_base
from relax_cli.checkpoint.layout import CheckpointMeta, sha256_of
from relax_cli.config.redact import scrubbed
from relax_cli.config.schema import Config
from relax_cli.data.reasoning_gym import REASONING_GYM
from relax_cli.data.sources import source_of
from relax_cli.errors import ConfigError, Problem, problem_kinds
from relax_cli.models.files import read_json
from relax_cli.models.hybrid import read_any_spec
from relax_cli.models.lora import lora_of
from relax_cli.models.packages import PREFIX, converted_folder, default_cache_dir

FOLDERS = "Folders and checkpoints"
declare = problem_kinds(FOLDERS)
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
    "A warning: `--rollout-batch-size`, `--rollout-seed`, `--dynamic-sampling`, `--partial-rollout` or `--curriculum` "
    "is not that of the checkpoint, so prompts of the current epoch will be repeated or left out.",
    severity="warning",
)

OTHER_GROUPS = declare(
    "resume-other-groups",
    "Responses that `--partial-rollout` carries over belong to groups of the checkpoint's `--n-samples-per-prompt`.",
    option="--n-samples-per-prompt",
)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja")
"""Files that decide which ids a text becomes, and how chat messages are rendered."""
TOKENIZER_KEYS = ("chat_template", "bos_token", "eos_token", "add_bos_token", "add_eos_token", "add_prefix_space")
"""Keys of tokenizer_config.json that do; the others follow the version of transformers that wrote it."""
SAMPLED_BLOCKS, BLOCK_BYTES = 16, 4096
"""How much of a file of weights tells it from another one, besides its size and header."""
NO_SHAPE = frozenset({"max_positions"})
"""Facts of a model that no weight depends on."""


@dataclass(frozen=True)
class RunIdentity:
    """What must stay the same for a checkpoint to be the state of a run."""

    estimator: str
    hf_checkpoint: str
    """As given, without secrets."""
    prompt_data: str
    """One item a line."""
    model_shape: dict[str, Any] | None
    """What `config.json` says of sizes and arithmetic; None where it was not read."""
    tokenizer: str | None
    dataset: str | None
    prompts: int | None
    """Training prompts; None where they were not counted."""
    rollout_batch_size: int
    seeds: dict[str, int]
    dynamic_sampling: bool = False
    curriculum: str | None = None
    carries_over: bool = False
    samples_per_prompt: int = 1
    reference: str | None = None
    """Of the weights that KL terms compare with; None where there are no KL terms."""
    reference_name: str = ""
    adapters: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each role that trains adapters, as `Lora.meta` gives them."""
    base: str | None = None
    """Of the weights below adapters."""

    def meta(self) -> dict[str, Any]:
        """What `relax.json` says of the run, at every iteration."""
        return {
            "estimator": self.estimator,
            "fingerprints": {
                "model": None if self.model_shape is None else _hash(self.model_shape),
                "tokenizer": self.tokenizer,
                "dataset": self.dataset,
                "reference": self.reference,
                **({"base": self.base} if self.adapters else {}),
            },
            "adapters": self.adapters,
            "model_shape": self.model_shape,
            "origin": {
                "hf_checkpoint": self.hf_checkpoint,
                "prompt_data": self.prompt_data,
                "reference": self.reference_name,
            },
            "prompts": self.prompts,
            **({"curriculum": self.curriculum} if self.curriculum else {}),
            "seeds": self.seeds,
        }


def identify(config: Config, model_folder: Path | None, prompts: int | None = None) -> RunIdentity:
    """The identity of a run; reads the model's small files and the whole prompt file.

    Args:
        model_folder: where the model is; None where that is not known yet.
        prompts: how many training prompts there are, where they were counted.
    """
    name = config.model.ref_load
    limit = config.rollout.rollout_max_prompt_len
    dropped = f" up to {limit} tokens" if limit and config.rollout.overlong_prompts == "drop" else ""
    dataset = dataset_fingerprint(config.data.prompt_data)
    adapters = {role: lora.meta() for role in ("actor", "critic") if (lora := lora_of(config, role)) is not None}
    reference = (model_folder if name is None else folder_of_model(name)) if config.algorithm.needs_reference else None
    return RunIdentity(
        estimator=config.algorithm.advantage_estimator,
        hf_checkpoint=scrubbed(config.model.hf_checkpoint),
        prompt_data="\n".join(map(scrubbed, config.data.prompt_data)),
        model_shape=None if model_folder is None else model_shape(model_folder),
        tokenizer=None if model_folder is None else tokenizer_fingerprint(model_folder),
        dataset=None if dataset is None else dataset + dropped,
        prompts=prompts,
        rollout_batch_size=config.batch.rollout_batch_size,
        seeds={"seed": config.run.seed, "rollout_seed": config.rollout.rollout_seed},
        dynamic_sampling=config.batch.dynamic_sampling,
        curriculum=config.data.curriculum,
        carries_over=config.carries_over,
        samples_per_prompt=config.batch.n_samples_per_prompt,
        reference=None if reference is None else weights_fingerprint(reference),
        reference_name=scrubbed(name or config.model.hf_checkpoint),
        adapters=adapters,
        base=None if model_folder is None or not adapters else weights_fingerprint(model_folder),
    )


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


def differences(run: RunIdentity, meta: CheckpointMeta, where: Path) -> list[Problem]:
    """Why the checkpoint `meta` is not one of `run`; what either side does not know is not held against it.

    Warnings are about the order of the data and the reference, errors about everything else.
    """
    found = [
        _other_estimator(run, meta, where),
        *model_differences(run.model_shape, run.tokenizer, meta, where, run.hf_checkpoint),
        _other_dataset(run, meta, where),
        _other_order(run, meta, where),
        _other_groups(run, meta, where),
        _other_reference(run, meta, where),
        other_adapters(run.adapters, meta, where),
        other_base(run.base, meta, where, run.hf_checkpoint),
    ]
    return [problem for problem in found if problem is not None]


def folder_differences(folder: Path, meta: CheckpointMeta, where: Path, given: str) -> list[Problem]:
    """Why the model in `folder`, named as `given`, is not that of the checkpoint `meta`."""
    found = model_differences(model_shape(folder), tokenizer_fingerprint(folder), meta, where, given)
    base = None if adapters_in(meta) is None else other_base(weights_fingerprint(folder), meta, where, given)
    return found if base is None else [*found, base]


def model_differences(
    shape: Mapping[str, Any] | None, tokenizer: str | None, meta: CheckpointMeta, where: Path, given: str
) -> list[Problem]:
    """The part of `differences` that needs the model folder alone; `given` is how it was named."""
    original = meta.recorded("origin", "hf_checkpoint")
    saved_shape, saved_tokenizer = meta.extra.get("model_shape"), meta.recorded("fingerprints", "tokenizer")
    fix = (
        f"--hf-checkpoint {shlex.quote(original)}"
        if original and original != given
        else "--hf-checkpoint of the run that saved it"
    )
    found = []
    if shape is not None and saved_shape is not None:
        # Names that one side lacks were not known to the version of relax that wrote it.
        other = [name for name in shape if name in saved_shape and saved_shape[name] != shape[name]]
        if other:
            found.append(
                OTHER_MODEL(
                    "the checkpoint belongs to a model of another shape",
                    where=str(where),
                    got=", ".join(f"{name} {shape[name]}" for name in other),
                    expected=", ".join(f"{name} {saved_shape[name]}" for name in other),
                    fix=fix,
                )
            )
    if tokenizer is not None and saved_tokenizer is not None and saved_tokenizer != tokenizer:
        found.append(
            OTHER_TOKENIZER(
                "the checkpoint was trained with another tokenizer: its token ids mean other texts",
                where=str(where),
                got=f"tokenizer {tokenizer[:12]} in {given}",
                expected=f"tokenizer {saved_tokenizer[:12]}",
                fix=fix,
            )
        )
    return found


def _new_run(run: RunIdentity, where: Path) -> str:
    """What to do with other data or another estimator: export the weights of the checkpoint as a model folder."""
    words = ["relax", "checkpoint", "export-hf", str(where.parent), "NEW_DIR", "--hf-checkpoint", run.hf_checkpoint]
    export = shlex.join(words)
    return f"; or begin a new run with its weights: {export}, then --hf-checkpoint NEW_DIR without --load"


def _other_estimator(run: RunIdentity, meta: CheckpointMeta, where: Path) -> Problem | None:
    saved = meta.extra.get("estimator")
    if saved is None or saved == run.estimator:
        return None
    return OTHER_ESTIMATOR(
        "the checkpoint was trained with another estimator, whose optimizer state and schedule it has",
        where=str(where),
        got=run.estimator,
        expected=str(saved),
        fix=f"--advantage-estimator {saved}" + _new_run(run, where),
    )


def _other_dataset(run: RunIdentity, meta: CheckpointMeta, where: Path) -> Problem | None:
    saved, original = meta.recorded("fingerprints", "dataset"), meta.recorded("origin", "prompt_data")
    if saved is None or run.dataset is None or saved == run.dataset:
        return None
    same_name = original is None or original == run.prompt_data
    items = " ".join(f"--prompt-data {shlex.quote(item)}" for item in str(original).split("\n"))
    given_back = "give the data as they were" if same_name else items
    return OTHER_DATA(
        "the prompts are not those of the checkpoint, so its position in them means nothing",
        where=str(where),
        got=f"{run.prompt_data} ({run.dataset[:19]})" if not run.prompt_data.startswith(REASONING_GYM) else run.dataset,
        expected=f"{original or 'the prompts of the run'} ({saved[:19]})",
        fix=given_back + _new_run(run, where),
    )


def _other_order(run: RunIdentity, meta: CheckpointMeta, where: Path) -> Problem | None:
    seen = meta.extra.get("data_position", {}).get("prompts_seen")
    saved_seed = meta.seeds.get("rollout_seed")
    got, expected = [], []
    if run.dynamic_sampling or run.carries_over or run.curriculum is not None or "prompts_drawn" in meta.extra:
        seen = None  # It continues at the prompt that the checkpoint names, or rows are drawn by their past.
    if (in_flight := meta.extra.get("prompts_in_flight")) is not None and not run.carries_over:
        got.append("--no-partial-rollout")
        expected.append(f"--partial-rollout --over-sampling-batch-size {in_flight}")
    elif "prompts_drawn" in meta.extra and not (run.dynamic_sampling or run.carries_over):
        got.append("--no-dynamic-sampling")
        expected.append("--dynamic-sampling")
    saved_curriculum = meta.extra.get("curriculum")
    if run.curriculum != saved_curriculum:
        got.append(f"--curriculum {run.curriculum}" if run.curriculum else "no --curriculum")
        expected.append(f"--curriculum {saved_curriculum}" if saved_curriculum else "drop --curriculum")
    if seen is not None and seen != meta.iteration * run.rollout_batch_size and meta.iteration:
        got.append(f"--rollout-batch-size {run.rollout_batch_size}")
        expected.append(f"--rollout-batch-size {seen // meta.iteration}")
    if saved_seed is not None and saved_seed != run.seeds["rollout_seed"]:
        got.append(f"--rollout-seed {run.seeds['rollout_seed']}")
        expected.append(f"--rollout-seed {saved_seed}")
    if not got:
        return None
    return DATA_ORDER(
        "prompts of this epoch will be repeated or left out: their order or place is not the checkpoint's",
        option=next(word for word in got[0].split() if word.startswith("--")),
        where=str(where),
        got=" ".join(got),
        expected=" ".join(expected),
        fix=" ".join(expected),
    )


def _other_groups(run: RunIdentity, meta: CheckpointMeta, where: Path) -> Problem | None:
    saved = meta.extra.get("carried_samples_per_prompt", run.samples_per_prompt)
    if not run.carries_over or saved == run.samples_per_prompt:
        return None
    what, fix = "the checkpoint has unfinished groups of another size", f"--n-samples-per-prompt {saved}"
    return OTHER_GROUPS(what, where=str(where), got=str(run.samples_per_prompt), expected=str(saved), fix=fix)


def _other_reference(run: RunIdentity, meta: CheckpointMeta, where: Path) -> Problem | None:
    saved, original = meta.recorded("fingerprints", "reference"), meta.recorded("origin", "reference")
    if saved is None or run.reference is None or saved == run.reference:
        return None
    has_moved = original and original != run.reference_name
    return OTHER_REFERENCE(
        "the KL terms will compare with other weights than before",
        where=str(where),
        got=f"{run.reference_name} ({run.reference[:12]})",
        expected=f"{original or 'the reference of the run'} ({saved[:12]})",
        fix=f"--ref-load {shlex.quote(str(original))}" if has_moved else "--ref-load with the folder as it was",
    )


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
