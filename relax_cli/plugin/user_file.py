"""`FILE.py:name`: a function or class from a file of the user's."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_cli.config.names import nearest
from relax_cli.errors import ConfigError, Problem, ProblemKind, problem_kind
from relax_cli.plugin.apart import Unanswered, run_apart
from relax_cli.plugin.user_code import UserCodeError, from_here, settings_kept, user_code


@dataclass(frozen=True)
class UserFile:
    """What an option takes from a file, and how its problems are called."""

    what: str
    """`reward`, for messages and the name of the module."""
    option: str
    noun: str
    """What the file defines: `function` or `class`."""
    example: str
    """Of the option's value."""
    expected: str
    syntax: ProblemKind
    file: ProblemKind
    missing: ProblemKind
    """The file has no such name."""
    broken: ProblemKind
    """It fails to import, or is not what is needed."""
    nowhere: ProblemKind
    """The option takes names as well, and there is none like that."""

    def unknown(self, name: str, known: Collection[str]) -> Problem:
        """The problem of a name that nothing has."""
        guess, form = nearest(name, known), self.expected.partition(",")[0]
        return self.nowhere(
            f"there is no {self.what} {name!r}",
            got=name,
            expected=", ".join([*sorted(known), form]),
            fix=f"{self.option} {guess}" if guess else f"install its plugin, or use {self.option} {form}",
        )

    def find(self, spec: str, is_listed: Callable[[Any], bool]) -> Any:
        """What `spec` names, after the file was imported. `is_listed` says which values messages offer instead.
        Raises ConfigError: the file is missing or fails to import, or has no such name."""
        path, separator, name = spec.rpartition(":")
        file = Path(path)
        if not separator or not path or not name.isidentifier():
            what = f"{spec!r} is not FILE.py:{self.noun}"
            raise ConfigError(self.syntax(what, expected=self.expected, fix=f"{self.option} {self.example}"))
        if not file.is_file():
            raise self._error(self.file, f"the {self.what} file does not exist", path, got=path)
        module = self._import(file)
        if name not in module:
            listed = [key for key, value in module.items() if is_listed(value) and not key.startswith("_")]
            fix = f"{self.option} {path}:{listed[0]}" if len(listed) == 1 else f"define {name} in {path}"
            what = f"the {self.what} file has no {self.noun} {name!r}"
            got = ", ".join(listed) or f"no {self.noun}"
            raise ConfigError(self.missing(what, where=path, got=got, expected=self.expected, fix=fix))
        return module[name]

    def check(self, function: str, spec: str) -> list[Problem]:
        """What `"module:function"` raises of `spec`, tried in a process of its own: an import may do anything."""
        try:
            return run_apart(function, spec)
        except Unanswered as error:
            path, what = spec.rpartition(":")[0], f"the import of the {self.what} file {error}"
            return [self.broken(what, where=path, expected=self.expected, fix=f"correct {path}")]

    def raised(self, what: str, error: UserCodeError, path: str) -> ConfigError:
        """The error of a file whose code failed; `what` happened then."""
        kind = self.file if isinstance(error.__cause__, SyntaxError) else self.broken
        got = " → ".join(f"{Path(f.filename).name}:{f.lineno}: {f.line}" for f in error.frames[-4:])
        fix = f"correct {path}; `python {path}` shows the whole traceback"
        where = from_here(error.place) or path
        return ConfigError(kind(f"{what}: {error.reason}", where=where, got=got, expected=self.expected, fix=fix))

    def _import(self, file: Path) -> dict[str, Any]:
        module_name = f"relax_custom_{self.what}_{file.stem}"
        spec = importlib.util.spec_from_file_location(module_name, file)
        if spec is None or spec.loader is None:
            raise self._error(self.file, f"the {self.what} file is not Python", str(file), got=file.name)
        module = importlib.util.module_from_spec(spec)
        # Dataclasses and pickle look a class's module up by name.
        sys.modules[module_name] = module
        folder = str(file.resolve().parent)
        # As for `python FILE.py`: the file's neighbours come first while it is imported. For imports inside its
        # functions they come last afterwards, so that they hide no module that relax imports then.
        sys.path.insert(0, folder)
        try:
            with user_code(passes=()), settings_kept():
                spec.loader.exec_module(module)
        except UserCodeError as error:
            del sys.modules[module_name]
            raise self.raised(f"the {self.what} file fails to import", error, str(file)) from error
        finally:
            sys.path.remove(folder)
            if folder not in sys.path:
                sys.path.append(folder)
        return vars(module)

    def unfit(self, spec: str, use: str, target: Any, *, fault: str = "", expected: str = "") -> ConfigError:
        """The error that the target of `spec` cannot be used: for its fault, or as it takes no such argument."""
        path, _, name = spec.rpartition(":")
        got = f"{name}{signature_of(target)}" if callable(target) else f"a {type(target).__name__}"
        return ConfigError(
            self.broken(
                f"{name} cannot {use}",
                where=path,
                got=f"{name}: {fault}" if fault else got,
                expected=expected or self.expected,
                fix=f"correct {name} in {path}",
            )
        )

    def _error(self, kind: ProblemKind, message: str, path: str, *, got: str) -> ConfigError:
        fix = f"{self.option} {path}:{self.noun}, with a file that exists"
        return ConfigError(kind(message, where=path, got=got, expected=self.expected, fix=fix))


def user_file(
    what: str, prefix: str, broken: ProblemKind, noun: str, example: str, expected: str, *, nowhere: str = ""
) -> UserFile:
    """What the option of `broken` takes from a file, with the problems that all such files share: `prefix` begins their
    ids, `nowhere` is empty where the option takes files alone."""
    option = broken.option
    name = f"the name of {'an' if what[0] in 'aeiou' else 'a'} {what}, or " if nowhere else ""
    kinds = {
        "syntax": f"`{option}` takes {name}`{expected.partition(',')[0]}`.",
        "file": "The file cannot be read, or is not valid Python.",
        noun: f"The file does not define that {noun}.",
    } | ({"unknown": nowhere} if nowhere else {})
    syntax, file, missing, *named = (
        problem_kind(f"{prefix}-{end}", broken.theme, text, option=option) for end, text in kinds.items()
    )
    return UserFile(what, option, noun, example, expected, syntax, file, missing, broken, named[0] if named else syntax)


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
