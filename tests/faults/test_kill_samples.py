"""`kill -9` while a thread writes samples: no half file has a final name, and no pair counts without its samples."""

from __future__ import annotations

import signal
from pathlib import Path

from relax_cli.roles.sample_files import read_samples, sample_files
from tests.support.fault_runs import STEPS, Folders, Zygote, arguments, assert_resumable

KILLS = {
    "half of the first file is written": (("tear 1", ".step_000001.zip.tmp", 2), 0),
    "a file is written and has no name": (("kill 1", ".step_000002.zip.tmp", 2), 1),
    "a file is not open yet": (("kill", ".step_000003.zip.tmp", 1), 2),
    # After the folder is made: three operations a step, of which the last opens the folder.
    "a name is not on the disk yet": (("kill 1", "/rollouts", 7), 3),
    "half of a later file is written": (("tear 1", ".step_000005.zip.tmp", 2), 4),
}
"""Each resumes the run that the one before ended: the fault, and the iteration that resumes after it.

During the second of a fault the other threads go on: a pair that does not wait for its samples counts by then.
"""


def test_kills_while_samples_are_written_change_no_number(
    zygote: Zygote, task: Path, straight: Folders, tmp_path: Path
) -> None:
    folders = Folders(tmp_path)
    expected = straight.samples()
    for instant, (fault, iteration) in KILLS.items():
        ended = zygote.run(tmp_path, arguments(task, folders), fault=fault)
        assert ended.code == -signal.SIGKILL, (instant, ended.err)
        assert assert_resumable(folders, instant) == iteration
        files = sample_files(folders.run)
        assert list(files)[:iteration] == list(range(1, iteration + 1)), instant
        for step, paths in files.items():
            assert len(read_samples(paths)) == len(expected[step - 1]), (instant, "every named file is whole")
        assert folders.samples()[:iteration] == expected[:iteration], instant
    assert zygote.run(tmp_path, arguments(task, folders)).code == 0
    assert [record["step"] for record in folders.metrics()] == list(range(1, STEPS + 1))
    assert folders.metrics() == straight.metrics()
    assert folders.samples() == expected
    assert list((folders.run / "rollouts").glob(".*")) == [], "nothing unfinished stays"
