"""Remembers sets of prompts in which nothing was wrong: large files are checked once, as long as nothing changes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from relax_cli.config.schema import DataSection, RewardSection
from relax_cli.data.sources import source_of
from relax_cli.errors import ConfigError
from relax_cli.models.packages import default_cache_dir

LEAST_BYTES = 1 << 20
"""A smaller file is checked faster than it is looked up."""
MOST_ENTRIES = 64
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "special_tokens_map.json"),
)

Summary = tuple[int, Sequence[int], str, int, int]
"""The fields of `PromptSummary`."""


def cache_key(
    spec: str, folder: Path | None, section: DataSection, reward: RewardSection, limits: tuple[int | None, str]
) -> str | None:
    """Hash of all that the check of a file depends on, its content first; None where it is not worth it."""
    try:
        source = source_of(spec)
        files = [] if source.is_task else source.files()
        if not all(file.is_file() for file in files) or sum(file.stat().st_size for file in files) < LEAST_BYTES:
            return None
        files += [] if folder is None else [folder / name for name in TOKENIZER_FILES]
        hashes = [_sha256(file) if file.is_file() else "" for file in files]
        rest = [
            section.model_dump(mode="json"),
            reward.rm_type,
            reward.custom_rm_path is None,
            reward.rm_url is None,
            limits,
        ]
        return hashlib.sha256(json.dumps([version("relax-cli"), spec, hashes, rest]).encode()).hexdigest()
    except (OSError, ConfigError):
        return None


def load_summary(key: str | None) -> tuple[int, tuple[int, ...], str, int, int] | None:
    """What was stored under a key."""
    if key is None:
        return None
    try:
        count, lengths, longest, over, most = json.loads((_folder() / key).read_text("utf-8"))
        return count, tuple(lengths), longest, over, most
    except (OSError, ValueError, TypeError):
        return None


def store_summary(key: str | None, summary: Summary) -> None:
    """Keep it, where the cache folder can be written."""
    if key is None:
        return
    folder = _folder()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f"{key}.{os.getpid()}"
        new.write_text(json.dumps(summary), "utf-8")
        new.replace(folder / key)
        oldest_first = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)
        for file in oldest_first[:-MOST_ENTRIES]:
            file.unlink()


def _folder() -> Path:
    return default_cache_dir(os.environ) / "checked-data"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
