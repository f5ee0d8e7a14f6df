"""What is known about an evaluation without a trainer before it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from relax_cli.config.layers import Layers, known
from relax_cli.config.model import flag, options_by_name
from relax_cli.config.schema import Config
from relax_cli.data.rewards import BUILTIN_REWARDS
from relax_cli.errors import problem_kind
from relax_cli.plugin.manager import Plugins
from relax_cli.preflight.check_run import CheckedRun, shown
from relax_cli.preflight.inputs import read_inputs
from relax_cli.preflight.machine import Machine
from relax_cli.preflight.resolve import command_words, resolve
from relax_cli.preflight.rules import RuleContext, run_rules
from relax_cli.preflight.rules.batches import THEME

SECTIONS = ("model", "data", "rollout", "sglang", "reward", "episode", "eval")
OF_TRAINING = {
    *("prompt_data", "shuffle", "eval_interval", "ref_load", "rollout_external", "rollout_external_engine_addrs"),
}
"""Options of these sections that only a run has."""
_READ = {name for name, (section, _) in options_by_name(Config).items() if section in SECTIONS}
OPTIONS = frozenset({*_READ, "load", "run_dir", "device", "threads_per_rank"} - OF_TRAINING)
OWN = (
    "data.prompt_data=[]",
    "parallel.resource={actor: [1, 1], rollout: [1, 1]}",
    "sglang.rollout_external=false",
    "sglang.rollout_external_engine_addrs=[]",
)
"""A recipe's training prompts are not read, and one process generates: a running server has other weights."""
NO_SETS = problem_kind(
    "eval-without-data", THEME, "`relax eval` needs a set of prompts, of its own or of a recipe.", option="--data"
)


def check_evaluation(
    plugins: Plugins, layers: Layers, progress: Callable[[str, float], None] | None = None
) -> CheckedRun:
    """Check an evaluation by the rules of a run about the options that it has.
    Raises ConfigError: two plugins claim one name, so that there are no options at all."""
    machine = Machine()
    overrides = [*layers.overrides, *OWN]
    resolved = resolve(plugins, replace(layers, overrides=overrides), machine, None)
    config = resolved.config
    rewards, envs = frozenset({*BUILTIN_REWARDS, *plugins.rewards()}), frozenset(plugins.envs())
    inputs = read_inputs(config, progress, rewards)
    context = RuleContext(config, inputs, machine, rewards, envs)
    problems = [*resolved.problems, *run_rules(context), *(known(lambda: plugins.broken_references(config)) or ())]
    if not (known(lambda: config.eval.eval_prompt_data) or "eval_prompt_data" in resolved.unread):
        problems.append(NO_SETS("there is nothing to evaluate on", fix="--data NAME=FILE.jsonl"))
    options = {*map(flag, OPTIONS), "--data", "", None}
    if known(lambda: config.eval.eval_max_response_len):
        options.remove("--rollout-max-response-len")  # which nothing then follows
    own = [p for p in problems if p.option in options and p.id not in ("eval-data-unused", "eval-option-unused")]
    seen = tuple(shown(own, resolved, is_strict=bool(known(lambda: config.run.strict))))
    words = command_words(layers, type(config))
    return CheckedRun(**vars(resolved) | {"problems": seen}, command=words, inputs=inputs)
