"""A disk that fails for one of two ranks fails the save for both, and the next save works."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_cli.checkpoint import folders, layout, store
from relax_cli.errors import RunError
from tests.support.tiny_models import on_ranks, save_tiny_model
from tests.support.training_runs import Run, build, loss_fn, micro_batches


@pytest.mark.parametrize("broken", ["__1_0.distcp", "common.pt"])
def test_a_disk_that_fails_for_one_rank_fails_the_save_for_both(tmp_path: Path, broken: str) -> None:
    save_tiny_model(tmp_path / "model", "qwen3", tied=True)
    said = on_ranks(2, save_twice, Run("policy", tmp_path / "model"), tmp_path / "saves", broken)
    for messages in said:
        assert len(messages) == 1, "the second save works"
        assert messages[0].startswith("storage-failed: ")
        assert "Input/output error" in messages[0]
    saved = layout.iteration_folder(tmp_path / "saves", 2)
    assert layout.is_complete(saved)
    assert layout.list_iterations(tmp_path / "saves") == [2]
    assert not layout.list_leftovers(tmp_path / "saves")


def save_twice(rank: int, ranks: int, port: int, run: Run, save_dir: Path, broken: str) -> list[str]:
    """What the disk said; it is broken during the first save."""
    model = build(run, rank, ranks, port)
    model.train_step(micro_batches(3, list(range(6))[rank::ranks]), loss_fn)
    faults = [True]

    def fail(event: str, args: tuple[Any, ...]) -> None:
        if faults[0] and event == "open" and broken in str(args[0]):
            raise OSError(errno.EIO, os.strerror(errno.EIO), args[0])

    sys.addaudithook(fail)
    said = []
    for iteration in (1, 2):
        try:
            store.prepare(model, save_dir, iteration, "actor", {}, copied=False)()
        except RunError as error:
            said.append(f"{error.problems[0].id}: {error.problems[0].message}")
            faults[0] = False
            continue
        if rank == 0:
            folders.commit(save_dir, iteration)
    return said
