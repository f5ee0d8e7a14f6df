"""Asks the rules about a configuration, on a machine that lacks nothing unless a test says so."""

from __future__ import annotations

from dataclasses import replace

from relax_cli.config.schema import Config
from relax_cli.data.rewards import BUILTIN_REWARDS
from relax_cli.errors import Problem
from relax_cli.preflight.inputs import RunInputs, read_inputs
from relax_cli.preflight.machine import Machine
from relax_cli.preflight.rules import RULES, RuleContext, memory, run_rules
from relax_cli.preflight.rules import machine as machine_rules
from relax_cli.preflight.rules.registry import Rule

UNKNOWN = Machine(
    memory=None,
    gpus=0,
    cores=2,
    free_disk=lambda _: None,
    gpu_memory=lambda: None,
    ray_address="",
    allocator="",
    shared_memory=None,
    sandbox_fault=lambda: "",
)
"""A machine of two cores of which nothing else is known."""
WITH_GPUS = replace(UNKNOWN, gpus=8, cores=64)


def context_of(
    config: Config, *, machine: Machine = UNKNOWN, more_rewards: frozenset[str] = frozenset(), read: bool = True
) -> RuleContext:
    inputs = read_inputs(config) if read else RunInputs()
    return RuleContext(config, inputs, machine, frozenset(BUILTIN_REWARDS) | more_rewards, frozenset({"mine"}))


def problems_of(
    config: Config,
    *,
    machine: Machine = UNKNOWN,
    more_rewards: frozenset[str] = frozenset(),
    skip_files: bool = False,
) -> list[Problem]:
    """What all rules find."""
    context = context_of(config, machine=machine, more_rewards=more_rewards, read=not skip_files)
    return run_rules(context, skip_files=skip_files)


def problems_by(rule: Rule, config: Config, *, machine: Machine = UNKNOWN) -> list[Problem]:
    """What one rule finds."""
    return list(rule.problems(context_of(config, machine=machine)))


def machine_problems(config: Config, inputs: RunInputs, machine: Machine) -> list[Problem]:
    """What the rules about memory, disk and GPUs find, given what was read of the files."""
    context = RuleContext(config, inputs, machine)
    rules = [rule for rule in RULES if rule.check.__module__ in (memory.__name__, machine_rules.__name__)]
    return [problem for rule in rules for problem in rule.problems(context)]
