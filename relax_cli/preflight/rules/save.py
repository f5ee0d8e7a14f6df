"""Rules about the folders that a run writes to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from relax_cli.config.schema import Config
from relax_cli.errors import Problem

if TYPE_CHECKING:
    from relax_cli.preflight.rules.files import Found, Surroundings


def writable_folders(config: Config, around: Surroundings) -> Found:
    """Checkpoints, metrics and samples can be written where they are to go; a folder to resume from need not be."""
    places = {
        "--save": config.checkpoint.save,
        "--critic-save": config.critic.critic_save,
        "--run-dir": config.run.run_dir,
    }
    found = []
    for option, folder in places.items():
        if folder is None:
            continue
        existing = nearest_existing(Path(folder))
        if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK, effective_ids=True):
            continue
        found.append(
            Problem(
                id="folder-read-only",
                message=f"nothing can be written to the folder of {option}",
                option=option,
                got=f"{existing} is {'read-only here' if existing.is_dir() else 'no folder'}",
                expected="a folder that can be written to",
                fix=f"{option} DIR with a folder of your own, or chmod u+wx {existing}",
            )
        )
    return found


def nearest_existing(path: Path) -> Path:
    """`path`, or what exists above it."""
    for place in (path.absolute(), *path.absolute().parents):
        # A link to nowhere is in the way, too.
        if os.path.lexists(place):
            return place
    return Path("/")
