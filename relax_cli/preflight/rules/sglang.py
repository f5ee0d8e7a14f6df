"""Rules about SGLang servers: where they are, and the options passed through to them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from relax_cli.config.model import flag
from relax_cli.config.placement import ranks_of, rollout_engine
from relax_cli.config.recipes import nearest
from relax_cli.config.schema import Config, SglangSection
from relax_cli.config.sglang_options import RESERVED, installed_options, misspelt
from relax_cli.errors import Problem
from relax_cli.preflight.rules.files import Found

STARTED_ONLY = ("sglang_options", "sglang_mem_fraction_static", "sglang_python")
"""Options of a server that the run starts itself."""


def external_servers(config: Config) -> Found:
    """`--rollout-external` and the addresses come together, and the addresses are `HOST:PORT`, each once."""
    section = config.sglang
    addresses = section.rollout_external_engine_addrs
    option = flag("rollout_external_engine_addrs")
    if section.rollout_external and not addresses:
        return Problem(
            id="sglang-external-addresses",
            message="--rollout-external needs to know where the servers are",
            fix=f"{option} HOST:PORT, once for each server",
            option=option,
            expected="at least one HOST:PORT",
        )
    if addresses and not section.rollout_external:
        return Problem(
            id="sglang-external-addresses",
            message="addresses of running servers are given, but the run would start its own",
            fix="add --rollout-external",
            option=option,
            got=", ".join(addresses),
        )
    problems = [
        Problem(
            id="sglang-address",
            message=f"{address!r} is not HOST:PORT",
            fix=f"{option} 10.0.0.5:30000 (an IPv6 host in brackets, no http://)",
            option=option,
            got=address,
            expected="HOST:PORT",
        )
        for address in addresses
        if not is_address(address)
    ]
    twice = sorted({address for address in addresses if addresses.count(address) > 1})
    problems += [
        Problem(
            id="sglang-address-twice",
            message=f"server {address} is given twice",
            fix=f"drop one {option} {address}",
            option=option,
            got=address,
        )
        for address in twice
    ]
    return problems


def is_address(text: str) -> bool:
    """Whether it is `HOST:PORT`."""
    host, _, port = text.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    named = bool(host) and not any(c in host for c in "/@ ") and (":" not in host or in_brackets)
    return named and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16


def external_workers(config: Config) -> Found:
    """Every rollout worker has a server of its own: two would update its weights twice."""
    section, parallel = config.sglang, config.parallel
    if not section.rollout_external or "rollout" not in parallel.resource:
        return None
    workers, servers = ranks_of(parallel, "rollout"), len(section.rollout_external_engine_addrs)
    if not 0 < servers < workers:
        return None
    return Problem(
        id="sglang-external-workers",
        message="there are more rollout workers than servers",
        fix=f"--resource '{{\"rollout\": [1, {servers}], …}}', or name more servers",
        option="--resource",
        got=f"{workers} workers, {servers} servers",
        expected=f"at most {servers} workers",
    )


def external_embedded(config: Config) -> Found:
    """The embedded engine is no server."""
    if config.rollout.rollout_engine != "embedded" or not config.sglang.rollout_external:
        return None
    return Problem(
        id="sglang-external-embedded",
        message="--rollout-external generates on SGLang servers, --rollout-engine embedded in the run itself",
        fix="drop one of the two",
        option="--rollout-engine",
        got="embedded",
        expected="sglang or auto",
    )


def external_options(config: Config) -> Found:
    """A server that runs already has its options."""
    section = config.sglang
    given = [name for name in STARTED_ONLY if getattr(section, name) != _default(name)]
    if not section.rollout_external or not given:
        return None
    return Problem(
        id="sglang-external-options",
        message="options of a server do nothing to servers that run already",
        fix="give them where those servers are started, and drop them here",
        option=flag(given[0]),
        got=", ".join(flag(name) for name in given),
        severity="warning",
    )


def gpus_per_engine(config: Config) -> Found:
    """The GPUs of the rollout role are shared out evenly over servers."""
    size, parallel = config.sglang.rollout_num_gpus_per_engine, config.parallel
    if "rollout" not in parallel.resource or config.sglang.rollout_external:
        return None
    services, devices = parallel.resource["rollout"]
    if services * devices <= 0 or services * devices % size == 0:
        return None
    return Problem(
        id="sglang-gpus-per-engine",
        message="the GPUs of the rollout role do not divide by the GPUs of one server",
        fix="--rollout-num-gpus-per-engine 1, or another count in --resource",
        option="--rollout-num-gpus-per-engine",
        got=f"{services * devices} GPUs, {size} a server",
        expected="a divisor of the count in --resource",
    )


def server_options(config: Config) -> Found:
    """Options passed through exist in the installed version, and are not ours to set."""
    return _server_options(config.sglang, installed_options(config.sglang.sglang_python))


def _server_options(section: SglangSection, installed: Collection[str] | None) -> list[Problem]:
    problems = []
    own = {name.removeprefix("sglang_") for name in SglangSection.model_fields if name.startswith("sglang_")}
    for name in section.sglang_options:
        option = f"--sglang-{name.replace('_', '-')}"
        if name in RESERVED:
            problems.append(
                Problem(
                    id="sglang-option-reserved",
                    message=f"the run sets --{name.replace('_', '-')} of its servers itself",
                    fix=f"drop {option}: {RESERVED[name]}",
                    option="--sglang-options",
                    got=option,
                )
            )
            continue
        if installed is None:
            guess = misspelt(name, own)
        elif name in installed:
            continue
        else:
            guess = nearest(name, [*own, *installed])
        if installed is not None or guess:
            problems.append(
                Problem(
                    id="sglang-option-unknown",
                    message=f"sglang has no option --{name.replace('_', '-')}",
                    fix=f"use --sglang-{guess.replace('_', '-')}" if guess else f"drop {option}",
                    option="--sglang-options",
                    got=option,
                    expected=f"--sglang-{guess.replace('_', '-')}" if guess else "",
                )
            )
    return problems


def sglang_package(config: Config) -> Found:
    """Servers can only be started where sglang is installed."""
    engine = rollout_engine(config.rollout, config.sglang, config.parallel)
    python = config.sglang.sglang_python
    if engine != "sglang" or config.sglang.rollout_external or installed_options(python) is not None:
        return None
    if python is not None:
        return Problem(
            id="sglang-missing",
            message="the environment of --sglang-python has no sglang, or is not there",
            fix=f"{python} -m pip install sglang",
            option="--sglang-python",
            got=python,
            expected="the bin/python of an environment with sglang",
        )
    return Problem(
        id="sglang-missing",
        message="the sglang package is not installed, and the rollout engine is to be started from it",
        fix="pip install 'relax-cli[sglang]', or use --sglang-python, --rollout-external or --rollout-engine embedded",
        option="--rollout-engine",
        got=config.rollout.rollout_engine,
    )


def python_path(config: Config) -> Found:
    """Workers on other machines and in other folders start the same interpreter."""
    python = config.sglang.sglang_python
    if python is None or Path(python).is_absolute():
        return None
    return Problem(
        id="sglang-python-relative",
        message="--sglang-python is not an absolute path",
        fix=f"--sglang-python {Path(python).absolute()}",
        option="--sglang-python",
        got=python,
        expected="an absolute path",
    )


def embedded_on_cuda(config: Config) -> Found:
    """The embedded engine knows no GPU."""
    if config.rollout.rollout_engine != "embedded" or config.parallel.device != "cuda":
        return None
    return Problem(
        id="embedded-engine-on-cuda",
        message="the embedded engine generates on the CPU while the GPUs wait",
        fix="--rollout-engine sglang",
        option="--rollout-engine",
        got="embedded",
        severity="warning",
    )


def greedy_log_probs(config: Config) -> Found:
    """SGLang gives greedy samples the log-probabilities of temperature 1."""
    section = config.rollout
    if rollout_engine(section, config.sglang, config.parallel) != "sglang":
        return None
    if section.rollout_top_k != 1 or section.rollout_temperature == 1.0:
        return None
    return Problem(
        id="sglang-greedy-temperature",
        message="with --rollout-top-k 1 SGLang's log-probabilities ignore the temperature",
        fix="--rollout-temperature 1",
        option="--rollout-temperature",
        got=f"{section.rollout_temperature:g}",
        expected="1",
    )


def partial_with_stop(config: Config) -> Found:
    """A stop string may lie across the place where a response was aborted."""
    section = config.rollout
    if not section.partial_rollout or not section.rollout_stop:
        return None
    return Problem(
        id="partial-rollout-stop",
        message="with stop strings an aborted response is asked for anew, not continued",
        fix="drop --partial-rollout, or stop at token ids alone",
        option="--partial-rollout",
        got=f"{len(section.rollout_stop)} stop strings",
        severity="warning",
    )


def _default(name: str) -> object:
    return SglangSection.model_fields[name].get_default(call_default_factory=True)


SGLANG_RULES: tuple[Callable[[Config], Found], ...] = (
    external_servers,
    external_workers,
    external_embedded,
    external_options,
    gpus_per_engine,
    server_options,
    sglang_package,
    python_path,
    embedded_on_cuda,
    greedy_log_probs,
    partial_with_stop,
)
