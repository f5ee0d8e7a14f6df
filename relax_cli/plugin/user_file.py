"""`FILE.py:name`: a function or class from a file of the user's."""

from __future__ import annotations

import importlib.util
import inspect
import shlex
import sys
from collections.abc import Callable, Collection
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from relax_cli.config.names import nearest
from relax_cli.errors import ConfigError, Problem, ProblemKind, problem_kinds
from relax_cli.plugin.apart import Unanswered, run_apart
from relax_cli.plugin.user_code import UserCodeError, from_here, settings_kept, user_code


class UserFile:
    """What an option takes from a file, and how its problems are called."""

    def __init__(
        self,
        what: str,
        prefix: str,
        broken: ProblemKind,
        noun: str,
        example: str,
        expected: str,
        *,
        tried_by: str,
        nowhere: str = "",
    ) -> None:
        """Declare the problems that all such files share.

        Args:
            what: `reward`, for messages and the name of the module.
            prefix: of the problems' ids.
            broken: it fails to import, or is not what the option needs.
            noun: what the file defines: `function` or `class`.
            example: of the option's value.
            tried_by: `"module:function"`, which raises what is wrong with a value.
            nowhere: when a name is unknown; empty where the option takes files alone.
        """
        self.what, self.noun, self.example, self.expected, self.broken = what, noun, example, expected, broken
        self.tried_by = tried_by
        self.option, self.form = broken.option, expected.partition(",")[0]
        declare = problem_kinds(broken.theme, option=broken.option)
        name = f"the name of {'an' if what[0] in 'aeiou' else 'a'} {what}, or " if nowhere else ""
        self.syntax = declare(f"{prefix}-syntax", f"`{self.option}` takes {name}`{self.form}`.")
        self.file = declare(f"{prefix}-file", "The file cannot be read, or is not valid Python.")
        self.missing = declare(f"{prefix}-{noun}", f"The file does not define that {noun}.")
        self.nowhere = declare(f"{prefix}-unknown", nowhere) if nowhere else self.syntax

    def unknown(self, name: str, known: Collection[str]) -> Problem:
        """The problem of a name that nothing has."""
        guess, expected = nearest(name, known), ", ".join([*sorted(known), self.form])
        fix = f"{self.option} {guess}" if guess else f"install its plugin, or use {self.option} {self.form}"
        return self.nowhere(f"there is no {self.what} {name!r}", got=name, expected=expected, fix=fix)

    def find(self, spec: str, is_listed: Callable[[Any], bool]) -> Any:
        """What `spec` names, after the file was imported. `is_listed` says which values messages offer instead.
        Raises ConfigError: the file is missing or fails to import, or has no such name."""
        path, separator, name = spec.rpartition(":")
        file = Path(path)
        if not separator or not path or not name.isidentifier():
            raise self._error(self.syntax, f"{spec!r} is not FILE.py:{self.noun}", f"{self.option} {self.example}")
        existing = f"{self.option} {path}:{self.noun}, with a file that exists"
        if not file.is_file():
            raise self._error(self.file, f"the {self.what} file does not exist", existing, where=path, got=path)
        found = importlib.util.spec_from_file_location(f"relax_custom_{self.what}_{file.stem}", file)
        if found is None:
            raise self._error(self.file, f"the {self.what} file is not Python", existing, where=path, got=file.name)
        module = self._import(found, path)
        if name not in module:
            listed = [key for key, value in module.items() if is_listed(value) and not key.startswith("_")]
            fix = (
                f"{self.option} {shlex.quote(f'{path}:{listed[0]}')}"
                if len(listed) == 1
                else f"define {name} in {path}"
            )
            what = f"the {self.what} file has no {self.noun} {name!r}"
            got = ", ".join(listed) or f"no {self.noun}"
            raise self._error(self.missing, what, fix, where=path, got=got)
        return module[name]

    def check(self, spec: str) -> list[Problem]:
        """What is wrong with `spec`, tried in a process of its own: an import may do anything."""
        path, what = spec.rpartition(":")[0], f"the import of the {self.what} file"
        try:
            return run_apart(self.tried_by, spec, what=f"{what} {path}")
        except Unanswered as error:
            return [self.broken(f"{what} {error}", where=path, expected=self.expected, fix=f"correct {path}")]

    def raised(self, what: str, error: UserCodeError, path: str) -> ConfigError:
        """The error of a file whose code failed; `what` happened then."""
        kind = self.file if isinstance(error.__cause__, SyntaxError) else self.broken
        fix = f"correct {path}; `{shlex.join([sys.executable, path])}` shows the whole traceback"
        where = from_here(error.place) or path
        return self._error(kind, f"{what}: {error.reason}", fix, where=where, got=error.trail)

    def _import(self, spec: ModuleSpec, path: str) -> dict[str, Any]:
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Dataclasses and pickle look a class's module up by name.
        sys.modules[spec.name] = module
        folder = str(Path(path).resolve().parent)
        # As for `python FILE.py`: the file's neighbours come first while it is imported. For imports inside its
        # functions they come last afterwards, so that they hide no module that relax imports then.
        sys.path.insert(0, folder)
        try:
            with user_code(passes=()), settings_kept():
                spec.loader.exec_module(module)
        except UserCodeError as error:
            del sys.modules[spec.name]
            raise self.raised(f"the {self.what} file fails to import", error, path) from error
        finally:
            sys.path.remove(folder)
            if folder not in sys.path:
                sys.path.append(folder)
        return vars(module)

    def unfit(self, spec: str, use: str, target: Any, fault: str = "") -> ConfigError:
        """The error that the target of `spec` cannot be used: for its fault, or as it takes no such argument."""
        path, _, name = spec.rpartition(":")
        got = fault and f"{name}: {fault}"
        got = got or (f"{name}{signature_of(target)}" if callable(target) else f"a {type(target).__name__}")
        return self._error(self.broken, f"{name} cannot {use}", f"correct {name} in {path}", where=path, got=got)

    def _error(self, kind: ProblemKind, what: str, fix: str, *, where: str = "", got: str = "") -> ConfigError:
        return ConfigError(kind(what, where=where, got=got, expected=self.expected, fix=fix))


def is_file_spec(spec: str) -> bool:
    """Whether an option names a file; otherwise it is the name of something that a plugin provides."""
    return ":" in spec or spec.endswith(".py")


def signature_of(target: Any) -> str:
    """`(self, row)`; `(…)` for what has none that Python knows."""
    try:
        return str(inspect.signature(target))
    except (TypeError, ValueError):
        return "(…)"


def accepts(target: Any, *arguments: Any) -> bool:
    """Whether a callable takes these positional arguments."""
    try:
        inspect.signature(target).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        # Functions of C have no signature.
        return True
    return True
