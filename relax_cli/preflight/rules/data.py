"""Rules about prompts and episodes. What is wrong in rows is found while they are read (`preflight.inputs`)."""

from __future__ import annotations

from collections.abc import Mapping

from relax_cli.config.schema import DataSection, EpisodeSection, RewardSection, RolloutSection
from relax_cli.data.curriculum import USER_FILE
from relax_cli.data.envs.load import THEME as EPISODES
from relax_cli.data.envs.load import USER_FILE as ENV_FILE
from relax_cli.data.sources import SOURCE, source_of, weights_of
from relax_cli.errors import ConfigError
from relax_cli.plugin.records import Curriculum
from relax_cli.plugin.user_file import is_file_spec
from relax_cli.preflight.rules.registry import Finding, Found, rule


@rule("prompt-data-missing", "Data", option="--prompt-data", needs="files")
def prompt_data_missing(data: DataSection) -> Found:
    """`--prompt-data` is required."""
    if not data.prompt_data:
        yield Finding(fix="add --prompt-data FILE.jsonl, or --prompt-data reasoning-gym:chain_sum?size=512")


@rule(USER_FILE.nowhere)
def curriculum_unknown(data: DataSection, curriculums: Mapping[str, Curriculum]) -> Found:
    """There is no built-in curriculum of that name, nor one of a plugin."""
    if (name := data.curriculum) is not None and not is_file_spec(name) and name not in curriculums:
        yield USER_FILE.unknown(name, curriculums)


RESERVED = {
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length"),
    *("messages", "padding", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
}


@rule("chat-template-kwargs-reserved", "Data", option="--chat-template-kwargs")
def chat_template_kwargs_reserved(data: DataSection) -> Found:
    """`--chat-template-kwargs` names what relax gives the chat template itself."""
    if reserved := sorted(RESERVED & data.chat_template_kwargs.keys()):
        yield Finding(fix="leave it out; tools are in the rows, under --tools-key", got=", ".join(reserved))


@rule(SOURCE)
def prompt_data_source(data: DataSection) -> Found:
    """An item of `--prompt-data` has a slice or a weight that cannot be read, or only some have a weight."""
    try:
        weights_of([source_of(item) for item in data.prompt_data])
    except ConfigError as error:
        yield from error.problems


@rule(ENV_FILE.nowhere)
def env_unknown(episode: EpisodeSection, envs: frozenset[str]) -> Found:
    """No installed plugin provides an environment of that name."""
    if episode.env is not None and not is_file_spec(episode.env) and episode.env not in envs:
        yield ENV_FILE.unknown(episode.env, envs)


@rule("env-and-reward", EPISODES, option="--env")
def env_and_reward(episode: EpisodeSection, reward: RewardSection) -> Found:
    """The environment gives the rewards of an episode, so `--rm-type` and `--custom-rm-path` have nothing to judge."""
    chosen = reward.rm_type or reward.custom_rm_path
    if episode.env is not None and chosen is not None:
        fix = f"drop {'--rm-type' if reward.rm_type else '--custom-rm-path'}"
        yield Finding(
            fix=fix, got=f"{episode.env} and {chosen}", expected="one of --env, --rm-type and --custom-rm-path"
        )


@rule("env-turns", EPISODES, option="--max-turns")
def env_turns(episode: EpisodeSection, rollout: RolloutSection) -> Found:
    """Every turn takes a token, so an episode never has more than `--rollout-max-response-len` turns."""
    longest = rollout.rollout_max_response_len
    if episode.env is not None and episode.max_turns > longest:
        fix = f"--max-turns {longest}, or a --rollout-max-response-len of the turns and observations together"
        yield Finding(fix=fix, expected=f"at most {longest}")
