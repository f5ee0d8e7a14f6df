"""The folder of a run: a name of its own, and a record that is a recipe again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_cli.config.layers import Layers
from relax_cli.engine import run_folder
from relax_cli.engine.run import prepare_run, run_trainer, start_notes
from relax_cli.engine.run_folder import new_run_folder, run_record
from relax_cli.engine.stopping import StopRequest
from relax_cli.engine.trainer import RunReport
from relax_cli.errors import ConfigError
from relax_cli.plugin.manager import Plugins, load_plugins
from relax_cli.preflight.check_run import CheckedRun, check_run
from relax_cli.tracking.run_files import write_config

SECRET = "hunter2-xyzzy"


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()


def check(plugins: Plugins, *recipes: str, sets: tuple[str, ...] = (), **flags: object) -> CheckedRun:
    return check_run(plugins, Layers(recipes, {}, sets, flags), skip_files=True)


def test_runs_of_one_second_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder.time, "strftime", lambda form: "20260101-000000")
    made = [str(new_run_folder("ppo")) for _ in range(3)]
    assert made == [f"runs/ppo-20260101-000000{suffix}" for suffix in ("", "-2", "-3")]
    assert all(Path(name).is_dir() for name in made)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").touch()
    with pytest.raises(ConfigError) as caught:
        new_run_folder("ppo")
    assert caught.value.problems[0].id == "run-folder-unwritable"


def test_the_record_of_a_run_is_a_recipe_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugins: Plugins
) -> None:
    monkeypatch.chdir(tmp_path)
    sets = ("sapo.sapo_tau_pos=2", "rollout.rollout_stop=['a b']", "batch.num_rollout=null", "batch.num_epoch=3")
    checked = check(plugins, "tiny-ppo-cpu", sets=sets, gamma="0.5", run_dir="r")
    config, _ = prepare_run(checked)
    config = config.model_copy(update={"batch": config.batch.model_copy(update={"num_rollout": 7})})
    path = write_config(tmp_path / "r", run_record(checked, config))
    written = json.loads(path.read_text("utf-8"))
    assert written["command"][:4] == ["relax", "train", "--recipe", "tiny-ppo-cpu"]
    assert {"python", "torch", "ray", "megatron-core"} <= written["versions"].keys()
    again = check(plugins, str(path))
    assert again.errors == ()
    expected = config.model_copy(update={"run": config.run.model_copy(update={"run_dir": None})})
    batch = expected.batch.model_copy(update={"num_epoch": 1})
    assert again.config.model_dump() == expected.model_copy(update={"batch": batch}).model_dump()


def test_a_secret_of_the_record_has_to_be_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugins: Plugins
) -> None:
    monkeypatch.chdir(tmp_path)
    checked = check(plugins, rm_type="remote", rm_url=f"http://me:{SECRET}@h/j")
    path = write_config(tmp_path / "r", run_record(checked, prepare_run(checked)[0]))
    assert SECRET not in path.read_text("utf-8")
    again = check(plugins, str(path))
    assert [(p.id, p.option) for p in again.errors] == [("recipe-secret", "--rm-url")]
    assert check(plugins, str(path), rm_url="http://h/j").errors == ()


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), RuntimeError("CUDA out of memory")])
def test_any_failure_of_a_run_says_how_to_resume_it(plugins: Plugins, tmp_path: Path, error: Exception) -> None:
    checked = check(plugins, "tiny-ppo-cpu", run_dir="r", load="a", critic_load="b")

    class Failing:
        config, report = prepare_run(checked)[0], RunReport(first=3)

        def run(self) -> None:
            raise error

    trainer: Any = Failing()
    with pytest.raises(type(error)) as caught:
        run_trainer(trainer, tmp_path, StopRequest(print), checked)
    assert "--load a" in caught.value.__notes__[-1]


def test_a_run_that_saves_nothing_says_so_at_its_start(plugins: Plugins) -> None:
    assert any("no checkpoints will be saved" in note for note in start_notes(check(plugins)))
    assert not any("no checkpoints" in note for note in start_notes(check(plugins, save="c")))
