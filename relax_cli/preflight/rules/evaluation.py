"""Rules about held-out evaluation."""

from __future__ import annotations

import re
from contextlib import suppress

from pydantic import ValidationError

from relax_cli.config.held_out import OF_A_SET, EvalSection, section_of_set
from relax_cli.config.names import nearest
from relax_cli.config.schema import CheckpointSection, RewardSection
from relax_cli.data.rewards.answers import compared_reward, majority_sizes
from relax_cli.preflight.rules.batches import THEME
from relax_cli.preflight.rules.registry import Finding, Found, rule

NAME = re.compile(r"[A-Za-z0-9_.-]+")


@rule("eval-interval-without-data", THEME, option="--eval-interval")
def eval_interval_without_data(eval: EvalSection) -> Found:
    """`--eval-interval` needs `--eval-prompt-data`."""
    if eval.eval_interval is not None and not eval.eval_prompt_data:
        yield Finding(fix="add --eval-prompt-data heldout PATH, or drop --eval-interval")


@rule("eval-data-unused", THEME, option="--eval-prompt-data", severity="warning")
def eval_data_unused(eval: EvalSection) -> Found:
    """A warning: there are held-out prompts, but `--eval-interval` is not set."""
    if eval.eval_interval is None and eval.eval_prompt_data:
        yield Finding(fix="add --eval-interval 10")


@rule("eval-data-name", THEME, option="--eval-prompt-data")
def eval_data_name(eval: EvalSection) -> Found:
    """Every held-out set has a name and a path, and names differ."""
    names = [name for name, _ in eval.sets]
    for index, (item, name) in enumerate(zip(eval.eval_prompt_data, names, strict=True)):
        expected = "NAME PATH, or NAME=PATH"
        if not NAME.fullmatch(name):
            yield Finding(f"{item!r} is not a name and a path", f"--eval-prompt-data heldout {item}", item, expected)
        elif name in names[:index]:
            yield Finding(f"two held-out sets are called {name!r}", "give each its own name", item, expected)


@rule("eval-sampling", THEME, option="--eval-sampling")
def eval_sampling(eval: EvalSection) -> Found:
    """An item of `--eval-sampling` names no held-out set, or says something about it that cannot be read."""
    names = [name for name, _ in eval.sets]
    for item in eval.eval_sampling:
        name, colon, _ = item.partition(":")
        expected = f"NAME:key=value,… with a name of {', '.join(names)} and keys of {', '.join(OF_A_SET)}"
        if not colon or (names and name not in names):
            meant = f"{names[0]}:" if names else "NAME:"
            yield Finding(f"{item!r} names no held-out set", f"begin it with {meant}", item, expected)
            continue
        try:
            section_of_set(eval.model_copy(update={"eval_sampling": (item,)}), name)
        except ValidationError as error:
            text = "; ".join(f"{e['input']}: {e['msg']}" for e in error.errors())
            yield Finding(f"a value of {item!r} cannot be used", f"correct it: {text}", item, expected)
        except ValueError as error:
            yield Finding(f"{item!r} cannot be read: {error}", f"--eval-sampling {name}:temperature=0", item, expected)


@rule("keep-best-metric", THEME, option="--keep-best")
def keep_best_metric(checkpoint: CheckpointSection, eval: EvalSection, reward: RewardSection) -> Found:
    """`--keep-best` names no metric of an evaluation of this run, of those where more is better."""
    if (metric := checkpoint.keep_best) is None:
        return
    with suppress(ValueError):  # eval-sampling tells of it.
        known = [f"eval/{name}/{kept}" for name, _ in eval.sets for kept in _kept_by(eval, name, reward)]
        part = re.fullmatch(r"eval/([^/]+)/reward/part/.+", metric)
        if metric not in known and not (part and part[1] in dict(eval.sets)):
            close = nearest(metric, known) or next(iter(known), "")
            fix = f"--keep-best {close}" if close else "add --eval-prompt-data NAME PATH --eval-interval 10"
            yield Finding(fix=fix, expected=", ".join(known) or "a run with held-out sets")


def _kept_by(section: EvalSection, name: str, reward: RewardSection) -> list[str]:
    samples = section_of_set(section, name).n_samples_per_eval_prompt
    passes = [f"pass@{1 << power}" for power in range(samples.bit_length())]
    majorities = [f"majority@{k}" for k in majority_sizes(samples)] if compared_reward(reward.rm_type) else []
    return ["reward/mean", "reward/min", "reward/max", *passes, *majorities]
