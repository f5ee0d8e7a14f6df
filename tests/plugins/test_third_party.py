"""Two strangers' packages, built as wheels and installed into an environment of their own: a good one and a broken one.

Nothing is downloaded: the new environment sees the packages of the one that runs the tests.
"""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from relax_cli.plugin.scaffold import write_package
from relax_cli.quickstart.task import prepare

BUILT_IN = {"ppo", "grpo", "gspo", "cispo", "sapo"}
RESOURCE = '{"actor": [1, 1], "rollout": [1, 1]}'


def call(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command with nothing in its environment that would lead it elsewhere."""
    kept = {name: v for name, v in os.environ.items() if not name.startswith(("RELAX_", "PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=kept, timeout=300)


def succeed(*command: str, cwd: Path | None = None) -> str:
    """Standard output of a command that must succeed."""
    done = call(*command, cwd=cwd)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Source folders of `rloo`, as `relax plugins new` writes it, and of `sick`, which raises when it is imported."""
    folder = tmp_path_factory.mktemp("packages")
    for name in ("rloo", "sick"):
        write_package(name, folder / name, taken={})
    init = folder / "sick" / "relax_sick" / "__init__.py"
    init.write_text("raise RuntimeError('no licence for this machine')\n" + init.read_text())
    return {name: folder / name for name in ("rloo", "sick")}


@pytest.fixture(scope="module")
def python(packages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Interpreter of a new environment with both wheels installed."""
    wheels = tmp_path_factory.mktemp("wheels")
    offline = ("--quiet", "--no-deps", "--no-index")
    succeed(
        sys.executable, "-m", "pip", "wheel", *offline, "--no-build-isolation", "-w", str(wheels),
        *map(str, packages.values()),
    )  # fmt: skip
    assert sorted(path.name for path in wheels.iterdir()) == [
        "relax_rloo-0.1.0-py3-none-any.whl",
        "relax_sick-0.1.0-py3-none-any.whl",
    ]
    root = tmp_path_factory.mktemp("environment")
    venv.create(root, with_pip=False)
    interpreter = str(root / "bin" / "python")
    own = succeed(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # addsitedir, unlike a plain line, also reads the .pth files there: an editable install is one.
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (Path(own) / "packages_of_the_tests.pth").write_text("\n".join(lines) + "\n")
    succeed(
        sys.executable, "-m", "pip", "--python", interpreter, "install", *offline, *map(str, sorted(wheels.iterdir()))
    )
    return interpreter


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, data and recipe of the quickstart."""
    folder = tmp_path_factory.mktemp("task") / "quickstart"
    prepare(folder, seed=1, steps=2)
    return folder


def relax(python: str, command: str, task: Path, out: Path, *options: str) -> list[str]:
    """`relax train` or `relax validate-config`: two steps of the quickstart's task without a critic; nothing is
    evaluated or saved."""
    unset = ["checkpoint.save=null", "critic.critic_save=null", "eval.eval_prompt_data=[]", "eval.eval_interval=null"]
    return [
        *(python, "-m", "relax_cli", command, "--recipe", str(task / "recipe.yaml"), "--run-dir", str(out)),
        *(word for item in (*unset, "critic.num_critic_only_steps=0") for word in ("--set", item)),
        *("--resource", RESOURCE, "--n-samples-per-prompt", "4", "--rollout-batch-size", "8", "--num-rollout", "2"),
        *options,
    ]


def test_the_good_one_is_listed_and_the_broken_one_explained(python: str) -> None:
    rows = {
        row["name"]: row
        for row in json.loads(succeed(python, "-m", "relax_cli", "plugins", "list", "--format", "json"))
    }
    assert rows.keys() == BUILT_IN | {"rloo", "sick"}
    assert (rows["rloo"]["distribution"], rows["rloo"]["version"], rows["rloo"]["status"]) == (
        "relax-rloo",
        "0.1.0",
        "ok",
    )
    assert (rows["sick"]["distribution"], rows["sick"]["status"]) == ("relax-sick", "broken")
    assert rows["sick"]["reason"] == "RuntimeError: no licence for this machine"
    assert {rows[name]["status"] for name in BUILT_IN} == {"ok"}


def test_its_options_have_a_panel_of_their_own_in_the_help(python: str) -> None:
    lines = succeed(python, "-m", "relax_cli", "train", "--help").splitlines()
    panel = lines.index("Rloo (leave-one-out baseline within the prompt group, no critic):")
    assert "--rloo-max-ratio FLOAT" in lines[panel + 1]
    assert "[default: 10.0]" in " ".join(lines[panel + 1 : panel + 3])


def test_its_options_are_checked_and_shown_by_validate_config(python: str, task: Path, tmp_path: Path) -> None:
    options = ("--format", "json", "--advantage-estimator", "rloo", "--rloo-max-ratio")
    shown = json.loads(succeed(*relax(python, "validate-config", task, tmp_path / "run", *options, "5")))
    assert shown["ok"]
    assert shown["config"]["rloo"] == {"rloo_max_ratio": 5.0}
    assert shown["origins"]["rloo.rloo_max_ratio"] == "--rloo-max-ratio"
    refused = call(*relax(python, "validate-config", task, tmp_path / "run", *options, "0.5"))
    assert refused.returncode == 2
    problems = json.loads(refused.stdout)["problems"]
    # The recipe is PPO's, so there are warnings about options that rloo does not have.
    assert [problem["option"] for problem in problems if problem["severity"] == "error"] == ["--rloo-max-ratio"]


def test_its_own_tests_pass_where_it_is_installed(python: str, packages: dict[str, Path]) -> None:
    # From the tests folder, so that the installed package is imported and not the source beside it.
    assert "3 passed" in succeed(
        python, "-m", "pytest", "-q", "-p", "no:cacheprovider", ".", cwd=packages["rloo"] / "tests"
    )


def test_the_kit_passes_the_good_one_and_fails_the_broken_one(python: str) -> None:
    succeed(python, "-m", "relax_cli", "plugins", "check", "rloo")
    done = call(python, "-m", "relax_cli", "plugins", "check", "sick")
    assert done.returncode == 1
    assert "no licence for this machine" in done.stdout


def test_the_good_one_trains_on_ray_found_by_name(python: str, task: Path, tmp_path: Path) -> None:
    options = ("--advantage-estimator", "rloo", "--rloo-max-ratio", "5")
    succeed(*relax(python, "train", task, tmp_path / "run", *options))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["config"]["rloo"] == {"rloo_max_ratio": 5.0}
    assert config["origins"]["rloo.rloo_max_ratio"] == "--rloo-max-ratio"
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    assert not any(name.startswith("critic/") for name in steps[0])


def test_requesting_the_broken_one_fails_before_the_launch(python: str, task: Path, tmp_path: Path) -> None:
    done = call(*relax(python, "train", task, tmp_path / "run", "--advantage-estimator", "sick"))
    assert done.returncode == 2
    assert "'sick' (relax-sick 0.1.0) is broken: RuntimeError: no licence for this machine" in done.stderr
    assert not (tmp_path / "run").exists()


def test_one_sample_per_prompt_is_refused_before_anything_starts(python: str, task: Path, tmp_path: Path) -> None:
    alone = ("--advantage-estimator", "rloo", "--n-samples-per-prompt", "1")
    done = call(*relax(python, "train", task, tmp_path / "run", *alone))
    assert done.returncode == 2
    assert "[group-size]" in done.stderr
    assert not (tmp_path / "run").exists()
