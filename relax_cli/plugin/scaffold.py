"""`relax plugins new NAME`: a complete estimator package to start from. Leave-one-out advantages are the example."""

from __future__ import annotations

import keyword
import re
from importlib.util import find_spec
from pathlib import Path
from string import Template

from relax_cli.config.schema import Config
from relax_cli.errors import ConfigError, Problem

_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "relax-$name"
version = "0.1.0"
description = "The $name advantage estimator for relax"
requires-python = ">=3.11"
dependencies = ["relax-cli"]

[project.optional-dependencies]
test = ["pytest"]

[project.entry-points."relax.plugins"]
$name = "relax_$name"

[tool.hatch.build.targets.wheel]
packages = ["relax_$name"]
"""

_INIT = '''\
"""$Name: a policy gradient whose baseline is the mean of the group's other samples. The formula is in `loss.py`."""

from pydantic import Field
from relax_cli import Config, Estimator, Problem, Section, hookimpl
from relax_cli.plugin.rules import check_group_size


class ${Name}Options(Section):
    """Options of $name; each becomes a flag of `relax train`."""

    ${name}_max_ratio: float = Field(10.0, gt=1, description="cap of the importance ratio")


@hookimpl
def relax_estimators() -> list[Estimator]:
    return [
        Estimator(
            name="$name",
            summary="leave-one-out baseline within the prompt group, no critic",
            paper="arXiv:2402.14740",
            options=${Name}Options,
            advantages="relax_$name.loss:advantages",
            policy_loss="relax_$name.loss:policy_loss",
            needs_groups=True,
        )
    ]


@hookimpl
def relax_check_config(config: Config) -> list[Problem]:
    return check_group_size(config)
'''

_LOSS = '''\
"""$Name. Paper: Ahmadian et al. 2024, "Back to Basics", arXiv:2402.14740. `B` samples, `T` response tokens.

Masked slots may hold NaN: `select` puts 0 there before anything is computed.
"""

import math

import torch
from relax_cli import AdvantageInputs, AdvantageOutputs, LossInputs, LossTerms
from relax_cli.algorithms.masking import select


@torch.no_grad()
def advantages(inputs: AdvantageInputs) -> AdvantageOutputs:
    """`A_i = r_i − mean of the group's other rewards`, on every trainable token of sample i."""
    trained_B = inputs.mask.any(dim=1)
    rewards_B = select(inputs.rewards, trained_B).double()
    if inputs.kl is not None:
        rewards_B = rewards_B - select(inputs.kl, inputs.mask).sum(dim=1)
    same_BB = inputs.group_ids[:, None] == inputs.group_ids
    others_BB = (same_BB & trained_B).fill_diagonal_(False)
    baseline_B = others_BB.double() @ rewards_B / others_BB.sum(dim=1).clamp(min=1)
    advantages_B = torch.where(others_BB.any(dim=1), rewards_B - baseline_B, 0.0).float()
    return AdvantageOutputs(select(advantages_B[:, None].expand(inputs.mask.shape), inputs.mask))


def policy_loss(inputs: LossInputs) -> LossTerms:
    """`−min(r, c)·A` per token `[B, T]`, `r = exp(logp − old_logp)`, `c = ${name}_max_ratio`."""
    diff_BT = select(inputs.logp, inputs.mask) - select(inputs.old_logp.detach(), inputs.mask)
    # Capped before exp: the gradient of a ratio that overflows would be NaN.
    ratio_BT = diff_BT.clamp(max=math.log(inputs.options.${name}_max_ratio)).exp()
    advantages_BT = select(inputs.advantages.detach(), inputs.mask)
    return LossTerms(-ratio_BT * advantages_BT, {"ppo_kl": -diff_BT.detach()})
'''

_TEST = '''\
"""The formulas with numbers worked out by hand, and every rule of relax's conformance kit."""

import torch
from relax_cli import AdvantageInputs, LossInputs
from relax_cli.plugin.kit.kit import assert_conforms

from relax_$name import ${Name}Options
from relax_$name.loss import advantages, policy_loss


def test_the_baseline_is_the_mean_of_the_other_samples_of_the_group() -> None:
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 3.0, 0.0, 0.5, 1.0]),
        mask=torch.tensor([[True, True], [True, False], [True, True], [True, True], [True, True]]),
        group_ids=torch.tensor([0, 1, 0, 0, 1]),
        options=${Name}Options(),
    )
    # Group 0: 1 − 0.25, 0 − 0.75, 0.5 − 0.5. Group 1: 3 − 1, 1 − 3.
    expected = torch.tensor([[0.75, 0.75], [2.0, 0.0], [-0.75, -0.75], [0.0, 0.0], [-2.0, -2.0]])
    torch.testing.assert_close(advantages(inputs).advantages, expected)


def test_the_loss_is_the_capped_ratio_times_the_advantage() -> None:
    old_logp = torch.tensor([[-1.0, -1.0]])
    logp = old_logp + torch.tensor([[2.0, 5.0]]).log()
    mask, options = torch.ones(1, 2, dtype=torch.bool), ${Name}Options(${name}_max_ratio=3.0)
    terms = policy_loss(LossInputs(logp, old_logp, torch.tensor([[0.5, 0.5]]), mask, options=options))
    torch.testing.assert_close(terms.loss_per_token, torch.tensor([[-1.0, -1.5]]))


def test_it_keeps_every_rule_of_the_conformance_kit() -> None:
    assert_conforms("$name")
'''

_FILES = {
    "pyproject.toml": _PYPROJECT,
    "relax_$name/__init__.py": _INIT,
    "relax_$name/loss.py": _LOSS,
    "tests/test_$name.py": _TEST,
}


def package_files(name: str) -> dict[str, str]:
    """Relative path to content of every file of a new package."""
    names = {"name": name, "Name": name.title().replace("_", "")}
    return {Template(path).substitute(names): Template(text).substitute(names) for path, text in _FILES.items()}


def write_package(name: str, folder: Path, *, taken: dict[str, str]) -> list[Path]:
    """Write a new package into `folder`.

    Args:
        name: of the estimator; lower-case letters, digits and `_`.
        folder: created when missing.
        taken: estimator names in use to the distribution that provides them.

    Returns:
        The files written.

    Raises:
        ConfigError: the name cannot be used, or the folder is not empty or cannot be written.
    """
    check_name(name, taken)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        got = "a folder with files in it" if folder.is_dir() else "a file"
        raise ConfigError(
            Problem(
                id="folder-in-use",
                message=f"{folder} is not empty",
                option="--dir",
                got=got,
                expected="a folder that is new or empty",
                fix=f"--dir {folder}-2",
            )
        )
    written = []
    try:
        for path, text in package_files(name).items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, "utf-8")
            written.append(target)
    except OSError as error:
        reason = Problem(
            id="folder-not-writable",
            message=f"cannot write into {folder}",
            option="--dir",
            got=f"{type(error).__name__}: {error}",
            expected="a folder that can be written",
            fix="choose another --dir",
        )
        raise ConfigError(reason) from error
    return written


def check_name(name: str, taken: dict[str, str]) -> None:
    """Refuse a name that a new estimator cannot have.

    Raises:
        ConfigError: it is no lower-case identifier, or it belongs to an estimator, a module or a section.
    """
    expected, got = "", name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        expected = "lower-case letters, digits and _, beginning with a letter"
    elif name in taken:
        expected, got = "a name no estimator has", f"{name}, of {taken[name]}"
    elif name in Config.model_fields:
        expected, got = "a name no section of the configuration has", f"{name}, a section of relax"
    elif find_spec(f"relax_{name}") is not None:
        expected, got = "a name for which no module is installed", f"{name}: relax_{name} is there already"
    if expected:
        raise ConfigError(
            Problem(
                id="plugin-name",
                message=f"a new estimator cannot be called {name!r}",
                got=got,
                expected=expected,
                fix="choose another name: relax plugins new my_estimator",
            )
        )
