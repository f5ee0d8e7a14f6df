"""`relax rollouts`: the samples of a run, a group side by side, and one sample token by token."""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from relax_cli.cli.console import Output
from relax_cli.errors import ConfigError, problem_kind
from relax_cli.roles.sample_files import Sample, finite
from relax_cli.tracking import sample_text
from relax_cli.tracking.run_reader import RunFolder, read_run
from relax_cli.tracking.token_view import advantage

BAD_FILTER = problem_kind(
    "rollouts-filter",
    "Folders and checkpoints",
    "`relax rollouts --filter` is not FIELD, one of `= != < <= > >= ~`, and a value, or no sample has that field.",
    option="--filter",
)
NO_SUCH_SAMPLE = problem_kind(
    "rollouts-sample",
    "Folders and checkpoints",
    "`relax rollouts --sample` or `--group` names one that the step does not have.",
)
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le, ">=": operator.ge, "!=": operator.ne, "=": operator.eq, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
SHOWN = 10

Run = Annotated[Path, typer.Argument(metavar="RUN", help="a run folder", show_default=False)]


def rollouts(
    output: Output,
    run: Run,
    step: Annotated[int | None, typer.Option(help="the step; the last one when unset")] = None,
    evals: Annotated[bool, typer.Option("--evals", help="samples of the held-out sets instead")] = False,
    worst: Annotated[int | None, typer.Option(min=1, metavar="K", help="the K with the lowest reward")] = None,
    best: Annotated[int | None, typer.Option(min=1, metavar="K", help="the K with the highest reward")] = None,
    chosen_by_chance: Annotated[int | None, typer.Option("--random", min=1, metavar="K", help="any K")] = None,
    conditions: Annotated[
        list[str] | None,
        typer.Option(
            "--filter", metavar="COND", help="FIELD=VALUE; also != < <= > >=, and ~ for a regular expression (repeats)"
        ),
    ] = None,
    group: Annotated[int | None, typer.Option(metavar="G", help="the samples of one prompt side by side")] = None,
    sample: Annotated[int | None, typer.Option(metavar="ROW", help="one sample, token by token")] = None,
) -> None:
    """Read the samples of a run: texts, rewards, and every number of every token.

    Fields of --filter: reward, length, advantage, finish_reason, prompt, response, label, group, row, source, set, and
    reward_parts.NAME.
    """
    folder = read_run(run)
    every = folder.samples(step, "evals" if evals else "rollouts")
    for found in every:
        found |= {"length": len(found["response_token_ids"]), "advantage": advantage(found)}
    kept = [found for found in every if all(_holds(found, text, every) for text in conditions or [])]
    if sample is not None:
        (only,) = _named(every, "row", sample)[:1]
        output.show(as_json(only, folder), *sample_text.one_sample(only, folder.token_texts))
        return
    if group is not None:
        members = _named(every, "group", group)
        output.show([as_json(member) for member in members], *sample_text.side_by_side(members))
        return
    chosen = _chosen(kept, worst, best, chosen_by_chance, len(kept) if output.is_json else SHOWN)
    output.show([as_json(found) for found in chosen], *sample_text.overview(every, kept, chosen))


def as_json(sample: Sample, run: RunFolder | None = None) -> dict[str, Any]:
    """A sample for a program, with the texts of its tokens where a run is given."""
    texts = {} if run is None else {"tokens": [run.token_texts[int(i)] for i in sample["response_token_ids"]]}
    plain: dict[str, Any] = finite(sample | texts)
    return plain


def _chosen(kept: list[Sample], worst: int | None, best: int | None, by_chance: int | None, first: int) -> list[Sample]:
    by_reward = sorted(kept, key=lambda found: (found["reward"] is not None, found["reward"] or 0.0))
    if worst is not None:
        return by_reward[:worst]
    if best is not None:
        return by_reward[::-1][:best]
    if by_chance is not None:
        return random.Random(0).sample(kept, min(by_chance, len(kept)))
    return kept[:first]


def _named(samples: Sequence[Sample], field: str, number: int) -> list[Sample]:
    """The samples with that number. Raises ConfigError: there are none."""
    found = [sample for sample in samples if sample[field] == number]
    if not found:
        there = sorted({sample[field] for sample in samples})
        what = "sample" if field == "row" else "group"
        option = f"--{what}"
        raise ConfigError(
            NO_SUCH_SAMPLE(
                f"the step has no {what} of that number",
                option=option,
                got=str(number),
                expected=f"from {there[0]} to {there[-1]}" if there else "a step with samples",
                fix=f"{option} {there[0]}" if there else "choose another step with --step",
            )
        )
    return found


def _holds(sample: Mapping[str, Any], condition: str, every: Sequence[Sample]) -> bool:
    match = re.fullmatch(r"\s*([\w.]+?)\s*(<=|>=|!=|=|<|>|~)\s*(.*)", condition, re.DOTALL)
    if match is None:
        raise _bad_filter(condition, "it has no operator")
    field, sign, wanted = match.groups()
    name, _, part = field.partition(".")
    known = {key for found in every for key in found}
    if name not in known:
        raise _bad_filter(condition, f"no sample has a field {name}")
    value = sample.get(name)
    if part:
        value = value.get(part) if isinstance(value, Mapping) else None
    if sign == "~":
        try:
            return re.search(wanted, str(value)) is not None
        except re.error as error:
            raise _bad_filter(condition, f"{wanted!r} is not a regular expression: {error}") from None
    if isinstance(value, int | float):
        try:
            return OPERATORS[sign](value, float(wanted))
        except ValueError:
            raise _bad_filter(condition, f"{field} is a number") from None
    return value is not None and OPERATORS[sign](str(value), wanted)


def _bad_filter(condition: str, why: str) -> ConfigError:
    return ConfigError(
        BAD_FILTER(
            f"--filter cannot be applied: {why}",
            got=condition,
            expected="FIELD, an operator and a value",
            fix="--filter 'reward<0.5', or --filter 'response~wait'",
        )
    )
