"""Whatever a data file contains or a reward returns has a meaning or is a named problem, never an exception of ours."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from relax_cli.config.schema import Config, DataSection, RewardSection
from relax_cli.data.prompts import Prompt, load_prompts
from relax_cli.data.rewards import RewardInput, RewardResult
from relax_cli.data.rewards.checked import CheckedReward
from relax_cli.data.rewards.math import as_math, is_usable, is_word
from relax_cli.data.rows import prompt_of_row
from relax_cli.errors import ConfigError, Problem, RunError
from relax_cli.preflight.data_reader import DataReader
from relax_cli.quickstart.task import MODEL

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
SECTION = DataSection(label_key="label")
TEXT = st.text(st.characters(exclude_categories=()), max_size=8) | st.sampled_from(["1+2=", "46", "", " ", "\ud835"])
SCALARS = (
    st.none() | st.booleans() | TEXT | st.integers() | st.floats()
    | st.sampled_from([10**400, 2**63, 1e308, -0.0, 1e-320])
)  # fmt: skip
ARROW = (
    SCALARS | st.binary(max_size=4) | st.decimals() | st.dates() | st.datetimes() | st.times() | st.timedeltas()
    | st.tuples(TEXT, TEXT)
)  # fmt: skip


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(leaves, lambda s: st.lists(s, max_size=3) | st.dictionaries(TEXT, s, max_size=3), max_leaves=6)


def messages(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    role = st.sampled_from(["user", "system", "assistant", "tool", "human", ""]) | leaves
    message = st.fixed_dictionaries({}, optional={"role": role, "content": TEXT | leaves, "name": leaves})
    return st.lists(message | leaves, max_size=3)


def row_of(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    tree = trees(leaves)
    parts = {
        "input": TEXT | messages(leaves) | tree,
        "label": leaves | tree,
        "metadata": st.none() | tree,
        "more": tree,
    }
    return st.fixed_dictionaries({}, optional=parts)


def check_prompt(prompt: Prompt) -> None:
    """A prompt that was accepted is one that a tokenizer, a file and a server take."""
    assert prompt.content
    json.dumps([prompt.content, prompt.label, prompt.metadata], allow_nan=False, ensure_ascii=False).encode()


def check_problems(problems: Sequence[Problem]) -> None:
    assert problems
    for problem in problems:
        assert problem.fix
        assert all(text.isprintable() for text in (problem.message, problem.got, problem.where, *problem.places))


@FUZZ
@given(row_of(ARROW))
@example({"input": "0", "label": False, "more": None, "metadata": {"\x1f": "\ud800"}})
def test_any_row_is_a_prompt_or_a_problem(row: dict[str, Any]) -> None:
    found = prompt_of_row(SECTION, row, "data:1")
    if isinstance(found, Prompt):
        check_prompt(found)
    else:
        check_problems([found])


LINES = st.lists(
    row_of(SCALARS).map(lambda row: json.dumps(row).encode())
    | trees(SCALARS).map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=20)
    | st.sampled_from([b'{"input": "x", "label": "1"}', b"[" * 3000, b'{"a":1,"a":2}', b"\xef\xbb\xbf", b"\x1f\x8b"]),
    min_size=1,
    max_size=4,
)  # fmt: skip


@FUZZ
@given(LINES, st.booleans())
def test_any_file_of_lines_is_read_or_refused(lines: list[bytes], chat: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data.jsonl")
        path.write_bytes(b"\n".join(lines))
        try:
            for prompt in load_prompts(SECTION, str(path)):
                check_prompt(prompt)
        except ConfigError as error:
            check_problems(error.problems)
        section = SECTION.model_copy(update={"prompt_data": str(path), "apply_chat_template": chat})
        reader = DataReader(Config(data=section, reward=RewardSection(rm_type="math")), MODEL, None, None)
        try:
            reader(section, str(path))
        except ConfigError as error:
            check_problems(error.problems)


@FUZZ
@given(st.lists(row_of(ARROW), min_size=1, max_size=3))
def test_any_parquet_file_is_read_or_refused(rows: list[dict[str, Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data.parquet")
        try:
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        except (pyarrow.ArrowException, ValueError, TypeError, OverflowError, UnicodeError):
            return  # Arrow has no such table.
        try:
            for prompt in load_prompts(SECTION, str(path)):
                check_prompt(prompt)
        except ConfigError as error:
            check_problems(error.problems)


@FUZZ
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=12) | st.text("$\\%0123456789e.-{}() B", max_size=9))
def test_any_label_is_mathematics_or_not(label: str) -> None:
    assert is_usable(label) in (True, False)
    assert is_word(label) in (True, False)
    assert as_math(label)


class Hostile:
    """Fails at whatever is asked of it."""

    def __float__(self) -> float:
        raise SystemExit(3)

    def __repr__(self) -> str:
        raise KeyError("repr")


ODD = st.sampled_from(
    [object(), Fraction(1, 3), Decimal("NaN"), 1j, np.float32(1), np.float64("nan"), np.ones(2), np.ones(1),
     np.array("x"), torch.tensor(1.0), torch.ones(2), torch.tensor([float("inf")]), b"1", timedelta(1), date.max,
     time.min, datetime.max, int, iter(()), range(2), {1}, RewardResult(1.0), RewardResult(float("nan")),
     RewardResult(0.5, {"a": None}), {"reward": 1.0, 3: 2.0}, {"reward": None}, {None: 1.0}]
)  # fmt: skip
SCORES = trees(SCALARS | ODD | st.builds(Hostile))
SAMPLES = [RewardInput("p", "r", "1", {}, truncated=False, group=group) for group in range(2)]


@FUZZ
@given(SCORES | st.lists(SCORES, min_size=2, max_size=2), st.sampled_from([None, "reward", "a", ""]))
def test_any_result_of_a_reward_is_numbers_or_refused(returned: Any, key: str | None) -> None:
    reward = CheckedReward("mine.py:judge", lambda samples: returned, key)
    check_reward(reward)


@FUZZ
@given(
    st.sampled_from([BaseException, SystemExit, Exception, GeneratorExit, StopIteration, StopAsyncIteration, OSError,
                     UnicodeError, RecursionError, MemoryError, AssertionError, TimeoutError]),
    TEXT | st.integers() | st.none(),
)  # fmt: skip
def test_any_exception_of_a_reward_is_a_problem(kind: type[BaseException], text: Any) -> None:
    def fail(samples: Sequence[RewardInput]) -> Any:
        raise kind(text)

    with pytest.raises(RunError) as caught:
        CheckedReward("mine.py:judge", fail, None)(SAMPLES)
    assert caught.value.problems[0].id == "reward-failed"


def check_reward(reward: Callable[[Sequence[RewardInput]], list[RewardResult]]) -> None:
    try:
        results = reward(SAMPLES)
    except RunError as error:
        check_problems(error.problems)
        return
    assert len(results) == len(SAMPLES)
    for result in results:
        assert type(result.reward) is float
        assert all(type(name) is str and isfinite(value) for name, value in result.parts.items())
        assert torch.tensor(result.reward).square().isfinite()
