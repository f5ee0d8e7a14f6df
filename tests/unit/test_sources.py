"""Items of `--prompt-data`: files, globs, folders, slices, weights, and the order of a mixture."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from pathlib import Path

import pyarrow
import pytest
from pyarrow import ipc

from relax_cli.checkpoint.fingerprint import dataset_fingerprint
from relax_cli.config.schema import Config, DataSection
from relax_cli.data.order import PromptOrder
from relax_cli.data.prompts import load_prompts
from relax_cli.data.sources import Source, source_of
from relax_cli.errors import ConfigError, Problem
from relax_cli.preflight.inputs import RunInputs, read_inputs
from relax_cli.preflight.rules.data import prompt_data_source
from relax_cli.preflight.rules.registry import RuleContext

SECTION = DataSection()


def rows(tmp_path: Path, name: str, *words: str) -> str:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"input": word}) + "\n" for word in words))
    return str(path)


def words(*specs: str) -> list[object]:
    return [prompt.content for prompt in load_prompts(SECTION, specs)]


def refusal(*specs: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        load_prompts(SECTION, specs)
    (problem,) = caught.value.problems
    return problem


def saved(folder: Path, *parts: list[str]) -> str:
    """A folder as `Dataset.save_to_disk` writes it."""
    folder.mkdir(parents=True)
    files = []
    for number, part in enumerate(parts):
        files.append({"filename": f"data-{number:05}-of-{len(parts):05}.arrow"})
        table = pyarrow.Table.from_pylist([{"input": word} for word in part])
        with ipc.new_stream(str(folder / files[-1]["filename"]), table.schema) as stream:
            stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": None}))
    return str(folder)


@pytest.mark.parametrize(
    ("spec", "source"),
    [
        ("a.jsonl", Source("a.jsonl")),
        ("a.jsonl@[0:1000]", Source("a.jsonl", (0, 1000, None))),
        ("a.jsonl@[5:]*0.3", Source("a.jsonl", (5, None, None), 0.3)),
        ("data/*.jsonl@[::2]", Source("data/*.jsonl", (None, None, 2))),
        ("a.jsonl*2", Source("a.jsonl", weight=2.0)),
        ("part[0-9].jsonl", Source("part[0-9].jsonl")),
    ],
)
def test_an_item_is_a_place_a_slice_and_a_weight(spec: str, source: Source) -> None:
    assert source_of(spec) == source


def test_a_file_whose_name_looks_like_a_slice_is_that_file(tmp_path: Path) -> None:
    assert words(rows(tmp_path, "a.jsonl@[0:1]", "x", "y")) == ["x", "y"]


def test_files_globs_and_slices_are_read_in_order(tmp_path: Path) -> None:
    first, second = rows(tmp_path, "p/b.jsonl", "c", "d", "e"), rows(tmp_path, "p/a.jsonl", "a", "b")
    assert words(first, second) == ["c", "d", "e", "a", "b"]
    assert words(f"{tmp_path}/p/*.jsonl") == ["a", "b", "c", "d", "e"]
    assert words(f"{tmp_path}/**/*.jsonl@[1:4]") == ["b", "c", "d"]
    assert words(f"{first}@[0:2]", f"{first}@[2:]") == ["c", "d", "e"]
    assert [prompt.source for prompt in load_prompts(SECTION, f"{first}@[2:3]")] == [f"{first}:3"]


def test_a_slice_also_takes_part_of_a_generated_task() -> None:
    assert words("reasoning-gym:chain_sum?size=8@[2:4]") == words("reasoning-gym:chain_sum?size=8")[2:4]


def test_a_folder_saved_by_datasets_is_read_without_it(tmp_path: Path) -> None:
    folder = saved(tmp_path / "set" / "train", ["a", "b"], ["c"])
    assert words(folder) == ["a", "b", "c"]
    assert words(f"{folder}@[1:]") == ["b", "c"]
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert refusal(str(tmp_path / "set")).fix == f"--prompt-data {folder}"


def test_an_arrow_file_of_either_format_is_read(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([{"input": "a", "more": 1}])
    for number, new in enumerate((ipc.new_file, ipc.new_stream)):
        path = str(tmp_path / f"{number}.arrow")
        with new(path, table.schema) as writer:
            writer.write_table(table)
        assert words(path) == ["a"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("other.txt", "", "it has no state.json"),
        ("state.json", "{", "cannot be read"),
        ("state.json", "[]", "cannot be read"),
        ("state.json", '{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}', "an index"),
    ],
)
def test_a_folder_of_another_kind_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    problem = refusal(str(tmp_path))
    assert problem.id == "prompt-data-unreadable"
    assert message in problem.message


@pytest.mark.parametrize(
    ("spec", "id"),
    [
        ("a.jsonl@[-5:]", "prompt-data-source"),
        ("a.jsonl@[3]", "prompt-data-source"),
        ("a.jsonl@[::0]", "prompt-data-source"),
        ("a.jsonl*0", "prompt-data-source"),
        ("none/*.jsonl", "prompt-data-file-missing"),
        ("a.jsonl@[7:]", "prompt-data-empty"),
    ],
)
def test_an_item_without_a_meaning_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, id: str
) -> None:
    rows(tmp_path, "a.jsonl", "x")
    monkeypatch.chdir(tmp_path)
    assert refusal(spec).id == id


def test_one_item_without_a_weight_among_others_is_refused_once(tmp_path: Path) -> None:
    one, two = rows(tmp_path, "a.jsonl", "x"), rows(tmp_path, "b.jsonl", "y")
    config = Config.model_validate({"data": {"prompt_data": [f"{one}*3", two]}})
    (problem,) = prompt_data_source.problems(RuleContext(config, RunInputs()))
    assert (problem.id, problem.got, problem.fix) == ("prompt-data-source", two, f"--prompt-data '{two}*1'")
    assert refusal(f"{one}*3", two).message == problem.message
    broken = Config.model_validate({"data": {"prompt_data": [f"{one}@[x]"]}})
    assert [p.id for p in read_inputs(broken).problems] == []
    assert [p.id for p in prompt_data_source.problems(RuleContext(broken, RunInputs()))] == ["prompt-data-source"]


def test_a_bad_row_of_one_of_several_files_is_named(tmp_path: Path) -> None:
    good, bad = rows(tmp_path, "a.jsonl", "x"), tmp_path / "b.jsonl"
    bad.write_text("{")
    config = Config.model_validate({"data": {"prompt_data": [good, str(bad)]}})
    read = read_inputs(config)
    assert [p.where for p in read.problems] == [f"{bad}:1"]
    assert read.prompts is None
    bad.write_text('{"input": "y"}')
    assert read_inputs(config).prompts == 2


def test_a_mixture_gives_each_set_its_share_of_every_epoch() -> None:
    order = PromptOrder(1000, 7, True, ((900, 1.0), (100, 3.0)))
    assert order.shares() == [250, 750]
    drawn = [order.rows(rollout, 100) for rollout in range(40)]
    first = list(chain(*drawn[:10]))
    assert sum(row < 900 for row in first) == 250
    # Every batch is mixed, and no prompt comes again before all of its set were used.
    assert all(10 <= sum(row < 900 for row in batch) <= 40 for batch in drawn)
    counts = Counter(chain(*drawn))
    assert {counts[row] for row in range(900)} == {1, 2}
    assert {counts[row] for row in range(900, 1000)} == {30}


def test_a_mixture_continues_where_it_was_whatever_the_batch() -> None:
    order = PromptOrder(30, 1, True, ((20, 0.5), (10, 0.5)))
    whole = order.rows(0, 120)
    assert list(chain(*(order.rows(i, 8) for i in range(15)))) == whole
    assert PromptOrder(30, 2, True, order.mixture).rows(0, 120) != whole


def test_an_unshuffled_mixture_is_interleaved_in_file_order() -> None:
    assert PromptOrder(6, 1, False, ((4, 2.0), (2, 1.0))).rows(0, 6) == [0, 4, 1, 2, 5, 3]


def test_a_small_weight_still_has_a_place_in_every_epoch() -> None:
    assert PromptOrder(12, 0, True, ((10, 1e6), (1, 1.0), (1, 1.0))).shares() == [10, 1, 1]


def test_weights_are_read_with_the_sizes_of_their_sets(tmp_path: Path) -> None:
    one, two = rows(tmp_path, "a.jsonl", *"abc"), rows(tmp_path, "b.jsonl", *"de")
    assert load_prompts(SECTION, [f"{one}*3", f"{two}@[:1]*1"]).mixture == ((3, 3.0), (1, 1.0))
    assert load_prompts(SECTION, [one, two]).mixture == ()


def test_the_fingerprint_follows_content_slices_and_weights(tmp_path: Path) -> None:
    one, two, same = rows(tmp_path, "a.jsonl", "x"), rows(tmp_path, "b.jsonl", "y"), rows(tmp_path, "c.jsonl", "x")
    variants: list[list[str]] = [[one], [one, two], [two, one], [f"{one}@[:1]"], [f"{one}*1", f"{two}*2"]]
    assert len({dataset_fingerprint(specs) for specs in variants}) == len(variants)
    assert dataset_fingerprint([same, two]) == dataset_fingerprint([one, two])
    assert dataset_fingerprint([one, str(tmp_path / "none.jsonl")]) is None
