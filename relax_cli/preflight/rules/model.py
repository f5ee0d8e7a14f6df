"""Rules about the model of `--hf-checkpoint` and the reference model of `--ref-load`."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from relax_cli.config.held_out import EvalSection, section_of_set
from relax_cli.config.placement import rollout_engine
from relax_cli.config.schema import Config, ModelSection, ParallelSection, RolloutSection
from relax_cli.data.light_tokenizer import OLDER_FILES
from relax_cli.errors import MACHINE_THEME, ConfigError
from relax_cli.models.packages import INSTALL, PREFIX
from relax_cli.models.spec import BRIDGE_FAMILIES, FAMILIES, config_of, known_folder, read_config
from relax_cli.preflight.inputs import PREPARE, RunInputs, is_of_quickstart
from relax_cli.preflight.rules.registry import Finding, Found, rule

THEME = "Model"
FOLDER = "a folder with config.json, safetensors and tokenizer"
BRIDGE = "megatron-bridge"
BRIDGE_PYTHON = (3, 12)
"""Oldest Python of the versions that know these families."""


@rule("model-missing", THEME, option="--hf-checkpoint", needs="files")
def model_missing(model: ModelSection) -> Found:
    """`--hf-checkpoint` is required."""
    if not model.hf_checkpoint:
        yield Finding("no model is chosen", "add --hf-checkpoint DIR", expected=FOLDER)


@rule("model-folder-missing", MACHINE_THEME, option="--hf-checkpoint", needs="files")
def model_folder_missing(model: ModelSection) -> Found:
    """The folder of `--hf-checkpoint` does not exist, or is a file."""
    name = model.hf_checkpoint
    if name and not name.startswith(PREFIX) and not Path(name).is_dir():
        known, hub = known_folder(name), "ORG/NAME --local-dir DIR"
        if known is not None and known.name.startswith("Qwen"):
            hub = f"Qwen/{known.name} --local-dir {name}"
        fix = f"give an existing folder; one from a hub: hf download {hub}"
        message = "the model folder is a file" if Path(name).is_file() else "the model folder does not exist"
        yield Finding(message, PREPARE if is_of_quickstart(name) else fix, expected=FOLDER)


@rule("model-config-missing", THEME, option="--hf-checkpoint", needs="files")
def model_config_missing(model: ModelSection) -> Found:
    """The folder has no `config.json`."""
    yield from _lacks(model, "config.json")


@rule("model-config-unreadable", THEME, option="--hf-checkpoint", needs="files")
def model_config_unreadable(model: ModelSection) -> Found:
    """`config.json` is not a JSON object, or not a regular file."""
    path = Path(model.hf_checkpoint) / "config.json"
    if model.hf_checkpoint and path.exists():
        try:
            read_config(path.parent)
        except ConfigError as error:
            yield Finding(str(error), "download it again", str(path), "a JSON object")


@rule("model-tokenizer-missing", THEME, option="--hf-checkpoint", needs="files")
def model_tokenizer_missing(model: ModelSection) -> Found:
    """The folder has no `tokenizer_config.json`, or no `tokenizer.json` or older file with the tokenizer itself."""
    yield from _lacks(model, "tokenizer_config.json")
    if not any((Path(model.hf_checkpoint) / name).exists() for name in OLDER_FILES):
        yield from _lacks(model, "tokenizer.json")


def _lacks(model: ModelSection, name: str) -> Found:
    folder = Path(model.hf_checkpoint)
    if model.hf_checkpoint and folder.is_dir() and not (folder / name).exists():
        yield Finding(f"the model folder has no {name}", f"download {name} into {folder}", str(folder), FOLDER)


@rule("model-package-unknown", THEME, option="--hf-checkpoint", needs="files")
def model_package_unknown(model: ModelSection) -> Found:
    """No model is known under that `package:` name."""
    name = model.hf_checkpoint
    if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in INSTALL:
        known = ", ".join(PREFIX + package for package in INSTALL)
        yield Finding(f"no model is known in {name!r}", f"--hf-checkpoint {known}", expected=known)


@rule("model-package-missing", MACHINE_THEME, option="--hf-checkpoint", needs="machine")
def model_package_missing(model: ModelSection) -> Found:
    """The Python package that ships the model is not installed."""
    package = model.hf_checkpoint.removeprefix(PREFIX)
    is_package = model.hf_checkpoint.startswith(PREFIX) and package in INSTALL
    if is_package and importlib.util.find_spec(package.replace("-", "_")) is None:
        yield Finding(f"the package {package} is not installed", INSTALL[package])


@rule("model-family-unsupported", THEME, option="--hf-checkpoint", needs="files")
def model_family_unsupported(inputs: RunInputs) -> Found:
    """The `model_type` of `config.json` is not a family that can be trained. The exact converter covers Llama, Qwen2
    (and 2.5), Qwen3 and Qwen3-MoE. Qwen3.5 goes through Megatron-Bridge."""
    family = str(inputs.model_config.get("model_type", "none"))
    if inputs.model_config and family not in (*FAMILIES, *BRIDGE_FAMILIES):
        message, fix = f"models of the family {family!r} cannot be trained", "choose a model of a supported family"
        yield Finding(
            message, fix, family, f"{', '.join(FAMILIES)}; through Megatron-Bridge {', '.join(BRIDGE_FAMILIES)}"
        )


@rule("bridge-missing", MACHINE_THEME, option="--hf-checkpoint", needs="machine")
def bridge_missing(inputs: RunInputs) -> Found:
    """The model goes through Megatron-Bridge, and the package megatron-bridge is not installed."""
    if not inputs.needs_bridge:
        return
    try:
        version(BRIDGE)
    except PackageNotFoundError:
        fix = "pip install 'relax-cli[bridge]'"
        if sys.version_info < BRIDGE_PYTHON:
            fix = "make an environment with Python 3.12 and install relax-cli[bridge] there"
        yield Finding(fix=fix, expected=f"{BRIDGE}, or a model of {', '.join(FAMILIES)}")


@rule("bridge-needs-cuda", THEME, option="--device", needs="files")
def bridge_needs_cuda(parallel: ParallelSection, inputs: RunInputs) -> Found:
    """A model that goes through Megatron-Bridge, with `--device cpu`. The bridge needs TransformerEngine, which needs
    CUDA."""
    if parallel.device == "cpu" and inputs.needs_bridge:
        message = "this model goes through Megatron-Bridge, which does not work on a CPU"
        yield Finding(message, f"--device cuda, or a model of {', '.join(FAMILIES)}", expected="cuda")


@rule("embedded-engine-family", THEME, option="--rollout-engine", needs="files")
def embedded_engine_family(config: Config, inputs: RunInputs) -> Found:
    """The embedded engine generates only with families of the exact converter. SGLang generates with the others."""
    if rollout_engine(config) == "embedded" and inputs.needs_bridge:
        yield Finding(fix="--rollout-engine sglang", expected=f"sglang, or a model of {', '.join(FAMILIES)}")


@rule("longer-than-positions", THEME, option="--rollout-max-response-len", needs="files")
def longer_than_positions(rollout: RolloutSection, eval: EvalSection, inputs: RunInputs) -> Found:
    """The longest prompt and response together are longer than the model has positions."""
    most = inputs.model_count("max_position_embeddings")
    seen, source = inputs.longest or (0, "")
    prompt, where = (seen, source) if rollout.rollout_max_prompt_len is None else (rollout.rollout_max_prompt_len, "")
    limits = {"--rollout-max-response-len": rollout.rollout_max_response_len}
    with suppress(ValueError):  # eval-sampling tells of it.
        for name, _ in eval.sets:
            if (own := section_of_set(eval, name)).eval_max_response_len:
                option = "--eval-max-response-len" if own == eval else "--eval-sampling"
                limits[option] = max(own.eval_max_response_len, limits.get(option, 0))
    for option, response in limits.items():
        if most and prompt + response > most:
            fix = f"{option} {most - prompt}" if most > prompt else "shorten the prompts"
            if option == "--eval-sampling" and most > prompt:
                fix = f"max_response_len={most - prompt} in --eval-sampling"
            got = f"{prompt} + {response} = {prompt + response} tokens"
            yield Finding("", fix, got, f"at most {most}", option, where)


@rule("reference-folder-missing", THEME, option="--ref-load", needs="files")
def reference_folder_missing(config: Config) -> Found:
    """The folder of `--ref-load` does not exist, or is a file."""
    folder = _reference(config)
    if folder is not None and not folder.is_dir():
        fix = "give the folder of a model, or drop --ref-load to compare with --hf-checkpoint"
        yield Finding(fix=fix, expected=FOLDER)


@rule("reference-config-unreadable", THEME, option="--ref-load", needs="files")
def reference_config_unreadable(config: Config) -> Found:
    """`config.json` of the reference model cannot be read."""
    folder = _reference(config)
    if folder is not None and folder.is_dir() and _vocabulary(folder) is None:
        message = "config.json of the reference model has no vocab_size, or cannot be read"
        yield Finding(message, "give a folder with config.json and safetensors", f"{folder}/config.json", FOLDER)


@rule("reference-vocabulary", THEME, option="--ref-load", needs="files")
def reference_vocabulary(config: Config) -> Found:
    """The reference model must have the vocabulary of the model that is trained."""
    folder = _reference(config)
    if folder is None or not config.model.hf_checkpoint:
        return
    ours, theirs = _vocabulary(Path(config.model.hf_checkpoint)), _vocabulary(folder)
    if ours is not None and theirs is not None and ours != theirs:
        fix = "give a model with the same tokenizer, or drop --ref-load"
        yield Finding("", fix, f"{theirs} tokens", f"{ours} tokens, as in --hf-checkpoint")


def _reference(config: Config) -> Path | None:
    name = config.model.ref_load
    is_folder = name is not None and config.algorithm.needs_reference and not name.startswith(PREFIX)
    return Path(name) if name is not None and is_folder else None


def _vocabulary(folder: Path) -> int | None:
    size = config_of(folder).get("vocab_size")
    return size if isinstance(size, int) else None
