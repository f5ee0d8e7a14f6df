"""Whatever stands in `relax.json`, every command that reads it ends with a named problem: never a bug, never a hang."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from relax_cli.checkpoint import layout
from relax_cli.cli.app import build_app
from relax_cli.plugin.manager import load_plugins
from tests.support.checkpoints import save

WRONG: list[Any] = [None, True, "x", "", -1, 0, 2, 3.5, 10**30, [], ["x"], [7], {}, {"x": 1}, {"tensor_parallel": 0}]
EXTRA = {
    "estimator": "grpo",
    "fingerprints": {"model": "a", "tokenizer": "b", "dataset": "sha256:c", "reference": None},
    "model_shape": {"num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 64, "vocab_size": 16},
    "origin": {"hf_checkpoint": "model", "prompt_data": "data.jsonl", "reference": "model"},
    "prompts": 7,
    "data_position": {"rollouts": 3, "prompts_seen": 24, "epoch": 3},
    "critic_save": None,
    "save_id": "one",
}
COMMANDS = (
    ("check-resume", "--load", "{a}", "--deep"),
    ("check-resume", "--load", "{a}", "--critic-load", "{c}", "--tensor-model-parallel-size", "2"),
    ("list", "{a}"),
    ("verify", "{a}"),
    ("align", "--load", "{a}", "--critic-load", "{c}"),
    ("prune", "{a}", "--keep", "1"),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON value."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    """The value with another one at a place."""
    if not path:
        return other
    copied = copy.deepcopy(value)
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = other
    return copied


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("fuzz")
    seeds = {"seed": 1, "rollout_seed": 2}
    return {name: save(root / name, role, 3, seeds=seeds, **EXTRA) for name, role in (("a", "actor"), ("c", "critic"))}


@pytest.fixture(scope="module")
def good(folders: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(meta_of(folders).read_text())
    return found


def meta_of(folders: dict[str, str]) -> Path:
    return Path(folders["a"]) / "iter_0000003" / layout.META_FILE


APP = build_app(load_plugins())


def try_everything(folders: dict[str, str], content: str) -> None:
    meta_of(folders).write_text(content)
    for command in COMMANDS:
        words = [word.format(**folders) for word in command]
        done = CliRunner().invoke(APP, ["checkpoint", *words, "--format", "json"])
        assert done.exit_code in (0, 2, 3), (words, content, done.output)
        assert "bug" not in done.output, (words, content, done.output)
        if isinstance(shown := json.loads(done.stdout), dict) and not shown["ok"] and "problems" in shown:
            assert all(problem["id"] for problem in shown["problems"])


def test_one_wrong_value_anywhere_is_a_named_problem(folders: dict[str, str], good: dict[str, Any]) -> None:
    for number, place in enumerate(places(good)):
        # Two of the wrong values at each place; all of them over the whole file.
        for other in (WRONG[(number + step) % len(WRONG)] for step in (0, 7)):
            try_everything(folders, json.dumps(changed(good, place, other)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_json_anywhere_is_a_named_problem(
    data: st.DataObject, folders: dict[str, str], good: dict[str, Any]
) -> None:
    place = data.draw(st.sampled_from(sorted(places(good), key=str)))
    try_everything(folders, json.dumps(changed(good, place, data.draw(JSON))))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[" * 20_000,
        '{"format_version": 2}',
        '{"format_version": 2, "role": "actor", "role": 7}',
        '{"format_version": 1e400}',
        '{"format_version": ' + "9" * 5000 + "}",
        '{"role": "\\ud800", "format_version": 2}',
        "\ufeff{}",
    ],
)
def test_text_that_is_no_relax_json_is_a_named_problem(folders: dict[str, str], content: str) -> None:
    try_everything(folders, content)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("parallel", {"tensor_parallel": "x"}),
        ("parallel", {"tensor_parallel": 0}),
        ("iteration", -3),
        ("seeds", {"seed": "1"}),
        ("extra", {"model_shape": []}),
        ("extra", {"data_position": {"prompts_seen": -1}}),
        ("extra", {"critic_save": 7}),
    ],
)
def test_the_field_with_another_type_is_named(
    folders: dict[str, str], good: dict[str, Any], field: str, value: Any
) -> None:
    meta_of(folders).write_text(json.dumps(good | {field: value}))
    done = CliRunner().invoke(APP, ["checkpoint", "check-resume", "--load", folders["a"]])
    assert done.exit_code == 3
    assert "checkpoint-meta-unreadable" in done.stderr
    assert (next(iter(value)) if isinstance(value, dict) else field) in done.stderr
