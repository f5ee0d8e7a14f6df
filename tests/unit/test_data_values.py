"""Values, encodings and shapes of data files: each has a stated meaning, or is refused by file and row."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import subprocess
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from relax_cli.config.schema import DataSection
from relax_cli.data import formats, rows
from relax_cli.data.prompts import Prompt, load_prompts
from relax_cli.errors import ConfigError, Problem

SECTION = DataSection(label_key="label")
LINE = '{"input": "12+34=", "label": "46"}\n'


def jsonl(folder: Path, *lines: str) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", errors="surrogatepass")
    return str(path)


def parquet(folder: Path, rows: Any, schema: Any = None) -> str:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the `parquet` extra")
    from pyarrow import parquet

    table = rows if schema is None else pyarrow.Table.from_pylist(rows, schema=schema)
    table = pyarrow.Table.from_pylist(rows) if isinstance(table, list) else table
    parquet.write_table(table, folder / "data.parquet")
    return str(folder / "data.parquet")


def problem_of(spec: str, section: DataSection = SECTION) -> Problem:
    with pytest.raises(ConfigError) as caught:
        load_prompts(section, spec)
    (problem,) = caught.value.problems
    assert problem.message
    assert problem.fix
    assert all(part.isprintable() for part in (problem.message, problem.got, problem.where, problem.fix))
    return problem


LABELS = {
    '"46"': "46",
    "46": "46",
    "46.0": "46",
    "-0.0": "0",
    "4.60": "4.6",
    "1e-7": "0.0000001",
    "1e22": "10000000000000000000000",
    "1.5e10": "15000000000",
    "12345678901234567890.50": "12345678901234567890.5",
    "0.10000000000000001": "0.1",
    "10.0": "10",
    '" a\\n"': " a\n",
    '"\\ud835\\udc00"': "\U0001d400",
    '""': "",
    "true": "true",
    "false": "false",
    '[1, 2.5, "a"]': [1, 2.5, "a"],
    '{"a": [null]}': {"a": [None]},
}
BAD_LABELS = ["NaN", "Infinity", "-Infinity", "1e999", "null", "[1e999]", '"\\ud835"', '"a\\udc00b"', '["\\ud835"]',
              "9" * 5000]  # fmt: skip


@pytest.mark.parametrize("literal", LABELS)
def test_a_label_is_the_text_people_write_or_its_json(tmp_path: Path, literal: str) -> None:
    (prompt,) = load_prompts(SECTION, jsonl(tmp_path, f'{{"input": "x", "label": {literal}}}'))
    assert prompt.label == LABELS[literal]


@pytest.mark.parametrize("literal", ["NaN", "true", "false", "null", "[1, null]", '{"a": true}'])
def test_a_value_is_shown_as_the_file_spells_it(tmp_path: Path, literal: str) -> None:
    assert problem_of(jsonl(tmp_path, f'{{"input": {literal}, "label": "y"}}')).got == literal
    assert problem_of(jsonl(tmp_path, f'{{"input": {literal}, "label": "y"}}')).got == literal


@pytest.mark.parametrize("literal", BAD_LABELS)
def test_a_label_without_meaning_is_refused(tmp_path: Path, literal: str) -> None:
    spec = jsonl(tmp_path, '{"input": "x", "label": "y"}', f'{{"input": "x", "label": {literal}}}')
    assert problem_of(spec).where == f"{spec}:2"


PARQUET_LABELS = [
    (46.0, "46"),
    (Decimal("18.90"), "18.9"),
    (Decimal("46.00"), "46"),
    (Decimal("1234567890123456789012345678901234.5"), "1234567890123456789012345678901234.5"),
    (date(2026, 1, 2), "2026-01-02"),
    (datetime(2026, 1, 2, 3, 4, 5), "2026-01-02T03:04:05"),
    (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00"),
    (time(12, 30), "12:30:00"),
    (b"46", "46"),
    (2**62, str(2**62)),
    (True, "true"),
    ([1.0], [1.0]),
    ({"a": 1}, {"a": 1}),
]


@pytest.mark.parametrize(("value", "label"), PARQUET_LABELS)
def test_a_parquet_label_becomes_the_same(tmp_path: Path, value: Any, label: Any) -> None:
    (prompt,) = load_prompts(SECTION, parquet(tmp_path, [{"input": "x", "label": value}]))
    assert prompt.label == label


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_a_short_float_is_read_as_it_was_written(tmp_path: Path, kind: str) -> None:
    numpy, pyarrow = pytest.importorskip("numpy"), pytest.importorskip("pyarrow")
    schema = pyarrow.schema([("input", pyarrow.string()), ("label", getattr(pyarrow, kind)())])
    values = getattr(numpy, kind)
    spec = parquet(tmp_path, [{"input": "x", "label": values(value)} for value in (0.1, 46.0, 2.5)], schema)
    assert [prompt.label for prompt in load_prompts(SECTION, spec)] == ["0.1", "46", "2.5"]


def test_short_floats_inside_of_values_are_read_as_written(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    short = pyarrow.float32()
    kind = pyarrow.struct([("truth", pyarrow.list_(short)), ("wide", pyarrow.float64()), ("half", pyarrow.float16())])
    schema = pyarrow.schema([("input", pyarrow.string()), ("label", kind)])
    label = {"truth": [0.1, None], "wide": 0.10000000149011612, "half": pytest.importorskip("numpy").float16(0.1)}
    (prompt,) = load_prompts(SECTION, parquet(tmp_path, [{"input": "x", "label": label}], schema))
    assert prompt.label == {"truth": [0.1, None], "wide": 0.10000000149011612, "half": 0.1}


def test_short_floats_of_a_dictionary_or_a_map_are_as_written(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    short, path = pyarrow.float32(), tmp_path / "x.arrow"
    for label, value in (
        (pyarrow.array([0.1], short).dictionary_encode(), "0.1"),
        (pyarrow.array([[("a", 0.1)]], pyarrow.map_(pyarrow.string(), short)), {"a": 0.1}),
    ):
        table = pyarrow.table({"input": ["x"], "label": label})
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        (prompt,) = load_prompts(SECTION, str(path))
        assert prompt.label == value


def test_a_key_is_not_offered_by_its_first_part(tmp_path: Path) -> None:
    line = json.dumps({"input": "x", "model": None})
    problem = problem_of(jsonl(tmp_path, line), SECTION.model_copy(update={"label_key": "model.truth"}))
    assert "with the key that the rows have" in problem.fix


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"\xff", timedelta(1), [timedelta(1)], None])
def test_a_parquet_label_without_meaning_is_refused(tmp_path: Path, value: Any) -> None:
    spec = parquet(tmp_path, [{"input": "x", "label": value}])
    assert problem_of(spec).where == f"{spec}: row 1"


def test_a_column_of_floats_with_a_gap_names_the_gap(tmp_path: Path) -> None:
    spec = parquet(tmp_path, [{"input": "x", "label": value} for value in (46.0, None, float("nan"))])
    with pytest.raises(ConfigError) as caught:
        load_prompts(SECTION, spec)
    assert [p.where for p in caught.value.problems] == [f"{spec}: row 2", f"{spec}: row 3"]


METADATA = [
    (datetime(2026, 1, 2), "2026-01-02T00:00:00"),
    (Decimal("1.5"), 1.5),
    (Decimal("2.0"), 2),
    (b"x", "x"),
    (float("nan"), None),
    ([1.0, float("nan")], [1.0, None]),
    ({"deep": {"when": date(2026, 1, 2)}}, {"deep": {"when": "2026-01-02"}}),
    (True, True),
]


@pytest.mark.parametrize(("value", "plain"), METADATA)
def test_metadata_is_plain_json(tmp_path: Path, value: Any, plain: Any) -> None:
    (prompt,) = load_prompts(SECTION, parquet(tmp_path, [{"input": "x", "label": "y", "metadata": {"k": value}}]))
    assert prompt.metadata == {"k": plain}
    json.dumps(prompt.metadata, allow_nan=False)


@pytest.mark.parametrize("value", [b"\xff", float("inf"), timedelta(1), ["a", "\ud835"], {"\ud835": 1}])
def test_metadata_without_json_form_is_refused_by_key(tmp_path: Path, value: Any) -> None:
    section = DataSection(label_key="label")
    row = {"input": "x", "label": "y", "metadata": {"outer": {"price": value}}}
    found = rows.prompt_of_row(section, row, "data.parquet: row 1")
    assert isinstance(found, Problem)
    assert "outer.price" in found.message


def test_an_arrow_map_is_an_object(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    schema = pyarrow.schema(
        [("input", pyarrow.string()), ("label", pyarrow.string()),
         ("metadata", pyarrow.map_(pyarrow.string(), pyarrow.int64()))]
    )  # fmt: skip
    spec = parquet(tmp_path, [{"input": "x", "label": "y", "metadata": [("a", 1), ("b", 2)]}], schema)
    assert load_prompts(SECTION, spec)[0].metadata == {"a": 1, "b": 2}


@pytest.mark.parametrize("metadata", ["[1]", '"text"', "1", "true", "[" * 100 + "]" * 100])
def test_metadata_that_is_not_an_object_is_refused(tmp_path: Path, metadata: str) -> None:
    line = f'{{"input": "x", "label": "y", "metadata": {metadata}}}'
    assert "metadata" in problem_of(jsonl(tmp_path, line)).message


def chat(*messages: dict[str, Any]) -> str:
    return json.dumps({"input": list(messages), "label": "y"})


USER = {"role": "user", "content": "1+2="}
BAD_CHATS = [
    ([], "no messages"),
    ([{"role": "user"}], "message 1"),
    ([{"content": "x"}], "message 1"),
    ([{"from": "human", "value": "x"}], "message 1"),
    (["text"], "message 1"),
    ([USER, {"role": "user", "content": None}], "message 2"),
    ([USER, {"role": None, "content": "x"}], "message 2"),
    ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "'content' is not text, but a list"),
    ([{**USER, "tool_calls": {"id": 1}}], "'tool_calls' is not text, but an object"),
    ([{**USER, "weight": 1}], "'weight'"),
    ([{"role": "user", "content": "\ud835"}], "surrogate"),
    ([USER, {"role": "assistant", "content": "3"}], "ends with the assistant"),
    ([{"role": "assistant", "content": "3"}], "ends with the assistant"),
    ([USER, {"role": "assistant", "content": ""}], "ends with the assistant"),
]


@pytest.mark.parametrize(("messages", "message"), BAD_CHATS)
def test_a_chat_that_is_no_prompt_is_refused(tmp_path: Path, messages: list[Any], message: str) -> None:
    spec = jsonl(tmp_path, chat(USER), chat(*messages))
    problem = problem_of(spec)
    assert problem.where == f"{spec}:2"
    assert message in problem.message


@pytest.mark.parametrize("text", [json.dumps([USER]), str([USER]), ' [ { "content": "x", "role": "user"}]'])
def test_a_chat_as_text_is_refused(tmp_path: Path, text: str) -> None:
    assert "the text of chat messages" in problem_of(jsonl(tmp_path, json.dumps({"input": text, "label": "y"}))).message


def test_a_pointer_of_lfs_is_named_whatever_it_stands_for(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    path.write_bytes(REFUSED["lfs"])
    assert problem_of(str(path)).fix == "git lfs pull"


def test_nulls_in_chats_are_dropped_from_both_formats(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "7", "name": None}, {**USER, "name": "u"}]
    expected = [{"role": "system", "content": "7"}, {**USER, "name": "u"}]
    both = [jsonl(tmp_path, chat(*messages)), parquet(tmp_path, [{"input": messages, "label": "y"}])]
    assert [load_prompts(SECTION, spec)[0].content for spec in both] == [expected, expected]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("tools", "given"),
    [
        (None, None),
        ([], None),
        ("", None),
        ([{"name": "search", "unit": None}], [{"name": "search"}]),
        ('[{"name": "search"}]', [{"name": "search"}]),
        ("search", "is text, but not JSON"),
        (["search"], "is not a list of JSON objects"),
    ],
)
def test_tools_are_for_the_chat_template(tmp_path: Path, form: str, tools: Any, given: Any) -> None:
    row = {"input": [USER], "label": "y", "tools": tools}
    spec = jsonl(tmp_path, json.dumps(row)) if form == "jsonl" else parquet(tmp_path, [row])
    if isinstance(given, str):
        assert problem_of(spec).message == f"'tools' {given}"
        return
    section = DataSection(label_key="label", chat_template_kwargs={"brief": True})
    (prompt,) = load_prompts(section, spec)
    assert prompt.content == [USER]
    assert prompt.template == {"brief": True} | ({} if given is None else {"tools": given})


def test_calls_of_tools_stay_in_a_chat(tmp_path: Path) -> None:
    calls = [{"function": {"name": "add", "arguments": {"a": 1, "b": None}}}]
    chatted = [USER, {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "3"}]
    (prompt,) = load_prompts(SECTION, jsonl(tmp_path, chat(*chatted)))
    kept = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    assert prompt.content == [USER, kept, {"role": "tool", "content": "3"}]


@pytest.mark.parametrize(
    ("value", "reward"), [(None, None), ("f1", "f1"), (0.5, "'reward' is not text"), ({}, "not text")]
)
def test_a_row_may_choose_its_reward(tmp_path: Path, value: Any, reward: str | None) -> None:
    spec = jsonl(tmp_path, json.dumps({"input": "x", "label": "y", "reward": value}))
    if value is None or isinstance(value, str):
        assert load_prompts(SECTION, spec)[0].reward == reward
    else:
        assert str(reward) in problem_of(spec).message


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('{"input": "x", "label": "47", "label": "46"}', "label"),
        ('{"input": "1", "input": "2", "label": "5"}', "input"),
        ('{"input": "x", "label": "y", "metadata": {"a": 1, "a": 2}}', "a"),
        ('{"input": "x", "label": "y", "unused": [{"b": 1, "b": 1}]}', "b"),
        ('{"input": "x", "label": "y", "\\u001b[2J": 1, "\\u001b[2J": 1}', "x1b[2J"),
    ],
)
def test_a_key_given_twice_is_refused(tmp_path: Path, line: str, key: str) -> None:
    spec = jsonl(tmp_path, LINE.strip(), line)
    problem = problem_of(spec)
    assert problem.where == f"{spec}:2"
    assert key in problem.message


KEYS = [
    ({"input": "x", "label": "y"}, {"label_key": "lable"}, "--label-key label"),
    ({"input": "x", "answer": "y"}, {"label_key": "label"}, "--label-key answer"),
    ({"input": "x", "extra": "y"}, {"label_key": "label"}, None),
    ({"label": "x", "text": "y"}, {"label_key": "label"}, None),
    ({"prompt": "x", "label": "y"}, {"label_key": "label"}, "--input-key prompt"),
    ({"prompt": "x", "rm": {"ground_truth": "y"}}, {"input_key": "prompt", "label_key": "ground_truth"},
     "--label-key rm.ground_truth"),
    ({"the input ": "x", "label": "y"}, {"input_key": "the input"}, "--input-key 'the input '"),
    ({"input": "x"}, {"label_key": "label"}, None),
    ({"input": "x"}, {"label_key": "inputs"}, None),
]  # fmt: skip


@pytest.mark.parametrize(("row", "keys", "fix"), KEYS)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_wrong_key_offers_the_nearest_once(
    tmp_path: Path, row: dict[str, Any], keys: dict[str, str], fix: str | None, form: str
) -> None:
    spec = jsonl(tmp_path, *[json.dumps(row)] * 9) if form == "jsonl" else parquet(tmp_path, [row] * 9)
    problem = problem_of(spec, DataSection(**keys))
    assert problem.count == 9
    assert all(key in problem.got for key in row)
    assert problem.fix == fix if fix else problem.fix.endswith("with the key that the rows have for it")


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_key_with_dots_leads_into_objects(tmp_path: Path, form: str) -> None:
    row = {"prompt": "x", "reward_model": {"ground_truth": "46"}, "a.b": "plain", "unused": 1}
    spec = jsonl(tmp_path, json.dumps(row)) if form == "jsonl" else parquet(tmp_path, [row])
    for key, label in (("reward_model.ground_truth", "46"), ("a.b", "plain")):
        assert load_prompts(DataSection(input_key="prompt", label_key=key), spec)[0].label == label


PACKED = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("suffix", [*PACKED, "zst"])
@pytest.mark.parametrize("name", ["data.jsonl.{}", "data.{}", "data.jsonl"])
def test_compressed_files_are_read_whatever_their_name(tmp_path: Path, suffix: str, name: str) -> None:
    path = tmp_path / name.format(suffix)
    if suffix == "zst":
        pyarrow = pytest.importorskip("pyarrow")
        with pyarrow.output_stream(str(path), compression="zstd") as stream:
            stream.write(LINE.encode() * 3)
    else:
        path.write_bytes(PACKED[suffix](LINE.encode() * 3))
    assert [prompt.source for prompt in load_prompts(SECTION, str(path))] == [f"{path}:{n}" for n in (1, 2, 3)]


@pytest.mark.parametrize("suffix", PACKED)
def test_a_damaged_compressed_file_is_one_problem(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data.jsonl.{suffix}"
    path.write_bytes(PACKED[suffix](os.urandom(5000).hex().encode() + b"\n")[:-40])
    with pytest.raises(ConfigError) as caught:
        load_prompts(SECTION, str(path))
    assert caught.value.problems[0].id in ("prompt-data-unreadable", "prompt-data-row")


KEYS_OF_A_ROW = ("input", "label", "metadata")
REFUSED = {
    "utf-16": LINE.encode("utf-16"),
    "utf-16-le": LINE.encode("utf-16-le"),
    "utf-16-be": LINE.encode("utf-16-be"),
    "utf-32": LINE.encode("utf-32"),
    "zip": b"PK\x03\x04" + bytes(60),
    "arrow": b"ARROW1\x00\x00",
    "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "page": b"<!DOCTYPE html>\n<html></html>",
    "array": b'[\n  {"input": "x", "label": "y"}\n]',
    "array-bom": b'\xef\xbb\xbf[{"input": "x", "label": "y"}]',
    "pretty": b'{\n  "input": "x",\n  "label": "y"\n}\n',
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_kinds_of_files_are_refused_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(REFUSED[kind])
    assert problem_of(str(path)).id == "prompt-data-unreadable"


@pytest.mark.parametrize(
    ("name", "text"),
    [("a b.csv", "\ufeffinput,label\r\nx,046\r\n'y',\"4,6\"\r\n"), ("b.TSV", "input\tlabel\nx\t046\n'y'\t4,6\n")],
)
def test_a_table_of_text_is_named_and_its_fix_works(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, "utf-8", newline="")
    fix = problem_of(str(tmp_path / name)).fix
    assert subprocess.run(fix, shell=True, cwd=tmp_path, timeout=60, check=False).returncode == 0
    read = [(prompt.content, prompt.label) for prompt in load_prompts(SECTION, str(tmp_path / "NEW.jsonl"))]
    assert read == [("x", "046"), ("'y'", "4,6")]


@pytest.mark.parametrize("place", ["column", "map"])
def test_a_key_given_twice_is_refused_in_parquet(tmp_path: Path, place: str) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the `parquet` extra")
    text, pairs = pyarrow.array(["x"]), pyarrow.array([[("a", 1), ("a", 2)]], pyarrow.map_("string", "int64"))
    columns = {"column": ([text] * 3, ["input", "label", "label"]), "map": ([text, text, pairs], [*KEYS_OF_A_ROW])}
    problem = problem_of(parquet(tmp_path, pyarrow.Table.from_arrays(*columns[place])))
    assert "twice" in problem.message


@pytest.mark.parametrize(
    "body", [b"\xef\xbb\xbf" + LINE.encode(), LINE.replace("\n", "\r\n").encode(), LINE.encode()[:-1]]
)
def test_a_bom_and_other_line_ends_are_accepted(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "data.jsonl").write_bytes(body)
    assert load_prompts(SECTION, str(tmp_path / "data.jsonl"))[0].label == "46"


@pytest.mark.parametrize(
    "line", [b"\x1b[2J\x1b]0;pwned\x07", b"\x9b31m", b'{"\x1b[2J": 1}', b'{"input": "\x07"', b"\xff\xfe\x00"]
)
def test_control_bytes_of_a_file_are_spelled_out(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "data.jsonl").write_bytes(LINE.encode() + line + b"\n")
    problem_of(str(tmp_path / "data.jsonl"))


@pytest.mark.parametrize("suffix", [".parquet", ".PARQUET", ".jsonl", ""])
def test_parquet_is_known_by_its_content(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"other{suffix}"
    Path(parquet(tmp_path, [{"input": "x", "label": "y"}])).rename(path)
    assert load_prompts(SECTION, str(path))[0].label == "y"


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder.parquet").mkdir()
    for name in (tmp_path / "pipe", tmp_path / "folder.parquet", "/dev/zero"):
        assert problem_of(str(name)).id == "prompt-data-unreadable"
    assert problem_of(str(tmp_path / "absent")).id == "prompt-data-file-missing"


def test_absurd_sizes_have_limits_with_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = jsonl(tmp_path, json.dumps({"input": "x" * 2000, "label": "y"}))
    chats = tmp_path / "chat.jsonl"
    chats.write_text(chat({"role": "user", "content": "x" * 2000}))
    assert load_prompts(SECTION, spec)
    monkeypatch.setattr(rows, "MOST_CHARACTERS", 1000)
    assert "characters" in problem_of(spec).message
    assert "characters" in problem_of(str(chats)).message
    monkeypatch.setattr(formats, "MOST_ROWS", 3)
    for name in (jsonl(tmp_path, *[LINE.strip()] * 4), jsonl(tmp_path, *[""] * 9)):
        assert problem_of(name).id == "prompt-data-too-large"
    assert problem_of(parquet(tmp_path, [{"input": "x", "label": "y"}] * 4)).id == "prompt-data-too-large"


def test_a_parquet_bomb_is_refused_at_once(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1_500_000, pyarrow.int32()), ["x"])
    spec = parquet(tmp_path, pyarrow.table({"input": column, "label": column}))
    assert Path(spec).stat().st_size < 15_000
    assert problem_of(spec).id == "prompt-data-too-large"


def test_columns_that_nothing_needs_are_not_read(tmp_path: Path) -> None:
    spec = parquet(tmp_path, [{"input": "x", "label": "y", "wait": timedelta(1), "raw": b"\xff"}])
    assert load_prompts(SECTION, spec) == [Prompt("x", "y", {}, f"{spec}: row 1")]


def test_the_files_of_the_page_on_data_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text("utf-8")
    files = [f"{number}.jsonl" for number, _ in enumerate(re.findall(r"```json\n(.*?)```", page, re.DOTALL))]
    for name, text in zip(files, re.findall(r"```json\n(.*?)```", page, re.DOTALL), strict=True):
        Path(name).write_text(text, "utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    read = [[prompt.label for prompt in load_prompts(SECTION, name)] for name in (*files, "sums.parquet")]
    assert read == [["46", "57"], ["46"], ["46", "57"]]
