"""Rules about the reward: one is chosen, it exists, and it has what it needs."""

from __future__ import annotations

from relax_cli.config.names import nearest
from relax_cli.config.redact import scrubbed
from relax_cli.config.schema import DataSection, EpisodeSection, RewardSection
from relax_cli.data.reasoning_gym import REASONING_GYM
from relax_cli.data.rewards import REWARD_UNKNOWN
from relax_cli.data.rewards.builtin import BUILTIN_PARTS, LABEL_REWARDS, REMOTE, url_fault
from relax_cli.data.rewards.types import NEEDS_LABEL
from relax_cli.preflight.rules.registry import Finding, Found, rule

THEME = "Reward"
EXAMPLE_URL = "http://127.0.0.1:8000/judge"
PYTHON_SPEC = "FILE.py:function"


@rule("reward-missing", THEME, option="--rm-type")
def reward_missing(reward: RewardSection, episode: EpisodeSection, rewards: frozenset[str]) -> Found:
    """Give `--rm-type`, `--custom-rm-path`, or an environment of episodes: `--env`."""
    if reward.rm_type is None and reward.custom_rm_path is None and episode.env is None:
        yield Finding(
            "no reward is chosen",
            expected=", ".join(sorted(rewards)),
            fix=f"add --rm-type exact, or --custom-rm-path {PYTHON_SPEC}",
        )


@rule("reward-twice", THEME, option="--rm-type")
def reward_twice(reward: RewardSection) -> Found:
    """`--rm-type` and `--custom-rm-path` exclude each other."""
    if reward.rm_type is not None and reward.custom_rm_path is not None:
        yield Finding(
            "two rewards are chosen",
            got=f"{reward.rm_type} and {reward.custom_rm_path}",
            fix="drop --rm-type, or drop --custom-rm-path",
        )


@rule(REWARD_UNKNOWN)
def reward_unknown(reward: RewardSection, rewards: frozenset[str]) -> Found:
    """There is no reward of that name, or it does not load."""
    name = reward.rm_type
    if name is not None and reward.custom_rm_path is None and name not in rewards:
        guess = nearest(name, rewards)
        yield Finding(
            f"there is no reward {name!r}",
            got=name,
            expected=", ".join(sorted(rewards)),
            fix=f"--rm-type {guess}" if guess else f"install its plugin, or use --custom-rm-path {PYTHON_SPEC}",
        )


@rule("reward-key-unknown", THEME, option="--reward-key")
def reward_key_unknown(reward: RewardSection) -> Found:
    """`--reward-key` picks a part of a reward that returns several. The built-in reward has no such part."""
    key, parts = reward.reward_key, BUILTIN_PARTS.get(reward.rm_type or "")
    if key is not None and reward.custom_rm_path is None and parts is not None and key not in parts:
        guess = nearest(key, parts)
        yield Finding(
            f"the reward {reward.rm_type} {'has no part ' + repr(key) if parts else 'returns one number, not parts'}",
            got=key,
            expected=", ".join(parts),
            fix=f"--reward-key {guess}" if guess else "drop --reward-key",
        )


@rule("reward-url-missing", THEME, option="--rm-url")
def reward_url_missing(reward: RewardSection) -> Found:
    """`--rm-type remote` needs the server's URL: `--rm-url`."""
    if reward.rm_type == REMOTE and reward.rm_url is None:
        yield Finding("--rm-type remote needs a URL", expected="a URL", fix=f"--rm-url {EXAMPLE_URL}")


@rule("reward-url-unused", THEME, option="--rm-url")
def reward_url_unused(reward: RewardSection) -> Found:
    """`--rm-url` is given, but `--rm-type` is not `remote`."""
    if reward.rm_url is not None and reward.rm_type != REMOTE:
        yield Finding(
            f"--rm-url is given, but the reward is {reward.rm_type or 'another one'}, which needs no URL",
            got=scrubbed(reward.rm_url),
            expected="--rm-type remote",
            fix="--rm-type remote, or drop --rm-url",
        )


@rule("reward-url-invalid", THEME, option="--rm-url")
def reward_url_invalid(reward: RewardSection) -> Found:
    """`--rm-url` is not an `http` or `https` URL with a host."""
    if reward.rm_type == REMOTE and reward.rm_url is not None and (fault := url_fault(reward.rm_url)):
        yield Finding(
            f"--rm-url {fault}",
            got=scrubbed(reward.rm_url),
            expected="http://HOST:PORT/PATH, or https",
            fix=f"--rm-url {EXAMPLE_URL}",
        )


@rule(NEEDS_LABEL, needs="files")
def reward_needs_label(reward: RewardSection, data: DataSection) -> Found:
    """The reward compares with a label, so `--label-key` has to name one."""
    compares = reward.custom_rm_path is None and reward.rm_type in LABEL_REWARDS and data.label_key is None
    # reasoning-gym brings labels of its own.
    if compares and not all(item.startswith(REASONING_GYM) for item in data.prompt_data):
        yield Finding(
            f"the reward {reward.rm_type} compares with a label, but --label-key is not set",
            expected="a key of the rows of --prompt-data",
            fix="add --label-key label",
        )
