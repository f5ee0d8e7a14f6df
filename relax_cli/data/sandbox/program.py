"""The functions of a response as its tests see them: calls of another process, which return plain data, and numbers for
other objects."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from relax_cli.data.sandbox.confined import in_program

MOST_BYTES = 1 << 20
"""Of one output, and of one answer of a program."""


def run_on(code: str, text: str) -> str | None:
    """What the response prints when it reads the text; None where it fails or prints too much."""
    given = os.memfd_create("input")
    with open(given, "wb", closefd=False) as file:
        file.write(text.encode(errors="surrogatepass"))
    os.lseek(given, 0, os.SEEK_SET)
    reading, writing = os.pipe()
    if (program := os.fork()) == 0:
        in_program(given, writing, lambda: execute(code, "__main__"))
    os.close(given)
    os.close(writing)
    output = bytearray()
    while len(output) <= MOST_BYTES and (some := os.read(reading, 1 << 16)):
        output += some
    os.close(reading)
    too_long = len(output) > MOST_BYTES
    if too_long:
        os.kill(program, signal.SIGKILL)
    failed = os.waitpid(program, 0)[1] != 0
    return None if too_long or failed else output.decode(errors="replace")


def execute(code: str, name: str) -> dict[str, Any]:
    """Execute the response as a module of that name, and return its names."""
    names: dict[str, Any] = {"__name__": name}
    exec(compile(code, "response.py", "exec"), names)
    return names


class Ended(BaseException):
    """The program has ended, or does not answer in the form agreed: nothing that a test could catch and pass."""


class Program:
    """A process that has executed the response and does what the tests ask of it, as the grader sees it."""

    def __init__(self, code: str) -> None:
        asked, self._asking = Pipe(duplex=False)
        self._answers, answering = Pipe(duplex=False)
        with asked, answering:
            if os.fork() == 0:
                in_program(asked.fileno(), answering.fileno(), lambda: serve(code))
        self._ended = False

    def ask(self, what: str, *arguments: Any) -> Any:
        """Let the program do one of `DONE`: plain data come back as they are, other objects as a `Remote`.
        Raises Ended: the program is no more; or what it raised, a RuntimeError for an exception of its own."""
        try:
            self._asking.send_bytes(packed((what, *arguments), remote_id))
            answer = self._answers.recv_bytes(MOST_BYTES)
            raised, value = Unpacker(io.BytesIO(answer), lambda number: Remote(self, number)).load()
        # Whatever the program sends is data of an attacker.
        except Exception as error:
            if isinstance(error, Unsendable):
                raise
            self._ended = True
            raise Ended from error
        if raised is None:
            return value
        kind = getattr(builtins, str(raised), None)
        raise kind(value) if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError(value)

    def passes(self, test: Any) -> bool:
        """Whether the program passes a test: Python text, or a function's name, its arguments and the value of it."""
        try:
            if isinstance(test, str):
                exec(compile(test, "test.py", "exec"), Names(self))
            else:
                name, arguments, expected = test
                value = listed(self._function(name)(*arguments))
                # APPS has the value as the only item of a list.
                return listed(expected) in (value, [value]) and not self._ended
        except BaseException:  # noqa: BLE001 - a test fails with any
            return False
        return not self._ended

    def _function(self, name: str) -> Any:
        try:
            return self.ask("name", name)
        except NameError:
            return getattr(self.ask("name", "Solution")(), name)


def listed(value: Any) -> Any:
    """The value with tuples as lists, which is what JSON makes of them."""
    if isinstance(value, list | tuple):
        return [listed(item) for item in value]
    return {key: listed(item) for key, item in value.items()} if isinstance(value, dict) else value


class Names(dict[str, Any]):
    """The names of a test: its own, Python's, and those of the response."""

    def __init__(self, program: Program) -> None:
        super().__init__(__name__="test")
        self._program = program

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        try:
            return self._program.ask("name", name)
        except NameError as error:
            raise KeyError(name) from error


class Remote:
    """An object of the program, with what tests do with one."""

    def __init__(self, program: Program, number: int) -> None:
        self._program, self._number = program, number

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._program.ask("call", self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        return self._program.ask("attribute", self, name)

    def __getitem__(self, key: Any) -> Any:
        return self._program.ask("item", self, key)

    def __len__(self) -> int:
        return int(self._program.ask("length", self))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._program.ask("items", self))


def serve(code: str) -> None:
    """Execute the response, then do what the grader asks until it is gone."""
    asked, answering = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    for place, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY)):
        silent = os.open("/dev/null", flags)
        os.dup2(silent, place)
    names = execute(code, "response")
    kept: list[Any] = []

    def number_of(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    while True:
        what, *arguments = Unpacker(io.BytesIO(asked.recv_bytes()), kept.__getitem__).load()
        answer: tuple[str | None, Any]
        try:
            if what == "name" and arguments[0] not in names:
                raise NameError(arguments[0])
            answer = (None, names[arguments[0]] if what == "name" else DONE[what](*arguments))
        except BaseException as error:  # noqa: BLE001 - the grader raises it
            answer = (type(error).__name__, str(error))
        answering.send_bytes(packed(answer, number_of))


DONE: dict[str, Callable[..., Any]] = {
    "call": lambda function, arguments, named: function(*arguments, **named),
    "attribute": getattr,
    "item": lambda value, key: value[key],
    "length": len,
    "items": list,
}


class Unsendable(TypeError):
    """A test gives the response something other than plain data."""


def remote_id(value: Any) -> int:
    """The number of an object of the program. Raises Unsendable: it is none."""
    if not isinstance(value, Remote):
        raise Unsendable(f"a {type(value).__name__} cannot be given to the response")
    return value._number


PLAIN = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)


class Packer(pickle.Pickler):
    """Plain data, also of derived types and arrays; a number for everything else."""

    def __init__(self, file: io.BytesIO, number_of: Callable[[Any], int]) -> None:
        super().__init__(file)
        self._number_of = number_of

    def persistent_id(self, value: Any) -> int | None:
        plain = (
            value is None
            or isinstance(value, PLAIN)
            or hasattr(type(value), "tolist")
            or any(value is t for t in PLAIN)
        )
        return None if plain else self._number_of(value)

    def reducer_override(self, value: Any) -> Any:
        if hasattr(type(value), "tolist"):
            plain = value.tolist()
            return type(plain), (plain,)
        base = next((base for base in PLAIN if isinstance(value, base) and type(value) is not base), None)
        return NotImplemented if base is None else (base, (base(value),))


class Unpacker(pickle.Unpickler):
    """Makes plain data, and nothing else."""

    def __init__(self, file: io.BytesIO, found: Callable[[int], Any]) -> None:
        super().__init__(file)
        self._found = found

    def persistent_load(self, number: int) -> Any:
        return self._found(number)

    def find_class(self, module: str, name: str) -> Any:
        return {base.__name__: base for base in PLAIN}[name]


def packed(value: Any, number_of: Callable[[Any], int]) -> bytes:
    """The value as bytes."""
    file = io.BytesIO()
    Packer(file, number_of).dump(value)
    return file.getvalue()
