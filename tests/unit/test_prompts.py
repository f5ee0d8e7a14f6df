"""Prompt files, reasoning-gym specs and the order of prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_cli.config.schema import DataSection
from relax_cli.data.order import PromptOrder
from relax_cli.data.prompts import Prompt, load_prompts
from relax_cli.errors import ConfigError, Problem

SECTION = DataSection(label_key="label")


def write(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", errors="surrogatepass")
    return str(path)


def problems_of(section: DataSection, spec: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load_prompts(section, spec)
    return caught.value.problems


def test_rows_become_prompts_with_label_metadata_and_source(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    spec = write(
        tmp_path,
        '{"input": "1+2=", "label": 3, "metadata": {"level": 1}}',
        "",
        json.dumps({"input": messages, "label": "né"}),
    )
    assert load_prompts(SECTION, spec) == [
        Prompt("1+2=", "3", {"level": 1}, f"{spec}:1"),
        Prompt(messages, "né", {}, f"{spec}:3"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"prompt": "x", "label": "y"}', "no key 'input'"),
        ('{"input": "x"}', "no key 'label'"),
        ('{"input": "", "label": "y"}', "neither text nor chat messages"),
        ('{"input": [{"role": "user"}], "label": "y"}', "neither text nor chat messages"),
        ('{"input": "\\ud800", "label": "y"}', "neither text nor chat messages"),
        ('{"input": "x", "label": null}', "'label' is not text"),
        ('{"input": "x", "label": "y", "metadata": [1]}', "'metadata' is not an object"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    spec = write(tmp_path, '{"input": "good", "label": "row"}', line)
    (problem,) = problems_of(SECTION, spec)
    assert problem.where == f"{spec}:2"
    assert message in problem.message


def test_a_missing_key_is_reported_with_the_keys_that_are_there(tmp_path: Path) -> None:
    (problem,) = problems_of(SECTION, write(tmp_path, '{"question": "x", "label": "y"}'))
    assert problem.option == "--input-key"
    assert problem.got == "question, label"


def test_rows_with_one_fault_are_one_problem(tmp_path: Path) -> None:
    spec = write(tmp_path, *["{", '{"input": "x", "label": null}'] * 25)
    syntax, null = problems_of(SECTION, spec)
    assert (syntax.count, null.count) == (25, 25)
    assert syntax.places == tuple(f"{spec}:{line}" for line in (1, 3, 5, 7, 9))
    assert null.where == f"{spec}:2"


def test_faults_beyond_twenty_are_counted(tmp_path: Path) -> None:
    lines = [f'{{"input": "x", "label": "y", "metadata": {{"k{i}": Infinity}}}}' for i in range(25)]
    problems = problems_of(SECTION, write(tmp_path, *lines))
    assert len(problems) == 21
    assert problems[-1].message == "5 more problems"


def test_a_line_that_is_not_utf8_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"input": "\xff\xfe", "label": "y"}\n')
    assert problems_of(SECTION, str(path))[0].where == f"{path}:1"


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    assert problems_of(SECTION, write(tmp_path, "", " "))[0].id == "prompt-data-empty"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert problems_of(SECTION, str(tmp_path / "none.jsonl"))[0].id == "prompt-data-file-missing"


def test_reasoning_gym_generates_the_asked_size_reproducibly() -> None:
    pytest.importorskip("reasoning_gym")
    spec = "reasoning-gym:chain_sum?size=5&seed=3&max_terms=2&allow_negation=false"
    prompts = load_prompts(SECTION, spec)
    assert len(prompts) == 5
    assert prompts == load_prompts(SECTION, spec)
    assert prompts[0].metadata["source_dataset"] == "chain_sum"
    assert prompts[0].metadata["question"] == prompts[0].content
    assert prompts[0].metadata["answer"] == prompts[0].label
    assert {prompt.metadata["num_terms"] for prompt in prompts} == {2}


def test_reasoning_gym_takes_lists_as_json() -> None:
    pytest.importorskip("reasoning_gym")
    prompts = load_prompts(SECTION, 'reasoning-gym:basic_arithmetic?size=8&operators=["+"]&allow_parentheses=false')
    assert not any(set("*/") & set(str(prompt.metadata["expression"])) for prompt in prompts)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("reasoning-gym:chain_summ", "no task 'chain_summ'"),
        ("reasoning-gym:chain_sum?sise=5", "unknown parameter 'sise'"),
        ("reasoning-gym:chain_sum?size=1&size=2", "'size' is given twice"),
        ("reasoning-gym:chain_sum?size=many", "bad value of 'size'"),
        ("reasoning-gym:chain_sum?min_terms=9", "max_terms must be >= min_terms"),
    ],
)
def test_a_wrong_reasoning_gym_spec_is_refused(spec: str, message: str) -> None:
    pytest.importorskip("reasoning_gym")
    (problem,) = problems_of(SECTION, spec)
    assert message in problem.message


def test_the_nearest_reasoning_gym_task_is_offered() -> None:
    pytest.importorskip("reasoning_gym")
    assert problems_of(SECTION, "reasoning-gym:chain_summ")[0].fix == "--prompt-data reasoning-gym:chain_sum"


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 30), batch=st.integers(1, 50), seed=st.integers(0, 2**32), shuffle=st.booleans())
def test_every_epoch_uses_each_prompt_once_across_batch_borders(n: int, batch: int, seed: int, shuffle: bool) -> None:
    order = PromptOrder(n, seed, shuffle)
    rollouts = -(-3 * n // batch)
    rows = [row for rollout in range(rollouts) for row in order.rows(rollout, batch)]
    for epoch in range(3):
        assert sorted(rows[epoch * n : (epoch + 1) * n]) == list(range(n))


@given(rollout=st.integers(0, 40), batch=st.integers(1, 40))
def test_a_rollout_does_not_depend_on_the_ones_before(rollout: int, batch: int) -> None:
    order = PromptOrder(17, 5, True)
    stream = [row for earlier in range(rollout + 1) for row in order.rows(earlier, batch)]
    assert PromptOrder(17, 5, True).rows(rollout, batch) == stream[rollout * batch :]


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    first, second = PromptOrder(100, 1, True).rows(0, 100), PromptOrder(100, 1, True).rows(1, 100)
    assert len({tuple(first), tuple(second), tuple(PromptOrder(100, 2, True).rows(0, 100)), tuple(range(100))}) == 4


def test_the_order_is_the_same_on_every_machine() -> None:
    assert PromptOrder(8, 42, True).rows(0, 8) == GOLDEN_ORDER


def test_without_shuffle_prompts_come_in_file_order() -> None:
    assert PromptOrder(3, 1, False).rows(1, 4) == [1, 2, 0, 1]


GOLDEN_ORDER = [4, 1, 3, 6, 0, 7, 2, 5]
