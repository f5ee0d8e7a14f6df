"""The model and data of a run, where they are on the Hugging Face Hub: in the cache, and the same for all processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from relax_cli.config.layers import known
from relax_cli.config.schema import Config
from relax_cli.data.sources import source_of
from relax_cli.errors import ConfigError, Problem
from relax_cli.models.hub import PREFIX, is_hub_model, model_folder, pinned
from relax_cli.plugin.records import Change

T = TypeVar("T")


def from_hub(config: Config, *, online: bool) -> tuple[Config, list[Change], list[Problem]]:
    """The configuration with the folder of a model of the hub, and with the commits of its data sets.

    Args:
        online: download what is not in the cache, and pin data sets; else only look for the model in the cache.
    """
    changes: list[Change] = []
    problems: list[Problem] = []

    def tried(get: Callable[[], T]) -> T | None:
        try:
            return get()
        except ConfigError as error:
            problems.extend(error.problems)
        return None

    name = known(lambda: config.model.hf_checkpoint) or ""
    folder = tried(lambda: model_folder(name, online=online)) if is_hub_model(name) else None
    if not online:
        # A rule says that there is no such folder.
        problems.clear()
    if folder is not None:
        changes.append(Change("--hf-checkpoint", name, str(folder), "the model's place in the cache of the hub"))
        config = config.model_copy(update={"model": config.model.model_copy(update={"hf_checkpoint": str(folder)})})
    items = known(lambda: config.data.prompt_data) or ()
    if online and any(item.startswith(PREFIX) for item in items):
        new = tuple(_pinned(item, tried) for item in items)
        if new != items:
            changes.append(Change("--prompt-data", items, new, "every process reads the same commit"))
            config = config.model_copy(update={"data": config.data.model_copy(update={"prompt_data": new})})
    return config, changes, problems


def _pinned(item: str, tried: Callable[[Callable[[], str]], str | None]) -> str:
    if not item.startswith(PREFIX):
        return item
    place = tried(lambda: source_of(item).place) or item
    commit = tried(lambda: pinned(place))
    return item if commit is None else commit + item.removeprefix(place)
