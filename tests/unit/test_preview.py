"""Reading all data before a launch: memory, Parquet, and a tokenizer that counts as the run's own does."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from relax_cli.config.schema import Config, DataSection, RewardSection, RolloutSection
from relax_cli.data.light_tokenizer import load_light
from relax_cli.data.prompts import Prompt, load_prompts, read_prompts
from relax_cli.data.tokenise import encode_prompt, encoded_text, fitting, load_tokenizer, stop_token_ids
from relax_cli.errors import ConfigError
from relax_cli.plugin.apart import Unanswered
from relax_cli.preflight.data_reader import DataReader
from relax_cli.quickstart.task import MODEL

SECTION = DataSection(label_key="label")
WORDS = [
    "<unk>",
    "<s>",
    "</s>",
    "<|user|>",
    "<|assistant|>",
    "hello",
    "world",
    "user",
    ":",
    '"',
    "{",
    "}",
    "content",
    "\n",
]
TEMPLATES = {
    "plain": "{{ bos_token }}{% for m in messages %}<|user|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "blocks": "{%- for m in messages %}\n  {%- generation -%}\n {{ m.content }} {% endgeneration %}\n{%- endfor %}",
    "json": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
}


def tokenizer_folder(folder: Path, template: str | None) -> Path:
    """A model folder's tokenizer that adds a BOS token to plain text."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(WORDS), "eos_token_id": 2}))
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("inside_config", [False, True])
def test_chats_become_the_ids_that_transformers_gives(tmp_path: Path, name: str, inside_config: bool) -> None:
    folder = tokenizer_folder(tmp_path, TEMPLATES[name])
    if inside_config:
        # Older checkpoints keep it in tokenizer_config.json.
        (folder / "chat_template.jinja").unlink()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATES[name]}))
    chat = [{"role": "user", "content": "hello world"}, {"role": "user", "content": "world é"}]
    own, light = load_tokenizer(folder), load_light(folder)
    for prompt in (Prompt(chat, None, {}, ""), Prompt("hello  world", None, {}, "")):
        expected = encode_prompt(own, prompt, apply_chat_template=True)
        assert encode_prompt(light, prompt, apply_chat_template=True) == expected
    assert stop_token_ids(folder, light) == stop_token_ids(folder, own) == (2,)


def test_plain_text_becomes_the_ids_that_transformers_gives(tmp_path: Path) -> None:
    for folder, text in ((tokenizer_folder(tmp_path, None), "hello <|user|> world"), (MODEL, "37+58=")):
        prompt = Prompt(text, None, {}, "")
        expected = encode_prompt(load_tokenizer(folder), prompt, apply_chat_template=False)
        assert encode_prompt(load_light(folder), prompt, apply_chat_template=False) == expected
    assert load_light(tmp_path / "nowhere") is None


def test_a_refusing_or_absent_template_is_a_problem_with_its_row(tmp_path: Path) -> None:
    prompt = Prompt("hello", None, {}, "data.jsonl:3")
    for template, message in (
        ("{{ raise_exception('no system role') }}", "no system role"),
        (None, "no chat template"),
    ):
        light = load_light(tokenizer_folder(tmp_path / message, template))
        with pytest.raises(ConfigError) as caught:
            encode_prompt(light, prompt, apply_chat_template=True)
        assert message in caught.value.problems[0].message
        assert caught.value.problems[0].where == "data.jsonl:3"


def test_a_damaged_tokenizer_is_a_problem(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, None)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        load_light(folder)
    assert caught.value.problems[0].id == "model-folder"


def test_reading_says_how_far_it_is(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"input": f"p{i}", "label": i}) + "\n" for i in range(5000)))
    seen: list[float] = []
    rows = list(read_prompts(SECTION, str(path), lambda name, part: seen.append(part)))
    assert (len(rows), rows[1]) == (5000, Prompt("p1", "1", {}, f"{path}:2"))
    assert [round(part, 1) for part in seen] == [0.4, 0.8]


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    row = (json.dumps({"input": "x" * 1000, "label": "y"}) + "\n") * 1000
    with path.open("w") as file:
        for _ in range(64):
            file.write(row)
    code = (
        "import resource, sys; from relax_cli.config.schema import DataSection\n"
        "from relax_cli.data.prompts import read_prompts\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "count = sum(1 for _ in read_prompts(DataSection(label_key='label'), sys.argv[1]))\n"
        "print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    count, grown_kb = map(int, done.stdout.split())
    assert count == 64_000
    assert grown_kb < 16_000


def test_one_endless_line_is_refused_without_reading_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_cli.data.formats.MOST_LINE_BYTES", 1000)
    path = tmp_path / "array.jsonl"
    path.write_text(json.dumps({"input": "x" * 2000, "label": "y"}))
    with pytest.raises(ConfigError) as caught:
        load_prompts(SECTION, str(path))
    assert [(p.message, p.where) for p in caught.value.problems] == [("line is too long", f"{path}:1")]


CHAT_TEMPLATE = (
    "{% for m in messages %}{% if loop.first and m.role == 'system' and m.content == 'no' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role in ('system', 'user', 'assistant') %}{{ m.content }} {% endif %}{% endfor %}"
)


def read_all(
    tmp_path: Path,
    rows: list[Any],
    *,
    rm_type: str = "exact",
    chat: bool = False,
    limit: int = 4,
    overlong: Any = "error",
    system: str | None = None,
) -> Any:
    """The reader after all rows, and the problems it reported."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config(
        data=DataSection(prompt_data=str(path), label_key="label", apply_chat_template=chat, system_prompt=system),
        reward=RewardSection(rm_type=rm_type),
        rollout=RolloutSection(rollout_max_prompt_len=limit, overlong_prompts=overlong),
    )
    folder = tmp_path / "model"
    if not folder.exists():
        tokenizer_folder(folder, CHAT_TEMPLATE)
    reader = DataReader(config, folder, None, None)
    try:
        reader(config.data, str(path))
    except ConfigError as error:
        return reader, list(error.problems)
    return reader, []


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


LATE_FAULTS = {
    "too long": ({"input": "hello " * 9, "label": "1"}, "prompt-too-long", {}),
    "null label": ({"input": "hello", "label": None}, "prompt-data-row", {}),
    "blank label": ({"input": "hello", "label": " "}, "label-unusable", {}),
    "no mathematics": ({"input": "hello", "label": "???"}, "label-unusable", {"rm_type": "math"}),
    "a word": ({"input": "hello", "label": "yes"}, "label-words", {"rm_type": "math"}),
    "not reasoning-gym": ({"input": "hello", "label": "1"}, "label-metadata", {"rm_type": "reasoning_gym"}),
    "chat without template": ({"input": turns(("user", "hello")), "label": "1"}, "prompt-encoding", {}),
    "template refuses": (
        {"input": turns(("system", "no"), ("user", "hello")), "label": "1"}, "prompt-encoding", {"chat": True}
    ),
    "template leaves out": (
        {"input": turns(("user", "hello"), ("human", "world")), "label": "1"}, "chat-message-left-out", {"chat": True}
    ),
    "ends with the answer": (
        {"input": turns(("user", "hello"), ("assistant", "1")), "label": "1"}, "prompt-data-row", {"chat": True}
    ),
}  # fmt: skip


def test_prompts_among_bad_rows_are_not_counted(tmp_path: Path) -> None:
    for rows in ([{"input": "hello"}] * 3, [{"input": "hello", "label": "1"}, {"input": "hello"}]):
        reader, problems = read_all(tmp_path, rows)
        assert (len(problems), reader.summaries) == (1, {})


@pytest.mark.parametrize("kind", LATE_FAULTS)
def test_the_last_row_is_checked_like_the_first(tmp_path: Path, kind: str) -> None:
    row, rule, options = LATE_FAULTS[kind]
    facts = dict.fromkeys(("source_dataset", "question", "answer"), "x")
    good = {"input": "hello", "label": "1", "metadata": facts}
    assert read_all(tmp_path, [good] * 1500, **options)[1] == []
    _, found = read_all(tmp_path, [*[good] * 1500, row, good], **options)
    assert [(p.id, p.where) for p in found] == [(rule, f"{tmp_path / 'data.jsonl'}:1501")]
    _, found = read_all(tmp_path, [*[good] * 1500, row, row], **options)
    assert [p.count for p in found] == [2]


def test_the_fix_for_long_prompts_holds_for_all_of_them(tmp_path: Path) -> None:
    rows = [{"input": "hello " * words, "label": "1"} for words in (1, 5, 9, 7)]
    reader, (problem,) = read_all(tmp_path, rows)
    assert (problem.count, problem.got, problem.where) == (3, "10 tokens", f"{tmp_path / 'data.jsonl'}:2")
    assert problem.fix.startswith("--rollout-max-prompt-len 10,")
    (summary,) = reader.summaries.values()
    assert (summary.prompts, summary.lengths, summary.longest) == (4, (2, 6, 10, 8), f"{tmp_path / 'data.jsonl'}:3")


def test_long_prompts_are_dropped_before_and_in_the_run(tmp_path: Path) -> None:
    rows = [{"input": "hello " * words, "label": "1"} for words in (1, 5, 3, 7)]
    reader, (warning,) = read_all(tmp_path, rows, overlong="drop")
    (summary,) = reader.summaries.values()
    assert (summary.prompts, summary.lengths, summary.longest) == (2, (2, 4), f"{tmp_path / 'data.jsonl'}:3")
    assert (warning.id, warning.severity) == ("prompts-overlong", "warning")
    assert warning.message == "2 of 4 prompts are longer than 4 tokens and are dropped"
    fits = partial(fitting, tokenizer=load_tokenizer(tmp_path / "model"), limit=4, apply_chat_template=False)
    kept = load_prompts(SECTION, [f"{tmp_path / 'data.jsonl'}*1"], fits)
    assert ([prompt.source[-2:] for prompt in kept], kept.mixture) == ([":1", ":3"], ((2, 1.0),))
    assert [p.id for p in read_all(tmp_path, rows[1:2], overlong="drop")[1]] == ["prompt-data-empty"]


def test_cut_prompts_are_counted_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("relax_cli.preflight.data_reader.LEAST_BYTES", 0)
    rows = [{"input": "hello " * words, "label": "1"} for words in (1, 5)]
    for _ in range(2):
        # The second time from the cache.
        reader, (warning,) = read_all(tmp_path, rows, overlong="truncate-left")
        assert warning.message == "1 of 2 prompts are longer than 4 tokens and are cut to their last 4 tokens"
        assert next(iter(reader.summaries.values())).lengths == (2, 4)


def test_a_system_prompt_precedes_chats_without_one(tmp_path: Path) -> None:
    template = "{{ kind }}{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}"
    folder = tokenizer_folder(tmp_path / "model", template)
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "hello"}]
    rows = [{"input": content, "label": "1"} for content in ("hello", own[1:], own)]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DataSection(label_key="label", system_prompt="be brief", chat_template_kwargs={"kind": "K "})
    for tokenizer in (load_light(folder), load_tokenizer(folder)):
        texts = [encoded_text(tokenizer, p, apply_chat_template=True) for p in load_prompts(section, str(path))]
        assert texts == ["K system:be brief user:hello "] * 2 + ["K system:mine user:hello "]
    (task,) = load_prompts(section, "reasoning-gym:chain_sum?size=1")
    assert (task.system, task.template) == ("be brief", {"kind": "K "})


def test_older_tokenizer_files_are_counted_like_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = pre_tokenizers.ByteLevel.alphabet()
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=letters, special_tokens=["<|endoftext|>"])
    made.train_from_iterator(["hello world, hello all"] * 9, trainer)
    folder = tmp_path / "model"
    folder.mkdir()
    made.model.save(str(folder))
    words = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    rows = [{"input": text, "label": "1"} for text in ("hello", "hello world", "1 + 1 = 2?")]
    own = load_tokenizer(folder)
    assert not (folder / "tokenizer.json").exists()
    for chat in (False, True):
        reader, problems = read_all(tmp_path, rows, chat=chat, limit=99)
        assert problems == []
        prompts = load_prompts(SECTION, str(tmp_path / "data.jsonl"))
        expected = tuple(len(encode_prompt(own, prompt, apply_chat_template=chat)) for prompt in prompts)
        assert next(iter(reader.summaries.values())).lengths == expected
    monkeypatch.setattr("relax_cli.data.light_tokenizer.DEADLINE", 1)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(words | {"chat_template": endless}))
    assert [(p.id, p.where) for p in read_all(tmp_path, rows, chat=True)[1]] == [("tokenizer-trial", str(folder))]


@pytest.mark.parametrize("trial", [Unanswered("takes more than 1 s"), []])
def test_prompts_that_cannot_be_counted_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trial: Any) -> None:
    def apart(*_: str, **__: Any) -> Any:
        if isinstance(trial, Exception):
            raise trial
        return trial

    monkeypatch.setattr("relax_cli.data.light_tokenizer.run_apart", apart)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "vocab.txt").write_text("hello")
    reader, (warning,) = read_all(tmp_path, [{"input": "hello", "label": "1"}])
    assert (warning.id, warning.severity) == ("prompts-not-counted", "warning")
    assert [(s.prompts, s.lengths) for s in reader.summaries.values()] == [(1, ())]


def test_older_tokenizer_files_that_do_not_load_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.model").write_text("no model")
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    _, (problem,) = read_all(tmp_path, [{"input": "hello", "label": "1"}])
    assert (problem.id, problem.severity) == ("model-folder", "error")


def test_tools_need_the_chat_template(tmp_path: Path) -> None:
    prompt = Prompt("hello", None, {}, "", template={"tools": [{"name": "add"}]})
    folder = tokenizer_folder(tmp_path, "{{ tools[0].name }} {{ messages[0].content }}")
    for tokenizer in (load_light(folder), load_tokenizer(folder)):
        assert encoded_text(tokenizer, prompt, apply_chat_template=True) == "add hello"
        with pytest.raises(ConfigError, match="tools need the chat template"):
            encoded_text(tokenizer, prompt, apply_chat_template=False)


def test_a_template_without_the_system_role_is_said(tmp_path: Path) -> None:
    tokenizer_folder(tmp_path / "model", "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    _, found = read_all(tmp_path, [{"input": "hello", "label": "1"}], chat=True, system="be brief")
    assert [p.id for p in found] == ["chat-message-left-out"]


def test_padding_and_truncation_of_the_file_are_off(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, None)
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    saved["padding"] = {
        "strategy": {"Fixed": 60}, "direction": "Right", "pad_id": 1, "pad_type_id": 0, "pad_token": "<s>",
        "pad_to_multiple_of": None,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    prompt = Prompt("hello world hello world", None, {}, "")
    expected = [1, 5, 6, 5, 6]
    light = load_light(folder)
    assert light is not None
    assert encode_prompt(light, prompt, apply_chat_template=False) == expected
    assert light.encode_many([str(prompt.content)], add_special_tokens=True) == [expected]
    assert encode_prompt(load_tokenizer(folder), prompt, apply_chat_template=False) == expected


def test_a_large_file_without_faults_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("relax_cli.preflight.data_reader.LEAST_BYTES", 0)
    rows = [{"input": "hello world", "label": "1"}, {"input": "hello", "label": "2"}]
    first, _ = read_all(tmp_path, rows)
    reads = []

    def read(*arguments: Any) -> Any:
        reads.append(1)
        return read_prompts(*arguments)

    monkeypatch.setattr("relax_cli.preflight.data_reader.read_prompts", read)
    again, _ = read_all(tmp_path, rows)
    assert (again.summaries, reads) == (first.summaries, [])
    # Whatever it depends on changes: it is read again.
    assert read_all(tmp_path, rows, limit=5)[1] == []
    assert read_all(tmp_path, rows, rm_type="math")[1] == []
    assert read_all(tmp_path, [*rows, {"input": "hello", "label": " "}])[1][0].id == "label-unusable"
    assert read_all(tmp_path, [*rows, {"input": "hello", "label": " "}])[1][0].id == "label-unusable"
    assert len(reads) == 4


class TestParquet:
    """Needs pyarrow, which the `test` extra brings."""

    @staticmethod
    def write(folder: Path, rows: list[dict[str, Any]]) -> str:
        pyarrow = pytest.importorskip("pyarrow", reason="needs the `parquet` extra")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "data.parquet")
        return str(folder / "data.parquet")

    def test_rows_become_the_prompts_that_json_lines_give(self, tmp_path: Path) -> None:
        chat = [{"role": "user", "content": "hi"}]
        rows: list[dict[str, Any]] = [
            {"input": chat, "label": "né", "metadata": {"level": 1}},
            {"input": chat, "label": "2", "metadata": None},
        ]
        found = load_prompts(SECTION, self.write(tmp_path, rows))
        assert [(p.content, p.label, p.metadata) for p in found] == [(chat, "né", {"level": 1}), (chat, "2", {})]
        assert found[1].source.endswith("data.parquet: row 2")

    def test_bad_rows_and_missing_columns_are_named(self, tmp_path: Path) -> None:
        spec = self.write(tmp_path, [{"input": "x", "label": "y"}, {"input": None, "label": "y"}])
        with pytest.raises(ConfigError) as caught:
            load_prompts(SECTION, spec)
        assert [p.where for p in caught.value.problems] == [f"{spec}: row 2"]
        with pytest.raises(ConfigError) as caught:
            load_prompts(DataSection(input_key="prompt"), spec)
        assert caught.value.problems[0].fix == "--input-key input"

    def test_a_damaged_file_is_one_problem(self, tmp_path: Path) -> None:
        spec = self.write(tmp_path, [{"input": "x", "label": "y"}])
        Path(spec).write_bytes(b"PAR1 and nothing else")
        with pytest.raises(ConfigError) as caught:
            load_prompts(SECTION, spec)
        assert [p.id for p in caught.value.problems] == ["prompt-data-unreadable"]


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError) as caught:
        load_prompts(SECTION, str(tmp_path / "data.parquet"))
    (problem,) = caught.value.problems
    assert (problem.id, problem.fix) == ("parquet-missing", "pip install 'relax-cli[parquet]'")
