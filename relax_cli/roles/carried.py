"""Responses that continue in a later rollout, and their form in a checkpoint. Importing this imports no torch.

| array | | |
|---|---|---|
| carried_places, carried_rows | `[G]` int64 | of each prompt among all drawn, and in the data |
| carried_lengths, carried_ends | `[G * n]` int64 | tokens of each response; 0: unfinished, 1: stop, 2: length |
| carried_tokens, carried_versions | int64, one response after the other | ids, and the weights that sampled them |
| carried_log_probs | float64, alike | under those weights |
| carried_routed | `[G * n]` int64, only with routes | positions with routes of each response |
| carried_routes | `[positions, layers, k]` int16, one response after the other | see `Generation` |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

ENDS: tuple[Literal["stop", "length"] | None, ...] = (None, "stop", "length")


@dataclass
class Begun:
    """One response, finished or not."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token."""
    finish_reason: Literal["stop", "length"] | None = None
    """None while it is unfinished."""
    routes: NDArray[np.int16] | None = None
    """See `Generation`."""


@dataclass
class BegunGroup:
    """The responses to one prompt."""

    place: int
    """Of the prompt among all that the run has drawn."""
    row: int
    """Of the prompt in the data."""
    responses: list[Begun]

    @property
    def is_complete(self) -> bool:
        return all(response.finish_reason is not None for response in self.responses)


def to_arrays(groups: Sequence[BegunGroup]) -> dict[str, NDArray[Any]]:
    """The form in a checkpoint; the prompts are in the order in which they were drawn."""
    groups = sorted(groups, key=lambda group: group.place)
    responses = [response for group in groups for response in group.responses]
    routes = [response.routes for response in responses if response.routes is not None]
    routed = [0 if response.routes is None else len(response.routes) for response in responses]
    more: dict[str, NDArray[Any]] = {}
    if routes:
        more = {"carried_routed": np.array(routed, np.int64), "carried_routes": np.concatenate(routes)}
    return more | {
        "carried_places": np.array([group.place for group in groups], np.int64),
        "carried_rows": np.array([group.row for group in groups], np.int64),
        "carried_lengths": np.array([len(response.tokens) for response in responses], np.int64),
        "carried_ends": np.array([ENDS.index(response.finish_reason) for response in responses], np.int64),
        "carried_tokens": np.array([token for r in responses for token in r.tokens], np.int64),
        "carried_versions": np.array([version for r in responses for version in r.versions], np.int64),
        "carried_log_probs": np.array([log_prob for r in responses for log_prob in r.log_probs], np.float64),
    }


def from_arrays(arrays: Mapping[str, NDArray[Any]], samples_per_prompt: int) -> list[BegunGroup]:
    """What `to_arrays` was given.
    Raises ValueError: the arrays contradict each other, or a prompt has another number of responses."""
    if "carried_places" not in arrays:
        return []
    read = {name: arrays[f"carried_{name}"].tolist() for name in ("places", "rows", "lengths", "ends")}
    if len(read["lengths"]) != samples_per_prompt * len(read["places"]):
        raise ValueError(f"{len(read['lengths'])} responses to {len(read['places'])} prompts in flight")
    ends = np.cumsum([0, *read["lengths"]]).tolist()
    tokens, log_probs, versions = (arrays[f"carried_{name}"].tolist() for name in ("tokens", "log_probs", "versions"))
    if not len(tokens) == len(log_probs) == len(versions) == ends[-1]:
        raise ValueError(f"{len(tokens)} tokens of {ends[-1]}")
    responses = [
        Begun(tokens[a:b], log_probs[a:b], versions[a:b], ENDS[end], routes if len(routes) else None)
        for a, b, end, routes in zip(ends[:-1], ends[1:], read["ends"], _routes(arrays, len(ends) - 1), strict=True)
    ]
    n = samples_per_prompt
    return [
        BegunGroup(place, row, responses[i * n : (i + 1) * n])
        for i, (place, row) in enumerate(zip(read["places"], read["rows"], strict=True))
    ]


def _routes(arrays: Mapping[str, NDArray[Any]], responses: int) -> list[NDArray[np.int16]]:
    routed = arrays.get("carried_routed", np.zeros(responses, np.int64))
    routes = arrays.get("carried_routes", np.empty(0, np.int16))
    if len(routed) != responses or routed.sum() != len(routes):
        raise ValueError(f"{len(routes)} positions with routes of {routed.sum()}")
    return np.split(routes, np.cumsum(routed)[:-1]) if responses else []
