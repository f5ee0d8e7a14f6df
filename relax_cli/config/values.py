"""One value of one layer: expanded, read and typed, or the problem that pydantic's leniency would hide."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from typing import Any

from pydantic.fields import FieldInfo

from relax_cli.config.model import base_type, flag, is_optional
from relax_cli.config.recipes import THEME, Setting, yaml_value
from relax_cli.config.redact import redacted
from relax_cli.config.text import in_json, unique_keys
from relax_cli.errors import Problem, ProblemKind, problem_kind, problem_kinds

declare = problem_kinds(THEME)
INVALID_VALUE = declare(
    "invalid-value",
    "The value has the wrong type, is out of range or is not finite. A switch takes `true` and `false`: `on`, `yes` "
    "and 1 are text and numbers in YAML 1.2. A number may stand in quotes, text may not be left without them where "
    "YAML reads a number.",
)
PATH_VARIABLE = declare(
    "path-variable", "A path has a `$VAR` that is not set. `~` and variables are expanded in the paths of every layer."
)
RESOURCE_JSON = declare(
    "resource-json",
    '`--resource` is not a JSON object `{"role": [services, devices]}` of whole numbers.',
    option="--resource",
)
_RESOURCE_EXAMPLE = """--resource '{"actor": [1, 1], "critic": [1, 1], "rollout": [1, 1], "advantages": [1, 0]}'"""
_TEMPLATE = "--chat-template-kwargs"
_SERVERS = "--sglang-options"
JSON_OPTIONS: dict[str, tuple[ProblemKind, str, str]] = {
    "resource": (RESOURCE_JSON, _RESOURCE_EXAMPLE, 'a JSON object {"role": [services, devices]}'),
    "chat_template_kwargs": (
        problem_kind("chat-template-kwargs-json", "Data", f"`{_TEMPLATE}` is not a JSON object.", option=_TEMPLATE),
        _TEMPLATE + """ '{"enable_thinking": false}'""",
        "a JSON object",
    ),
    "sglang_options": (
        problem_kind(
            "sglang-options-json",
            "SGLang servers",
            f"`{_SERVERS}` is not a JSON object of server options.",
            option=_SERVERS,
        ),
        _SERVERS + """ '{"attention_backend": "triton"}'""",
        "a JSON object of server options",
    ),
}
"""The problem of each option that is a JSON object, an example, and what is expected."""

NULL = "null"
"""What unsets an option in any layer: it is as if no layer before had given it."""
UNSET = object()
ADDED_UP = frozenset({"sglang_options"})
"""Options whose layers are put together key by key; of all others the last layer wins."""
MOST_PATH, MOST_NAME = 4095, 255

PATH_OPTIONS = frozenset(
    {
        *("critic_load", "critic_save", "curriculum", "custom_rm_path", "env", "eval_prompt_data", "hf_checkpoint"),
        *("load", "prompt_data", "ref_load", "run_dir", "save", "sglang_python"),
    }
)
"""Options that are a path, or end in one."""

_VARIABLE = re.compile(r"\$(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)|\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)\})")
_HOME = re.compile(r"^(?P<before>[\w.-]+(?:=|\s+))?(?P<home>~[\w.-]*)(?=/|$)")


def expand_path(text: str, env: Mapping[str, str], *, braces: bool = True) -> tuple[str, list[str]]:
    """The text with variables (with `braces` also `${VAR}`) and home folder, and the names of variables not set."""
    missing: list[str] = []

    def value(match: re.Match[str]) -> str:
        name = match["name"] or match["braced"]
        if match["braced"] and not braces:
            return match[0]
        if name not in env:
            missing.append(name)
        return env.get(name, "")

    def home(match: re.Match[str]) -> str:
        known = env.get("HOME") if match["home"] == "~" else None
        return (match["before"] or "") + (known or os.path.expanduser(match["home"]))

    return _VARIABLE.sub(value, _HOME.sub(home, text)), missing


def with_expanded_paths(setting: Setting, env: Mapping[str, str]) -> Setting:
    if setting.key not in PATH_OPTIONS:
        return setting
    missing: list[str] = []

    def expand(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [expand(item) for item in value]
        # A lone ~ is YAML's null.
        if not isinstance(value, str) or (setting.is_text and value == "~"):
            return value
        text, names = expand_path(value, env, braces=setting.where.startswith(("RELAX_", "--")))
        missing.extend(names)
        return text

    value, got = expand(setting.value), in_json(redacted(setting.section, setting.key, setting.value))
    problems = tuple(unset_variable(name, flag(setting.key), setting.where, got) for name in dict.fromkeys(missing))
    return replace(setting, value=value, problems=(*setting.problems, *problems))


def unset_variable(name: str, option: str, where: str, got: str) -> Problem:
    """The problem of a path with a variable that is not set."""
    message, fix = f"{option} has ${name}, a variable that is not set", f"export {name}=…, or write the path out"
    return PATH_VARIABLE(message, fix=fix, option=option, where=where, got=got)


def prepare(setting: Setting, field: FieldInfo) -> Any:
    """The value as pydantic may see it, or the problem that pydantic's leniency would hide."""
    kind = base_type(field)
    is_typed = setting.where.startswith(("RELAX_", "--"))
    # A variable of the shell that is not set leaves an empty text, which is not meant to unset an option.
    is_empty = is_typed and setting.value == ""
    value = _from_text(setting.value, field) if setting.is_text and not is_empty else setting.value
    if value is None and not is_optional(field) and (is_typed or kind in (tuple, dict)):
        return UNSET
    if kind is str and value == "" and field.default != "":
        return _bad_value(setting, "a text that is not empty", f"leave {flag(setting.key)} out, or give it a value")
    if any(not is_text(part) for part in (value if isinstance(value, list | tuple) else [value])):
        return _bad_value(setting, "a text in UTF-8 without NUL bytes", f"write {flag(setting.key)} in UTF-8")
    if setting.key in PATH_OPTIONS and not all(map(_fits_a_disk, value if isinstance(value, list) else [value])):
        expected = f"at most {MOST_PATH:,} bytes, and {MOST_NAME} in each of its parts"
        return _bad_value(setting, expected, f"give {flag(setting.key)} a shorter path")
    if kind is dict:
        return _mapping(setting, value)
    if kind is tuple and isinstance(value, str):
        value = (value,)
    if kind is bool and not isinstance(value, bool) and not (value is None and is_optional(field)):
        typed = f"{setting.where}=" if setting.where.startswith("RELAX_") else f"{setting.section}.{setting.key}: "
        return _bad_value(setting, "true or false", f"write {typed}true (or false)")
    if kind in (int, float) and isinstance(value, bool):
        return _bad_value(setting, "a number", "write a number instead of true or false")
    return value


def _from_text(text: str, field: FieldInfo) -> Any:
    """Text read as YAML 1.2, except that a text option keeps what was typed (`123`, `a: b`, `a # b`) unless it stands
    in quotes, or is a list in brackets."""
    value, kind = yaml_value(text), base_type(field)
    if kind not in (str, tuple) or text == NULL:
        return value
    if text.lstrip().startswith(("'", '"', "[")) and isinstance(value, str if kind is str else str | list):
        return value
    is_unset = text.strip() in ("", "~") and is_optional(field)
    return None if is_unset else text.strip() if kind is str else text


def _fits_a_disk(path: Any) -> bool:
    content = path.encode(errors="replace") if isinstance(path, str) else b""
    return len(content) <= MOST_PATH and max(map(len, content.split(b"/"))) <= MOST_NAME


def is_text(value: Any) -> bool:
    """False for text that no file can have as its name: NUL bytes, and bytes of another encoding."""
    return not isinstance(value, str) or not re.search("[\0\ud800-\udfff]", value)


def _mapping(setting: Setting, value: Any) -> Any:
    """A JSON object from a flag, or a mapping from any other layer; `true` and `"1"` are not counts."""
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=unique_keys)
        except ValueError as error:
            return _bad_json(setting, f"{flag(setting.key)} is not JSON: {error}")
    if not isinstance(value, dict):
        return _bad_json(setting, f"{flag(setting.key)} is not a JSON object")
    if setting.key in ADDED_UP:
        return {str(key).replace("-", "_"): item for key, item in value.items()}
    if setting.key != "resource":
        return {str(key): item for key, item in value.items()}
    if any(type(count) is not int for pair in value.values() if isinstance(pair, list) for count in pair):
        return _bad_json(setting, f"{flag(setting.key)} has a count that is not a whole number")
    return value


def _bad_json(setting: Setting, message: str) -> Problem:
    kind, example, expected = JSON_OPTIONS[setting.key]
    return kind(message, fix=example, where=setting.where, got=in_json(setting.value), expected=expected)


def _bad_value(setting: Setting, expected: str, fix: str) -> Problem:
    option, got = flag(setting.key), in_json(redacted(setting.section, setting.key, setting.value))
    message = f"{option} has the wrong type"
    return INVALID_VALUE(message, fix=fix, option=option, where=setting.where, got=got, expected=expected)


def invalid(error: dict[str, Any], origins: Mapping[str, str]) -> Problem:
    """A pydantic error in four parts."""
    section, key, *inside = (str(part) for part in error["loc"])
    verb, expected = _demand(error["msg"])
    kind, fix = INVALID_VALUE, f"give {section}.{key} a value that {verb} {expected}"
    if error["type"] == "string_type" and isinstance(error["input"], int | float | date):
        fix = f"put the value of {section}.{key} in quotes"
    if key == "resource":
        kind, fix, demanded = JSON_OPTIONS[key]
        expected = expected if error["type"] == "less_than_equal" else demanded
    of = f" ({' '.join(inside)})" if inside else ""
    message = f"{flag(key)}{of} does not accept this value"
    where, got = origins[f"{section}.{key}"], in_json(redacted(section, key, error["input"]))
    return kind(message, fix=fix, option=flag(key), where=where, got=got, expected=expected)


def _demand(message: str) -> tuple[str, str]:
    """What a message of pydantic demands, after `a value that`: `is` and `greater than 0`, `has` and `1 item`."""
    text = message.removeprefix("Value error, ").partition(", unable")[0].partition(", got")[0]
    text = text.replace("a valid tuple", "a list")
    for should, verb in (("should be ", "is"), ("should have ", "has"), ("should match ", "matches")):
        _, found, demand = text.partition(should)
        if found:
            return verb, demand
    return "is", text
