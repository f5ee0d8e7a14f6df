"""`relax plugins new NAME`: a complete package to start from, made of the files in `template/`."""

from __future__ import annotations

import keyword
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Literal

from relax_cli.config.schema import Config
from relax_cli.errors import ConfigError, problem_kinds

Kind = Literal["estimator", "reward", "env", "curriculum"]
_TEMPLATES = Path(__file__).parent / "template"
_WHAT = {"estimator": "advantage estimator", "env": "environment"}
"""Kinds whose name in texts is another."""

declare = problem_kinds("Plugins")
PLUGIN_NAME = declare("plugin-name", "The name for a new plugin cannot be the name of a Python module or is taken.")
FOLDER_IN_USE = declare("folder-in-use", "`relax plugins new` writes into a new or empty folder only.", option="--dir")
FOLDER_NOT_WRITABLE = declare("folder-not-writable", "The folder for the new plugin cannot be written.", option="--dir")


def package_files(name: str, kind: Kind = "estimator") -> dict[str, str]:
    """Relative path to content of every file of a new package."""
    names = {"name": name, "Name": name.title().replace("_", ""), "what": _WHAT.get(kind, kind)}
    files = {}
    for folder in (_TEMPLATES / "common", _TEMPLATES / kind):
        for path in sorted(folder.rglob("*.tmpl")):
            target = str(path.relative_to(folder)).replace("NAME", name).removesuffix(".tmpl")
            files[target] = Template(path.read_text("utf-8")).substitute(names)
    return files


def write_package(name: str, folder: Path, *, taken: dict[str, str], kind: Kind = "estimator") -> list[Path]:
    """Write a new package into `folder`, which is created when missing; returns the files written.
    Raises ConfigError: the name is not usable or `taken`, or the folder is not empty or cannot be written."""
    check_name(name, taken, kind)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        got = "a folder with files in it" if folder.is_dir() else "a file"
        expected, fix = "a folder that is new or empty", f"--dir {shlex.quote(f'{folder}-2')}"
        raise ConfigError(FOLDER_IN_USE(f"{folder} is not empty", got=got, expected=expected, fix=fix))
    written = []
    try:
        for path, text in package_files(name, kind).items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, "utf-8")
            written.append(target)
    except OSError as error:
        what, got = f"cannot write into {folder}", f"{type(error).__name__}: {error}"
        fix, expected = "choose another --dir", "a folder that can be written"
        raise ConfigError(FOLDER_NOT_WRITABLE(what, got=got, expected=expected, fix=fix)) from error
    return written


def check_name(name: str, taken: dict[str, str], kind: Kind = "estimator") -> None:
    """Refuse a name that a new plugin cannot have.
    Raises ConfigError: it is not a lower-case identifier, or it belongs to a plugin, a module or a section."""
    expected, got = "", name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        expected = "lower-case letters, digits and _, beginning with a letter"
    elif name in taken:
        expected, got = f"a name no {kind} has", f"{name}, of {taken[name]}"
    elif name in Config.model_fields:
        expected, got = "a name no section of the configuration has", f"{name}, a section of relax"
    elif find_spec(f"relax_{name}") is not None:
        expected, got = "a name for which no module is installed", f"{name}: relax_{name} is there already"
    if expected:
        fix = f"choose another name: relax plugins new my_{kind}"
        raise ConfigError(PLUGIN_NAME(f"a new {kind} cannot be called {name!r}", got=got, expected=expected, fix=fix))
