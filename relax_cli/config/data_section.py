"""Options of prompts and rewards."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from relax_cli.config.section import Section, option


class DataSection(Section):
    """Prompts."""

    prompt_data: tuple[str, ...] = option(
        (),
        "file, glob or folder with prompts, or reasoning-gym:TASK?size=N&...; rows by @[START:STOP], a "
        "weight by *WEIGHT (repeatable)",
    )
    input_key: str = option("input", "key of the prompt (text, or a list of chat messages)")
    label_key: str | None = option(None, "key of the label the reward compares with")
    metadata_key: str = option("metadata", "key of a free-form object handed to the reward")
    tools_key: str = option("tools", "key of the functions that a chat may call, for the chat template")
    apply_chat_template: bool = option(False, "render prompts with the tokenizer's chat template")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="JSON object of variables for the chat template"
    )
    system_prompt: str | None = option(None, "system message for chats without one")
    shuffle: bool = option(True, "reshuffle the prompts every epoch, seeded by --rollout-seed")
    curriculum: str | None = option(
        None, "draw rows by their past rewards: learnability, a plugin's name or FILE.py:function"
    )

    @field_validator("prompt_data", mode="before")
    @classmethod
    def _one_item(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) and value else value or ()


class RewardSection(Section):
    """Rewards of responses."""

    rm_type: str | None = option(
        None, "named reward, or a sum of several: math, f1, remote, a plugin's, or math=1,format=0.1"
    )
    reward_key: str | None = option(None, "the part that trains, where the reward returns several")
    custom_rm_path: str | None = option(None, "FILE.py:function used as the reward")
    rm_timeout: float = option(3600.0, "deadline of the reward of one batch in seconds", gt=0, le=1e6)
    rm_url: str | None = option(None, "URL of the reward server, for --rm-type remote")
    reward_on_error: Literal["stop", "zero", "drop"] = option(
        "stop", "where the reward fails: end the run, or score the sample 0, or train without the sample"
    )
    overlong_penalty: float = option(
        0.0, "weight of DAPO's soft penalty on responses that reach into --overlong-buffer-len", ge=0
    )
    overlong_buffer_len: int | None = option(
        None, "tokens before --rollout-max-response-len in which the penalty grows from 0 to 1", ge=1
    )

    @property
    def shares(self) -> tuple[tuple[str, str], ...]:
        """Name and weight, as written, of the rewards of `--rm-type`."""
        return shares_of(self.rm_type or "")


def shares_of(text: str) -> tuple[tuple[str, str], ...]:
    """Name and weight, as written, of `NAME`, or of every part of `NAME=WEIGHT,NAME=WEIGHT`."""
    parts = (part.partition("=") for part in text.split(",")) if text else ()
    return tuple((name.strip(), weight.strip() if equals else "1") for name, equals, weight in parts)
