"""Models and data sets of the Hugging Face Hub, through `huggingface_hub`: its cache, token, endpoint, offline mode."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from relax_cli.errors import MACHINE_THEME, ConfigError, problem_kind

HUB = problem_kind(
    "hub",
    MACHINE_THEME,
    "The Hugging Face Hub does not have the model or data set, does not give it without a token, or cannot be reached,"
    " and it is not in the cache.",
)
PREFIX = "hf:"
MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
DATA_SUFFIXES = (".parquet", ".arrow", ".jsonl", *(f".jsonl.{packed}" for packed in ("gz", "bz2", "xz", "zst")))
SPLITS = ("train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval")
COMMIT = re.compile("[0-9a-f]{40}")

_MODEL = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_DATASET = re.compile(
    r"hf:(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:/(?P<config>[\w./-]+))?(?:@(?P<revision>[\w./-]+))?(?::(?P<split>[\w.-]+))?"
)


def is_hub_model(name: str) -> bool:
    """Whether `--hf-checkpoint` names a model of the hub: `OWNER/NAME`, where no folder OWNER is here."""
    owner = name.partition("/")[0]
    return bool(_MODEL.fullmatch(name)) and owner != "quickstart" and not Path(owner).exists()


def model_folder(name: str, *, online: bool = True) -> Path:
    """The folder of the cache with the model, which is downloaded where it is not complete.
    Raises ConfigError: the hub does not give it."""
    return _snapshot(name, "model", None, MODEL_FILES, online)


def pinned(item: str) -> str:
    """`hf:OWNER/NAME…` with the commit that it now is, so that all processes of a run read the same.
    Raises ConfigError: the item has another form, or the hub does not give it."""
    match = _parts(item)
    if match["revision"] and COMMIT.fullmatch(match["revision"]):
        return item
    commit = _snapshot(match["repo"], "dataset", match["revision"], ["README.md"]).name
    config = f"/{match['config']}" if match["config"] else ""
    return f"{PREFIX}{match['repo']}{config}@{commit}:{match['split'] or 'train'}"


@functools.lru_cache(64)
def dataset_files(item: str) -> tuple[Path, ...]:
    """The files of `hf:OWNER/NAME[/CONFIG][@REVISION][:SPLIT]` in the cache; they are downloaded where they are not.
    Raises ConfigError: the item has another form, the hub does not give it, or it has no such split."""
    match = _parts(item)
    repo, revision, split = match["repo"], match["revision"], match["split"] or "train"
    folder = _snapshot(repo, "dataset", revision, ["README.md"])
    names = sorted(_names(repo, revision, folder))
    card = folder / "README.md"
    chosen = files_of_split(names, split, match["config"], _configs(card) if card.is_file() else [])
    if not chosen:
        data = [name for name in names if name.endswith(DATA_SUFFIXES)]
        what = f"the data set has no files of the split {split!r}"
        fix = f"--prompt-data {PREFIX}{repo}:SPLIT, or {PREFIX}{repo}/CONFIG:SPLIT, or download it and give its files"
        got = ", ".join(data[:10]) or "no files of Parquet, Arrow or JSON Lines"
        raise ConfigError(HUB(what, option="--prompt-data", where=item, got=got, fix=fix))
    folder = _snapshot(repo, "dataset", revision, chosen)
    return tuple(folder / name for name in chosen)


def files_of_split(
    names: Sequence[str], split: str, config: str | None, configs: Sequence[dict[str, Any]]
) -> list[str]:
    """The files of a split: as the card of the data set says, else those with its name in their path.

    Args:
        config: a configuration of the card, or a folder; None for the default one, or the only one.
        configs: of the card.
    """
    data = [name for name in names if name.endswith(DATA_SUFFIXES)]
    named = {str(entry.get("config_name")): entry for entry in configs}
    default = next((name for name, entry in named.items() if entry.get("default")), "default")
    chosen = named.get(config or default) or (configs[0] if len(configs) == 1 and config is None else None)
    if chosen is not None and chosen.get("data_files"):
        patterns = [_regex(pattern) for pattern in _patterns(chosen["data_files"], split)]
        return [name for name in data if any(re.fullmatch(pattern, name) for pattern in patterns)]
    if len(configs) > 1 and config is None:
        return []
    data = [name for name in data if config is None or name.startswith(f"{config}/")]
    words = {name: set(re.split(r"[^a-z0-9]+", name.lower())) for name in data}
    if split == "train" and not any(words[name] & set(SPLITS) for name in data):
        return data
    return [name for name in data if split.lower() in words[name]]


def _patterns(entry: Any, split: str) -> list[str]:
    """Of `data_files` in a card: a pattern, a list of them, or of objects with `split` and `path`."""
    if isinstance(entry, str):
        return [entry] if split == "train" else []
    if isinstance(entry, dict):
        found = entry.get("path", []) if entry.get("split", "train") == split else []
        return [found] if isinstance(found, str) else list(found)
    return [pattern for item in entry for pattern in _patterns(item, split)]


def _regex(pattern: str) -> str:
    """Of a glob, in which `**` stands for any folders and `*` for none."""
    meanings = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(meanings.get(part, re.escape(part)) for part in re.split(r"(\*\*/|\*\*|\*|\?)", pattern))


def _configs(card: Path) -> list[dict[str, Any]]:
    from huggingface_hub import metadata_load

    try:
        found = (metadata_load(card) or {}).get("configs") or []
    # What the YAML library raises of a broken card is not an OSError or ValueError.
    except Exception:  # noqa: BLE001
        return []
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _names(repo: str, revision: str | None, folder: Path) -> list[str]:
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(repo, repo_type="dataset", revision=revision)
    except (_http_error(), OSError):
        # Offline, what was downloaded once is known.
        return [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]


def _snapshot(
    repo: str, kind: Literal["model", "dataset"], revision: str | None, patterns: list[str], online: bool = True
) -> Path:
    from huggingface_hub import snapshot_download

    get = functools.partial(snapshot_download, repo, repo_type=kind, revision=revision, allow_patterns=patterns)
    try:
        return Path(get(local_files_only=not online))
    except (_http_error(), OSError, ValueError) as error:
        option = "--hf-checkpoint" if kind == "model" else "--prompt-data"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        fix = f"check the name; where the hub cannot be reached: hf download {repo} --repo-type {kind}, on a machine"
        what = f"the {kind} is not in the cache, and the hub does not give it: {reason}"
        expected = "a folder, or OWNER/NAME of the Hugging Face Hub" if kind == "model" else f"{PREFIX}OWNER/NAME:SPLIT"
        found = HUB(what, option=option, got=repo, expected=expected, fix=f"{fix} that shares HF_HOME")
        raise ConfigError(found) from error


def _http_error() -> type[Exception]:
    """What the hub's HTTP client raises: versions of huggingface_hub use different clients."""
    from huggingface_hub import errors

    error: type[Exception] = vars(errors)["HTTPError"]
    assert issubclass(errors.HfHubHTTPError, error)
    return error


def _parts(item: str) -> re.Match[str]:
    match = _DATASET.fullmatch(item)
    if match is None:
        what = "the data set is not hf:OWNER/NAME[/CONFIG][@REVISION][:SPLIT]"
        fix = "--prompt-data hf:OWNER/NAME:train"
        raise ConfigError(HUB(what, option="--prompt-data", got=item, expected=f"{PREFIX}OWNER/NAME:SPLIT", fix=fix))
    return match
