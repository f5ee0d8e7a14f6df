"""`relax plugins show` and `relax plugins new`, and names that do not exist."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from relax_cli import RewardInput, RowHistory
from relax_cli.errors import ConfigError
from relax_cli.plugin.manager import load_plugins
from relax_cli.plugin.scaffold import package_files

Install = Callable[..., str]
Relax = Callable[..., Result]


def install(folder: Path, name: str) -> None:
    """Let a package that lies in a folder count as installed once the folder is on the path."""
    info = folder / f"relax_{name}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: relax-{name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[relax.plugins]\n{name} = relax_{name}\n")


def test_show_gives_summary_paper_options_and_where_the_math_is(relax: Relax) -> None:
    (plugin,) = json.loads(relax("plugins", "show", "sapo", "--format", "json").stdout)["plugins"]
    assert (plugin["distribution"], plugin["status"]) == ("relax-cli", "ok")
    (estimator,) = plugin["estimators"]
    assert estimator["paper"] == "arXiv:2511.20347"
    options = {option["flag"]: option for option in estimator["options"]}
    assert options["--sapo-tau-neg"]["default"] == 1.05
    assert options["--sapo-tau-neg"]["key"] == "sapo.sapo_tau_neg"
    assert options["--disable-grpo-std-normalization"]["key"] == "algorithm.disable_grpo_std_normalization"
    for part, reference in (("policy_loss", "relax_sapo.loss:policy_loss"), ("advantages", None)):
        place = estimator[part]
        source = Path(place["file"]).read_text().splitlines()[place["line"] - 1]
        assert source.startswith(f"def {part}(")
        assert reference in (None, place["reference"])


def test_show_reads_like_a_page(relax: Relax) -> None:
    text = relax("plugins", "show", "ppo").stdout
    for part in ("ppo  relax-cli", "estimator ppo: PPO-Clip", "arXiv:1707.06347", "relax_ppo.loss:policy_loss  /"):
        assert part in text
    (line,) = (line for line in text.splitlines() if "--eps-clip-c" in line)
    assert line.split()[:2] == ["--eps-clip-c", "unset"]


def test_show_and_new_import_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from relax_cli.cli.app import main; assert main(sys.argv[1:]) == 0;"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    for argv in (["show", "ppo"], ["new", "light", "--dir", str(tmp_path / "light")]):
        subprocess.run([sys.executable, "-c", code, "plugins", *argv], check=True, capture_output=True)


def test_show_of_a_broken_plugin_says_why(relax: Relax, install: Install) -> None:
    done = relax("plugins", "show", install("poorly", "from pydantic", "import no_such_module\nfrom pydantic"))
    assert done.exit_code == 0
    assert "no_such_module" in done.stdout


@pytest.mark.parametrize("command", ["show", "check"])
def test_an_unknown_plugin_is_refused_with_the_nearest_name(relax: Relax, command: str) -> None:
    done = relax("plugins", command, "grppo")
    assert done.exit_code == 2
    assert "fix       use grpo" in done.stderr


def test_an_unknown_estimator_is_refused_with_the_nearest_name(install: Install) -> None:
    install("rloo")
    with pytest.raises(ConfigError) as caught:
        load_plugins().estimator("rlo")
    (problem,) = caught.value.problems
    assert problem.fix == "--advantage-estimator rloo"
    assert "grpo (relax-cli)" in problem.expected
    assert "rloo (relax-rloo)" in problem.expected


@pytest.mark.parametrize(
    ("name", "fix"),
    [("GRPO", "--advantage-estimator grpo"), ("dapo", "install"), ("dpo", "install"), ("trpo", "install")],
)
def test_another_algorithm_is_not_taken_for_a_typing_error(name: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_plugins().estimator(name)
    assert caught.value.problems[0].fix.startswith(fix)


def test_new_writes_a_package_and_says_what_to_do_next(relax: Relax, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "mine"
    data = json.loads(relax("plugins", "new", "mine", "--dir", str(folder), "--format", "json").stdout)
    assert {str(Path(path).relative_to(folder)) for path in data["files"]} == {
        "pyproject.toml",
        "relax_mine/__init__.py",
        "relax_mine/loss.py",
        "tests/test_mine.py",
    }
    assert all(Path(path).is_file() for path in data["files"])
    assert data["next"][1] == "relax plugins check mine"


def test_a_new_reward_keeps_the_rules_and_judges(relax: Relax, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = relax("plugins", "new", "blue", "--kind", "reward", "--dir", str(tmp_path), "--format", "json")
    assert json.loads(new.stdout)["next"][2] == "relax train --label-key label --rm-type blue ..."
    install(tmp_path, "blue")
    monkeypatch.syspath_prepend(str(tmp_path))
    checks = json.loads(relax("plugins", "check", "blue", "--format", "json").stdout)["checks"]
    assert {check["check"]: check["status"] for check in checks}["references"] == "ok"
    assert all(check["status"] == "ok" for check in checks)
    sample = RewardInput("What is above?", "a sky", "blue sky", {}, truncated=False, group=0)
    assert load_plugins().rewards()["blue"].load()([sample]) == [0.5]


def test_a_new_curriculum_keeps_the_rules_and_weighs(
    relax: Relax, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = relax("plugins", "new", "again", "--kind", "curriculum", "--dir", str(tmp_path), "--format", "json")
    assert json.loads(new.stdout)["next"][2] == "relax train --curriculum again ..."
    install(tmp_path, "again")
    monkeypatch.syspath_prepend(str(tmp_path))
    checks = json.loads(relax("plugins", "check", "again", "--format", "json").stdout)["checks"]
    assert [check for check in checks if check["status"] != "ok"] == []
    past = RowHistory.empty(3).after([(1, 0.25), (2, 1.0)])
    assert load_plugins().curriculums()["again"].load()(past).tolist() == [1.0, 0.75, 0.1]
    assert "curriculum again: rows that fail" in relax("plugins", "show", "again").stdout


def test_a_new_environment_keeps_the_rules_and_plays(
    relax: Relax, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = relax("plugins", "new", "hunt", "--kind", "env", "--dir", str(tmp_path), "--format", "json")
    assert json.loads(new.stdout)["next"][2] == "relax train --label-key label --env hunt ..."
    install(tmp_path, "hunt")
    # Also for the process in which the example is played.
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def checked() -> dict[str, Any]:
        return {
            c["check"]: c for c in json.loads(relax("plugins", "check", "hunt", "--format", "json").stdout)["checks"]
        }

    assert {name: check["status"] for name, check in checked().items() if check["status"] != "ok"} == {}
    assert checked()["plays"]["subject"] == "hunt"
    game = tmp_path / "relax_hunt" / "env.py"
    text = game.read_text()
    for wrong, right, said in [
        ("{hint} {id(self)}", "{hint}", "differ"),
        ("self.secret = 2 + ", "self.secret = ", "ends before the episode"),
        ("self.secret = 1 / 0 + ", "self.secret = ", "ZeroDivisionError"),
        ("def stop(self", "def step(self", "no method step"),
    ]:
        game.write_text(text.replace(right, wrong))
        found = [finding["message"] for check in checked().values() for finding in check["findings"]]
        assert any(said in message for message in found), (wrong, found)


def test_a_new_packages_own_code_is_about_forty_lines() -> None:
    files = package_files("rloo")
    own = [line for path in ("relax_rloo/__init__.py", "relax_rloo/loss.py") for line in files[path].splitlines()]
    assert len([line for line in own if line.strip()]) <= 55


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("grpo", "grpo, of relax-cli"),
        ("batch", "batch, a section of relax"),
        ("cli", "relax_cli is there already"),
        ("My-Thing", "beginning with a letter"),
        ("class", "beginning with a letter"),
        ("../up", "beginning with a letter"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(relax: Relax, tmp_path: Path, name: str, reason: str) -> None:
    done = relax("plugins", "new", name, "--dir", str(tmp_path / "x"))
    assert done.exit_code == 2
    assert reason in done.stderr
    assert not (tmp_path / "x").exists()


def test_a_folder_with_files_in_it_is_left_alone(relax: Relax, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    done = relax("plugins", "new", "mine", "--dir", str(tmp_path))
    assert done.exit_code == 2
    assert "[folder-in-use]" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_folder_that_cannot_be_made_is_an_error_with_a_fix(relax: Relax, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = relax("plugins", "new", "mine", "--dir", str(tmp_path / "file" / "below"))
    assert done.exit_code == 2
    assert "[folder-not-writable]" in done.stderr
