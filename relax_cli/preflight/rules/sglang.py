"""Rules about SGLang servers: where they are, and the options passed through to them."""

from __future__ import annotations

import shlex
from pathlib import Path

from relax_cli.config.model import flag
from relax_cli.config.names import nearest
from relax_cli.config.placement import ranks_of, rollout_engine
from relax_cli.config.schema import Config, ParallelSection, RolloutSection, SglangSection
from relax_cli.config.sglang_options import RESERVED, ServerOption, as_arguments, installed_options
from relax_cli.errors import MACHINE_THEME
from relax_cli.preflight.machine import Machine
from relax_cli.preflight.rules.registry import Finding, Found, rule

THEME = "SGLang servers"
ADDRESSES = "--rollout-external-engine-addrs"
STARTED_ONLY = ("sglang_options", "sglang_mem_fraction_static", "sglang_python")
"""Options of a server that the run starts itself."""


@rule("sglang-external-addresses", THEME, option=ADDRESSES)
def sglang_external_addresses(sglang: SglangSection) -> Found:
    """`--rollout-external` and `--rollout-external-engine-addrs HOST:PORT` need each other."""
    addresses = sglang.rollout_external_engine_addrs
    if sglang.rollout_external and not addresses:
        yield Finding(fix=f"{ADDRESSES} HOST:PORT, once for each server", expected="at least one HOST:PORT")
    if addresses and not sglang.rollout_external:
        yield Finding(
            "addresses of running servers are given, but the run would start its own", "add --rollout-external"
        )


@rule("sglang-address", THEME, option=ADDRESSES)
def sglang_address(sglang: SglangSection) -> Found:
    """An address of a server is not `HOST:PORT`."""
    for address in sglang.rollout_external_engine_addrs if sglang.rollout_external else ():
        if not is_address(address):
            fix = f"{ADDRESSES} 10.0.0.5:30000 (an IPv6 host in brackets, no http://)"
            yield Finding(f"{address!r} is not HOST:PORT", fix, address, "HOST:PORT")


@rule("sglang-address-twice", THEME, option=ADDRESSES)
def sglang_address_twice(sglang: SglangSection) -> Found:
    """One server is named twice. Its weights would be updated twice."""
    seen = set[str]()
    for address in sglang.rollout_external_engine_addrs if sglang.rollout_external else ():
        host, _, port = address.lower().rpartition(":")
        place = f"{'127.0.0.1' if host == 'localhost' else host}:{port.lstrip('0')}"
        if place in seen:
            yield Finding(f"server {address} is given twice", f"drop one {ADDRESSES} {address}", address)
        seen.add(place)


def is_address(text: str) -> bool:
    """Whether it is `HOST:PORT`."""
    host, _, port = text.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    named = bool(host) and not any(c in host for c in "/@ ") and (":" not in host or in_brackets)
    return named and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16


@rule("sglang-external-workers", THEME, option="--resource")
def sglang_external_workers(sglang: SglangSection, parallel: ParallelSection) -> Found:
    """Every rollout worker needs a server of its own, or several. Lower the count of `rollout` in `--resource`."""
    if not sglang.rollout_external or "rollout" not in parallel.resource:
        return
    workers, servers = ranks_of(parallel, "rollout"), len(sglang.rollout_external_engine_addrs)
    # Two workers would update the weights of one server twice.
    if 0 < servers < workers:
        fix = f'write "rollout": [1, {servers}] in --resource, or name more servers'
        got = f"{workers} workers, {servers} servers"
        yield Finding("there are more rollout workers than servers", fix, got, f"at most {servers} workers")


@rule("sglang-external-embedded", THEME, option="--rollout-engine")
def sglang_external_embedded(rollout: RolloutSection, sglang: SglangSection) -> Found:
    """`--rollout-engine embedded` contradicts `--rollout-external`."""
    if rollout.rollout_engine == "embedded" and sglang.rollout_external:
        fix = "drop --rollout-engine, or drop --rollout-external and --rollout-external-engine-addrs"
        yield Finding(fix=fix, expected="sglang or auto")


@rule("sglang-external-options", THEME, severity="warning")
def sglang_external_options(sglang: SglangSection) -> Found:
    """Options of a server were given, but servers that already run have their options. A warning."""
    given = [name for name in STARTED_ONLY if getattr(sglang, name) != getattr(SglangSection(), name)]
    if sglang.rollout_external and given:
        flags = list(map(flag, given))
        fix = f"drop {' and '.join(flags)} (give them where those servers are started)"
        yield Finding("server options do not change servers that already run", fix, ", ".join(flags), option=flags[0])


@rule("sglang-gpus-per-engine", THEME, option="--rollout-num-gpus-per-engine")
def sglang_gpus_per_engine(sglang: SglangSection, parallel: ParallelSection) -> Found:
    """The GPUs of `rollout` in `--resource` must be a multiple of `--rollout-num-gpus-per-engine`."""
    size = sglang.rollout_num_gpus_per_engine
    services, devices = parallel.resource.get("rollout", (0, 0))
    if not sglang.rollout_external and services * devices > 0 and services * devices % size:
        fix = "--rollout-num-gpus-per-engine 1, or another count in --resource"
        got = f"{services * devices} GPUs, {size} per server"
        yield Finding("", fix, got, f"a divisor of {services * devices}")


@rule("sglang-option-reserved", THEME, option="--sglang-options")
def sglang_option_reserved(sglang: SglangSection) -> Found:
    """The run sets this option of its servers itself, or cannot use servers that have it. The fix says why, or which
    option of relax to use."""
    for name in sglang.sglang_options:
        if name in RESERVED:
            typed, message = flag(f"sglang_{name}"), f"servers of the run cannot be given {flag(name)}"
            yield Finding(message, f"drop {typed}: {RESERVED[name]}", typed)


@rule("sglang-option-unknown", THEME, option="--sglang-options")
def sglang_option_unknown(sglang: SglangSection) -> Found:
    """The installed version of sglang has no such option. Its own source is read; the nearest name is given."""
    installed = installed_options(sglang.sglang_python)
    own = {name.removeprefix("sglang_") for name in SglangSection.model_fields if name.startswith("sglang_")}
    for name in sglang.sglang_options:
        if name in RESERVED or (installed is not None and name in installed):
            continue
        # Without an sglang to ask, only a name that is hardly another word than one of ours.
        guess = nearest(name, own, cutoff=0.85) if installed is None else nearest(name, [*own, *installed])
        if installed is not None or guess:
            typed, meant = flag(f"sglang_{name}"), flag(f"sglang_{guess}") if guess else ""
            fix = f"use {meant}" if meant else f"drop {typed}"
            yield Finding(f"sglang has no option {flag(name)}", fix, typed, meant)


@rule("sglang-option-value", THEME, option="--sglang-options")
def sglang_option_value(sglang: SglangSection) -> Found:
    """The installed version of sglang does not take this value of its option. Its own source is read."""
    installed = installed_options(sglang.sglang_python) or {}
    for name, value in sglang.sglang_options.items():
        option = installed.get(name, ServerOption())
        if name not in RESERVED and (expected := option.expected(value)):
            typed = " ".join(as_arguments({f"sglang_{name}": value}))
            guess = nearest(str(value), option.choices)
            is_on = option.kind == "bool" and str(value).lower() in ("1", "on", "true", "yes")
            fix = f"{flag(f'sglang_{name}')} {'' if is_on else guess}".strip() if is_on or guess else f"drop {typed}"
            yield Finding(f"sglang's {flag(name)} does not take this value", fix, typed, expected)


@rule("sglang-missing", MACHINE_THEME, option="--rollout-engine", needs="machine")
def sglang_missing(config: Config) -> Found:
    """The run would start SGLang servers, and the sglang package is not installed here, or not in the environment of
    `--sglang-python`."""
    python = config.sglang.sglang_python
    if rollout_engine(config) != "sglang" or config.sglang.rollout_external or installed_options(python) is not None:
        return
    if python is not None:
        message = "the environment of --sglang-python does not exist or has no sglang"
        expected = "the bin/python of an environment with sglang"
        yield Finding(message, f"{python} -m pip install sglang", expected=expected, option="--sglang-python")
    else:
        ways = "or use --sglang-python, --rollout-external or --rollout-engine embedded"
        message = "--rollout-engine sglang needs the sglang package, which is not installed"
        yield Finding(message, f"pip install 'relax-cli[sglang]', {ways}")


@rule("sglang-no-gpu", MACHINE_THEME, option="--rollout-engine", needs="machine")
def sglang_no_gpu(config: Config, machine: Machine) -> Found:
    """The run would start SGLang servers on a machine without a GPU. SGLang does so only with `--sglang-device cpu`."""
    starts = rollout_engine(config) == "sglang" and not config.sglang.rollout_external and not machine.ray_address
    is_default = config.parallel.device == "cpu" and "device" not in config.sglang.sglang_options
    if starts and is_default and machine.gpus == 0:
        fix = "--rollout-engine embedded, or --sglang-device cpu with an sglang that was built for CPUs"
        yield Finding("SGLang finds no GPU on this machine, and would not start", fix, expected="a GPU")


@rule("sglang-python-relative", THEME, option="--sglang-python")
def sglang_python_relative(sglang: SglangSection) -> Found:
    """`--sglang-python` is an absolute path: workers start servers from other folders, and on other machines."""
    python = sglang.sglang_python
    if python is not None and not Path(python).is_absolute():
        fix = f"--sglang-python {shlex.quote(str(Path(python).absolute()))}"
        yield Finding("--sglang-python is not an absolute path", fix, expected="an absolute path")


@rule("embedded-engine-on-cuda", THEME, option="--rollout-engine", severity="warning")
def embedded_engine_on_cuda(rollout: RolloutSection, parallel: ParallelSection) -> Found:
    """The embedded engine generates on the CPU. A warning with `--device cuda`."""
    if rollout.rollout_engine == "embedded" and parallel.device == "cuda":
        yield Finding("the embedded engine generates on the CPU while the GPUs wait", "--rollout-engine sglang")


@rule("sglang-greedy-temperature", THEME, option="--rollout-temperature")
def sglang_greedy_temperature(config: Config) -> Found:
    """With `--rollout-top-k 1` SGLang reports log-probabilities at temperature 1, whatever `--rollout-temperature`
    says."""
    is_scaled_greedy = config.rollout.rollout_top_k == 1 and config.rollout.rollout_temperature != 1.0
    if is_scaled_greedy and rollout_engine(config) == "sglang":
        yield Finding(fix="--rollout-temperature 1", expected="1")


@rule("partial-rollout-stop-strings", THEME, option="--rollout-stop")
def partial_rollout_stop_strings(config: Config) -> Found:
    """A server does not see a stop string that lies across the parts of a response, so `--partial-rollout` with
    `--over-sampling-batch-size` needs responses that end with a token. The embedded engine sees them."""
    if config.carries_over and config.rollout.rollout_stop and rollout_engine(config) == "sglang":
        message = "SGLang does not see a stop string across two parts of a response"
        yield Finding(message, "--no-partial-rollout", got=f"{len(config.rollout.rollout_stop)} stop strings")


@rule("partial-rollout-stop", THEME, option="--partial-rollout", severity="warning")
def partial_rollout_stop(rollout: RolloutSection) -> Found:
    """With stop strings an aborted response is generated again from its prompt, because a stop string may lie across
    the seam. A warning."""
    if rollout.partial_rollout and rollout.rollout_stop:
        fix = "drop --partial-rollout, or stop at token ids alone"
        yield Finding(fix=fix, got=f"{len(rollout.rollout_stop)} stop strings")
