"""Which tokens follow a response: those of an observation, and of the chat template around it.

What was sampled is never rendered, decoded or encoded again: the template is asked what it puts behind *some* assistant
message, and that text alone is tokenised.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relax_cli.data.envs.load import Observation
from relax_cli.data.rows import Prompt
from relax_cli.data.tokenise import encoded_text, encoding_problem
from relax_cli.errors import ConfigError

ASSISTANT = "4b7e0c-response-93d1fa"
"""Stands for the response; as good as never in a chat."""


def observation_ids(
    tokenizer: Any, opening: Prompt, observation: Observation, *, apply_chat_template: bool, sampled_end: str
) -> list[int]:
    """Token ids between the last sampled token and the next response of the episode that `opening` began.

    Args:
        sampled_end: the text of the stop token that the response ended with; empty where it ended otherwise.

    Raises:
        ConfigError: the chat template does not fit, or messages come without `--apply-chat-template`.
    """
    if apply_chat_template:
        text = _behind_the_response(tokenizer, opening, _messages(observation)).removeprefix(sampled_end)
    elif isinstance(observation, str):
        text = observation
    else:
        what = "an observation of chat messages needs the chat template"
        raise ConfigError(encoding_problem(opening, what, fix="--apply-chat-template"))
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return list(ids)


def _behind_the_response(tokenizer: Any, opening: Prompt, observed: list[dict[str, str]]) -> str:
    chat = [*_messages(opening.content), {"role": "assistant", "content": ASSISTANT}, *observed]
    text = encoded_text(tokenizer, replace(opening, content=chat), apply_chat_template=True)
    _, found, behind = text.partition(ASSISTANT)
    if not found:
        what = "the chat template does not show the assistant's messages, so it cannot be used for episodes"
        raise ConfigError(encoding_problem(opening, what, fix="leave out --apply-chat-template"))
    return behind


def _messages(content: Observation) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}] if isinstance(content, str) else content
