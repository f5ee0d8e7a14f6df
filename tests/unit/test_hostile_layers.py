"""Nothing that a user writes into a recipe, a flag, `--set` or the environment is a bug of relax."""

from __future__ import annotations

import json
import os
import string
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from relax_cli.cli.app import build_app
from relax_cli.cli.checked_text import as_dict, as_text
from relax_cli.config.layers import Layers
from relax_cli.config.model import options_by_name
from relax_cli.config.recipes import MOST_BYTES
from relax_cli.errors import declared_kinds
from relax_cli.plugin.config_model import config_model
from relax_cli.plugin.manager import load_plugins
from relax_cli.preflight.check_run import check_run

PLUGINS = load_plugins()
OPTIONS = options_by_name(config_model(PLUGINS.estimators().values()))
HEAD = "optimizer:\n  lr: "
BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE = {
    "merge list": "x: &x {lr: 1}\noptimizer:\n  <<: [*x, *x]\n  lr: 2\n",
    "merge scalar": "optimizer:\n  <<: 3\n",
    "merge": "optimizer:\n  <<: {lr: 2, rl: 3}\n",
    "deep flow": HEAD + "[" * 2000 + "]" * 2000,
    "deep block": "optimizer:\n" + "".join("  " * (i + 1) + "a:\n" for i in range(400)),
    "deep value": HEAD + "[" * 30 + "]" * 30,
    "long integer": HEAD + "9" * 6000,
    "long hexadecimal": HEAD + "0x" + "f" * 6000,
    "long exponent": HEAD + "1e999999999",
    "long integer in an object": "data:\n  chat_template_kwargs: {a: 12345678901234567890123}\n",
    "long integer in a record": '{"config": {"run": {"seed": 12345678901234567890123}}, "origins": {}}',
    "itself": "optimizer: &a\n  lr: *a\n",
    "itself in a list": "rollout:\n  rollout_stop: &a [*a]\n",
    "bomb": BOMB + "rollout:\n  rollout_stop: *i\n",
    "tag": "optimizer: !!python/object/apply:os.system ['true']\n",
    "tags": "optimizer:\n  lr: !!binary aGk=\n  min_lr: !!timestamp 2026-01-01\n  adam_eps: !x 3\n",
    "set": "rollout:\n  rollout_stop: !!set {a, b}\n",
    "keys": "? [a, b]\n: 1\n? {a: b}\n: 2\n3: {4: 5}\nnull: 1\ntrue: {}\noptimizer:\n  ? [1]\n  : 2\n  5: 6\n",
    "two documents": "optimizer: {}\n---\noptimizer: {}\n",
    "directive": "%YAML 9.9\n---\noptimizer: {}\n",
    "alias": "optimizer: *nowhere\n",
    "nul": 'checkpoint:\n  save: "a\\0b"\n',
    "surrogate": 'checkpoint:\n  save: "a\\ud800b"\n',
    "control": 'checkpoint:\n  save: "a\\eb"\n',
    "dates": "run:\n  run_dir: 2026-01-01\n  seed: 12:30:45\n",
    "numbers": "optimizer: {lr: .inf, min_lr: -.nan, adam_eps: 0o17, weight_decay: 1_0.5, clip_grad: 1e400}\n",
    "resource": "parallel:\n  resource: {actor: [1, 99999999999999], rollout: [[1], {}], null: [1, 1]}\n",
    "counts": "parallel:\n  resource: {actor: [1, 1000000000], rollout: [1, 1]}\n",
    "record": '{"config": [1], "origins": {}}',
    "record values": '{"config": {"optimizer": {"lr": [1], "x": 1}, "y": 3, "run": 4}, "origins": 5}',
    "tabs": "optimizer:\n\tlr: 1\n",
    "empty": "",
    "scalar": "hello",
    "long names": "checkpoint:\n  save: " + "a" * 300 + "\n  load: " + "a/" * 3000 + "\n",
    "variable": "model:\n  hf_checkpoint: ${" + "A" * 5000 + "}\n",
    "variables": "model:\n  hf_checkpoint: " + "${A:-" * 300 + "}" * 300 + "\n",
}


def judge(layers: Layers) -> list[str]:
    """Check a run and show it; every problem has its parts and a declared kind. Returns the ids."""
    checked = check_run(PLUGINS, layers, here=False)
    json.dumps(as_dict(checked))
    as_text(checked, show_origin=True)
    known = {kind.id for kind in declared_kinds()}
    for problem in checked.problems:
        assert problem.id in known
        assert problem.message
        assert problem.fix
    return [problem.id for problem in checked.errors]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_recipe_is_a_problem_within_seconds(folder: Path, name: str) -> None:
    path = folder / "r.yaml"
    path.write_text(HOSTILE[name], "utf-8")
    started = time.process_time()
    assert judge(Layers([str(path)]))
    assert time.process_time() - started < 20


@pytest.mark.parametrize(
    ("content", "rule"),
    [(b"a: " + b"x" * MOST_BYTES, "recipe-limit"), (b"\xff\xfeo\x00", "recipe-syntax"), (b"a: \x00", "recipe-syntax"),
     (b"\xef\xbb\xbfoptimizer: {lr: 0}\n", "invalid-value")],
)  # fmt: skip
def test_bytes_of_a_recipe_are_bounded_and_utf_8(folder: Path, content: bytes, rule: str) -> None:
    path = folder / "r.yaml"
    path.write_bytes(content)
    assert rule in judge(Layers([str(path)]))


def test_huge_and_endless_recipes_are_refused_at_once(folder: Path) -> None:
    with (folder / "large.yaml").open("wb") as file:
        file.truncate(100 << 20)
    os.mkfifo(folder / "pipe.yaml")
    started = time.process_time()
    assert "recipe-limit" in judge(Layers([str(folder / "large.yaml")]))
    assert "recipe-not-found" in judge(Layers([str(folder / "pipe.yaml")]))
    assert "recipe-not-found" in judge(Layers(["/dev/zero"]))
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    ("recipe", "sets", "rule"),
    [
        ("tiny-ppo-cpu", ["parallel.pipeline_model_parallel_size=1000000"], "invalid-value"),
        ("tiny-ppo-cpu", ["parallel.pipeline_model_parallel_size=65536"], "pipeline-layers"),
        # A stage without a layer has no memory plan.
        (
            "qwen3-4B-8xgpu-ppo",
            ["parallel.pipeline_model_parallel_size=3", "parallel.decoder_last_pipeline_num_layers=99991"],
            "pipeline-layers",
        ),
        ("tiny-ppo-cpu", ["batch.rollout_batch_size=999999999989", "batch.global_batch_size=999999999988"],
         "batch-arithmetic"),
    ],
)  # fmt: skip
def test_counts_of_any_size_are_judged_at_once(recipe: str, sets: list[str], rule: str) -> None:
    started = time.process_time()
    checked = check_run(PLUGINS, Layers([recipe], {}, sets), here=False)
    assert rule in [problem.id for problem in checked.errors]
    assert max(len(problem.got) for problem in checked.problems) < 200
    as_text(checked, show_origin=True)
    assert time.process_time() - started < 10


@pytest.mark.parametrize("name", [name for name, (_, field) in OPTIONS.items() if "int" in str(field.annotation)])
def test_numbers_that_nobody_can_count_to_are_refused(name: str) -> None:
    text = '{"actor": [1, 99999999], "rollout": [1, 1]}' if name == "resource" else "9" * 30
    for layers in (Layers(flags={name: text}), Layers(overrides=[f"{OPTIONS[name][0]}.{name}={text}"])):
        assert {"invalid-value", "resource-json"} & set(judge(layers))


TEXTS = st.one_of(
    st.text(max_size=12),
    st.text(alphabet="0123456789.-+eExXoO_inf ", max_size=9),
    st.text(alphabet="[]{},:&*!|>%@`'\"\\ \n\t#?-~$ab1", max_size=16),
    st.sampled_from(
        ["null", "~", "true", "[]", "{}", "0", "-1", "1e308", "1e-308", "${A", "$B", "~x/y", "a=b", "\0", "\ud800"]
    ),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
SECTIONS = st.sampled_from([*dict.fromkeys(section for section, _ in OPTIONS.values()), "oops"])
FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


@FUZZ
@given(
    recipe=st.dictionaries(SECTIONS, st.dictionaries(st.sampled_from([*OPTIONS, "x"]), VALUES, max_size=4), max_size=4),
    flags=st.dictionaries(st.sampled_from(list(OPTIONS)), TEXTS, max_size=3),
    sets=st.lists(st.tuples(st.sampled_from(list(OPTIONS)), TEXTS), max_size=3),
    env=st.dictionaries(st.sampled_from([f"RELAX_{name.upper()}" for name in OPTIONS]), TEXTS, max_size=2),
)
def test_no_combination_of_values_is_a_bug(
    folder: Path, recipe: dict[str, Any], flags: dict[str, str], sets: list[tuple[str, str]], env: dict[str, str]
) -> None:
    path = folder / "r.yaml"
    path.write_bytes(json.dumps(recipe).encode())
    given_flags = {
        name: [text] if "tuple" in str(OPTIONS[name][1].annotation) else text
        for name, text in flags.items()
        if OPTIONS[name][1].annotation is not bool
    }
    judge(Layers([str(path)], env, [f"{OPTIONS[name][0]}.{name}={text}" for name, text in sets], given_flags))


@FUZZ
@given(text=st.one_of(st.text(max_size=80), st.text(alphabet="optimizer:lr \n-[]{}&*!<>|?'\"#%@,1", max_size=80)))
def test_no_text_of_a_recipe_is_a_bug(folder: Path, text: str) -> None:
    path = folder / "r.yaml"
    path.write_bytes(text.encode("utf-8", "replace"))
    judge(Layers([str(path)]))


WORD = st.one_of(
    st.sampled_from([f"--{name.replace('_', '-')}" for name in OPTIONS]),
    st.sampled_from(
        ["--set", "--recipe", "--format", "--dry-run", "--", "-", "-x", "--sglang-x", "--eval-prompt-data"]
    ),
    st.text(alphabet=string.printable, max_size=8),
)
APP: list[typer.Typer] = []


@FUZZ
@given(words=st.lists(WORD, max_size=6), command=st.sampled_from(["train", "validate-config"]))
def test_no_command_line_is_a_bug(folder: Path, words: list[str], command: str) -> None:
    if not APP:
        APP.append(build_app(PLUGINS))
    shown = CliRunner().invoke(APP[0], [command, *words])
    assert shown.exit_code == 2 or (shown.exit_code == 0 and {"-h", "--help", "--show-config"} & set(words)), words
    assert shown.exception is None or isinstance(shown.exception, SystemExit), repr(shown.exception)


@pytest.mark.parametrize("name", OPTIONS)
def test_any_unread_option_leaves_the_rest_judged(folder: Path, name: str) -> None:
    path = folder / "r.yaml"
    path.write_text(f"{OPTIONS[name][0]}:\n  {name}: ${{GONE}}/x\n", "utf-8")
    alone = check_run(PLUGINS, Layers([str(path)]), here=False)
    assert [
        problem.id for problem in alone.errors if problem.option in ("--recipe", f"--{name.replace('_', '-')}")
    ] == ["recipe-variable"]
    flags = {"rm_type": "exakt", "lr": "1", "prompt_data": "gone.jsonl", "hf_checkpoint": "gone"}
    layers = Layers([str(path)], flags={key: text for key, text in flags.items() if key != name})
    found = [problem.id for problem in check_run(PLUGINS, layers).errors]
    assert name in ("rm_type", "custom_rm_path") or "reward-unknown" in found
    # Of prompts, what is judged depends on these options.
    keys = ("prompt_data", "input_key", "label_key", "metadata_key", "tools_key")
    assert name in (*keys, "rollout_max_prompt_len", "overlong_prompts") or "prompt-data-file-missing" in found
