"""What `config.json` says about rotary positions (arXiv:2104.09864): one base, one scaling, under any key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_cli.models.families import BRIDGE_FAMILIES, positive, require_counts, unsupported

DEFAULT_THETA = 10000.0
_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_NEEDED = {"default": _NUMBERS[:0], "linear": _NUMBERS[:1], "llama3": _NUMBERS}
"""Implemented types, and the numbers that each has."""
_KNOWN = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_NUMBERS}
_IMAGES = {"mrope_interleaved", "mrope_section"}
"""How positions of images differ from those of text."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched; the names of `rope_parameters` in `config.json`."""

    rope_type: str
    """`linear` or `llama3`."""
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


def rotary(path: Path, full: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).
    Raises ConfigError: places disagree, or the scaling is not implemented."""
    stated = [_read(path, key, full) for key in ("rope_parameters", "rope_scaling") if full.get(key)]
    stated = stated or [(_base(path, full["rope_theta"]), None)]
    if stated[0] != stated[-1]:
        raise unsupported(path, "rope_scaling", full["rope_scaling"], "absent, or the same as rope_parameters")
    return stated[0]


def _read(path: Path, key: str, full: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    rope, text_only = full[key], full["model_type"] not in BRIDGE_FAMILIES
    if not isinstance(rope, dict):
        raise unsupported(path, key, rope, "a JSON object")
    kind = rope.get("rope_type") or rope.get("type") or ("absent" if rope.get("factor") else "default")
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise unsupported(path, f"{key}.rope_type", kind, "default, linear or llama3")
    if rope.get("type") not in (None, kind):
        raise unsupported(path, f"{key}.type", rope["type"], f"absent, or the same as rope_type ({kind})")
    for name, value in rope.items():
        if value is not None and name not in (_KNOWN if text_only else _KNOWN | _IMAGES):
            raise unsupported(path, f"{key}.{name}", value, "absent")
    if text_only and rope.get("partial_rotary_factor") not in (None, 1.0):
        raise unsupported(path, f"{key}.partial_rotary_factor", rope["partial_rotary_factor"], "1.0")
    inner, outer = rope.get("rope_theta"), full["rope_theta"]
    if None not in (inner, outer) and inner != outer:
        raise unsupported(path, f"{key}.rope_theta", inner, f"the same as rope_theta ({outer})")
    rope = {"original_max_position_embeddings": full["max_position_embeddings"]} | rope
    if kind == "llama3":
        require_counts(path, rope, _NUMBERS[3:])
    numbers = [positive(path, f"{key}.{name}", rope.get(name)) for name in _NEEDED[kind]]
    if kind == "llama3" and numbers[1] >= numbers[2]:
        raise unsupported(path, f"{key}.low_freq_factor", numbers[1], f"below high_freq_factor ({numbers[2]})")
    theta = _base(path, outer if inner is None else inner)
    match numbers:
        case [factor]:
            return theta, RopeScaling(kind, factor)
        case [factor, low, high, positions]:
            return theta, RopeScaling(kind, factor, low, high, int(positions))
    return theta, None


def _base(path: Path, theta: object) -> float:
    return DEFAULT_THETA if theta is None else positive(path, "rope_theta", theta)
