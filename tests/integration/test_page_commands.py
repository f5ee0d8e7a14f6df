"""What README and docs tell people to type works as it stands, from the files of `relax quickstart --prepare-only`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.fault_runs import Zygote
from tests.support.page_commands import (
    NOT_RUN,
    blocks,
    files_to_save,
    make_environment,
    run_block,
    unmarked_commands,
    warm_relax,
)

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}


def damaged_pair(folder: Path, relax: Callable[[str], None]) -> None:
    """The situation of docs/checkpoints.md: five steps, the critic's last save lost, its first damaged."""
    relax(
        "train --recipe tiny-ppo-cpu --num-rollout 5 --save ckpt/actor --critic-save ckpt/critic --save-interval 1 "
        "--rollout-batch-size 32 --micro-batch-size 16"
    )
    critic = folder / "ckpt" / "critic"
    shutil.rmtree(critic / "iter_0000005")
    (critic / "latest_checkpointed_iteration.txt").write_text("4", "utf-8")
    with (critic / "iter_0000001" / "__0_0.distcp").open("r+b") as file:
        file.truncate(1000)
    (folder / "ckpt" / "actor" / ".iter_0000006.tmp").mkdir()


def short_quickstart(folder: Path, relax: Callable[[str], None]) -> None:
    """The situation of docs/first-run.md and docs/looking.md: `relax quickstart` has run."""
    relax("train --recipe quickstart/recipe.yaml --num-rollout 1 --run-dir quickstart/run")


PREPARATIONS = {"first-run.md": short_quickstart, "looking.md": short_quickstart, "checkpoints.md": damaged_pair}


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `relax quickstart --prepare-only` writes."""
    folder = tmp_path_factory.mktemp("pages")
    subprocess.run(
        [sys.executable, "-m", "relax_cli", "quickstart", "--prepare-only"], cwd=folder, check=True, timeout=120
    )
    return folder / "quickstart"


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """A warm process, whose forks are the commands of most pages."""
    warm = Zygote()
    yield warm
    warm.close()


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs(page: str, quickstart: Path, zygote: Zygote, tmp_path: Path) -> None:
    text = PAGES[page].read_text("utf-8")
    assert unmarked_commands(text) == []
    shown = blocks(text)
    assert {block.title for block in shown if block.title} <= set(NOT_RUN)
    runnable = [block for block in shown if not block.title]
    if not runnable:
        return
    shutil.copytree(quickstart, tmp_path / "quickstart")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "PATH": f"{tmp_path / '.venv' / 'bin'}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }

    def relax(words: str) -> None:
        local = environment | {"RELAX_LAUNCHER": "local"}
        subprocess.run(["relax", *words.split()], cwd=tmp_path, env=local, check=True, timeout=240)

    # What a page installs, only a process of its own environment finds.
    installs = any("pip install" in block.commands for block in runnable)
    with nullcontext() if installs else warm_relax(zygote, tmp_path) as warm:
        make_environment(tmp_path / ".venv", warm)
        PREPARATIONS.get(page, lambda *_: None)(tmp_path, relax)
        for name, content in files_to_save(text).items():
            (tmp_path / name).write_text(content, "utf-8")
        assert [wrong for block in runnable if (wrong := run_block(block, tmp_path, environment))] == []
