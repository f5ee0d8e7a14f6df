"""`relax checkpoint align` and `prune`: what they show, what they do with `--yes`, and what they never touch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from relax_cli.checkpoint import align, layout, prune
from relax_cli.checkpoint.layout import Tracker
from relax_cli.cli.app import build_app
from relax_cli.engine.run_folder import claimed
from relax_cli.plugin.manager import load_plugins
from tests.support.checkpoints import describe_files


def save(folder: Path, role: str, *iterations: int, has_critic: bool = True, run: str = "run") -> Path:
    """Complete checkpoints of a role, the tracker at the last."""
    for iteration in iterations:
        checkpoint = layout.iteration_folder(folder, iteration)
        checkpoint.mkdir(parents=True)
        (checkpoint / "shard").write_text(f"{role} {iteration}")
        extra = {"has_critic": has_critic, "save_id": f"{run} {iteration}"}
        files = describe_files(checkpoint)
        layout.write_meta(checkpoint, layout.CheckpointMeta(role, iteration, iteration, {}, run, {}, extra, files))
        layout.write_tracker(folder, iteration)
    return folder


def pair(tmp_path: Path, actor: tuple[int, ...], critic: tuple[int, ...]) -> tuple[Path, Path]:
    return save(tmp_path / "a", "actor", *actor), save(tmp_path / "c", "critic", *critic)


def cut(folder: Path, iteration: int) -> None:
    (layout.iteration_folder(folder, iteration) / "shard").write_text("")


def relax(*words: object) -> Result:
    return CliRunner().invoke(build_app(load_plugins()), ["checkpoint", *map(str, words)])


def as_json(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def problem_of(result: Result) -> dict[str, str]:
    (problem,) = as_json(result)["problems"]
    return dict(problem)


def content(*folders: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


def test_align_shows_what_it_would_do_and_changes_nothing(tmp_path: Path) -> None:
    actor, critic = pair(tmp_path, (2, 4, 5), (2, 4))
    before = content(actor, critic)
    result = relax("align", "--load", actor, "--critic-load", critic)
    assert result.exit_code == 0
    assert "5 -> 4" in result.stdout
    assert "not 5: the critic has none" in result.stdout
    assert "nothing was changed; --yes does it" in result.stdout
    assert content(actor, critic) == before


def test_align_moves_both_trackers_and_deletes_nothing(tmp_path: Path) -> None:
    actor, critic = pair(tmp_path, (2, 4, 5), (1, 2, 4, 6))
    result = relax("align", "--load", actor, "--critic-load", critic, "--yes", "--format", "json")
    assert result.exit_code == 0
    found = as_json(result)
    assert (found["ok"], found["iteration"], found["changed"]) == (True, 4, True)
    assert [(t["role"], t["from"], t["to"]) for t in found["trackers"]] == [("actor", 5, 4), ("critic", 6, 4)]
    assert [left["iteration"] for left in found["left_out"]] == [6, 5]
    assert layout.read_tracker(actor) == layout.read_tracker(critic) == Tracker(4)
    assert (layout.list_iterations(actor), layout.list_iterations(critic)) == ([2, 4, 5], [1, 2, 4, 6])
    assert relax("check-resume", "--load", actor, "--critic-load", critic).exit_code == 0


def test_align_skips_damaged_and_foreign_checkpoints(tmp_path: Path) -> None:
    actor, critic = pair(tmp_path, (1, 2, 3, 4), (1, 3, 4))
    cut(critic, 4)
    save(critic, "critic", 2, run="another run")
    meta = layout.iteration_folder(actor, 3) / layout.META_FILE
    meta.write_text(meta.read_text().replace('"role": "actor"', '"role": "critic"'))
    plan = align.plan_alignment(actor, critic)
    assert plan.iteration == 1
    assert "damaged: shard has 0 bytes" in plan.left_out[4]
    assert "contains a checkpoint of the critic" in plan.left_out[3]
    assert "different runs" in plan.left_out[2]


def test_align_compares_hashes_of_large_ones_if_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor, critic = pair(tmp_path, (1, 2), (1, 2))
    (layout.iteration_folder(critic, 2) / "shard").write_text("critic X")
    assert align.plan_alignment(actor, critic).iteration == 1
    monkeypatch.setattr(layout, "MOST_HASHED_BYTES", 0)
    assert align.plan_alignment(actor, critic).iteration == 2
    assert align.plan_alignment(actor, critic, deep=True).iteration == 1


@pytest.mark.parametrize("text", ["", "forty", "99"])
def test_align_repairs_a_tracker_that_says_nothing_of_use(tmp_path: Path, text: str) -> None:
    actor, critic = pair(tmp_path, (1, 2), (1, 2))
    (critic / layout.TRACKER_FILE).write_text(text)
    assert relax("align", "--load", actor, "--critic-load", critic, "--yes").exit_code == 0
    assert layout.read_tracker(critic) == Tracker(2)


def test_align_has_nothing_to_do_where_both_agree(tmp_path: Path) -> None:
    actor, critic = pair(tmp_path, (1, 2), (1, 2))
    result = relax("align", "--load", actor, "--critic-load", critic, "--yes")
    assert (result.exit_code, "nothing to do" in result.stdout) == (0, True)


def test_align_without_a_common_iteration_exits_3_with_the_list(tmp_path: Path) -> None:
    actor, critic = pair(tmp_path, (2,), (1,))
    before = content(actor, critic)
    result = relax("align", "--load", actor, "--critic-load", critic, "--yes", "--format", "json")
    assert result.exit_code == 3
    (problem,) = as_json(result)["problems"]
    assert problem["id"] == "align-nothing-common"
    assert "2: the critic has none; 1: the actor has none" in problem["got"]
    assert content(actor, critic) == before


def test_align_wants_two_folders_that_exist(tmp_path: Path) -> None:
    actor, critic = pair(tmp_path, (1,), (1,))
    (tmp_path / "link").symlink_to(actor)
    for same in (actor, tmp_path / "link"):
        result = relax("align", "--load", actor, "--critic-load", same, "--format", "json")
        assert (result.exit_code, problem_of(result)["id"]) == (2, "align-one-folder")
    for missing in (tmp_path / "missing", actor / layout.TRACKER_FILE):
        result = relax("align", "--load", missing, "--critic-load", critic, "--format", "json")
        assert (result.exit_code, problem_of(result)["id"]) == (2, "checkpoint-folder-missing")
        assert (problem_of(result)["option"], problem_of(result)["got"]) == ("--load", str(missing))
    assert relax("align", "--load", actor, "--critic-load", critic).exit_code == 0


@pytest.mark.parametrize("command", ["list", "verify", "prune", "align", "export-hf"])
def test_a_folder_that_is_something_else_is_called_so(tmp_path: Path, command: str) -> None:
    actor, _ = pair(tmp_path, (1,), (1,))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").touch()
    words: dict[str, list[object]] = {
        "prune": [model, "--keep", 1],
        "align": ["--load", actor, "--critic-load", model],
        "export-hf": [model, tmp_path / "out", "--hf-checkpoint", model],
    }
    result = relax(command, *words.get(command, [model]), "--format", "json")
    assert (result.exit_code, problem_of(result)["id"]) == (3, "resume-not-a-save-folder")
    assert problem_of(result)["got"] == "a model"


def test_align_names_the_failed_disk_and_can_be_repeated(tmp_path: Path) -> None:
    actor, critic = pair(tmp_path, (1, 2), (1,))
    tracker = critic / layout.TRACKER_FILE
    tracker.unlink()
    tracker.mkdir()
    words = ("align", "--load", actor, "--critic-load", critic, "--yes", "--format", "json")
    result = relax(*words)
    assert (result.exit_code, problem_of(result)["id"]) == (1, "checkpoint-change-failed")
    assert problem_of(result)["where"].startswith(str(critic))
    tracker.rmdir()
    assert relax(*words).exit_code == 0
    assert layout.read_tracker(actor) == layout.read_tracker(critic) == Tracker(1)


@pytest.mark.parametrize("command", ["align", "prune"])
def test_a_folder_that_a_run_is_writing_is_left_alone(tmp_path: Path, command: str) -> None:
    actor, critic = pair(tmp_path, (1, 2, 3), (1, 2))
    words = (
        ("--load", actor, "--critic-load", critic) if command == "align" else (actor, "--critic", critic, "--keep", 1)
    )
    with claimed({critic: "--critic-save"}):
        before = content(actor, critic)
        result = relax(command, *words, "--yes")
        assert result.exit_code == 2
        assert {path: text for path, text in content(actor, critic).items() if path.name != ".lock"} == {
            path: text for path, text in before.items() if path.name != ".lock"
        }


def doomed(plan: list[prune.Entry]) -> list[str]:
    return [f"{entry.role} {entry.path.name}" for entry in plan if not entry.keep]


def test_prune_shows_what_would_go_and_removes_nothing(tmp_path: Path) -> None:
    actor, critic = pair(tmp_path, (1, 2, 3), (1, 2, 3))
    before = content(actor, critic)
    result = relax("prune", actor, "--critic", critic, "--keep", 2)
    assert result.exit_code == 0
    assert "drop  iter_0000001" in result.stdout
    assert "nothing was changed; --yes does it" in result.stdout
    assert content(actor, critic) == before


def test_prune_with_yes_keeps_the_newest_pairs(tmp_path: Path) -> None:
    actor, critic = pair(tmp_path, (1, 2, 3, 4), (1, 2, 3, 4))
    cut(critic, 3)
    result = relax("prune", actor, "--critic", critic, "--keep", 2, "--yes", "--format", "json")
    assert result.exit_code == 0
    found = as_json(result)
    gone = [Path(row["path"]) for row in found["checkpoints"] if not row["keep"]]
    assert found["removed"]
    assert found["bytes"] > 0
    assert {path.name for path in gone} == {"iter_0000001", "iter_0000003"}
    assert layout.list_iterations(actor) == layout.list_iterations(critic) == [2, 4]
    assert relax("check-resume", "--load", actor, "--critic-load", critic, "--deep").exit_code == 0


def test_prune_never_drops_what_a_tracker_names_in_either_folder(tmp_path: Path) -> None:
    actor, critic = pair(tmp_path, (1, 2, 3, 4), (1, 2, 3, 4))
    layout.write_tracker(critic, 2)
    plan = prune.plan_pruning(actor, critic, 1)
    assert doomed(plan) == [f"{role} iter_000000{i}" for role in ("actor", "critic") for i in (1, 3)]


def test_prune_keeps_the_newest_complete_checkpoint_of_each_side(tmp_path: Path) -> None:
    actor, critic = pair(tmp_path, (1, 2, 3), (1, 2))
    layout.write_tracker(actor, 2)
    assert doomed(prune.plan_pruning(actor, critic, 1)) == ["actor iter_0000001", "critic iter_0000001"]


def test_prune_removes_what_interrupted_saves_left(tmp_path: Path) -> None:
    actor = save(tmp_path / "a", "actor", 1, has_critic=False)
    leftover = layout.temporary_folder(actor, 2)
    shutil.copytree(layout.iteration_folder(actor, 1), leftover)
    assert relax("prune", actor, "--keep", 5, "--yes").exit_code == 0
    assert (leftover.exists(), layout.list_iterations(actor)) == (False, [1])


def test_prune_of_a_run_without_a_critic_needs_one_folder(tmp_path: Path) -> None:
    actor = save(tmp_path / "a", "actor", 1, 2, 3, has_critic=False)
    assert doomed(prune.plan_pruning(actor, None, 1)) == ["actor iter_0000001", "actor iter_0000002"]


@pytest.mark.parametrize("role", ["a", "c"])
def test_prune_refuses_half_a_pair(tmp_path: Path, role: str) -> None:
    pair(tmp_path, (1, 2, 3), (1,))
    result = relax("prune", tmp_path / role, "--keep", 1, "--yes", "--format", "json")
    assert result.exit_code == 2
    assert as_json(result)["problems"][0]["id"] == "prune-half-a-pair"
    assert layout.list_iterations(tmp_path / "a") == [1, 2, 3]


def test_prune_deletes_nothing_without_a_complete_pair(tmp_path: Path) -> None:
    actor, critic = pair(tmp_path, (1, 2), (3, 4))
    result = relax("prune", actor, "--critic", critic, "--keep", 1, "--yes", "--format", "json")
    assert result.exit_code == 3
    assert as_json(result)["problems"][0]["id"] == "prune-nothing-complete"
    assert (layout.list_iterations(actor), layout.list_iterations(critic)) == ([1, 2], [3, 4])


def test_prune_leaves_everything_where_the_tracker_is_garbage(tmp_path: Path) -> None:
    actor = save(tmp_path / "a", "actor", 1, 2, has_critic=False)
    (actor / layout.TRACKER_FILE).write_text("garbage")
    result = relax("prune", actor, "--keep", 1, "--yes", "--format", "json")
    assert (result.exit_code, problem_of(result)["id"]) == (3, "prune-tracker-unreadable")
    assert problem_of(result)["where"] == str(actor / layout.TRACKER_FILE)
    assert layout.list_iterations(actor) == [1, 2]
    layout.write_tracker(actor, 2)
    assert relax("prune", actor, "--keep", 1, "--yes").exit_code == 0
    assert layout.list_iterations(actor) == [2]


def test_prune_removes_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    actor = save(tmp_path / "a", "actor", 1, 2, has_critic=False)
    elsewhere = tmp_path / "elsewhere"
    layout.iteration_folder(actor, 1).rename(elsewhere)
    layout.iteration_folder(actor, 1).symlink_to(elsewhere)
    assert relax("prune", actor, "--keep", 1, "--yes").exit_code == 0
    assert layout.list_iterations(actor) == [2]
    assert (elsewhere / "shard").exists()


def test_prune_keeps_at_least_one(tmp_path: Path) -> None:
    actor = save(tmp_path / "a", "actor", 1, has_critic=False)
    assert relax("prune", actor, "--keep", 0).exit_code == 2


def test_the_screens_fit_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, critic = pair(tmp_path, (1, 2, 4, 5), (1, 2, 4))
    cut(critic, 1)
    for words in (("align", "--load", "a", "--critic-load", "c"), ("prune", "a", "--critic", "c", "--keep", 1)):
        assert max(len(line) for line in relax(*words).stdout.splitlines()) <= 80


PATHS = [
    ("check-resume", "--load", "{a}", "--critic-load", "{c}", "--save", "{a}", "--critic-save", "{c}"),
    ("list", "{a}"),
    ("verify", "{a}"),
    ("align", "--load", "{a}", "--critic-load", "{c}"),
    ("prune", "{a}", "--critic", "{c}", "--keep", "1"),
]


@pytest.mark.parametrize("home", ["~", "$HOME", "${HOME}"])
@pytest.mark.parametrize("words", PATHS, ids=lambda words: words[0])
def test_paths_of_commands_expand_as_those_of_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], home: str
) -> None:
    actor, critic = pair(tmp_path, (2,), (2,))
    monkeypatch.setenv("HOME", str(tmp_path))
    there = relax(*(word.format(a=actor, c=critic) for word in words))
    assert there.exit_code == 0
    assert relax(*(word.format(a=f"{home}/a", c=f"{home}/c") for word in words)).stdout == there.stdout
    unset = relax(*(word.format(a="$NOT_SET/a", c=critic) for word in words))
    assert unset.exit_code == 2
    assert "[path-variable]" in unset.stderr


def test_check_resume_finds_the_critic_where_train_does(tmp_path: Path) -> None:
    actor = save(tmp_path / "x", "actor", 2, 3, has_critic=False)
    assert as_json(relax("check-resume", "--load", actor, "--format", "json"))["critic"] is None
    save(tmp_path / "x-critic", "critic", 2, 3)
    found = as_json(relax("check-resume", "--load", actor, "--format", "json"))
    assert (found["verdict"], found["critic"]["path"]) == ("resume", f"{actor}-critic")
    given = as_json(relax("check-resume", "--load", actor, "--critic-load", tmp_path / "no", "--format", "json"))
    assert (given["verdict"], given["critic"]["path"]) == ("refuse", str(tmp_path / "no"))
    new = as_json(relax("check-resume", "--load", tmp_path / "n", "--save", tmp_path / "n", "--format", "json"))
    assert (new["verdict"], new["critic"]) == ("cold-start", None)
