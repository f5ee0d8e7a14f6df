"""Rules that look at files and at this machine: model, data, reward, the folders to write to, the cores."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from relax_cli.config.recipes import nearest
from relax_cli.config.schema import Config, DataSection
from relax_cli.errors import ConfigError, Problem
from relax_cli.preflight.rules.backend import BACKEND_FILE_RULES
from relax_cli.preflight.rules.model import MODEL_RULES
from relax_cli.preflight.rules.reference import reference_model
from relax_cli.preflight.rules.reward import REMOTE
from relax_cli.preflight.rules.save import writable_folders

Found = Problem | list[Problem] | None

BUILTIN_REWARDS = frozenset({"exact", "math", "reasoning_gym", REMOTE})
LABEL_REWARDS = frozenset({"exact", "math"})
"""Rewards that compare the response with a label."""
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
    *MODEL_RULES,
    *BACKEND_FILE_RULES,
    reference_model,
    prompt_data,
    eval_prompt_data,
    label_for_reward,
    custom_reward,
    run_folder,
    save_folders,
    writable_folders,
    ranks_by_cores,
)
