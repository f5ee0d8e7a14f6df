"""The conformance of a plugin's environment: its example is played. `relax plugins check NAME` runs it."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from relax_cli.data.envs.checked import CheckedEnv
from relax_cli.data.envs.load import THEME, EnvFactory, EnvRow
from relax_cli.errors import ConfigError, problem_kind
from relax_cli.plugin.apart import Unanswered, run_apart
from relax_cli.plugin.kit.findings import CheckResult, Finding, result_of
from relax_cli.plugin.records import Env, load_reference
from relax_cli.plugin.stdout import stdout_as_stderr
from relax_cli.plugin.user_calls import UserCalls

RULE = "the example is played to its end, and twice the same, also next to another episode"
SECONDS = 60.0
NOT_PLAYED = problem_kind(
    "env-example",
    THEME,
    "The example of a plugin's environment does not end, or is not the same when it is played again.",
)


def check_env(env: Env) -> CheckResult:
    """Play the example of an environment, in a process of its own."""
    if not env.example:
        return CheckResult("plays", env.name, "skipped", RULE, reason="the Env has no example")
    try:
        problems = run_apart(
            f"{__name__}:play_example", env.name, env.environment, dict(env.example), what=f"the example of {env.name}"
        )
        found = [Finding(f"{p.message}; {p.got}".rstrip("; "), p.fix) for p in problems]
    except Unanswered as error:
        found = [Finding(f"the example {error}", "correct the environment")]
    return result_of("plays", env.name, RULE, found)


def play_example(name: str, reference: str, example: dict[str, Any]) -> None:
    """The part of `check_env` that runs in the other process. Raises RelaxError: what is wrong."""
    factory = EnvFactory(name, load_reference(reference, f"environment {name}"))
    with stdout_as_stderr():
        alone, one, other = asyncio.run(_play(factory, example))
    if not alone[-1].done:
        raise ConfigError(NOT_PLAYED(f"the example of {name} ends before the episode", fix="give it more responses"))
    for episode in (one, other):
        if episode != alone:
            what = f"two episodes of {name} with the same row and responses differ"
            fix = "keep the state of an episode in its instance, and draw with the seed of its row"
            raise ConfigError(NOT_PLAYED(what, got=f"{episode} after {alone}", fix=fix))


async def _play(factory: EnvFactory, example: dict[str, Any]) -> list[list[Any]]:
    """What three episodes said: one alone, then two turn by turn."""
    calls = UserCalls(SECONDS)
    said: list[list[Any]] = []
    for count in (1, 2):
        games = [CheckedEnv(factory, calls, "the example") for _ in range(count)]
        rows = [EnvRow(example["prompt"], example.get("label"), example.get("metadata", {}), 0) for _ in games]
        episodes: list[list[Any]] = [
            [await game.reset(copy.deepcopy(row))] for game, row in zip(games, rows, strict=True)
        ]
        for response in example["responses"]:
            for game, episode in zip(games, episodes, strict=True):
                if len(episode) == 1 or not episode[-1].done:
                    episode.append(await game.step(response))
        for game in games:
            await game.close()
        said += episodes
    return said
