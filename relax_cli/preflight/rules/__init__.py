"""What can be known to be wrong before anything starts: small rules, all asked, all reported. One file a theme."""

from relax_cli.preflight.rules import (
    batches,
    data,
    episodes,
    evaluation,
    experts,
    folders,
    layers,
    machine,
    memory,
    model,
    objective,
    resources,
    rewards,
    sglang,
    tracking,
)
from relax_cli.preflight.rules.registry import RULES, RuleContext, run_rules

__all__ = ["RULES", "RuleContext", "run_rules"]
THEMES = (
    resources,
    layers,
    experts,
    batches,
    evaluation,
    rewards,
    episodes,
    objective,
    sglang,
    model,
    data,
    folders,
    machine,
    tracking,
    memory,
)
