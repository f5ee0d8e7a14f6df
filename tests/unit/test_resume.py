"""Every row of the table that decides where a run starts, and the commands that show it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from relax_cli.checkpoint import layout
from relax_cli.checkpoint.resume import decide_resume
from relax_cli.cli.app import build_app
from relax_cli.errors import ResumeError
from relax_cli.plugin.manager import load_plugins


def save(folder: Path, role: str, *iterations: int, has_critic: bool = True) -> str:
    """Complete checkpoints of a role, the tracker at the last."""
    for iteration in iterations:
        checkpoint = layout.iteration_folder(folder, iteration)
        checkpoint.mkdir(parents=True)
        (checkpoint / "shard").write_text(f"{role} {iteration}")
        meta = layout.CheckpointMeta(
            role, iteration, iteration, {}, "", {}, {"has_critic": has_critic}, layout.describe_files(checkpoint)
        )
        layout.write_meta(checkpoint, meta)
        layout.write_tracker(folder, iteration)
    return str(folder)


def refusal(load: str | None, critic_load: str | None) -> tuple[str, str]:
    """Id and fix of the one problem."""
    with pytest.raises(ResumeError) as caught:
        decide_resume(load, critic_load, has_critic=True)
    (problem,) = caught.value.problems
    return problem.id, problem.fix


def relax(*words: str) -> Result:
    return CliRunner().invoke(build_app(load_plugins()), ["checkpoint", *words])


def test_nothing_given_or_empty_folders_start_both_anew(tmp_path: Path) -> None:
    for load in (None, str(tmp_path), str(tmp_path / "missing")):
        assert decide_resume(load, load, has_critic=True).verdict == "cold-start"


def test_a_pair_resumes_at_its_iteration(tmp_path: Path) -> None:
    actor, critic = save(tmp_path / "a", "actor", 2, 4), save(tmp_path / "c", "critic", 2, 4)
    decision = decide_resume(actor, critic, has_critic=True)
    assert (decision.verdict, decision.iteration) == ("resume", 4)
    assert (decision.actor, decision.critic) == (tmp_path / "a/iter_0000004", tmp_path / "c/iter_0000004")
    alone = decide_resume(actor, None, has_critic=False)
    assert (alone.verdict, alone.actor, alone.critic) == ("resume", tmp_path / "a/iter_0000004", None)


def test_unequal_iterations_are_refused_with_the_newest_common_complete_one(tmp_path: Path) -> None:
    actor, critic = save(tmp_path / "a", "actor", 2, 3, 4), save(tmp_path / "c", "critic", 2, 3)
    (tmp_path / "a/iter_0000003/shard").write_text("cut")
    rule, fix = refusal(actor, critic)
    assert rule == "resume-pair-mismatch"
    assert fix.startswith("write 2 into")


@pytest.mark.parametrize("empty", ["actor", "critic"])
def test_one_side_without_a_checkpoint_is_refused(tmp_path: Path, empty: str) -> None:
    folders = {role: str(tmp_path / role) for role in ("actor", "critic")}
    for role in folders.keys() - {empty}:
        save(tmp_path / role, role, 3)
    assert refusal(folders["actor"], folders["critic"])[0] == "resume-pair-mismatch"


def test_a_critic_that_follows_load_into_the_actors_folder_is_refused(tmp_path: Path) -> None:
    rule, fix = refusal(save(tmp_path / "a", "actor", 3), None)
    assert rule == "resume-wrong-role"
    assert "--critic-load" in fix


def test_swapped_folders_are_refused_on_both_sides(tmp_path: Path) -> None:
    actor, critic = save(tmp_path / "a", "actor", 3), save(tmp_path / "c", "critic", 3)
    with pytest.raises(ResumeError) as caught:
        decide_resume(critic, actor, has_critic=True)
    assert [problem.id for problem in caught.value.problems] == ["resume-wrong-role"] * 2


@pytest.mark.parametrize("text", ["", "  \n", "abc", "-3", "3.5", "release", "9"])
def test_a_tracker_that_leads_nowhere_is_refused(tmp_path: Path, text: str) -> None:
    actor, critic = save(tmp_path / "a", "actor", 3), save(tmp_path / "c", "critic", 3)
    (tmp_path / "c" / layout.TRACKER_FILE).write_text(text)
    assert refusal(actor, critic)[0] == "resume-unreadable"


def test_a_tracker_with_spaces_and_newline_is_understood(tmp_path: Path) -> None:
    actor, critic = save(tmp_path / "a", "actor", 3), save(tmp_path / "c", "critic", 3)
    (tmp_path / "c" / layout.TRACKER_FILE).write_text(" 3 \n\n")
    assert decide_resume(actor, critic, has_critic=True).iteration == 3


def test_a_cut_or_missing_shard_and_a_newer_format_are_refused(tmp_path: Path) -> None:
    actor, critic = save(tmp_path / "a", "actor", 3), save(tmp_path / "c", "critic", 3)
    shard, meta = (tmp_path / "c/iter_0000003" / name for name in ("shard", layout.META_FILE))
    whole = shard.read_text()
    shard.write_text(whole[:-1])
    assert refusal(actor, critic)[0] == "resume-unreadable"
    shard.unlink()
    assert refusal(actor, critic)[0] == "resume-unreadable"
    shard.write_text(whole)
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"format_version": layout.FORMAT_VERSION + 1}))
    assert refusal(actor, critic)[0] == "checkpoint-meta-unreadable"


def test_check_resume_shows_the_pair_and_exits_0_or_3(tmp_path: Path) -> None:
    actor, critic = save(tmp_path / "a", "actor", 3), save(tmp_path / "c", "critic", 3)
    done = relax("check-resume", "--load", actor, "--critic-load", critic, "--format", "json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0
    assert (found["ok"], found["verdict"], found["iteration"], found["next_rollout_id"]) == (True, "resume", 3, 3)
    assert found["critic"] == {"path": critic, "tracker": 3, "iteration": 3, "complete": True, "role": "critic"}

    alone = relax("check-resume", "--load", actor, "--format", "json")
    assert alone.exit_code == 3
    assert json.loads(alone.stdout)["verdict"] == "refuse"
    assert json.loads(alone.stdout)["fix"]
    no_critic = save(tmp_path / "g", "actor", 5, has_critic=False)
    assert relax("check-resume", "--load", no_critic).exit_code == 0


def test_only_a_deep_check_sees_a_flipped_bit(tmp_path: Path) -> None:
    actor, critic = save(tmp_path / "a", "actor", 3), save(tmp_path / "c", "critic", 3)
    shard = tmp_path / "c/iter_0000003/shard"
    shard.write_text(shard.read_text().swapcase())
    words = ("check-resume", "--load", actor, "--critic-load", critic)
    assert relax(*words).exit_code == 0
    deep = relax(*words, "--deep")
    assert deep.exit_code == 3
    assert "has changed since it was written" in deep.stderr
    assert relax("verify", critic).exit_code == 3
    assert relax("verify", actor).exit_code == 0


def test_list_says_what_is_complete_and_what_is_latest(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", "actor", 2, 4)
    (tmp_path / "a/iter_0000002/shard").unlink()
    rows = json.loads(relax("list", folder, "--format", "json").stdout)
    assert [(row["iteration"], row["complete"], row["latest"]) for row in rows] == [(2, False, False), (4, True, True)]
    assert "shard is missing" in relax("list", folder).stdout
