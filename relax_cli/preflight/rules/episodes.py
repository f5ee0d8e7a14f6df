"""Rules about multi-turn episodes."""

from __future__ import annotations

from relax_cli.config.schema import EpisodeSection, RewardSection, RolloutSection
from relax_cli.data.envs.load import THEME, USER_FILE
from relax_cli.plugin.user_file import is_file_spec
from relax_cli.preflight.rules.registry import Finding, Found, rule


@rule(USER_FILE.nowhere)
def env_unknown(episode: EpisodeSection, envs: frozenset[str]) -> Found:
    """No installed plugin provides an environment of that name."""
    if episode.env is not None and not is_file_spec(episode.env) and episode.env not in envs:
        yield USER_FILE.unknown(episode.env, envs)


@rule("env-and-reward", THEME, option="--env")
def env_and_reward(episode: EpisodeSection, reward: RewardSection) -> Found:
    """The environment gives the rewards of an episode, so `--rm-type` and `--custom-rm-path` have nothing to judge."""
    chosen = reward.rm_type or reward.custom_rm_path
    if episode.env is not None and chosen is not None:
        fix = f"drop {'--rm-type' if reward.rm_type else '--custom-rm-path'}"
        yield Finding(
            fix=fix, got=f"{episode.env} and {chosen}", expected="one of --env, --rm-type and --custom-rm-path"
        )


@rule("env-turns", THEME, option="--max-turns")
def env_turns(episode: EpisodeSection, rollout: RolloutSection) -> Found:
    """Every turn takes a token, so an episode never has more than `--rollout-max-response-len` turns."""
    longest = rollout.rollout_max_response_len
    if episode.env is not None and episode.max_turns > longest:
        fix = f"--max-turns {longest}, or a --rollout-max-response-len of the turns and observations together"
        yield Finding(fix=fix, expected=f"at most {longest}")
