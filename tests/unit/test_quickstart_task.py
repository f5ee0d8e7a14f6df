"""The quickstart task and its folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from relax_cli import EnvRow
from relax_cli.config.schema import Config
from relax_cli.data.envs.load import USER_FILE
from relax_cli.data.prompts import load_prompts
from relax_cli.errors import ConfigError
from relax_cli.quickstart.task import MODEL, prepare, prompt, split
from relax_cli.quickstart.tool.calculator import Calculator
from tests.support import local_runs


def test_the_split_covers_all_two_digit_pairs_once() -> None:
    train, heldout = split()
    assert (len(train), len(heldout)) == (7600, 500)
    assert set(train) | set(heldout) == {(x, y) for x in range(10, 100) for y in range(10, 100)}


def test_the_split_is_the_same_every_time() -> None:
    assert split() == split()
    # The shipped model was trained on this split.
    assert split()[1][:3] == [(22, 13), (90, 94), (17, 91)]


def test_the_prompt_is_the_sum_to_finish() -> None:
    assert prompt(37, 58) == "37+58="


def test_prepare_writes_a_folder_that_passes_schema_and_loader(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "quickstart"
    prepare(folder, seed=7, steps=12)
    text = (folder / "recipe.yaml").read_text().replace("${RECIPE_DIR}", str(folder))
    config = Config.model_validate(YAML(typ="safe", pure=True).load(text))

    assert (config.batch.num_rollout, config.eval.eval_interval) == (12, 12)
    assert (config.run.seed, config.rollout.rollout_seed) == (7, 7)
    assert config.batch.samples_per_step == 128
    assert Path(config.model.hf_checkpoint, "model.safetensors").is_file()
    assert len(load_prompts(config.data, config.data.prompt_data)) == 7600
    heldout = load_prompts(config.data, config.eval.eval_prompt_data[0].removeprefix("heldout="))
    assert all(eval(str(row.content)[:-1]) == int(row.label or "") for row in heldout)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["quickstart"]


def test_the_recipe_leaves_no_placeholder(tmp_path: Path) -> None:
    prepare(tmp_path, seed=1, steps=2)
    assert not re.search(r"\b(STEPS|SEED)\b", (tmp_path / "recipe.yaml").read_text())


def test_preparing_an_untouched_folder_again_renews_the_recipe(tmp_path: Path) -> None:
    prepare(tmp_path, seed=1, steps=40)
    prepare(tmp_path, seed=2, steps=3)
    assert "num_rollout: 3" in (tmp_path / "recipe.yaml").read_text()


@pytest.mark.parametrize(
    ("name", "content", "got"),
    [
        ("notes.txt", "mine", "also contains notes.txt"),
        ("run/metrics.jsonl", "{}", "also contains run/metrics.jsonl"),
        ("data/train.jsonl", "{}", "has changed data/train.jsonl"),
        ("recipe.yaml", "optimizer: {lr: 1}", "has changed recipe.yaml"),
    ],
)
def test_a_folder_in_use_is_refused_and_left_alone(tmp_path: Path, name: str, content: str, got: str) -> None:
    prepare(tmp_path, seed=1, steps=2)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        prepare(tmp_path, seed=1, steps=9)
    assert caught.value.problems[0].got == got
    assert (tmp_path / name).read_text() == content
    assert "num_rollout: 9" not in (tmp_path / "recipe.yaml").read_text()


def test_an_empty_folder_is_filled_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, linked = tmp_path / "here", tmp_path / "linked"
    here.mkdir()
    linked.mkdir()
    (tmp_path / "link").symlink_to(linked)
    monkeypatch.chdir(here)
    for folder in (Path(), tmp_path / "link"):
        prepare(folder, seed=1, steps=2)
        assert sorted(path.name for path in folder.iterdir()) == ["data", "model", "recipe.yaml"]
    assert (tmp_path / "link").is_symlink()
    assert Path.cwd().samefile(here)


def test_a_folder_of_someone_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="already in use"):
        prepare(tmp_path, seed=1, steps=2)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        prepare(tmp_path / "file" / "quickstart", seed=1, steps=2)
    with pytest.raises(ConfigError, match="cannot write"):
        prepare(tmp_path / "file", seed=1, steps=2)


def test_the_shipped_model_is_small_and_complete() -> None:
    sizes = {file.name: file.stat().st_size for file in MODEL.iterdir()}
    assert set(sizes) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(sizes.values()) < 5_000_000
    assert json.loads((MODEL / "config.json").read_text())["model_type"] == "qwen3"


def test_the_shipped_model_has_half_the_skill() -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    from relax_cli.data.tokenise import load_tokenizer

    torch.manual_seed(0)
    tokenizer, model = load_tokenizer(MODEL), AutoModelForCausalLM.from_pretrained(MODEL)
    heldout = split()[1]
    prompts = torch.tensor(tokenizer([prompt(x, y) for x, y in heldout]).input_ids)
    output = model.generate(prompts, do_sample=True, top_k=0, max_new_tokens=4)[:, prompts.shape[1] :]
    texts = tokenizer.batch_decode(output, skip_special_tokens=True)
    right = sum(text == str(x + y) for text, (x, y) in zip(texts, heldout, strict=True))
    assert 0.38 <= right / len(heldout) <= 0.52


def test_the_tool_task_is_a_folder_of_its_own(tmp_path: Path) -> None:
    prepare(tmp_path / "tool", seed=7, steps=12, task="tool")
    text = (tmp_path / "tool" / "recipe.yaml").read_text().replace("${RECIPE_DIR}", str(tmp_path / "tool"))
    config = Config.model_validate(YAML(typ="safe", pure=True).load(text))
    assert (config.batch.num_rollout, config.run.seed, config.reward.rm_type) == (12, 7, None)
    assert config.episode.env is not None
    assert USER_FILE.check(config.episode.env) == []
    heldout, train = (load_prompts(config.data, str(tmp_path / f"tool/data/{n}.jsonl")) for n in ("heldout", "train"))
    assert (len(heldout), len(train)) == (500, 7600)
    assert not {row.content for row in heldout} & {row.content for row in train}
    prepare(tmp_path / "tool", seed=8, steps=3, task="tool")
    with pytest.raises(ConfigError, match="already in use"):
        prepare(tmp_path / "tool", seed=7, steps=12)


def test_the_calculator_answers_calls_and_judges_answers() -> None:
    game = Calculator()
    assert game.reset(EnvRow("12+30=", "42", {}, 0)) == "12+30="
    assert game.step("!12+30") == ("42=", 0.0, False)
    assert game.step("!12+") == ("?=", 0.0, False)
    assert game.step("42")[1:] == (1.0, True)
    assert game.step("41")[1:] == (0.0, True)


def test_the_tool_models_first_steps_are_clumsy(tmp_path: Path) -> None:
    """It asks sometimes, and is right when it asks and reads well."""
    prepare(tmp_path / "tool", seed=1, steps=1, task="tool")
    done = local_runs.train(
        tmp_path / "tool", tmp_path / "run", str(tmp_path / "tool" / "recipe.yaml"), "batch.num_rollout=1",
        "checkpoint.save=null", "critic.critic_save=null",
    )  # fmt: skip
    (samples,) = done.samples
    calls = [sample for sample in samples if sample["turns"][0]["response"].startswith("!")]
    assert 0.05 < len(calls) / len(samples) < 0.3
    assert 0.01 < done.metrics[0]["reward/mean"] < 0.2
    assert any(sample["reward"] for sample in calls)
