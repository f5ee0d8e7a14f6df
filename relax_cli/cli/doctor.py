"""`relax doctor`: whether this machine can run relax; each part of it is tried in a process of its own."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Annotated, Literal

import typer
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from relax_cli.cli.console import Output
from relax_cli.cli.text import counted
from relax_cli.cli.warm import tell
from relax_cli.config.redact import scrubbed
from relax_cli.config.text import shortened, table
from relax_cli.config.versions import NEWEST_MEGATRON, SETS, SGLANG_CONTRACTS, installed_version
from relax_cli.data.sandbox.outside import sandbox_fault, sandbox_fix
from relax_cli.errors import ExitCode
from relax_cli.plugin.manager import Plugins
from relax_cli.preflight.machine import (
    NVIDIA_SMI_SECONDS,
    gpu_count,
    ray_address,
    ray_temp_folder,
    ray_temp_trouble,
    total_memory,
    usable_cores,
)
from relax_cli.preflight.memory.sizes import in_bytes

Severity = Literal["note", "problem"]
PAIRED = ("torch", "megatron-core", "sglang")
"""Distributions whose versions depend on each other."""
PINNING = ("sglang", "megatron-core", "megatron-bridge", "TransferQueue", "transformers")
"""Distributions whose own requirements must be satisfied together: pip breaks them when it installs one by one."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
Timeout = Annotated[float, typer.Option("--timeout", min=1, help="seconds that one part may take to import")]
SMALL_SHARED_MEMORY = 1 << 30
"""Ray's object store falls back to files where /dev/shm is too small for it."""
MUCH_LOCKED = 1 << 30
FEW_FILES = 4096
"""Ray's processes open thousands of files and sockets."""
TOO_SLOW = "does not import within"
LITTLE_DISK = 2 << 30
CPU_SUPPORT = "from relax_cli.backends.megatron.cpu_support import install; install()"
CUDA = """
import json, torch
rows = []
for i in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(i)
    rows.append([torch.cuda.get_device_name(i), free, total])
print(json.dumps({"build": torch.version.cuda, "devices": rows}))
"""


@dataclass(frozen=True)
class Check:
    """One row of `relax doctor`."""

    name: str
    status: Literal["ok", "note", "problem"]
    found: str
    fix: str = ""
    """What to type; empty when it is ok."""


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
    known = " and ".join(SGLANG_CONTRACTS)
    text = f"written against {known}; {found} is installed"
    return _check(found in SGLANG_CONTRACTS, "sglang protocol", text, f"pip install sglang=={SGLANG_CONTRACTS[-1]}")


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
        if found is not None and not requirement.specifier.contains(found, prereleases=True):
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


@dataclass(frozen=True)
class Part:
    """A package that relax uses."""

    distribution: str
    code: str
    """Proves that it works."""
    optional: str = ""
    """How to install what not every run needs."""

    @property
    def fix(self) -> str:
        """How to install it."""
        return self.optional or required(self.distribution)


PARTS = (
    Part("torch", "import torch; assert torch.ones(2).sum() == 2"),
    Part("megatron-core", "import megatron.core"),
    Part("ray", "import ray"),
    Part("TransferQueue", "import transfer_queue"),
    Part("tensordict", "import tensordict"),
    Part("transformers", "from transformers import AutoTokenizer"),
    Part("psutil", "import psutil"),
    Part("math-verify", r"from math_verify import parse; assert parse(r'$\frac{1}{2}$')"),
    Part("sglang", "import sglang", "pip install 'relax-cli[sglang]' (for rollouts on GPUs)"),
    Part(
        "transformer-engine",
        "import transformer_engine.pytorch",
        "pip install --no-build-isolation 'transformer-engine[pytorch]' (on GPUs; optional)",
    ),
    Part(
        "megatron-bridge",
        "from megatron.bridge import AutoBridge",
        "pip install 'relax-cli[bridge]' (for Qwen3.5; Python 3.12)",
    ),
    Part("reasoning-gym", "import reasoning_gym", "pip install 'relax-cli[reasoning-gym]' (for its tasks)"),
    Part("pyarrow", "import pyarrow.parquet", "pip install 'relax-cli[parquet]' (for Parquet data)"),
    Part("tensorboard", "import tensorboard", "pip install 'relax-cli[tensorboard]' (for --tensorboard)"),
)


def required(distribution: str) -> str:
    """How to install what relax itself requires, by its own metadata."""
    for requirement in requirements_of("relax-cli"):
        if canonicalize_name(requirement.name) == canonicalize_name(distribution):
            requirement.marker = None
            return f"pip install '{requirement}'"
    return f"pip install {distribution}"


def doctor(output: Output, plugins: Plugins, timeout: Timeout = 180.0) -> ExitCode:
    """Check this machine: versions, imports, devices, memory, disk, plugins. Exit code 0, or 4 with problems."""
    with output.err.status("importing every part in a process of its own"):
        checks = examine_machine(plugins, timeout)
    ok = all(check.status != "problem" for check in checks)
    data = [{name: scrubbed(text) for name, text in asdict(check).items()} for check in checks]
    output.result({"ok": ok, "checks": data}, as_text(checks))
    return ExitCode.OK if ok else ExitCode.ENVIRONMENT


def examine_machine(plugins: Plugins, timeout: float) -> list[Check]:
    """Every check, in the order of the table."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        packages = list(pool.map(lambda part: check_part(part, timeout), PARTS))
    works = {check.name for check in packages if check.status == "ok"}
    has_gpu = gpu_count() > 0
    checks = [Check("Python", "ok", f"{platform.python_version()} ({sys.prefix})"), *packages]
    installed = {name: found for name in PAIRED if (found := installed_version(name)) is not None}
    checks.append(tested_pair(sys.version_info[:2], installed))
    if "sglang" in installed:
        checks.append(sglang_contract(installed["sglang"]))
    checks += [check for name in PINNING for check in broken_requirements(name)]
    checks += [*allocator_conflict(os.environ, has_gpu=has_gpu), *_devices(works, timeout)]
    checks += [*_memory(), *_limits(has_gpu), *_disk(), *_ray(), *warm_checks()]
    fault = sandbox_fault()
    checks.append(_check(not fault, "sandbox of --rm-type code", fault or "withstands its probe", sandbox_fix()))
    return [*checks, *_plugins(plugins)]


def check_part(part: Part, timeout: float) -> Check:
    """The version of a package and whether it works."""
    severity: Severity = "note" if part.optional else "problem"
    found = installed_version(part.distribution)
    if found is None:
        return Check(part.distribution, severity, "not installed", part.fix)
    _, trouble = _try(part.code, timeout)
    slow = trouble is not None and trouble.startswith(TOO_SLOW)
    fix = "relax doctor --timeout 600, when the machine is idle" if slow else part.fix
    return _check(trouble is None, part.distribution, f"{found}, {trouble}" if trouble else found, fix, severity)


def as_text(checks: list[Check]) -> str:
    """The table, then what to do."""
    width = 80 - len("problem") - 4 - max(len(check.name) for check in checks)
    rows = [(c.name, c.status, shortened(scrubbed(c.found), width)) for c in checks]
    lines = [table(("part", "status", "found"), rows)]
    for status, title in (("problem", "problems"), ("note", "notes")):
        chosen = [check for check in checks if check.status == status]
        lines += ["", title] if chosen else []
        for check in chosen:
            lines += textwrap.wrap(scrubbed(f"  {check.name}: {check.found}"), 80, subsequent_indent="    ")
            lines.append(f"    fix: {scrubbed(check.fix)}")
    return "\n".join(lines)


def _try(code: str, timeout: float) -> tuple[str, str | None]:
    """What the code prints in a process of its own, and what went wrong."""
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "RAY_USAGE_STATS_ENABLED": "0"}
    # Elsewhere, so that a file of the current folder does not stand in for a package.
    command = [sys.executable, "-P", "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=timeout, env=environment)
    except subprocess.TimeoutExpired:
        return "", f"{TOO_SLOW} {timeout:g} s"
    if done.returncode == 0:
        return done.stdout, None
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return "", f"does not import: {reason}"


def _devices(works: set[str], timeout: float) -> Iterator[Check]:
    if "torch" not in works:
        return
    if driver := driver_check():
        yield driver
    answer, trouble = _try(CUDA, timeout)
    if trouble is not None:
        yield Check("CUDA", "problem", trouble, "nvidia-smi shows whether the driver works")
    cuda = json.loads(answer) if trouble is None else {"build": None, "devices": []}
    for number, (name, free, total) in enumerate(cuda["devices"]):
        yield Check(f"GPU {number}", "ok", f"{name}, {in_bytes(free)} of {in_bytes(total)} free")
    if cuda["devices"]:
        return
    if trouble is None:
        build = f"torch is built for CUDA {cuda['build']}" if cuda["build"] else "torch is a CPU build"
        present = gpu_count()
        seen = f"{present} GPUs in /dev, but torch sees none" if present else "no GPU: runs use the CPU"
        yield _check(
            present == 0, "CUDA", f"{seen}; {build}", "install a CUDA build of torch, and see that `nvidia-smi` works"
        )
    if "megatron-core" in works:
        _, trouble = _try(CPU_SUPPORT, timeout)
        found = "works" if trouble is None else trouble.removeprefix("does not import: ")
        fix = f"pip install megatron-core=={NEWEST_MEGATRON}"
        yield _check(trouble is None, "Megatron on a CPU", found, fix, "problem")


def _memory() -> Iterator[Check]:
    yield Check("memory", "ok", in_bytes(total_memory()))
    yield Check("cores", "ok", str(usable_cores()))
    if Path("/dev/shm").is_dir():
        usage = shutil.disk_usage("/dev/shm")
        found = f"{in_bytes(usage.free)} of {in_bytes(usage.total)} free"
        fix = "docker run --shm-size=8g; with less, Ray puts stores of up to 10 GB into files and refuses larger ones"
        yield _check(usage.free >= SMALL_SHARED_MEMORY, "shared memory", found, fix)


def _limits(has_gpu: bool) -> Iterator[Check]:
    limits: list[tuple[str, int, int, Callable[[int], str], str]] = [
        ("open files", resource.RLIMIT_NOFILE, FEW_FILES, str, "ulimit -n {most}"),
        ("processes", resource.RLIMIT_NPROC, FEW_FILES, str, "ulimit -u {most}"),
    ]
    if has_gpu:
        # Sleeping roles are parked in page-locked memory.
        fix = "ulimit -l unlimited (in a container: --ulimit memlock=-1)"
        limits.append(("page-locked memory", resource.RLIMIT_MEMLOCK, MUCH_LOCKED, in_bytes, fix))
    for name, kind, enough, shown, fix in limits:
        soft, hard = resource.getrlimit(kind)
        unlimited = soft == resource.RLIM_INFINITY
        most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        found = "unlimited" if unlimited else shown(soft)
        yield _check(unlimited or soft >= enough, name, found, fix.format(most=most))


def _ray() -> Iterator[Check]:
    if address := ray_address():
        fix = "unset RAY_ADDRESS, to run on this machine alone"
        yield Check("Ray cluster", "note", f"runs join the one at {address}", fix)
    elif trouble := ray_temp_trouble():
        fix = "export RAY_TMPDIR=/tmp (or another short folder), or use --launcher local"
        yield Check("Ray's temporary folder", "note", f"{ray_temp_folder()}: {trouble}", fix)


def warm_checks() -> Iterator[Check]:
    """The process of `relax up`, if there is one."""
    if found := tell("look"):
        fits = f"process {found['pid']}, {counted(len(found['runs']), 'run')}"
        yield _check(not found["refused"], "warm process", found["refused"] or fits, "relax down && relax up")


def _disk() -> Iterator[Check]:
    for name, place in (("disk, here", "."), ("disk, temporary", tempfile.gettempdir())):
        free = shutil.disk_usage(place).free
        fix = "make room, or set RAY_TMPDIR and TMPDIR to a larger disk"
        yield _check(free >= LITTLE_DISK, name, f"{in_bytes(free)} free in {Path(place).resolve()}", fix)


def _check(is_ok: bool, name: str, found: str, fix: str, severity: Severity = "note") -> Check:
    return Check(name, "ok", found) if is_ok else Check(name, severity, found, fix)


def _plugins(plugins: Plugins) -> Iterator[Check]:
    for row in plugins.rows():
        found = f"{row.distribution} {row.version}".strip()
        is_ok = row.status == "ok"
        # A plugin of someone else that is broken hurts no run that does not ask for it.
        severity: Severity = "problem" if row.distribution == "relax-cli" and row.status == "broken" else "note"
        found = found if is_ok else f"{found} is {row.status}: {row.reason}"
        yield _check(is_ok, f"plugin {row.name}", found, f"reinstall or update {row.distribution}", severity)
