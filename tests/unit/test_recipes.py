"""Every bundled recipe is valid on any machine, with stand-ins for its model and data."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from relax_cli.cli.checked_text import as_text
from relax_cli.config.layers import Layers
from relax_cli.config.recipes import bundled_recipes, describe
from relax_cli.errors import is_about_machine
from relax_cli.models.spec import known_folder, read_spec
from relax_cli.plugin.manager import Plugins
from relax_cli.preflight.check_run import CheckedRun, check_run
from relax_cli.quickstart.task import prepare
from tests.support.cli_app import built_in_plugins
from tests.support.standins import MODELS, prepare_all

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "training" / "text" / "run-qwen35-9B-8xgpu-ppo.sh"
PPO_9B = "qwen35-9B-8xgpu-ppo"
ESTIMATORS = ("ppo", "grpo", "gspo", "cispo", "sapo")
WARNINGS: dict[str, tuple[str, ...]] = dict.fromkeys(bundled_recipes(), ())
"""Ids of the warnings that each recipe is known to give."""


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return prepare_all(tmp_path_factory.mktemp("standins"))


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return built_in_plugins()


Checked = Callable[[str], CheckedRun]


@pytest.fixture(scope="module")
def checked(plugins: Plugins, variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checked]:
    """A bundled recipe's check, made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield cache(lambda name: check_run(plugins, Layers((name,), variables), here=False))


@pytest.mark.parametrize("name", bundled_recipes())
def test_a_bundled_recipe_is_valid_and_its_plan_is_known(checked: Checked, name: str) -> None:
    run = checked(name)
    assert [problem for problem in run.problems if problem.severity == "error"] == []
    assert tuple(problem.id for problem in run.warnings) == WARNINGS[name]
    assert run.plan is not None
    assert run.plan.memory
    assert all(is_about_machine(note) for note in run.notes)
    text = as_text(run, show_origin=False)
    assert max(len(line) for line in text.splitlines() if "fix" not in line) <= 80


@pytest.mark.parametrize("name", bundled_recipes())
def test_a_bundled_recipe_shows_its_plan_anywhere(
    plugins: Plugins, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAX_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run = check_run(plugins, Layers((name,), {}), here=False)
    assert (run.errors, run.warnings) == ((), ())
    assert run.plan is not None
    assert run.plan.memory
    missing = {note.id: note.fix for note in run.notes if note.id.endswith("-missing")}
    if "smollm2" not in name:
        assert {"model-folder-missing", "prompt-data-file-missing"} <= set(missing)
    if "tiny" in name:
        assert set(missing.values()) == {"relax quickstart --prepare-only"}
    here = check_run(plugins, Layers([name], {}), here=True)
    assert set(missing) <= {problem.id for problem in here.errors}


def test_the_bundled_sizes_of_the_quickstart_are_its_own(tmp_path: Path) -> None:
    prepare(tmp_path / "quickstart", seed=1, steps=1)
    folder = tmp_path / "quickstart" / "model"
    known = known_folder(str(folder))
    assert known is not None
    assert read_spec(known) == read_spec(folder)


@pytest.mark.parametrize("name", bundled_recipes())
def test_the_first_line_says_what_a_recipe_is(name: str) -> None:
    first = describe(bundled_recipes()[name])
    assert 30 < len(first) <= 140
    assert first.endswith(".")


def test_every_estimator_has_a_recipe_for_a_cpu_and_for_8_gpus() -> None:
    names = bundled_recipes()
    assert {f"tiny-{e}-cpu" for e in ESTIMATORS} | {f"qwen3-4B-8xgpu-{e}" for e in ESTIMATORS} <= set(names)


@pytest.mark.parametrize("name", [name for name in bundled_recipes() if "gpu" in name])
def test_a_recipe_for_gpus_asks_for_as_many_as_its_name_says(checked: Checked, name: str) -> None:
    run = checked(name)
    model, gpus, estimator = name.rsplit("-", 2)
    count = int(gpus.removesuffix("xgpu"))
    config = run.config
    assert run.plan is not None
    assert run.plan.gpus == count
    assert all(devices in (0, count) for _, devices in config.parallel.resource.values())
    assert config.algorithm.advantage_estimator == estimator
    assert (config.parallel.device, config.parallel.launcher) == ("cuda", "ray")
    folder = Path(config.model.hf_checkpoint).name
    assert folder in MODELS
    assert folder.lower().replace(".", "") == model.lower()


@pytest.mark.parametrize(
    ("section", "option", "value"),
    [
        ("algorithm", "advantage_estimator", "ppo"),
        ("algorithm", "gamma", 1.0),
        ("algorithm", "lambd", 0.95),
        ("algorithm", "eps_clip", 0.2),
        ("algorithm", "eps_clip_high", 0.2),
        ("algorithm", "entropy_coef", 0.0),
        ("algorithm", "use_rollout_logprobs", True),
        ("algorithm", "use_kl_loss", False),
        ("algorithm", "kl_coef", 0.0),
        ("critic", "value_clip", 0.5),
        ("critic", "critic_lr", 1e-5),
        ("optimizer", "lr", 1e-6),
        ("critic", "num_critic_only_steps", 5),
        ("critic", "critic_lr_warmup_iters", 5),
        (
            "parallel",
            "resource",
            {"actor": (1, 8), "critic": (1, 8), "rollout": (1, 8), "advantages": (1, 0)},
        ),
        ("parallel", "colocate", True),
        ("optimizer", "optimizer_cpu_offload", True),
    ],
)
def test_the_9b_recipe_has_the_values_of_the_ppo_page(
    checked: Checked, section: str, option: str, value: object
) -> None:
    assert vars(vars(checked(PPO_9B).config)[section])[option] == value


def test_the_9b_recipe_reads_and_writes_where_the_ppo_page_says(checked: Checked, variables: dict[str, str]) -> None:
    config = checked(PPO_9B).config
    assert config.model.hf_checkpoint == f"{variables['MODEL_DIR']}/Qwen3.5-9B"
    assert config.data.prompt_data == (f"{variables['DATA_DIR']}/dapo-math-17k/dapo-math-17k.jsonl",)
    assert config.eval.eval_prompt_data == (f"aime={variables['DATA_DIR']}/aime-2024/aime-2024.jsonl",)
    for place in (config.checkpoint.save, config.critic.critic_save, config.run.run_dir):
        assert str(place).startswith(f"{variables['EXP_DIR']}/")
    assert config.sglang.sglang_mem_fraction_static is not None
    # SGLang itself takes 0.8 to 0.9, depending on the GPU.
    assert config.sglang.sglang_mem_fraction_static <= 0.7


def test_an_unset_variable_is_named_with_file_and_line(
    plugins: Plugins, variables: dict[str, str], tmp_path: Path
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("checkpoint:\n  save: ${MY_DIR}/actor\nrun:\n  run_dir: ${MY_DIR}/run\n")
    run = check_run(plugins, Layers((PPO_9B, str(own)), variables), here=False)
    assert {problem.id for problem in run.errors} == {"recipe-variable"}
    assert [problem.where.rpartition(" ")[2] for problem in run.errors] == [f"{own}:2", f"{own}:4"]


def test_a_plan_needs_no_variables(plugins: Plugins, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model:\n  hf_checkpoint: ${GONE}/Qwen3-4B\ncheckpoint:\n  save: ${GONE}/actor\n", "utf-8")
    run = check_run(plugins, Layers(("qwen3-4B-8xgpu-grpo", str(recipe))), here=False)
    assert [problem.id for problem in run.errors] == ["recipe-variable", "recipe-variable"]
    assert run.plan is not None
    assert run.plan.memory


@pytest.fixture
def script(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """An environment in which `relax` writes down its arguments, and the file it writes to."""
    log = tmp_path / "calls"
    stand_in = tmp_path / "bin" / "relax"
    stand_in.parent.mkdir()
    stand_in.write_text(
        f'#!{sys.executable}\nimport os, sys\nopen({str(log)!r}, "a").write("\\n".join(sys.argv[1:]) + "\\n--\\n")\n'
        'print("the report")\nsys.exit(int(os.environ.get("EXIT_CODE", "0")) if sys.argv[1] != "train" else 7)\n'
    )
    stand_in.chmod(0o755)
    kept = {n: v for n, v in os.environ.items() if n not in ("MODEL_DIR", "DATA_DIR", "EXP_DIR")}
    return {**kept, "PATH": f"{stand_in.parent}:{os.environ['PATH']}"}, log


FOLDERS = {"MODEL_DIR": "/models", "DATA_DIR": "/data", "EXP_DIR": "/exp"}


@pytest.mark.parametrize("missing", FOLDERS)
def test_the_script_names_an_unset_variable_and_starts_nothing(
    script: tuple[dict[str, str], Path], missing: str
) -> None:
    env, log = script
    folders = FOLDERS | {missing: ""}
    done = subprocess.run([SCRIPT], env=env | folders, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"error: {missing} not set" in done.stderr
    assert not log.exists()


def test_the_script_checks_then_trains_and_passes_arguments_on(script: tuple[dict[str, str], Path]) -> None:
    env, log = script
    words = ["--num-rollout", "2", "--set", "run.run_dir=a b"]
    done = subprocess.run([SCRIPT, *words], env=env | FOLDERS, capture_output=True, text=True)
    # The exit code is that of `relax train`.
    assert done.returncode == 7
    first, second, rest = log.read_text().split("\n--\n")
    assert first.splitlines() == ["validate-config", "--here", "--recipe", PPO_9B, *words]
    assert second.splitlines() == ["train", "--recipe", PPO_9B, *words]
    assert not rest


def test_the_script_reports_a_wrong_configuration_and_stops(
    script: tuple[dict[str, str], Path],
) -> None:
    env, log = script
    done = subprocess.run([SCRIPT], env=env | FOLDERS | {"EXIT_CODE": "2"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "the report" in done.stderr
    assert "train\n" not in log.read_text()
