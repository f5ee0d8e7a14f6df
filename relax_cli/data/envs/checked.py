"""One episode's environment, whose calls end in time and return what they must, or it is said which one did not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from relax_cli.data.envs.load import EnvFactory, EnvRow, Observation
from relax_cli.data.rewards.checked import MOST_REWARD, as_float
from relax_cli.data.values import Unusable, plain_json, printable, shown, text_of
from relax_cli.errors import RunError, problem_kind
from relax_cli.plugin.user_calls import UserCalls
from relax_cli.plugin.user_code import TookTooLong, UserCodeError, from_here

ENV_FAILED = problem_kind(
    "env-failed",
    "Episodes",
    "A call of the environment raised an exception, took longer than `--env-timeout`, or returned something else than "
    "what [environments.md](environments.md) says.",
)
TURN = "(observation, reward, done)"


@dataclass(frozen=True)
class Step:
    """What an environment said to a response."""

    observation: Observation | None
    """None where the episode is done."""
    reward: float
    done: bool


class CheckedEnv:
    """Raises `RunError` for whatever goes wrong in its environment."""

    def __init__(self, factory: EnvFactory, calls: UserCalls, source: str) -> None:
        """`source` is the file and line of the episode's row."""
        self._factory = factory
        self._calls = calls
        self._source = source
        self._env: Any = None
        self._turn = 0

    async def reset(self, row: EnvRow) -> Observation:
        """Make the environment and ask it for the prompt."""

        def start() -> Any:
            self._env = self._factory.make()
            return self._env.reset(row)

        return self._observation("reset", await self._call("reset", start))

    async def step(self, response: str) -> Step:
        """Have a response answered."""
        self._turn += 1
        returned = await self._call("step", lambda: self._env.step(response))
        if not isinstance(returned, tuple | list) or len(returned) != len(TURN.split()):
            count = f"{len(returned)} values" if isinstance(returned, tuple | list) else f"a {type(returned).__name__}"
            raise self._wrong("step", f"{count}: {shown(returned)}", TURN)
        observation, reward, done = returned
        number = as_float(reward)
        if number is None or not abs(number) <= MOST_REWARD:
            expected = f"a finite number, at most {MOST_REWARD:g} in size"
            raise self._wrong("step", f"the reward {shown(reward)}", expected)
        if type(done).__name__ not in ("bool", "bool_"):
            raise self._wrong("step", f"done {shown(done)}", "True or False")
        return Step(None if done else self._observation("step", observation), number, bool(done))

    async def close(self) -> None:
        """Tell the environment that its episode has ended, where it wants to know."""
        env, self._env = self._env, None
        if callable(getattr(env, "close", None)):
            await self._call("close", env.close)

    async def _call(self, method: str, function: Callable[[], Any]) -> Any:
        try:
            return await self._calls(function)
        except UserCodeError as error:
            what, fix = f"failed: {error.reason}", ""
            if isinstance(error.__cause__, TookTooLong):
                what, fix = "did not return within --env-timeout", "make it faster, or raise --env-timeout"
            raise self._error(method, what, error.trail, fix=fix, at=error.place) from error.__cause__

    def _observation(self, method: str, value: Any) -> Observation:
        expected = "text, or a list of messages with role and content"
        try:
            if not isinstance(value, list):
                return text_of(value)
            messages = [{str(name): _part(part) for name, part in message.items()} for message in value]
        except (Unusable, AttributeError):
            raise self._wrong(method, shown(value), expected) from None
        if not messages or not all({"role", "content"} <= message.keys() for message in messages):
            raise self._wrong(method, shown(value), expected)
        return messages

    def _wrong(self, method: str, got: str, expected: str) -> RunError:
        return self._error(method, "returned something else", got, expected)

    def _error(self, method: str, what: str, got: str, expected: str = "", *, fix: str = "", at: str = "") -> RunError:
        turn = f", turn {self._turn}" if self._turn else ""
        return RunError(
            ENV_FAILED(
                printable(f"{method} of the environment {self._factory.name} {what}"),
                where="; ".join(filter(None, (from_here(at), f"the episode of {self._source}{turn}"))),
                got=printable(got),
                expected=expected,
                fix=fix or f"correct the environment {self._factory.name}",
            )
        )


def _part(value: Any) -> Any:
    """Of a message: text, or a list such as `tool_calls`."""
    return plain_json(value) if isinstance(value, list) else text_of(value)
