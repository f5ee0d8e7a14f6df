"""What `--device auto` means for a run: settled once, before anything is checked or launched. Imports no torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from relax_cli.config.placement import shared_bundles
from relax_cli.config.schema import Config, ParallelSection, SglangSection
from relax_cli.plugin.records import Change
from relax_cli.preflight.machine import Machine


def settle_device(
    config: Config, machine: Machine, torch_has_cuda: bool, cluster_gpus: Callable[[], int] | None
) -> tuple[Config, list[Change]]:
    """The configuration with `cpu` or `cuda` in the place of `auto`.

    Args:
        cluster_gpus: asks the cluster that the run would join how many GPUs it has; None where it is not to be asked,
            and then `auto` stays.
    """
    parallel = config.parallel
    if parallel.device != "auto":
        return config, []
    joins = bool(machine.ray_address) and parallel.launcher == "ray"
    if joins and cluster_gpus is None:
        return config, []
    gpus = cluster_gpus() if joins and cluster_gpus is not None else machine.gpus
    place = "the Ray cluster" if joins else "this machine"
    device, why = choose_device(parallel, config.sglang, gpus, torch_has_cuda, place)
    settled = config.model_copy(update={"parallel": parallel.model_copy(update={"device": device})})
    return settled, [Change("--device", "auto", device, why)]


def choose_device(
    parallel: ParallelSection, sglang: SglangSection, gpus: int, torch_has_cuda: bool, place: str
) -> tuple[Literal["cpu", "cuda"], str]:
    """CUDA where the roles get as many GPUs as they need, and why or why not."""
    needed = shared_bundles(parallel, sglang)
    if gpus == 0:
        return "cpu", f"{place} has no GPU"
    count = f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"
    if gpus < needed:
        return "cpu", f"{place} has {count}, and the roles need {needed}"
    if not torch_has_cuda:
        return "cpu", f"{place} has {count}, but torch is built without CUDA"
    return "cuda", f"{place} has {count}, and the roles need {needed}"


def installed_torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA build, read from its version file: importing it takes seconds."""
    package = importlib.util.find_spec("torch")
    if package is None or package.origin is None:
        return False
    try:
        text = Path(package.origin).with_name("version.py").read_text("utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\s*(?::[^=]*)?=\s*['\"]", text, re.MULTILINE) is not None
