"""Whether low-rank adapters of a checkpoint are those of a run, and mean something on the weights of its model."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_cli.checkpoint.layout import CheckpointMeta
from relax_cli.errors import Problem, problem_kind
from relax_cli.models.lora import Lora, lora_from_meta

OTHER_ADAPTERS = problem_kind(
    "resume-other-adapters",
    "Folders and checkpoints",
    "The checkpoint was trained with other low-rank adapters, or with none where the run has some.",
    option="--lora-rank",
)
OTHER_BASE = problem_kind(
    "resume-other-base",
    "Folders and checkpoints",
    "A checkpoint of low-rank adapters means something only on the weights that they were trained on, and "
    "`--hf-checkpoint` has others.",
    option="--hf-checkpoint",
)


def adapters_in(meta: CheckpointMeta) -> Lora | None:
    """The adapters that a checkpoint has instead of weights."""
    return lora_from_meta(meta.extra.get("adapters", {}).get(meta.role))


def other_adapters(run: Mapping[str, Any], meta: CheckpointMeta, where: Path) -> Problem | None:
    """The problem of a checkpoint with other adapters than those of the run, which are given by role."""
    saved, now = adapters_in(meta), lora_from_meta(run.get(meta.role))
    if saved == now:
        return None
    rank = "--critic-lora-rank" if meta.role == "critic" else "--lora-rank"
    return OTHER_ADAPTERS(
        f"the {meta.role}'s checkpoint has other adapters than the run",
        option=rank,
        where=str(where),
        got=_options(rank, now),
        expected=_options(rank, saved),
        fix=_options(rank, saved),
    )


def other_base(base: str | None, meta: CheckpointMeta, where: Path, given: str) -> Problem | None:
    """The problem of adapters that were trained on other weights than those of the model folder `given`."""
    saved, original = meta.recorded("fingerprints", "base"), meta.recorded("origin", "hf_checkpoint")
    if saved is None or base is None or saved == base:
        return None
    folder = shlex.quote(original) if original and original != given else "with the folder as it was"
    return OTHER_BASE(
        "the adapters were trained on other weights",
        where=str(where),
        got=f"weights {base[:12]} in {given}",
        expected=f"weights {saved[:12]}",
        fix=f"--hf-checkpoint {folder}",
    )


def _options(rank: str, lora: Lora | None) -> str:
    if lora is None:
        return f"{rank} 0"
    targets = " ".join(f"--lora-targets {target}" for target in lora.targets)
    return f"{rank} {lora.rank} --lora-alpha {lora.alpha:g} {targets}"
