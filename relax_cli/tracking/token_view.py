"""The numbers of each response token of one sample, under the names that people read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from relax_cli.roles.sample_files import Sample

Numbers: TypeAlias = np.ndarray[Any, Any]
COLUMNS = {
    "log_probs": "log-prob",
    "ratio": "ratio",
    "values": "value",
    "reward": "reward",
    "advantages": "advantage",
    "returns": "return",
    "weight_versions": "weights",
}
"""Numbers of a token and their titles; `ratio` is exp(trainer − rollout engine) of its log-probability, `weights`
the number of steps after which it was sampled (with `--partial-rollout`)."""


def is_trainable(sample: Mapping[str, Any]) -> Numbers:
    """For each response token whether it is trained; observations of an episode are not."""
    mask = sample.get("response_mask")
    return np.ones(len(sample["response_token_ids"]), bool) if mask is None else mask != 0


def token_numbers(sample: Sample) -> dict[str, Numbers]:
    """Those of `COLUMNS` that the sample has; NaN where a token has none."""
    found = {name: sample[name] for name in COLUMNS if isinstance(sample.get(name), np.ndarray)}
    trainable = is_trainable(sample)
    if "train_log_probs" in sample and "log_probs" in sample:
        with np.errstate(over="ignore", invalid="ignore"):
            found["ratio"] = np.exp(sample["train_log_probs"] - sample["log_probs"])
    if "token_rewards" in sample:
        found["reward"] = np.where(sample["token_rewards"] != 0, sample["token_rewards"], np.nan)
    elif trainable.any() and isinstance(sample["reward"], float):
        reward = np.full(len(trainable), np.nan, np.float32)
        reward[np.flatnonzero(trainable)[-1]] = sample["reward"]
        found["reward"] = reward
    return {name: np.where(trainable, found[name], np.nan) for name in COLUMNS if name in found}


def advantage(sample: Mapping[str, Any]) -> float | None:
    """The mean advantage of a sample's trainable tokens: with a group estimator, that of the sample."""
    trainable = is_trainable(sample)
    return float(sample["advantages"][trainable].mean()) if "advantages" in sample and trainable.any() else None
