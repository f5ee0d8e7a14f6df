"""The functions of a response as its tests see them: calls of another process, which return plain data."""

from __future__ import annotations

import builtins
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from relax_cli.data.sandbox.channel import MOST_BYTES, receive, send, send_all
from relax_cli.data.sandbox.confined import in_program
from relax_cli.data.sandbox.plain import packed, unpacked


def run_on(code: str, text: str) -> str | None:
    """What the response prints when it reads the text; None where it fails or prints too much."""
    given = os.memfd_create("input")
    send_all(given, text.encode(errors="surrogatepass"))
    os.lseek(given, 0, os.SEEK_SET)
    reading, writing = os.pipe()
    if (program := os.fork()) == 0:
        in_program(given, writing, lambda: run_main(code))
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


def run_main(code: str) -> None:
    """The response as a program."""
    exec(compile(code, "response.py", "exec"), {"__name__": "__main__"})


class Ended(BaseException):
    """The program has ended, or does not answer in the form agreed: nothing that a test could catch and pass."""


class Program:
    """A process that has executed the response and does what the tests ask of it, as the grader sees it."""

    def __init__(self, code: str) -> None:
        asked, asking = os.pipe()
        answers, answering = os.pipe()
        if os.fork() == 0:
            in_program(asked, answering, lambda: serve(code))
        os.close(asked)
        os.close(answering)
        self._asking, self._answers = asking, answers
        self._ended = False

    def ask(self, what: str, *arguments: Any) -> Any:
        """Let the program do one of `DONE`: plain data come back as they are, other objects as a `Remote`.

        Raises:
            Ended: the program is no more.
            Exception: what the program raised, or a RuntimeError for an exception of its own.
        """
        try:
            send(self._asking, packed((what, *arguments), remote_id))
            answer = unpacked(receive(self._answers, MOST_BYTES), lambda number: Remote(self, number))
            raised, value = answer
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
    asked, answering = os.dup(0), os.dup(1)
    for place, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY)):
        silent = os.open("/dev/null", flags)
        os.dup2(silent, place)
    names: dict[str, Any] = {"__name__": "response"}
    exec(compile(code, "response.py", "exec"), names)
    kept: list[Any] = []

    def number_of(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    while True:
        what, *arguments = unpacked(receive(asked), kept.__getitem__)
        answer: tuple[str | None, Any]
        try:
            if what == "name" and arguments[0] not in names:
                raise NameError(arguments[0])
            answer = (None, names[arguments[0]] if what == "name" else DONE[what](*arguments))
        except BaseException as error:  # noqa: BLE001 - the grader raises it
            answer = (type(error).__name__, str(error))
        send(answering, packed(answer, number_of))


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
