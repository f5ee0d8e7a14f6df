"""What can be known to be wrong before anything starts: small pure rules, all run, all reported.

A rule takes the configuration and returns its problems; its id never changes. Rules here judge the
configuration alone, those of `file_checks` look at files and this machine. Estimator plugins add their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from relax_cli.config.placement import QUEUE_CPUS, SERVICE_CPUS, needed_cpus, shared_bundles
from relax_cli.config.recipes import nearest
from relax_cli.config.schema import Config
from relax_cli.errors import Problem
from relax_cli.preflight.rules.algorithm import ALGORITHM_RULES
from relax_cli.preflight.rules.backend import BACKEND_RULES
from relax_cli.preflight.rules.batch import BATCH_RULES, TRAINED_ROLES
from relax_cli.preflight.rules.files import FILE_RULES, Found, Surroundings
from relax_cli.preflight.rules.placement import PLACEMENT_RULES
from relax_cli.preflight.rules.recompute import RECOMPUTE_RULES
from relax_cli.preflight.rules.reward import REWARD_RULES
from relax_cli.preflight.rules.sglang import SGLANG_RULES

ROLES = ("actor", "critic", "rollout", "advantages", "reference")
"""Roles that `--resource` may name."""
DEVICE_ROLES = ("actor", "critic", "rollout", "reference")
"""Roles that hold a model."""


def check_config(config: Config, around: Surroundings, *, skip_files: bool = False) -> list[Problem]:
    """Every problem of a configuration.

    Args:
        config: after the plugins' normalisation.
        around: what is known of the world outside the configuration.
        skip_files: leave out the rules that need the model and data files or this machine.
    """
    problems = _as_list(reward_choice(config, around.rewards))
    for rule in RULES:
        problems += _as_list(rule(config))
    for file_rule in () if skip_files else FILE_RULES:
        problems += _as_list(file_rule(config, around))
    return problems


def reward_choice(config: Config, rewards: Collection[str]) -> Found:
    """`--rm-type` names a reward that exists, or `--custom-rm-path` is given, not both."""
    name, custom = config.reward.rm_type, config.reward.custom_rm_path
    if name is None and custom is None:
        return Problem(
            id="reward-missing",
            message="no reward is chosen",
            fix="add --rm-type exact, or --custom-rm-path FILE.py:function",
            option="--rm-type",
            expected=", ".join(sorted(rewards)),
        )
    if name is not None and custom is not None:
        return Problem(
            id="reward-twice",
            message="two rewards are chosen",
            fix="drop one of --rm-type and --custom-rm-path",
            option="--rm-type",
            got=f"{name} and {custom}",
        )
    if name is None or name in rewards:
        return None
    guess = nearest(name, rewards)
    return Problem(
        id="reward-unknown",
        message=f"there is no reward {name!r}",
        fix=f"--rm-type {guess}" if guess else "install its plugin, or use --custom-rm-path FILE.py:function",
        option="--rm-type",
        got=name,
        expected=", ".join(sorted(rewards)),
    )


def resource_roles(config: Config) -> Found:
    """`--resource` names known roles and holds at least an actor and a rollout."""
    given = config.parallel.resource
    problems = [
        Problem(
            id="resource-unknown-role",
            message=f"--resource names the unknown role {role!r}",
            fix=f"use one of {', '.join(ROLES)}",
            option="--resource",
            got=role,
            expected=", ".join(ROLES),
        )
        for role in given
        if role not in ROLES
    ]
    problems += [
        Problem(
            id="resource-missing-role",
            message=f"--resource has no {role}",
            fix=f'add "{role}": [1, 1] to --resource',
            option="--resource",
            got=", ".join(given),
            expected="at least actor and rollout",
        )
        for role in ("actor", "rollout")
        if role not in given
    ]
    return problems


def resource_counts(config: Config) -> Found:
    """One service per role, no negative counts, and a device for every role that holds a model."""
    problems = []
    for role, (services, devices) in config.parallel.resource.items():
        got = f'"{role}": [{services}, {devices}]'
        if services != 1:
            problems.append(_resource_count("resource-one-service", role, got, "exactly one service per role"))
        if devices < 0:
            problems.append(_resource_count("resource-negative", role, got, "a device count of 0 or more"))
        elif devices == 0 and role in DEVICE_ROLES:
            problems.append(_resource_count("resource-no-device", role, got, "at least one device for a model"))
    return problems


def _resource_count(rule: str, role: str, got: str, expected: str) -> Problem:
    devices = 1 if role in DEVICE_ROLES else 0
    return Problem(
        id=rule,
        message=f"--resource gives {role} impossible counts",
        fix=f'write "{role}": [1, {devices}]',
        option="--resource",
        got=got,
        expected=expected,
    )


def local_launcher(config: Config) -> Found:
    """`--launcher local` is one process, so every role has at most one device."""
    wide = {role: n for role, (_, n) in config.parallel.resource.items() if n > 1}
    if config.parallel.launcher != "local" or not wide:
        return None
    return Problem(
        id="local-launcher-one-process",
        message="--launcher local runs everything in one process",
        fix="use --launcher ray, or a count of 1 for every role",
        option="--launcher",
        got=", ".join(f"{role} on {n}" for role, n in wide.items()),
        expected="at most 1 device per role",
    )


def pipeline(config: Config) -> Found:
    """Pipeline parallelism is not built yet."""
    size = config.parallel.pipeline_model_parallel_size
    if size == 1:
        return None
    return Problem(
        id="pipeline-not-supported",
        message="pipeline parallelism is not supported yet",
        fix="drop --pipeline-model-parallel-size; --tensor-model-parallel-size splits a model, too",
        option="--pipeline-model-parallel-size",
        got=str(size),
        expected="1",
    )


def fully_async(config: Config) -> Found:
    """Nothing generates while it trains."""
    if not config.parallel.fully_async:
        return None
    return Problem(
        id="fully-async-not-supported",
        message="generating while training is not supported: every rollout is sampled by the newest weights",
        fix="drop --fully-async",
        option="--fully-async",
        got="on",
        expected="off",
    )


def ranks_by_parallelism(config: Config) -> Found:
    """The ranks of a trained role are a multiple of tensor x pipeline parallel size."""
    grid = config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
    return [
        Problem(
            id="ranks-not-divisible",
            message=f"the {devices} ranks of {role} do not make whole groups of {grid} model-parallel ranks",
            fix=f'write "{role}": [1, {max(1, round(devices / grid)) * grid}] in --resource',
            option="--resource",
            got=str(devices),
            expected=f"a multiple of {grid}",
        )
        for role, (_, devices) in config.parallel.resource.items()
        if role in TRAINED_ROLES and devices > 0 and devices % grid
    ]


def length_of_run(config: Config) -> Found:
    """The run has an end."""
    if config.batch.num_rollout is not None or config.batch.num_epoch is not None:
        return None
    return Problem(
        id="run-length-missing",
        message="nothing says how long to train",
        fix="add --num-rollout 20, or --num-epoch 1",
        option="--num-rollout",
    )


def save_interval(config: Config) -> Found:
    """`--save-interval` needs a place to save to."""
    section = config.checkpoint
    if section.save_interval is None or section.save is not None:
        return None
    return Problem(
        id="save-interval-without-save",
        message="--save-interval is set, but there is no folder to save to",
        fix="add --save DIR (and --critic-save DIR for a run with a critic), or drop --save-interval",
        option="--save-interval",
        got=str(section.save_interval),
    )


def critic_save(config: Config) -> Found:
    """Actor and critic are saved as a pair, in two folders."""
    save, critic = config.checkpoint.save, config.critic.critic_save
    if "critic" not in config.parallel.resource:
        return None
    if save is not None and critic is None:
        return Problem(
            id="critic-save-missing",
            message="the critic is not saved, so this run can never be resumed",
            fix=f"add --critic-save {save.rstrip('/')}-critic",
            option="--critic-save",
            severity="warning",
        )
    if save is None and critic is not None:
        return Problem(
            id="critic-save-without-save",
            message="the critic is saved, but the actor is not, so this run can never be resumed",
            fix=f"add --save {critic.rstrip('/')}-actor, or drop --critic-save",
            option="--critic-save",
            got=critic,
        )
    return None


def eval_data(config: Config) -> Found:
    """Evaluation needs both an interval and data."""
    section = config.eval
    if section.eval_interval is not None and not section.eval_prompt_data:
        return Problem(
            id="eval-interval-without-data",
            message="--eval-interval is set, but there is nothing to evaluate on",
            fix="add --eval-prompt-data heldout PATH, or drop --eval-interval",
            option="--eval-interval",
            got=str(section.eval_interval),
        )
    if section.eval_interval is None and section.eval_prompt_data:
        return Problem(
            id="eval-data-unused",
            message="--eval-prompt-data is set, but nothing says when to evaluate",
            fix="add --eval-interval 10",
            option="--eval-prompt-data",
            severity="warning",
        )
    return None


def _as_list(found: Found) -> list[Problem]:
    if found is None:
        return []
    return [found] if isinstance(found, Problem) else found


def overlap_updates(config: Config) -> Found:
    """Actor and critic can only learn at the same time where they do not share a device's memory."""
    if not config.parallel.overlap_updates or config.parallel.device != "cuda":
        return None
    return Problem(
        id="overlap-needs-cpu",
        message="on a GPU actor and critic take turns in memory, so their updates cannot overlap",
        fix="drop --overlap-updates",
        option="--overlap-updates",
        got="--device cuda",
        expected="--device cpu",
    )


def ray_cpus(config: Config) -> Found:
    """A local Ray has a logical CPU for every bundle, the CPU-only services and TransferQueue, which else waits."""
    given, parallel = config.parallel.ray_num_cpus, config.parallel
    # Resources that make no sense have rules of their own.
    if given is None or any(devices < 0 or services < 0 for services, devices in parallel.resource.values()):
        return None
    needed = needed_cpus(parallel, config.sglang)
    if given >= needed:
        return None
    return Problem(
        id="ray-cpus",
        message="the roles and TransferQueue need more logical CPUs than Ray would have",
        fix=f"--ray-num-cpus {needed} (logical: more than cores is fine), or fewer workers in --resource",
        option="--ray-num-cpus",
        got=str(given),
        expected=f"at least {needed}: {shared_bundles(parallel, config.sglang)} for the roles, "
        f"{QUEUE_CPUS} for TransferQueue, {SERVICE_CPUS} for services without a device",
    )


RULES: tuple[Callable[[Config], Found], ...] = (
    resource_roles,
    resource_counts,
    local_launcher,
    pipeline,
    fully_async,
    ranks_by_parallelism,
    *BATCH_RULES,
    length_of_run,
    save_interval,
    critic_save,
    eval_data,
    *REWARD_RULES,
    *ALGORITHM_RULES,
    overlap_updates,
    ray_cpus,
    *PLACEMENT_RULES,
    *SGLANG_RULES,
    *RECOMPUTE_RULES,
    *BACKEND_RULES,
)
