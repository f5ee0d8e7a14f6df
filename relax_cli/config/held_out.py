"""Options of evaluations, and how each held-out set is sampled: what is said of it, then of all, then as rollouts."""

from __future__ import annotations

import re
from typing import TypeVar

from pydantic import field_validator

from relax_cli.config.section import LEAST_TEMPERATURE, Section, option

Generation = TypeVar("Generation", bound=Section)

OF_A_SET = {
    "temperature": "eval_temperature",
    "top_p": "eval_top_p",
    "top_k": "eval_top_k",
    "max_response_len": "eval_max_response_len",
    "n": "n_samples_per_eval_prompt",
}
"""Keys of `--eval-sampling`, and the fields that say the same of all sets."""


class EvalSection(Section):
    """Held-out evaluation."""

    eval_interval: int | None = option(
        None, "rollouts between evaluations; also before the first and after the last", ge=1
    )
    eval_prompt_data: tuple[str, ...] = option((), "held-out prompts as NAME PATH or NAME=PATH (repeatable)")
    n_samples_per_eval_prompt: int = option(1, "samples per held-out prompt", ge=1)
    eval_temperature: float | None = option(
        None, "temperature of evaluations, 0 is greedy; follows --rollout-temperature when unset", ge=0
    )
    eval_top_p: float | None = option(
        None, "nucleus sampling mass of evaluations; follows --rollout-top-p when unset", gt=0, le=1
    )
    eval_top_k: int | None = option(
        None, "sample among the k likeliest tokens; follows --rollout-top-k when unset", ge=-1
    )
    eval_max_response_len: int | None = option(
        None, "maximum new tokens; follows --rollout-max-response-len when unset", ge=1
    )
    eval_sampling: tuple[str, ...] = option(
        (), "one set's own NAME:temperature=T,top_p=P,top_k=K,max_response_len=L,n=N, any of them (repeatable)"
    )
    eval_pass_reward: float = option(1.0, "reward from which a response passes (pass@k, majority@k)")

    @field_validator("eval_temperature")
    @classmethod
    def _is_greedy_or_not_tiny(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < LEAST_TEMPERATURE:
            raise ValueError(f"0 for greedy decoding, or at least {LEAST_TEMPERATURE:g}")
        return value

    @property
    def sets(self) -> tuple[tuple[str, str], ...]:
        """Name and path of every held-out set; the name is empty where an item has only one of the two."""
        pairs = (re.fullmatch(r"([^\s=]+)(?:=|\s+)(\S.*)", item) for item in self.eval_prompt_data)
        items = zip(pairs, self.eval_prompt_data, strict=True)
        return tuple((pair[1], pair[2]) if pair else ("", item) for pair, item in items)


def section_of_set(section: EvalSection, name: str) -> EvalSection:
    """The section with what `--eval-sampling` says of one set.
    Raises ValueError: an item about the set cannot be read."""
    values: dict[str, str] = {}
    for item in section.eval_sampling:
        about, _, pairs = item.partition(":")
        for key, is_pair, value in (pair.strip().partition("=") for pair in pairs.split(",") if about == name):
            if not is_pair or key not in OF_A_SET:
                raise ValueError(f"{key!r} is none of {', '.join(OF_A_SET)}, followed by = and a value")
            if OF_A_SET[key] in values:
                raise ValueError(f"{key} is given twice")
            values[OF_A_SET[key]] = value
    return EvalSection.model_validate(section.model_dump() | values)


def sampling_of_set(section: EvalSection, name: str, rollout: Generation) -> Generation:
    """The options of generation, as they are for one set."""
    own = section_of_set(section, name)
    given = {
        "rollout_temperature": own.eval_temperature,
        "rollout_top_p": own.eval_top_p,
        "rollout_top_k": own.eval_top_k,
        "rollout_max_response_len": own.eval_max_response_len,
    }
    if own.eval_temperature == 0:
        given |= {"rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": 1}
    return rollout.model_copy(update={key: value for key, value in given.items() if value is not None})
