"""One row of a data file as a prompt, or what is wrong with it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_cli.config.names import nearest
from relax_cli.config.schema import DataSection
from relax_cli.data.values import Unusable, label_value, metadata_of, plain_json, printable, shown, text_of
from relax_cli.errors import Problem, problem_kind

MOST_CHARACTERS = 4 << 20
"""Of a prompt: a tokenizer needs 150 bytes for each."""
NEITHER = "is neither text nor chat messages"
CALLS = "tool_calls"
"""The key of an assistant's message whose value is a list of objects."""
CHAT_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content)["']\s*:""")
"""JSON, or what Python and pandas print of a list."""
MOST_KEYS = 20
"""Keys of a row that a message names."""

TOOLS = "tools"
"""What chat templates call the functions that a model may call."""
REWARD_KEY = "reward"
"""The key of a row that chooses its reward."""

Messages = list[dict[str, Any]]
Label = str | list[Any] | dict[str, Any] | None

BAD_ROW = problem_kind(
    "prompt-data-row",
    "Data",
    "A row cannot become a prompt: it is not a JSON object, lacks a key, has one twice, or a value has a type without"
    " a [meaning](data.md). Every row of every file is read; rows with the same fault are one problem with a count and"
    " the first places.",
    option="--prompt-data",
)


@dataclass(frozen=True)
class Prompt:
    """One thing to respond to."""

    content: str | Messages
    """Text, or chat messages with `role` and `content`."""
    label: Label
    """What the reward compares with: text, also of numbers, or the list or object of the row."""
    metadata: dict[str, Any]
    """Free-form plain JSON, handed to the reward."""
    source: str
    """`file:line`, or the reasoning-gym task and index."""
    system: str | None = None
    """The system message of a chat that begins with none."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template is given besides the messages."""
    reward: str | None = None
    """What judges this prompt's responses; None: `--rm-type`."""

    @property
    def messages(self) -> Messages:
        """The prompt as a chat."""
        chat = [{"role": "user", "content": self.content}] if isinstance(self.content, str) else self.content
        if self.system is None or chat[0]["role"] == "system":
            return chat
        return [{"role": "system", "content": self.system}, *chat]


class _Absent(Exception):
    """A row has no such key."""


def prompt_of_row(section: DataSection, row: Mapping[str, Any], where: str) -> Prompt | Problem:
    """The prompt of a row; keys may lead into objects: `reward_model.ground_truth`."""
    key: str | None
    try:
        key, expected = section.input_key, CONTENT
        content = _content(_look_up(row, key))
        key, expected = section.label_key, "text or a number"
        label = None if key is None else label_value(_look_up(row, key))
        key, expected = section.metadata_key, "a JSON object"
        metadata = metadata_of(row.get(key))
        key, expected = section.tools_key, "a list of JSON objects, each a function"
        tools = _tools(row, key)
        key, expected = REWARD_KEY, "the name of a reward"
        reward = None if row.get(key) is None else text_of(row[key])
    except _Absent:
        if key == section.input_key:
            return missing_key("--input-key", key, row, where)
        return missing_key("--label-key", str(key), row, where, besides=section.input_key)
    except Unusable as error:
        return bad_row(where, f"{key!r} {error}", shown(row.get(str(key))), expected)
    template = section.chat_template_kwargs if tools is None else section.chat_template_kwargs | {TOOLS: tools}
    return Prompt(content, label, metadata, where, section.system_prompt, template, reward)


USUAL_KEYS = {
    "--input-key": ("input", "prompt", "question", "problem", "instruction", "query", "messages"),
    "--label-key": ("label", "answer", "solution", "ground_truth", "target", "final_answer", "gold"),
}
"""What data sets call the two."""
CONTENT = 'text, or [{"role": "user", "content": "…"}]'


def bad_row(where: str, message: str, got: str, expected: str) -> Problem:
    """The problem of one row. Its message says nothing that differs from row to row: equal ones are counted."""
    return BAD_ROW(message, where=where, got=got, expected=expected, fix="correct or remove the row")


def missing_key(option: str, key: str, row: Mapping[str, Any], where: str, besides: str | None = None) -> Problem:
    """A row without `key`. What is offered is a key of a like name, never just another one: that would train; nor
    `besides`, which has another use."""
    keys = [name for name in _paths(row) if name != besides and not key.startswith(f"{name}.")]
    inner = next((name for name in keys if name.rpartition(".")[2] == key), "")
    near = inner or nearest(key, keys) or next((name for name in USUAL_KEYS[option] if name in keys), "")
    names = [printable(str(name)) for name in list(row)[:MOST_KEYS]]
    return BAD_ROW(
        f"row has no key {key!r}",
        option=option,
        where=where,
        got=", ".join(names) + (", …" if len(row) > MOST_KEYS else "") or "no keys",
        expected=key,
        fix=f"{option} {shlex.quote(near) if near else 'with the key that the rows have for it'}",
    )


def _look_up(row: Mapping[str, Any], key: str) -> Any:
    if key in row:
        return row[key]
    value: Any = row
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise _Absent
        value = value[name]
    return value


def _paths(row: Mapping[str, Any], depth: int = 2) -> Iterator[str]:
    for name, value in row.items():
        yield str(name)
        if depth and isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in _paths(value, depth - 1))


def _content(content: Any) -> str | Messages:
    found: str | Messages
    if isinstance(content, list):
        found = [_message(message, number) for number, message in enumerate(content, 1)]
        if not found:
            raise Unusable("has no messages")
        if found[-1]["role"] == "assistant":
            raise Unusable("ends with the assistant's message: the model would be shown the answer")
        size = sum(len(message["content"]) for message in found)
    elif isinstance(content, str | bytes):
        try:
            found = text_of(content)
        except Unusable as error:
            raise Unusable(f"{NEITHER}: it {error}") from error
        if not found:
            raise Unusable("is empty: neither text nor chat messages")
        if CHAT_AS_TEXT.match(found):
            raise Unusable("is the text of chat messages: they have to be a list of objects")
        size = len(found)
    else:
        raise Unusable(NEITHER)
    if size > MOST_CHARACTERS:
        raise Unusable(f"has more than {MOST_CHARACTERS:,} characters")
    return found


def _tools(row: Mapping[str, Any], key: str) -> list[dict[str, Any]] | None:
    """The functions that a chat may call; a text is their JSON, for Arrow cannot keep objects of several shapes."""
    try:
        value = _look_up(row, key)
    except _Absent:
        return None
    if isinstance(value, str | bytes) and value:
        try:
            value = json.loads(value)
        except ValueError as error:
            raise Unusable("is text, but not JSON") from error
    tools = plain_json(value or [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unusable("is not a list of JSON objects")
    return tools or None


def _message(message: Any, number: int) -> dict[str, Any]:
    if isinstance(message, dict) and message.get(CALLS) and message.get("content") is None:
        message = {**message, "content": ""}
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        raise Unusable(f"{NEITHER}: message {number} lacks role or content")
    kept: dict[str, Any] = {}
    for name, value in message.items():
        if value is None:
            continue  # Arrow gives every message of a file the keys of all.
        try:
            kept[name] = plain_json(value) if name == CALLS and isinstance(value, list) else text_of(value)
        except Unusable as error:
            raise Unusable(f"{NEITHER}: in message {number} {name!r} {error}") from error
    if not kept.get("role") or "content" not in kept:
        raise Unusable(f"{NEITHER}: message {number} has no role or content")
    return kept
