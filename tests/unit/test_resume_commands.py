"""`check-resume`, `validate-config` and `train` say the same about where a run starts; `list` and `verify`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from relax_cli.checkpoint import layout
from relax_cli.checkpoint.fingerprint import identify
from relax_cli.cli.app import build_app
from relax_cli.config.layers import Layers
from relax_cli.config.schema import Config
from relax_cli.plugin.manager import load_plugins
from relax_cli.preflight.check_run import check_run
from tests.support.checkpoints import save, save_release

Relax = Callable[..., Result]


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    return build_app(load_plugins())


@pytest.fixture
def relax(app: typer.Typer) -> Relax:
    """A command line, run in this process."""
    return lambda *words: CliRunner().invoke(app, list(words))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """An actor and a critic at iteration 3."""
    return save(tmp_path / "a", "actor", 3), save(tmp_path / "c", "critic", 3)


def test_check_resume_shows_the_pair_and_exits_0_or_3(relax: Relax, tmp_path: Path, pair: tuple[str, str]) -> None:
    actor, critic = pair
    words = ("checkpoint", "check-resume", "--load", actor)
    done = relax(*words, "--critic-load", critic, "--format", "json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0
    assert (found["ok"], found["verdict"], found["iteration"], found["next_rollout_id"]) == (True, "resume", 3, 3)
    assert found["critic"] == {"path": critic, "tracker": 3, "iteration": 3, "complete": True, "role": "critic"}
    assert found["loads"]["critic"] == {"path": f"{critic}/iter_0000003", "weights_only": False}
    assert "both continue with step 4" in relax(*words, "--critic-load", critic).stdout

    alone = relax(*words, "--format", "json")
    assert alone.exit_code == 3
    shown = json.loads(alone.stdout)
    assert (shown["verdict"], shown["next_rollout_id"], shown["loads"]) == ("refuse", None, {})
    assert shown["problems"][0]["id"] == "resume-critic-lost"
    assert shown["fix"]
    allowed = json.loads(relax(*words, "--critic-init-from-actor", "--format", "json").stdout)
    assert allowed["loads"]["critic"] == {"path": f"{actor}/iter_0000003", "weights_only": True}
    no_critic = save(tmp_path / "g", "actor", 5, has_critic=False)
    assert relax("checkpoint", "check-resume", "--load", no_critic).exit_code == 0


def test_check_resume_shows_weights(relax: Relax, tmp_path: Path) -> None:
    weights = save_release(tmp_path / "w")
    words = ("checkpoint", "check-resume", "--load", weights)
    found = json.loads(relax(*words, "--format", "json").stdout)
    assert (found["verdict"], found["iteration"], found["next_rollout_id"]) == ("weights-only", None, 0)
    assert found["actor"] == {"path": weights, "tracker": "release", "iteration": None, "complete": True, "role": None}
    assert found["loads"]["actor"] == {"path": f"{weights}/release", "weights_only": True}
    text = relax(*words)
    assert text.exit_code == 0
    assert "weights only" in text.stdout
    assert "a critic, where the run has one" in text.stdout


def test_flipped_bits_are_seen_those_of_large_ones_by_deep(
    relax: Relax, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, critic = pair
    shard = Path(critic) / "iter_0000003/__0_0.distcp"
    shard.write_text(shard.read_text().swapcase())
    words = ("checkpoint", "check-resume", "--load", actor, "--critic-load", critic)
    assert relax(*words).exit_code == 3
    monkeypatch.setattr(layout, "MOST_HASHED_BYTES", 0)
    assert relax(*words).exit_code == 0
    deep = relax(*words, "--deep", "--format", "json")
    assert deep.exit_code == 3
    assert json.loads(deep.stdout)["critic"]["complete"] is False
    assert "has changed since it was written" in relax(*words, "--deep").stderr
    assert relax("checkpoint", "verify", critic).exit_code == 3
    assert relax("checkpoint", "verify", actor).exit_code == 0


def test_list_says_what_is_complete_and_what_is_latest(relax: Relax, tmp_path: Path) -> None:
    folder = save(tmp_path / "a", "actor", 2, 4)
    (tmp_path / "a/iter_0000002/__0_0.distcp").unlink()
    rows = json.loads(relax("checkpoint", "list", folder, "--format", "json").stdout)
    assert [(row["iteration"], row["complete"], row["latest"]) for row in rows] == [(2, False, False), (4, True, True)]
    assert "__0_0.distcp is missing" in relax("checkpoint", "list", folder).stdout


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relax: Relax) -> Path:
    """A folder with the quickstart's model, data and recipe."""
    monkeypatch.chdir(tmp_path)
    assert relax("quickstart", "--prepare-only").exit_code == 0
    return tmp_path


PPO = ("--recipe", "tiny-ppo-cpu")


def recipe_config() -> Config:
    """The bundled recipe's configuration."""
    return check_run(load_plugins(), Layers(["tiny-ppo-cpu"]), skip_files=True).config


def saved_run(task: Path, iteration: int, **changes: Any) -> tuple[str, str]:
    """The pair that a run of the bundled recipe would save at an iteration."""
    config = recipe_config()
    meta = identify(config, Path(config.model.hf_checkpoint)) | changes
    return save(task / "a", "actor", iteration, **meta), save(task / "c", "critic", iteration, **meta)


def verdicts(relax: Relax, *words: str) -> tuple[str, list[str]]:
    """What `validate-config` says, and that `train` ends the same way before it writes anything."""
    shown = json.loads(relax("validate-config", *PPO, *words, "--format", "json").stdout)
    start = shown["plan"]["steps"]["start"]
    ids = [problem["id"] for problem in shown["problems"] if problem["severity"] == "error"]
    if start["verdict"] == "refuse":
        ended = relax("train", *PPO, *words, "--run-dir", "never")
        assert ended.exit_code == 3, ended.output
        assert all(rule in ended.stderr for rule in ids)
        assert not Path("never").exists()
    text = relax("validate-config", *PPO, *words).stdout
    assert start["text"] in " ".join(text.split())
    return start["verdict"], ids


def test_validate_config_and_train_decide_as_check_resume(relax: Relax, task: Path) -> None:
    assert verdicts(relax) == ("cold-start", [])
    actor, critic = saved_run(task, 3)
    load, save_to = ("--load", actor), ("--save", actor, "--critic-save", critic)
    assert verdicts(relax, *load, "--critic-load", critic, *save_to) == ("resume", [])
    assert verdicts(relax, *load, "--save", "x", "--critic-save", "y") == ("refuse", ["resume-critic-lost"])
    from_actor = (*load, "--critic-init-from-actor", "--save", "x", "--critic-save", "y")
    assert verdicts(relax, *from_actor) == ("resume", [])
    both = (*load, "--critic-load", critic, *save_to)
    assert verdicts(relax, *both, "--num-rollout", "2") == ("refuse", ["resume-nothing-left"])
    assert verdicts(relax, *both, "--num-rollout", "3") == ("resume", [])
    for folder in ("nonsense", "quickstart/model", "quickstart/data"):
        verdict, ids = verdicts(relax, "--load", folder, "--save", "x", "--critic-save", "y")
        assert (verdict, ids[0]) in {("refuse", "resume-folder-missing"), ("refuse", "resume-not-a-save-folder")}
    first = ("--load", "x", "--critic-load", "y", "--save", "x", "--critic-save", "y")
    assert verdicts(relax, *first) == ("cold-start", [])
    assert verdicts(relax, *both, "--rollout-seed", "9") == ("resume", [])
    strict = verdicts(relax, *both, "--rollout-seed", "9", "--strict")
    assert (strict[0], "resume-data-order" in strict[1]) == ("refuse", True)


def test_a_resumed_plan_goes_on_at_the_iteration(relax: Relax, task: Path) -> None:
    actor, critic = saved_run(task, 3)
    words = ("--load", actor, "--critic-load", critic, "--save", actor, "--critic-save", critic)
    shown = json.loads(relax("validate-config", *PPO, *words, "--format", "json").stdout)
    steps = shown["plan"]["steps"]
    assert (steps["first_rollout"], steps["start"]["next_rollout_id"]) == (3, 3)
    assert steps["start"]["critic"] == {"path": f"{critic}/iter_0000003", "weights_only": False}
    without = json.loads(relax("validate-config", *PPO, *words, "--skip-files", "--format", "json").stdout)
    assert without["plan"]["steps"]["start"] is None


def test_weights_are_shown_as_the_start_of_a_run(relax: Relax, task: Path) -> None:
    weights = save_release(task / "w")
    verdict, ids = verdicts(relax, "--load", weights, "--save", "x", "--critic-save", "y")
    assert (verdict, ids) == ("weights-only", [])


def test_check_resume_compares_only_model_and_tokenizer(relax: Relax, task: Path) -> None:
    actor, critic = saved_run(task, 3)
    model = recipe_config().model.hf_checkpoint
    words = ("checkpoint", "check-resume", "--load", actor, "--critic-load", critic)
    same = relax(*words, "--hf-checkpoint", model)
    assert same.exit_code == 0
    assert f"model and tokenizer are those of {model}" in same.stdout
    shutil.copytree(model, "other")
    config = json.loads(Path("other/config.json").read_text())
    deeper = {"num_hidden_layers": 9, "layer_types": ["full_attention"] * 9}
    Path("other/config.json").write_text(json.dumps(config | deeper))
    Path("other/tokenizer.json").write_text("{}")
    other = relax(*words, "--hf-checkpoint", "other", "--format", "json")
    assert other.exit_code == 3
    found = json.loads(other.stdout)
    assert [p["id"] for p in found["problems"]] == ["resume-other-model", "resume-other-tokenizer"]
    # What is compared is the run's, not the folders' state.
    assert found["actor"]["complete"]
    missing = relax(*words, "--hf-checkpoint", "gone")
    assert (missing.exit_code, "model-folder-missing" in missing.stderr) == (2, True)


@pytest.mark.parametrize(("size", "code"), [(1, 0), (2, 0), (3, 3)])
def test_check_resume_says_whether_the_model_can_be_shared_out(relax: Relax, task: Path, size: int, code: int) -> None:
    actor, critic = saved_run(task, 3, model_shape={"num_heads": 4, "num_kv_heads": 2})
    words = ("checkpoint", "check-resume", "--load", actor, "--critic-load", critic)
    done = relax(*words, "--tensor-model-parallel-size", str(size), "--format", "json")
    assert done.exit_code == code
    found = json.loads(done.stdout)
    assert found["model"]["saved_parallel"] == {"tensor_parallel": 1, "data_parallel": 1}
    assert {p["id"] for p in found["problems"]} == (set() if code == 0 else {"tensor-parallel-indivisible"})


@pytest.mark.parametrize(
    ("name", "codes"),
    [("nope", (2, 2)), ("model", (3, 3)), ("a/iter_0000003", (3, 3)), ("empty", (0, 3)), ("a", (0, 0))],
)
def test_list_and_verify_say_what_is_no_save_folder(
    relax: Relax, tmp_path: Path, name: str, codes: tuple[int, int]
) -> None:
    save(tmp_path / "a", "actor", 3)
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "model" / file).write_text("{}")
    done = [relax("checkpoint", command, str(tmp_path / name)) for command in ("list", "verify")]
    assert tuple(result.exit_code for result in done) == codes
    expected = {"nope": "no folder", "model": "leads to a model", "a/iter_0000003": "leads to one checkpoint"}
    assert expected.get(name, "") in done[0].stderr
