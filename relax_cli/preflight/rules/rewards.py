"""Rules about the reward: one is chosen, it exists, and it has what it needs."""

from __future__ import annotations

from importlib.util import find_spec

from relax_cli.config.names import nearest
from relax_cli.config.schema import AlgorithmSection, DataSection, EpisodeSection, RewardSection, RolloutSection
from relax_cli.data.rewards import BUILTINS, REMOTE, REWARD_UNKNOWN, url_fault
from relax_cli.data.rewards.code import CODE_SANDBOX
from relax_cli.data.rewards.types import NEEDS_LABEL
from relax_cli.data.sandbox.outside import sandbox_fix
from relax_cli.data.sources import INSTALL, MISSING, REASONING_GYM
from relax_cli.preflight.labels import share_faults
from relax_cli.preflight.machine import Machine
from relax_cli.preflight.rules.registry import Finding, Found, rule

THEME = "Reward"
EXAMPLE_URL = "http://127.0.0.1:8000/judge"
PYTHON_SPEC = "FILE.py:function"


@rule("reward-missing", THEME, option="--rm-type")
def reward_missing(reward: RewardSection, episode: EpisodeSection, rewards: frozenset[str]) -> Found:
    """Give `--rm-type`, `--custom-rm-path`, or an environment of episodes: `--env`."""
    if reward.rm_type is None and reward.custom_rm_path is None and episode.env is None:
        fix = f"add --rm-type exact, or --custom-rm-path {PYTHON_SPEC}"
        yield Finding("no reward is chosen", fix, expected=", ".join(sorted(rewards)))


@rule("reward-twice", THEME, option="--rm-type")
def reward_twice(reward: RewardSection) -> Found:
    """`--rm-type` and `--custom-rm-path` exclude each other."""
    if reward.rm_type is not None and reward.custom_rm_path is not None:
        got = f"{reward.rm_type} and {reward.custom_rm_path}"
        yield Finding(fix="drop --rm-type, or drop --custom-rm-path", got=got)


@rule(REWARD_UNKNOWN)
def reward_unknown(reward: RewardSection, rewards: frozenset[str]) -> Found:
    """There is no reward of that name, or it does not load."""
    unknown = [name for name, _ in reward.shares if name not in rewards]
    if unknown and reward.custom_rm_path is None:
        yield Finding(*share_faults(reward.shares, rewards), got=unknown[0], expected=", ".join(sorted(rewards)))


@rule("reward-weights", THEME, option="--rm-type")
def reward_weights(reward: RewardSection, rewards: frozenset[str]) -> Found:
    """A sum of rewards is `NAME=WEIGHT,NAME=WEIGHT`, with each name once and weights that are not 0."""
    message, fix = share_faults(reward.shares, rewards | dict(reward.shares).keys())
    if message:
        yield Finding(message, fix)


@rule("reward-key-unknown", THEME, option="--reward-key")
def reward_key_unknown(reward: RewardSection) -> Found:
    """`--reward-key` picks a part of a reward that returns several. The chosen reward has no such part."""
    key = reward.reward_key
    if key is None or reward.custom_rm_path is not None:
        return
    if len(reward.shares) > 1:
        yield Finding("--reward-key picks a part of one reward, not of a sum", "drop --reward-key")
    builtin = BUILTINS.get(reward.rm_type or "")
    if builtin is not None and builtin.parts is not None and key not in builtin.parts:
        guess = nearest(key, builtin.parts)
        has = f"has no part {key!r}" if builtin.parts else "returns one number, not parts"
        fix = f"--reward-key {guess}" if guess else "drop --reward-key"
        yield Finding(f"the reward {reward.rm_type} {has}", fix, expected=", ".join(builtin.parts))


@rule("reward-url-missing", THEME, option="--rm-url")
def reward_url_missing(reward: RewardSection) -> Found:
    """`--rm-type remote` needs the server's URL: `--rm-url`."""
    if REMOTE in dict(reward.shares) and reward.rm_url is None:
        yield Finding(fix=f"--rm-url {EXAMPLE_URL}")


@rule("reward-url-unused", THEME, option="--rm-url")
def reward_url_unused(reward: RewardSection) -> Found:
    """`--rm-url` is given, but `--rm-type` is not `remote`."""
    if reward.rm_url is not None and REMOTE not in dict(reward.shares):
        yield Finding(fix="--rm-type remote, or drop --rm-url", expected="--rm-type remote")


@rule("reward-url-invalid", THEME, option="--rm-url")
def reward_url_invalid(reward: RewardSection) -> Found:
    """`--rm-url` is not an `http` or `https` URL with a host."""
    if REMOTE in dict(reward.shares) and reward.rm_url is not None and (fault := url_fault(reward.rm_url)):
        yield Finding(f"--rm-url {fault}", f"--rm-url {EXAMPLE_URL}", expected="http://HOST:PORT/PATH, or https")


@rule(NEEDS_LABEL, needs="files")
def reward_needs_label(reward: RewardSection, data: DataSection) -> Found:
    """The reward compares with a label, so `--label-key` has to name one."""
    names = [name for name, _ in reward.shares if name in BUILTINS and BUILTINS[name].needs_label]
    # reasoning-gym brings labels of its own.
    if (
        names
        and reward.custom_rm_path is None
        and data.label_key is None
        and not all(item.startswith(REASONING_GYM) for item in data.prompt_data)
    ):
        message = f"the reward {names[0]} compares with a label, but --label-key is not set"
        yield Finding(message, "add --label-key label", expected="a key of the rows of --prompt-data")


@rule(MISSING, needs="machine")
def reasoning_gym_missing(reward: RewardSection) -> Found:
    """The reasoning-gym package is not installed."""
    if "reasoning_gym" in dict(reward.shares) and find_spec("reasoning_gym") is None:
        yield Finding(fix=INSTALL, option="--rm-type")


@rule(CODE_SANDBOX, needs="machine")
def code_sandbox(reward: RewardSection, machine: Machine) -> Found:
    """`--rm-type code` runs what a model writes, which needs a sandbox that holds. This machine has none."""
    if reward.custom_rm_path is None and "code" in dict(reward.shares) and (fault := machine.sandbox_fault()):
        yield Finding(f"--rm-type code cannot run programs here: {fault}", sandbox_fix(), got=reward.rm_type or "")


@rule("overlong-penalty-buffer", THEME, option="--overlong-penalty")
def overlong_penalty_buffer(reward: RewardSection, rollout: RolloutSection) -> Found:
    """`--overlong-penalty` needs `--overlong-buffer-len`, at most `--rollout-max-response-len`."""
    buffer, longest = reward.overlong_buffer_len, rollout.rollout_max_response_len
    if reward.overlong_penalty and (buffer is None or buffer > longest):
        got = "" if buffer is None else f"--overlong-buffer-len {buffer}"
        yield Finding("", f"--overlong-buffer-len {max(1, longest // 5)}", got, f"at most {longest}")


@rule("mask-truncated-bootstrap", THEME, option="--mask-truncated")
def mask_truncated_bootstrap(algorithm: AlgorithmSection) -> Found:
    """`--mask-truncated` leaves truncated responses out, `--bootstrap-truncated` trains on them."""
    if algorithm.mask_truncated and algorithm.bootstrap_truncated:
        yield Finding(fix="drop --mask-truncated, or drop --bootstrap-truncated")
