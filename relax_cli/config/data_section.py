"""Options of prompts and rewards."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from relax_cli.config.section import Section


class DataSection(Section):
    """Prompts."""

    prompt_data: tuple[str, ...] = Field(
        (),
        description="file, glob or folder with prompts, or reasoning-gym:TASK?size=N&...; rows by @[START:STOP], a "
        "weight by *WEIGHT (repeatable)",
    )
    input_key: str = Field("input", description="key of the prompt (text, or a list of chat messages)")
    label_key: str | None = Field(None, description="key of the label the reward compares with")
    metadata_key: str = Field("metadata", description="key of a free-form object handed to the reward")
    tools_key: str = Field("tools", description="key of the functions that a chat may call, for the chat template")
    apply_chat_template: bool = Field(False, description="render prompts with the tokenizer's chat template")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="JSON object of variables for the chat template"
    )
    system_prompt: str | None = Field(None, description="system message for chats without one")
    shuffle: bool = Field(True, description="reshuffle the prompts every epoch, seeded by --rollout-seed")
    curriculum: str | None = Field(
        None, description="draw rows by their past rewards: learnability, a plugin's name or FILE.py:function"
    )

    @field_validator("prompt_data", mode="before")
    @classmethod
    def _one_item(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) and value else value or ()


class RewardSection(Section):
    """Rewards of responses."""

    rm_type: str | None = Field(
        None, description="named reward, or a sum of several: math, f1, remote, a plugin's, or math=1,format=0.1"
    )
    reward_key: str | None = Field(None, description="the part that trains, where the reward returns several")
    custom_rm_path: str | None = Field(None, description="FILE.py:function used as the reward")
    rm_timeout: float = Field(3600.0, gt=0, le=1e6, description="deadline of the reward of one batch in seconds")
    rm_url: str | None = Field(None, description="URL of the reward server, for --rm-type remote")
    reward_on_error: Literal["stop", "zero", "drop"] = Field(
        "stop", description="where the reward fails: end the run, or score the sample 0, or train without the sample"
    )
    overlong_penalty: float = Field(
        0.0, ge=0, description="weight of DAPO's soft penalty on responses that reach into --overlong-buffer-len"
    )
    overlong_buffer_len: int | None = Field(
        None, ge=1, description="tokens before --rollout-max-response-len in which the penalty grows from 0 to 1"
    )

    @property
    def shares(self) -> tuple[tuple[str, str], ...]:
        """Name and weight, as written, of the rewards of `--rm-type`."""
        return shares_of(self.rm_type or "")


def shares_of(text: str) -> tuple[tuple[str, str], ...]:
    """Name and weight, as written, of `NAME`, or of every part of `NAME=WEIGHT,NAME=WEIGHT`."""
    parts = (part.partition("=") for part in text.split(",")) if text else ()
    return tuple((name.strip(), weight.strip() if equals else "1") for name, equals, weight in parts)
