"""Every row of the table that decides where a run starts."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relax_cli.checkpoint import layout
from relax_cli.checkpoint.resume import examine_resume, was_saved_beside_a_critic
from relax_cli.config.schema import CheckpointSection, Config, CriticSection
from relax_cli.errors import Problem, ResumeError
from relax_cli.plugin.launch_plan import LoadFrom
from relax_cli.preflight.rules.folders import folder_read_only
from tests.support.checkpoints import SHARDED, decide_resume, save, save_release, write_weights
from tests.support.rules import problems_by

NOBODY = 65534


def refusals(load: str | None, critic_load: str | None, *, from_actor: bool = False) -> list[Problem]:
    """Every problem of a run that saves where it loads from."""
    saves = {"save": load, "critic_save": critic_load}
    with pytest.raises(ResumeError) as caught:
        decide_resume(load, critic_load, has_critic=True, critic_init_from_actor=from_actor, **saves)
    return list(caught.value.problems)


def refusal(load: str | None, critic_load: str | None, *, from_actor: bool = False) -> Problem:
    """The one problem."""
    (problem,) = refusals(load, critic_load, from_actor=from_actor)
    return problem


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """An actor and a critic at iteration 3."""
    return save(tmp_path / "a", "actor", 3), save(tmp_path / "c", "critic", 3)


@pytest.mark.parametrize("from_actor", [False, True])
@pytest.mark.parametrize("name", [None, "", "missing", "missing/", "link"])
def test_nothing_given_or_new_save_folders_start_cold(tmp_path: Path, name: str | None, from_actor: bool) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    load = None if name is None else f"{tmp_path}/{name}"
    save = None if name is None else str(tmp_path / name)
    saves = {"save": save, "critic_save": save}
    decision = decide_resume(load, load, has_critic=True, critic_init_from_actor=from_actor, **saves)
    assert (decision.verdict, decision.actor, decision.critic) == ("cold-start", None, None)


NOT_SAVE_FOLDERS: dict[str, tuple[list[str], str, str]] = {
    "nothing": ([], "no such folder", "--save {0} if the run makes this folder; or start again without --load"),
    "an empty folder": (["x/"], "a folder without a checkpoint", "start again without --load"),
    "notes": (["x/notes.txt"], "a folder without a checkpoint", "start again without --load"),
    "a file": (["x"], "a file", "start again without --load"),
    "a model": (["x/config.json", "x/model.safetensors"], "a model", "--hf-checkpoint {0}, without --load"),
    "a model's tokenizer": (["x/config.json", "x/tokenizer.json"], "a model", "--hf-checkpoint {0}, without --load"),
    "data": (["x/train.jsonl"], "data", "start again without --load; --prompt-data takes a file"),
    "Parquet": (["x/a.parquet"], "data", "start again without --load; --prompt-data takes a file"),
    "one of Megatron's": (["x/.metadata"], "one checkpoint", "--load {1}"),
    "the folder above": (
        ["x/one/latest_checkpointed_iteration.txt"],
        "the folder above save folders",
        "--load {0}/one",
    ),
    "two below": (
        ["x/actor/latest_checkpointed_iteration.txt", "x/critic/latest_checkpointed_iteration.txt"],
        "the folder above save folders",
        "--load {0}/actor",
    ),
    "a run folder": (["x/metrics.jsonl", "x/config.json"], "a run folder", "--load with the folder of --save"),
}


@pytest.mark.parametrize("case", NOT_SAVE_FOLDERS)
def test_what_is_no_save_folder_is_named(tmp_path: Path, case: str) -> None:
    paths, got, fix = NOT_SAVE_FOLDERS[case]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).mkdir() if path.endswith("/") else (tmp_path / path).write_text("{}")
    given = str(tmp_path / "x")
    for has_critic in (False, True):
        (problem,) = examine_resume(given, None, has_critic=has_critic, save=str(tmp_path / "y")).problems
        assert problem.id in ("resume-folder-missing", "resume-not-a-save-folder")
        assert (problem.got, problem.fix) == (got, fix.format(given, tmp_path))
    critic = examine_resume(None, given, has_critic=True, save=given, critic_save=str(tmp_path / "y")).problems
    assert [(p.option, p.got) for p in critic] == [("--critic-load", got)]
    assert f"--hf-checkpoint {given}" not in critic[0].fix, "it would be the actor's model as well"
    # With --critic-init-from-actor a mistyped --critic-load is still one.
    actor = save(tmp_path / "a", "actor", 3)
    assert examine_resume(actor, given, has_critic=True, critic_init_from_actor=True).problems


def test_a_run_folder_knows_where_its_run_saved(tmp_path: Path) -> None:
    actor = save(tmp_path / "a b", "actor", 3)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").touch()
    (tmp_path / "run/config.json").write_text(json.dumps({"config": {"checkpoint": {"save": actor}, "critic": 7}}))
    (problem,) = examine_resume(str(tmp_path / "run"), None, has_critic=False).problems
    assert problem.fix == f"--load '{actor}'"


def test_foreign_checkpoints_without_a_tracker_are_refused(tmp_path: Path) -> None:
    actor = save(tmp_path / "a", "actor", 1)
    (tmp_path / "a" / layout.TRACKER_FILE).unlink()
    (problem,) = examine_resume(actor, None, has_critic=False).problems
    assert problem.got == f"checkpoints without {layout.TRACKER_FILE}"
    # A run that was killed before its first pair counted starts again.
    assert examine_resume(actor, None, has_critic=False, save=actor).decision.verdict == "cold-start"


def test_a_pair_resumes_at_its_iteration(tmp_path: Path) -> None:
    actor, critic = save(tmp_path / "a", "actor", 2, 4), save(tmp_path / "c", "critic", 2, 4)
    for from_actor in (False, True):  # a state that is there is never thrown away
        decision = decide_resume(actor, critic, has_critic=True, critic_init_from_actor=from_actor)
        assert (decision.verdict, decision.iteration) == ("resume", 4)
        assert decision.actor == LoadFrom(tmp_path / "a/iter_0000004")
        assert decision.critic == LoadFrom(tmp_path / "c/iter_0000004")
        assert "both continue with step 5" in decision.text
    alone = decide_resume(actor, None, has_critic=False)
    assert (alone.verdict, alone.actor, alone.critic) == ("resume", LoadFrom(tmp_path / "a/iter_0000004"), None)


def test_unequal_iterations_are_refused_with_the_newest_common(tmp_path: Path) -> None:
    actor, critic = save(tmp_path / "a", "actor", 2, 3, 4), save(tmp_path / "c", "critic", 2, 3)
    (tmp_path / "a/iter_0000003/.metadata").write_text("cut")
    for from_actor in (False, True):
        problem = refusal(actor, critic, from_actor=from_actor)
        assert problem.id == "resume-pair-mismatch"
        assert problem.got == "actor iteration 4, critic iteration 3"
        assert problem.expected.endswith("complete in both is iteration 2")
        assert problem.fix == f"relax checkpoint align --load {actor} --critic-load {critic} --yes"


def test_damage_is_refused_with_the_way_back(tmp_path: Path) -> None:
    actor, critic = save(tmp_path / "a", "actor", 2, 3), save(tmp_path / "c", "critic", 2, 3)
    (tmp_path / "c/iter_0000003/.metadata").unlink()
    assert refusal(actor, critic).fix == f"relax checkpoint align --load {actor} --critic-load {critic} --yes"
    (tmp_path / "a/iter_0000003" / layout.META_FILE).write_text("{")
    (problem,) = examine_resume(actor, None, has_critic=False).problems
    assert (problem.id, problem.fix) == (
        "checkpoint-meta-unreadable",
        f"echo 2 > {tmp_path / 'a' / layout.TRACKER_FILE}",
    )
    shutil.rmtree(tmp_path / "a/iter_0000002")
    assert "align" not in refusals(actor, critic)[0].fix


@pytest.mark.parametrize("empty", ["actor", "critic"])
def test_one_side_without_a_checkpoint_is_refused(tmp_path: Path, empty: str) -> None:
    folders = {role: str(tmp_path / role) for role in ("actor", "critic")}
    for role in folders.keys() - {empty}:
        save(tmp_path / role, role, 3)
    problem = refusal(folders["actor"], folders["critic"])
    assert (problem.id, "no checkpoint" in problem.got) == ("resume-pair-mismatch", True)
    assert ("--critic-init-from-actor" in problem.fix) == (empty == "critic")


def test_a_pair_of_different_runs_is_refused(tmp_path: Path) -> None:
    actor = save(tmp_path / "a", "actor", 3, save_id="1")
    assert refusal(actor, save(tmp_path / "c", "critic", 3, save_id="2")).message.endswith("saved by different runs")
    other = save(tmp_path / "d", "critic", 3, save_id="1", config_hash="d")
    assert refusal(actor, other).id == "resume-pair-mismatch"
    twin = save(tmp_path / "e", "critic", 3, save_id="1")
    assert decide_resume(actor, twin, has_critic=True).verdict == "resume"


@pytest.mark.parametrize("how", ["follows", "explicit", "symlink"])
def test_a_critic_from_the_actors_training_checkpoint_is_refused(tmp_path: Path, how: str) -> None:
    critic = save(tmp_path / "c", "critic", 3)
    actor = save(tmp_path / "a", "actor", 3, critic_save=critic)
    (tmp_path / "link").symlink_to(actor)
    given = {"follows": None, "explicit": actor, "symlink": str(tmp_path / "link")}[how]
    problem = refusal(actor, given)
    assert problem.id == "resume-critic-lost"
    assert problem.option == ("--load" if given is None else "--critic-load")
    assert problem.fix.startswith(f"--critic-load {critic};")

    allowed = decide_resume(actor, given, has_critic=True, critic_init_from_actor=True)
    assert (allowed.verdict, allowed.iteration) == ("resume", 3)
    assert allowed.actor == LoadFrom(Path(actor) / "iter_0000003")
    assert allowed.critic == LoadFrom(Path(actor) / "iter_0000003", weights_only=True)
    assert "the critic starts from the actor's backbone" in allowed.text


def test_a_lost_critic_is_found_after_both_folders_moved(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    save(tmp_path / "old/c", "critic", 3)
    save(tmp_path / "old/a", "actor", 3, critic_save=str(tmp_path / "old/c"))
    (tmp_path / "old").rename(tmp_path / "new")
    actor = str(tmp_path / "new/a")
    assert refusal(actor, None).fix.startswith(f"--critic-load {tmp_path / 'new/c'};")
    shutil.rmtree(tmp_path / "new/c")
    assert refusal(actor, None).fix.startswith("--critic-load CRITIC_DIR;")


def test_a_checkpoint_of_a_run_without_critic_says_so(tmp_path: Path) -> None:
    actor = save(tmp_path / "a", "actor", 3, has_critic=False)
    problem = refusal(actor, None)
    assert (problem.id, "had no critic" in problem.message) == ("resume-critic-lost", True)
    assert decide_resume(actor, None, has_critic=False).verdict == "resume"


def test_the_actor_stands_in_only_for_a_critic_without_a_state(tmp_path: Path, pair: tuple[str, str]) -> None:
    actor, critic = pair
    damaged = save(tmp_path / "damaged", "critic", 3)
    (tmp_path / "damaged/iter_0000003/.metadata").unlink()
    for given in (str(tmp_path / "empty"), damaged, save_release(tmp_path / "weights")):
        assert refusals(actor, given)
        allowed = decide_resume(actor, given, has_critic=True, critic_init_from_actor=True, critic_save=given)
        assert allowed.critic == LoadFrom(Path(actor) / "iter_0000003", weights_only=True)
    # Somebody else's actor is a mistake in the command, not a lost state; and an actor has nothing to stand in for it.
    other = save(tmp_path / "other", "actor", 3)
    assert refusal(actor, other, from_actor=True).id == "resume-wrong-role"
    assert refusal(str(tmp_path / "empty"), critic, from_actor=True).id == "resume-pair-mismatch"


def test_swapped_folders_are_refused_on_both_sides(pair: tuple[str, str]) -> None:
    actor, critic = pair
    assert [problem.id for problem in refusals(critic, actor)] == ["resume-wrong-role"] * 2
    assert refusal(critic, critic).id == "resume-wrong-role"
    assert refusal(critic, None).option == "--load"


@pytest.mark.parametrize("text", ["", "  \n", "abc", "-3", "3.5", "3 4", "release", "9", "٣"])
def test_a_tracker_that_leads_nowhere_is_refused(pair: tuple[str, str], text: str) -> None:
    (Path(pair[1]) / layout.TRACKER_FILE).write_text(text)
    assert refusal(*pair).id == "resume-unreadable"


@pytest.mark.parametrize("text", [" 3 \n\n", "3", "0000003\n", "\t3\r\n"])
def test_a_tracker_with_spaces_and_newline_is_understood(pair: tuple[str, str], text: str) -> None:
    (Path(pair[1]) / layout.TRACKER_FILE).write_text(text)
    assert decide_resume(*pair, has_critic=True).iteration == 3


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_cut_or_missing_file_is_refused(pair: tuple[str, str], name: str, damage: str) -> None:
    path = Path(pair[1]) / "iter_0000003" / name
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    problem = refusal(*pair)
    assert problem.id == "resume-unreadable"
    assert name in problem.message


@pytest.fixture
def longer(tmp_path: Path) -> tuple[Path, Path]:
    """The save folders of a pair at iterations 2 and 3."""
    folders = tmp_path / "a", tmp_path / "c"
    for role, folder in zip(("actor", "critic"), folders, strict=True):
        save(folder, role, 2, 3)
    return folders


@pytest.mark.parametrize("at", [0, 1])
def test_lost_trackers_do_not_start_a_run_from_nothing(longer: tuple[Path, Path], at: int) -> None:
    """One checkpoint alone may be what a kill in the first save left."""
    (longer[at] / layout.TRACKER_FILE).unlink()
    problem = refusal(*map(str, longer))
    assert (problem.id, problem.where) == ("resume-unreadable", str(longer[at]))
    assert problem.fix.startswith("relax checkpoint align")
    first = longer[0].parent / "first"
    save(first, "actor", 1)
    (first / layout.TRACKER_FILE).unlink()
    assert decide_resume(str(first), None, has_critic=False, save=str(first)).verdict == "cold-start"


def test_newer_checkpoints_than_the_trackers_are_said(longer: tuple[Path, Path]) -> None:
    folders = [str(folder) for folder in longer]
    assert examine_resume(*folders, has_critic=True).warnings == ()
    for folder in longer:
        layout.write_tracker(folder, 2)
    report = examine_resume(*folders, has_critic=True)
    (warning,) = report.warnings
    assert (report.decision.iteration, warning.id) == (2, "resume-not-newest")
    assert warning.expected.endswith("iteration 3")
    (longer[1] / "iter_0000003/__0_0.distcp").unlink()
    assert examine_resume(*folders, has_critic=True).warnings == (), "half a pair is none"


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_files_of_another_iteration_are_refused(longer: tuple[Path, Path], name: str) -> None:
    (longer[0] / "iter_0000003" / name).write_bytes((longer[0] / "iter_0000002" / name).read_bytes())
    problem = refusal(*map(str, longer))
    assert problem.message.endswith(f"{name} has changed since it was written")
    assert problem.expected.endswith("iteration 2")


def test_hashes_of_a_large_checkpoint_need_a_deep_check(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MOST_HASHED_BYTES", 0)
    shard = Path(pair[1]) / "iter_0000003/__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[3] ^= 4
    shard.write_bytes(content)
    assert examine_resume(*pair, has_critic=True).problems == ()
    (problem,) = examine_resume(*pair, has_critic=True, deep=True).problems
    assert "has changed since it was written" in problem.message


@pytest.mark.parametrize(
    "content",
    ["[]", '"text"', "7", "null", "{", '{"format_version": 1}', '{"format_version": 99, "files": []}', ""],
)
def test_a_relax_json_of_an_unknown_form_is_refused(pair: tuple[str, str], content: str) -> None:
    (Path(pair[1]) / "iter_0000003" / layout.META_FILE).write_text(content)
    assert refusal(*pair).id == "checkpoint-meta-unreadable"


def test_a_newer_format_is_named(pair: tuple[str, str]) -> None:
    meta = Path(pair[0]) / "iter_0000003" / layout.META_FILE
    newer = layout.FORMAT_VERSION + 1
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"format_version": newer}))
    assert f"format {newer}" in refusal(*pair).message


def test_a_checkpoint_under_another_iterations_name_is_refused(pair: tuple[str, str]) -> None:
    for folder in map(Path, pair):
        (folder / "iter_0000003").rename(folder / "iter_0000007")
        layout.write_tracker(folder, 7)
    assert {p.id for p in refusals(*pair)} == {"resume-unreadable"}


def test_one_checkpoint_given_for_its_save_folder_is_refused(pair: tuple[str, str]) -> None:
    problem = refusal(pair[0] + "/iter_0000003", pair[1])
    assert (problem.id, problem.fix) == ("resume-not-a-save-folder", f"--load {pair[0]}")


def test_symlinked_save_folders_resume(pair: tuple[str, str], tmp_path: Path) -> None:
    for name, folder in zip(("x", "y"), pair, strict=True):
        (tmp_path / name).symlink_to(folder)
    decision = decide_resume(str(tmp_path / "x"), str(tmp_path / "y"), has_critic=True)
    assert decision.critic == LoadFrom(tmp_path / "y/iter_0000003")


def test_release_weights_start_both_at_0(tmp_path: Path) -> None:
    weights = save_release(tmp_path / "w")
    for critic_load in (None, weights):
        decision = decide_resume(weights, critic_load, has_critic=True)
        assert (decision.verdict, decision.iteration) == ("weights-only", None)
        assert decision.actor == decision.critic == LoadFrom(tmp_path / "w/release", weights_only=True)
        assert "step 1" in decision.text
        assert "the critic takes the same weights and a new value head" in decision.text
    alone = decide_resume(weights, None, has_critic=False)
    assert alone.critic is None
    assert "critic" not in alone.text
    own = decide_resume(weights, save_release(tmp_path / "own"), has_critic=True)
    assert own.critic == LoadFrom(tmp_path / "own/release", weights_only=True)


def test_megatrons_own_iterations_are_weights(tmp_path: Path) -> None:
    write_weights(tmp_path / "m/iter_0000500")
    layout.write_tracker(tmp_path / "m", 500)
    decision = decide_resume(str(tmp_path / "m"), None, has_critic=True)
    assert (decision.verdict, decision.iteration) == ("weights-only", None)
    assert decision.actor == LoadFrom(tmp_path / "m/iter_0000500", weights_only=True)


def test_our_checkpoint_without_relax_json_is_damaged(tmp_path: Path) -> None:
    actor = save(tmp_path / "a", "actor", 2, 3)
    (tmp_path / "a/iter_0000003" / layout.META_FILE).unlink()
    with pytest.raises(ResumeError) as caught:
        decide_resume(actor, None, has_critic=False)
    assert caught.value.problems[0].id == "checkpoint-meta-unreadable"


@pytest.mark.parametrize("missing", SHARDED)
def test_weights_that_are_not_all_there_are_refused(tmp_path: Path, missing: str) -> None:
    weights = save_release(tmp_path / "w")
    (tmp_path / "w/release" / missing).unlink()
    assert {p.id for p in refusals(weights, None)} == {"resume-unreadable"}


def test_weights_and_a_training_checkpoint_do_not_make_a_pair(pair: tuple[str, str], tmp_path: Path) -> None:
    weights = save_release(tmp_path / "w")
    assert refusal(weights, pair[1]).got == "actor weights only, critic iteration 3"
    assert refusal(pair[0], weights).got == "actor iteration 3, critic weights only"
    assert refusal(weights, str(tmp_path / "empty")).got == "actor weights only, critic no checkpoint"
    empty = str(tmp_path / "empty")
    allowed = decide_resume(weights, empty, has_critic=True, critic_init_from_actor=True, critic_save=empty)
    assert allowed.critic == allowed.actor


def test_a_critic_is_known_from_the_actors_checkpoint(tmp_path: Path, pair: tuple[str, str]) -> None:
    assert was_saved_beside_a_critic(pair[0])
    assert not was_saved_beside_a_critic(save(tmp_path / "g", "actor", 3, has_critic=False))
    assert not was_saved_beside_a_critic(save_release(tmp_path / "w"))
    assert not was_saved_beside_a_critic(str(tmp_path / "missing"))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user can reach, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def as_somebody() -> Iterator[None]:
    """An ordinary user inside the block: root may write anywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def run(folder: Path, **sections: object) -> Config:
    return Config(checkpoint=CheckpointSection(load=str(folder / "a"), save=str(folder / "a")), **sections)  # type: ignore[arg-type]


def test_a_read_only_folder_is_resumed_from_but_not_saved_into(open_folder: Path) -> None:
    actor, critic = save(open_folder / "a", "actor", 3), save(open_folder / "c", "critic", 3)
    (open_folder / "own").mkdir()
    (open_folder / "own").chmod(0o777)
    for folder in (open_folder / "a", open_folder / "c"):
        folder.chmod(0o555)
    elsewhere = CheckpointSection(load=actor, save=str(open_folder / "own/new"))
    with as_somebody():
        assert decide_resume(actor, critic, has_critic=True).iteration == 3
        assert problems_by(folder_read_only, Config(checkpoint=elsewhere)) == []
        found = problems_by(folder_read_only, run(open_folder, critic=CriticSection(critic_save=critic)))
    assert [(p.id, p.option) for p in found] == [("folder-read-only", "--save"), ("folder-read-only", "--critic-save")]


def test_a_folder_below_a_file_or_a_dead_link_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place in ("file/save", "link"):
        found = problems_by(folder_read_only, Config(checkpoint=CheckpointSection(save=str(tmp_path / place))))
        assert [p.id for p in found] == ["folder-read-only"]
    assert problems_by(folder_read_only, Config(checkpoint=CheckpointSection(save=str(tmp_path / "a/b/c")))) == []


def test_a_folder_that_may_not_be_read_is_refused_with_its_name(open_folder: Path) -> None:
    actor = save(open_folder / "a", "actor", 3)
    (open_folder / "a/iter_0000003").chmod(0)
    with as_somebody():
        report = examine_resume(actor, None, has_critic=False)
    (open_folder / "a/iter_0000003").chmod(0o755)
    assert report.decision.verdict == "refuse"
    assert "Permission denied" in report.problems[0].message
