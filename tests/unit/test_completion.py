"""Folders of the critic that were not given: next to the actor's, where that is what a run wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_cli.config.schema import Config
from relax_cli.preflight.completion import complete

PAIR = ["ck", "ck-critic"]
BOTH = {"critic_save": "ck-critic", "critic_load": "ck-critic"}
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.mark.parametrize(
    ("checkpoint", "critic", "existing", "expected"),
    [
        # --save alone, with and without a slash at the end; a folder that is given stays.
        ({"save": "ck"}, {}, [], {"critic_save": "ck-critic"}),
        ({"save": "ck/"}, {}, [], {"critic_save": "ck-critic"}),
        ({"save": "ck"}, {"critic_save": "c"}, [], {}),
        ({}, {}, [], {}),
        # One script restarts itself: the first time there is nothing, then there is a pair.
        ({"save": "ck", "load": "ck"}, {}, [], BOTH),
        ({"save": "ck", "load": "ck"}, {}, PAIR, BOTH),
        # Another run's pair.
        ({"load": "ck"}, {}, PAIR, {"critic_load": "ck-critic"}),
        ({"load": "ck", "save": "new"}, {}, PAIR, {"critic_save": "new-critic", "critic_load": "ck-critic"}),
        # Weights, or an actor alone: the critic follows --load, as ever.
        ({"load": "ck"}, {}, ["ck"], {}),
        ({"load": "ck", "save": "ck"}, {}, ["ck"], {"critic_save": "ck-critic"}),
        # What is said is done.
        ({"load": "ck"}, {"critic_load": "c"}, PAIR, {}),
        ({"load": "ck"}, {"critic_init_from_actor": True}, PAIR, {}),
        ({"save": "ck", "load": "ck"}, {"critic_save": "c"}, [], {}),
    ],
)
def test_the_critic_is_next_to_the_actor(
    checkpoint: dict[str, Any],
    critic: dict[str, Any],
    existing: list[str],
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in existing:
        Path(name).mkdir()
        Path(name, TRACKER).write_text("4")
    given = Config.model_validate({"checkpoint": checkpoint, "critic": critic})
    completed, changes = complete(given, has_critic=True)
    assert completed.critic.model_dump() == given.critic.model_dump() | expected
    assert {change.option: change.after for change in changes} == {
        f"--{name.replace('_', '-')}": folder for name, folder in expected.items()
    }
    assert complete(given, has_critic=False) == (given, [])
