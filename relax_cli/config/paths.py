"""`~` and `$VAR` in options that are paths, in every layer: a shell expands neither in quotes nor in files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

PATH_OPTIONS = frozenset(
    {
        "critic_load",
        "critic_save",
        "curriculum",
        "custom_rm_path",
        "env",
        "eval_prompt_data",
        "hf_checkpoint",
        "load",
        "prompt_data",
        "ref_load",
        "run_dir",
        "save",
        "sglang_python",
    }
)
"""Options that are a path, or end in one."""

_VARIABLE = re.compile(r"\$(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)|\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)\})")
_HOME = re.compile(r"^(?P<before>[\w.-]+(?:=|\s+))?(?P<home>~[\w.-]*)(?=/|$)")


def expand_path(text: str, env: Mapping[str, str], *, braces: bool = True) -> tuple[str, list[str]]:
    """The text with its variables and home folder, and the names of variables that are not set.

    Args:
        braces: also `${VAR}`, which a recipe expands by itself.
    """
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
