"""Checks of `relax doctor` about versions: whether what is installed was tested together, and what never works."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement

from relax_cli.config.versions import SETS, SGLANG_CONTRACTS, installed_version
from relax_cli.preflight.machine import NVIDIA_SMI_SECONDS

Severity = Literal["note", "problem"]
PAIRED = ("torch", "megatron-core", "sglang")
"""Distributions whose versions depend on each other."""
PINNING = ("sglang", "megatron-core", "megatron-bridge", "TransferQueue", "transformers")
"""Distributions whose own requirements must be satisfied together: pip breaks them when it installs one by one."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True)
class Check:
    """One row of `relax doctor`."""

    name: str
    status: Literal["ok", "note", "problem"]
    found: str
    fix: str = ""
    """What to type; empty when it is ok."""


def version_checks(has_gpu: bool) -> list[Check]:
    """The pair of versions, requirements that do not hold, and settings that are known to break runs."""
    installed = {name: found for name in PAIRED if (found := installed_version(name)) is not None}
    checks = [tested_pair(sys.version_info[:2], installed)]
    if "sglang" in installed:
        checks.append(sglang_contract(installed["sglang"]))
    checks += [check for name in PINNING for check in broken_requirements(name)]
    checks += allocator_conflict(os.environ, has_gpu=has_gpu)
    return checks


def tested_pair(python: tuple[int, int], installed: Mapping[str, str]) -> Check:
    """Whether Python, torch, megatron-core and sglang were run together."""
    public = {name: found.partition("+")[0] for name, found in installed.items()}
    shown = ", ".join([*(f"{name} {found}" for name, found in public.items()), f"Python {python[0]}.{python[1]}"])
    for known in SETS:
        if not known.matches(python, installed):
            continue
        if known.is_tested:
            return Check("versions", "ok", f"tested for {known.name}: {shown}")
        found = f"known for {known.name}: {shown} ({known.proof})"
        return Check("versions", "note", found, "run scripts/gpu_check.sh and look at what it reports")
    fixes = [f"{known.as_requirements} (for {known.name})" for known in SETS if python in known.python]
    fix = f"pip install {', or '.join(fixes)}" if fixes else "make an environment with Python 3.11 or 3.12"
    return Check("versions", "note", f"not tested together: {shown}", fix)


def sglang_contract(found: str) -> Check:
    """Whether the client was written against the protocol of this version."""
    if found in SGLANG_CONTRACTS:
        return Check("sglang protocol", "ok", f"that of {found} is known")
    known = " and ".join(SGLANG_CONTRACTS)
    fix = f"pip install sglang=={SGLANG_CONTRACTS[-1]}"
    return Check("sglang protocol", "note", f"written against {known}, not {found}", fix)


def requirements_of(distribution: str) -> Iterator[Requirement]:
    """What an installed distribution requires here, without its extras; nothing for one that is not installed."""
    with suppress(PackageNotFoundError):
        for text in requires(distribution) or ():
            with suppress(InvalidRequirement):
                requirement = Requirement(text)
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    yield requirement


def broken_requirements(name: str) -> Iterator[Check]:
    """What a distribution wants of others that are installed in another version."""
    for requirement in requirements_of(name):
        found = installed_version(requirement.name)
        if found is None or requirement.specifier.contains(found, prereleases=True):
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        fix = f"pip install '{wanted}', or {name} in an environment of its own"
        yield Check(f"{name} needs", "note", f"{wanted}, but {found} is installed", fix)


def allocator_conflict(environment: Mapping[str, str], *, has_gpu: bool) -> Iterator[Check]:
    """Expandable segments cannot be taken away from a sleeping SGLang server."""
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", ""):
            found = f"{name} asks for expandable segments, which SGLang's sleep does not work with"
            yield Check("CUDA allocator", "problem" if has_gpu else "note", found, f"unset {name}")


def driver_check() -> Check | None:
    """The NVIDIA driver and the newest CUDA it runs; None where there is no nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=NVIDIA_SMI_SECONDS)
    except FileNotFoundError:
        return None
    except (OSError, subprocess.SubprocessError) as error:
        found = f"nvidia-smi does not answer: {error}"
        return Check("NVIDIA driver", "problem", found, "restart, or reinstall the driver")
    versions = sorted(set(done.stdout.split()))
    if done.returncode or not versions:
        reason = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        return Check("NVIDIA driver", "problem", f"nvidia-smi fails: {reason}", "reinstall the driver of the GPU")
    return Check("NVIDIA driver", "ok", ", ".join(versions))
