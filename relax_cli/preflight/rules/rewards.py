"""Rules about the reward: one is chosen, it exists, and it has what it needs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from relax_cli.config.recipes import nearest
from relax_cli.config.redact import scrubbed
from relax_cli.config.schema import DataSection, RewardSection
from relax_cli.data.rewards.builtin import LABEL_REWARDS, REMOTE, url_fault
from relax_cli.preflight.rules.registry import Finding, Found, rule

THEME = "Reward"
EXAMPLE_URL = "http://127.0.0.1:8000/judge"
PYTHON_SPEC = "FILE.py:function"


@rule("reward-missing", THEME, option="--rm-type")
def reward_missing(reward: RewardSection, rewards: frozenset[str]) -> Found:
    """Give `--rm-type`, or `--custom-rm-path`."""
    if reward.rm_type is None and reward.custom_rm_path is None:
        yield Finding(
            "no reward is chosen",
            expected=", ".join(sorted(rewards)),
            fix=f"add --rm-type exact, or --custom-rm-path {PYTHON_SPEC}",
        )


@rule("reward-twice", THEME, option="--rm-type")
def reward_twice(reward: RewardSection) -> Found:
    """`--rm-type` and `--custom-rm-path` exclude each other."""
    if reward.rm_type is not None and reward.custom_rm_path is not None:
        yield Finding(
            "two rewards are chosen",
            got=f"{reward.rm_type} and {reward.custom_rm_path}",
            fix="drop one of --rm-type and --custom-rm-path",
        )


@rule("reward-unknown", THEME, option="--rm-type")
def reward_unknown(reward: RewardSection, rewards: frozenset[str]) -> Found:
    """There is no reward of that name, or it does not load."""
    name = reward.rm_type
    if name is not None and reward.custom_rm_path is None and name not in rewards:
        guess = nearest(name, rewards)
        yield Finding(
            f"there is no reward {name!r}",
            got=name,
            expected=", ".join(sorted(rewards)),
            fix=f"--rm-type {guess}" if guess else f"install its plugin, or use --custom-rm-path {PYTHON_SPEC}",
        )


@rule("reward-url-missing", THEME, option="--rm-url")
def reward_url_missing(reward: RewardSection) -> Found:
    """`--rm-type remote` needs the server's URL: `--rm-url`."""
    if reward.rm_type == REMOTE and reward.rm_url is None:
        yield Finding("--rm-type remote needs a URL", expected="a URL", fix=f"--rm-url {EXAMPLE_URL}")


@rule("reward-url-unused", THEME, option="--rm-url")
def reward_url_unused(reward: RewardSection) -> Found:
    """`--rm-url` is given, but `--rm-type` is not `remote`."""
    if reward.rm_url is not None and reward.rm_type != REMOTE:
        yield Finding(
            f"--rm-url is given, but the reward is {reward.rm_type or 'another one'}, which needs no URL",
            got=scrubbed(reward.rm_url),
            expected="--rm-type remote",
            fix="--rm-type remote, or drop --rm-url",
        )


@rule("reward-url-invalid", THEME, option="--rm-url")
def reward_url_invalid(reward: RewardSection) -> Found:
    """`--rm-url` is not an `http` or `https` URL with a host."""
    if reward.rm_type == REMOTE and reward.rm_url is not None and (fault := url_fault(reward.rm_url)):
        yield Finding(
            f"--rm-url {fault}",
            got=scrubbed(reward.rm_url),
            expected="http://HOST:PORT/PATH, or https",
            fix=f"--rm-url {EXAMPLE_URL}",
        )


@rule("reward-needs-label", THEME, option="--label-key", needs="files")
def reward_needs_label(reward: RewardSection, data: DataSection) -> Found:
    """The reward compares with a label, so `--label-key` has to name one."""
    compares = reward.custom_rm_path is None and reward.rm_type in LABEL_REWARDS and data.label_key is None
    # reasoning-gym brings labels of its own.
    if compares and data.prompt_data and not data.prompt_data.startswith("reasoning-gym:"):
        yield Finding(
            f"the reward {reward.rm_type} compares with a label, but --label-key is not set",
            expected="a key of the rows of --prompt-data",
            fix="add --label-key label",
        )


@rule("custom-rm-syntax", THEME, option="--custom-rm-path", needs="files")
def custom_rm_syntax(reward: RewardSection) -> Found:
    """`--custom-rm-path` takes `FILE.py:function`."""
    spec = reward.custom_rm_path
    if spec is not None and _parts(spec) is None:
        yield Finding(f"{spec!r} is not {PYTHON_SPEC}", "--custom-rm-path reward.py:score", spec, PYTHON_SPEC)


@rule("custom-rm-file", THEME, option="--custom-rm-path", needs="files")
def custom_rm_file(reward: RewardSection) -> Found:
    """The file does not exist or is not valid Python. It is parsed, not run."""
    spec = reward.custom_rm_path
    if spec is None or (parts := _parts(spec)) is None:
        return
    try:
        ast.parse(Path(parts[0]).read_bytes())
    except OSError as error:
        yield Finding(f"{parts[0]} cannot be read: {error.strerror}", "give an existing file", spec, PYTHON_SPEC)
    except (SyntaxError, ValueError) as error:
        line = error.lineno if isinstance(error, SyntaxError) else None
        place = f"{parts[0]}:{line}" if line else parts[0]
        yield Finding(f"{parts[0]} is not valid Python: {error}", "correct the file", spec, PYTHON_SPEC, where=place)


@rule("custom-rm-function", THEME, option="--custom-rm-path", needs="files")
def custom_rm_function(reward: RewardSection) -> Found:
    """The file does not define the function."""
    spec = reward.custom_rm_path
    if spec is None or (parts := _parts(spec)) is None:
        return
    file, function = parts
    try:
        defined = sorted(_names(ast.parse(Path(file).read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return  # `custom-rm-file`
    if function not in defined:
        guess = nearest(function, defined)
        fix = f"--custom-rm-path {file}:{guess}" if guess else f"define {function} in {file}"
        yield Finding(f"{file} does not define {function}", fix, spec, PYTHON_SPEC)


def _parts(spec: str) -> tuple[str, str] | None:
    name, _, function = spec.rpartition(":")
    return (name, function) if name and function.isidentifier() else None


def _names(tree: ast.Module) -> Iterator[str]:
    """Names bound at the top level of a module."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
