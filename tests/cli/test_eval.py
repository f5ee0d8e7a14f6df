"""`relax eval` before anything starts: what it asks for, and whose problems it reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli_app import Invoke


@pytest.mark.parametrize(
    ("words", "code", "ids"),
    [
        ([], 2, {"eval-without-data"}),
        (["--data", "h=gone.jsonl"], 2, {"prompt-data-file-missing"}),
        (["--data", "HELDOUT"], 2, {"eval-data-name"}),
        (["--data", "h=HELDOUT", "--eval-sampling", "other:n=2"], 2, {"eval-sampling"}),
        (["--data", "h=HELDOUT", "--rm-type", "exakt"], 2, {"reward-unknown"}),
        (["--data", "h=HELDOUT", "--env", "calk"], 2, {"env-unknown"}),
        (["--data", "h=HELDOUT", "--load", "gone"], 2, {"checkpoint-folder-missing"}),
        (["--data", "h=HELDOUT", "--load", "."], 3, {"export-no-checkpoint"}),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_built(
    invoke: Invoke, task: Path, words: list[str], code: int, ids: set[str]
) -> None:
    given = [word.replace("HELDOUT", str(task / "data/heldout.jsonl")) for word in words]
    common = ["--hf-checkpoint", str(task / "model"), "--label-key", "label", "--eval-max-response-len", "6"]
    common += [] if {"--rm-type", "--env"} & set(words) else ["--rm-type", "exact"]
    result = invoke("eval", *common, *given, "--format", "json")
    assert result.exit_code == code, result.stderr
    assert {p["id"] for p in json.loads(result.stdout)["problems"]} == ids


def test_options_of_training_are_not_offered(invoke: Invoke) -> None:
    text = invoke("eval", "--help").stdout
    assert all(option in text for option in ("--data ", "--load ", "--eval-sampling ", "--rm-type ", "--device "))
    assert not any(option in text for option in ("--lr ", "--save ", "--prompt-data ", "--gamma ", "--eval-interval "))
