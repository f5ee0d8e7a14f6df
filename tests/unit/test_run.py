"""What a run says at its end."""

from __future__ import annotations

from relax_cli.engine.run import without_options


def test_an_option_is_taken_out_of_a_command_with_its_value_wherever_it_stands() -> None:
    words = ["--recipe", "a.yaml", "--run-dir", "x", "--strict", "--load", "y", "--set", "run.seed=1"]
    assert without_options(words, {"--run-dir", "--load"}) == ["--recipe", "a.yaml", "--strict", "--set", "run.seed=1"]
    assert without_options(words, set()) == words
