"""Every fix of a checkpoint problem that is a command or an option does away with the problem."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from relax_cli.checkpoint import layout
from relax_cli.cli.app import build_app
from relax_cli.plugin.manager import load_plugins
from tests.support.checkpoints import save
from tests.support.fixes import follow

Words = list[str]


def relax(*words: str) -> Result:
    return CliRunner().invoke(build_app(load_plugins()), list(words))


def flip(folder: Path, iteration: int) -> None:
    """Change the bytes of a shard; sizes stay."""
    shard = layout.iteration_folder(folder, iteration) / "__0_0.distcp"
    shard.write_text(shard.read_text().swapcase())


def cut(folder: Path, iteration: int, name: str = ".metadata") -> None:
    (layout.iteration_folder(folder, iteration) / name).write_text("")


class Folders:
    """An actor and a critic with the iterations 1 to 3, in folders whose names a shell must have quoted."""

    def __init__(self, tmp_path: Path) -> None:
        root = tmp_path / "it's here"
        self.root, self.actor, self.critic = root, root / "my actor", root / "my critic"
        for iteration in (1, 2, 3):
            ids = {"save_id": f"pair {iteration}", "critic_save": str(self.critic)}
            save(self.actor, "actor", iteration, **ids)
            save(self.critic, "critic", iteration, **ids)

    def check(self, *words: str) -> Words:
        folders = ["--load", str(self.actor), "--critic-load", str(self.critic)]
        return ["checkpoint", "check-resume", *folders, *words]

    def alone(self, *words: str) -> Words:
        """The same of a run without a critic."""
        shutil.rmtree(self.actor)
        save(self.actor, "actor", 1, 2, 3, has_critic=False)
        return ["checkpoint", "check-resume", "--load", str(self.actor), *words]


def a_flipped_bit(f: Folders) -> Words:
    flip(f.critic, 3)
    return f.check("--deep")


def flipped_bits_in_two(f: Folders) -> Words:
    flip(f.critic, 3)
    flip(f.actor, 2)
    return f.check("--deep")


def a_flipped_bit_without_a_critic(f: Folders) -> Words:
    words = f.alone("--deep")
    flip(f.actor, 3)
    flip(f.actor, 2)
    return words


def a_cut_file(f: Folders) -> Words:
    cut(f.actor, 3)
    return f.check()


def a_cut_file_without_a_critic(f: Folders) -> Words:
    words = f.alone()
    cut(f.actor, 3)
    return words


def relax_json_that_is_cut(f: Folders) -> Words:
    words = f.alone()
    cut(f.actor, 3, layout.META_FILE)
    return words


def relax_json_with_other_types(f: Folders) -> Words:
    path = layout.iteration_folder(f.critic, 3) / layout.META_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"parallel": {"tensor_parallel": "x"}}))
    return f.check()


def trackers_that_differ(f: Folders) -> Words:
    layout.write_tracker(f.critic, 2)
    shutil.rmtree(layout.iteration_folder(f.critic, 3))
    return f.check()


def a_tracker_of_nonsense(f: Folders) -> Words:
    (f.actor / layout.TRACKER_FILE).write_text("nonsense")
    return f.check()


def a_tracker_that_is_gone(f: Folders) -> Words:
    (f.actor / layout.TRACKER_FILE).unlink()
    return f.check()


def a_tracker_that_leads_nowhere(f: Folders) -> Words:
    words = f.alone()
    layout.write_tracker(f.actor, 9)
    return words


def another_runs_critic(f: Folders) -> Words:
    shutil.rmtree(layout.iteration_folder(f.critic, 3))
    save(f.critic, "critic", 3, save_id="of another run")
    return f.check()


def one_checkpoint(f: Folders) -> Words:
    return ["checkpoint", "check-resume", "--load", str(f.actor / "iter_0000003"), "--critic-load", str(f.critic)]


def the_folder_above(f: Folders) -> Words:
    f.actor.rename(f.root / "actor")
    return ["checkpoint", "check-resume", "--load", str(f.root), "--critic-load", str(f.critic)]


def the_run_folder(f: Folders) -> Words:
    run = f.root / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    (run / "config.json").write_text(json.dumps({"checkpoint": {"save": str(f.actor)}}))
    return ["checkpoint", "check-resume", "--load", str(run), "--critic-load", str(f.critic)]


def a_new_folder(f: Folders) -> Words:
    return ["checkpoint", "check-resume", "--load", str(f.root / "new one")]


def no_folder_for_the_critic(f: Folders) -> Words:
    return ["checkpoint", "check-resume", "--load", str(f.actor)]


def half_a_pair(f: Folders) -> Words:
    return ["checkpoint", "prune", str(f.actor), "--keep", "2"]


def pruning_with_nonsense_in_the_tracker(f: Folders) -> Words:
    (f.critic / layout.TRACKER_FILE).write_text("nonsense")
    return ["checkpoint", "prune", str(f.actor), "--critic", str(f.critic), "--keep", "1"]


def pruning_an_actor_with_nonsense_in_the_tracker(f: Folders) -> Words:
    f.alone()
    (f.actor / layout.TRACKER_FILE).write_text("nonsense")
    return ["checkpoint", "prune", str(f.actor), "--keep", "1"]


SITUATIONS: list[Callable[[Folders], Words]] = [
    a_flipped_bit,
    flipped_bits_in_two,
    a_flipped_bit_without_a_critic,
    a_cut_file,
    a_cut_file_without_a_critic,
    relax_json_that_is_cut,
    relax_json_with_other_types,
    trackers_that_differ,
    a_tracker_of_nonsense,
    a_tracker_that_is_gone,
    a_tracker_that_leads_nowhere,
    another_runs_critic,
    one_checkpoint,
    the_folder_above,
    the_run_folder,
    a_new_folder,
    no_folder_for_the_critic,
    half_a_pair,
    pruning_with_nonsense_in_the_tracker,
    pruning_an_actor_with_nonsense_in_the_tracker,
]


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: str(situation.__name__))
def test_the_fix_does_away_with_the_problem(situation: Callable[[Folders], Words], tmp_path: Path) -> None:
    words = situation(Folders(tmp_path))
    refused = relax(*words, "--format", "json")
    assert refused.exit_code in (2, 3)
    problem = json.loads(refused.stdout)["problems"][0]
    assert not problem["expected"].startswith(";")
    again = relax(*follow(problem["fix"], words, relax), "--format", "json")
    assert again.exit_code == 0, (problem, again.output)


@pytest.mark.parametrize(
    ("damaged", "newest"), [((3,), 2), ((3, 2), 1), ((2,), 3)], ids=["the newest", "the two newest", "an older one"]
)
def test_a_deep_check_goes_back_to_hashes_that_are_right(damaged: tuple[int, ...], newest: int, tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    for iteration in damaged:
        flip(folders.actor, iteration)
    found = json.loads(relax(*folders.check("--deep", "--format", "json")).stdout)
    assert found["ok"] == (newest == 3)
    if not found["ok"]:
        assert found["problems"][0]["expected"].endswith(f"in both is iteration {newest}")
        assert found["fix"].endswith("--deep --yes")
        follow(found["fix"], [], relax)
    assert layout.read_tracker(folders.actor).iteration == newest
