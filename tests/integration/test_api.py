"""relax from Python is the command line: the same options, checks, errors and files."""

from __future__ import annotations

import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_cli import api
from relax_cli.errors import ConfigError

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.py"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the example defines; its files are in `folder`."""
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return {"folder": folder, **runpy.run_path(str(NOTEBOOK))}


def test_the_notebook_trains_and_reads_its_run(notebook: dict[str, Any]) -> None:
    assert notebook["checked"].problems == ()
    result, done = notebook["result"], notebook["done"]
    assert (result.completed, result.summary["steps"], result.resume) == (True, 3, None)
    assert result.run.metrics == done.metrics
    assert list(notebook["rewards"]) == [1, 2, 3]
    assert notebook["config"].batch.num_rollout == done.config["batch"]["num_rollout"] == 3
    assert len(notebook["best"]["advantages"]) == len(notebook["best"]["response_token_ids"])


def test_records_become_tables(notebook: dict[str, Any]) -> None:
    pytest.importorskip("pandas", reason="pip install pandas")
    table = api.to_pandas(notebook["done"].metrics)
    assert list(table["step"]) == [0, 1, 2, 3]
    assert table["phase_seconds/critic"].notna().sum() == 3
    assert len(api.to_pandas(notebook["done"].samples(3))) == len(notebook["done"].samples(3))


def test_a_run_folder_in_use_is_refused(notebook: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(notebook["folder"])
    with pytest.raises(ConfigError) as caught:
        api.train("tiny-ppo-cpu", **notebook["run"])
    assert [problem.id for problem in caught.value.problems] == ["run-dir-in-use"]


def test_options_are_those_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_SEED", "7")
    monkeypatch.chdir(tmp_path)
    config = api.load_config("tiny-ppo-cpu", lr=1e-3, save=Path("ck"), critic_lr=None, resource={"actor": [1, 2]})
    assert (config.optimizer.lr, config.run.seed, config.checkpoint.save) == (1e-3, 7, "ck")
    assert config.critic.critic_save == "ck-critic"
    assert config.parallel.resource["actor"] == (1, 2)
    assert api.load_config("tiny-ppo-cpu", rm_type="null").reward.rm_type is None
    numbers = api.load_config(lr=np.float64(0.5), num_rollout=np.int64(3), prompt_data=[Path("a"), "b"])
    assert (numbers.optimizer.lr, numbers.batch.num_rollout) == (0.5, 3)
    assert numbers.data.prompt_data == ("a", "b")


def test_what_is_wrong_comes_with_its_fix() -> None:
    with pytest.raises(ConfigError) as caught:
        api.check(learning_rate=1e-6, num_rollouts=3)
    assert [problem.fix for problem in caught.value.problems] == ["use --lr", "use --num-rollout"]
    with pytest.raises(ConfigError) as caught:
        api.load_config(num_rollout="many")
    assert "invalid-value" in {problem.id for problem in caught.value.problems}
    with pytest.raises(ConfigError, match="no-such-recipe"):
        api.load_config("no-such-recipe")
    for wrong in (["tiny-ppo-cpu"], {"lr": 1}, None):
        with pytest.raises(TypeError):
            api.load_config(wrong)  # type: ignore[arg-type]


def test_another_thread_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool, pytest.raises(RuntimeError, match="main thread"):
        pool.submit(api.train, "tiny-ppo-cpu", run_dir=tmp_path / "run").result()
    assert not (tmp_path / "run").exists()
    assert "reward-missing" in {problem.id for problem in api.check(here=False).errors}
