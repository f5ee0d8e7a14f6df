"""What a person sees while a run goes."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from relax_cli.cli.screen import Screen
from relax_cli.tracking.live import StepDisplay
from relax_cli.tracking.numbers import (
    COLUMNS,
    clock_text,
    columns_of,
    count_text,
    fitting_columns,
    number_text,
    plain_line,
)
from relax_cli.tracking.view import RunHeader

FULL = {
    "step": 12,
    "reward/mean": 0.71,
    "response_len/mean": 2.9,
    "value_loss": 0.12,
    "value_clip_frac": 0.02,
    "pg_loss": -0.0123,
    "pg_clip_frac": 0.031,
    "ppo_kl": 0.00021,
    "tokens_per_second": 5234.0,
    "memory_gb": 1.25,
    "phase_seconds": {"rollout": 1.0, "critic": 0.5, "advantages": 0.001, "actor": 2.5, "publish": 0.1},
}
CRITIC_ONLY = {name: value for name, value in FULL.items() if not name.startswith(("pg_", "ppo_"))}
TOGETHER = ("reward/mean", "value_loss", "value_clip_frac", "pg_loss", "pg_clip_frac", "ppo_kl")
PPO = RunHeader(
    "runs/ppo-1", "models/Qwen3-4B", 4_020_000_000, "ppo", "cuda", "Ray",
    {"rollout": 8, "critic": 8, "advantages": 1, "actor": 8},
)  # fmt: skip
GRPO = RunHeader("runs/grpo-1", "tiny", 101_000, "grpo", "cpu", "in this process", {"rollout": 1, "actor": 1})


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def terminal(width: int, height: int = 24) -> Console:
    return Screen(file=io.StringIO(), force_terminal=True, width=width, height=height, _environ={"TERM": "xterm"})


def shown(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def picture(display: StepDisplay, console: Console) -> list[str]:
    """What the display shows now, as plain lines."""
    with console.capture() as captured:
        console.print(display._render())
    return Text.from_ansi(captured.get()).plain.splitlines()


def trained(console: Console, header: RunHeader = PPO, steps: int = 12, **more: float) -> StepDisplay:
    """A display of a run after some steps."""
    display = StepDisplay(console, 40, header)
    for step in range(1, steps + 1):
        display.show(FULL | {"step": step, "reward/mean": step / 40} | more)
    return display


# --- lines ---------------------------------------------------------------------------------------------------------


def test_a_plain_line_says_everything_in_a_fixed_order() -> None:
    assert plain_line(FULL, 40, 25.0) == (
        "step 12/40  eta 00:25  reward 0.710  len 2.90  v_loss 0.120  pg_loss -0.012  pg_clip 0.031  v_clip 0.020  "
        "kl 2.1e-4  5234 tok/s  gen 1.0 crit 0.5 act 2.5 sync 0.1"
    )


def test_what_a_critic_only_step_lacks_is_a_dash() -> None:
    line = plain_line(CRITIC_ONLY, 40, None)
    assert line.startswith("step ")
    assert "  eta -  " in line
    assert "pg_loss -  pg_clip -  v_clip 0.020  kl -  " in line


def test_numbers_fit_their_columns() -> None:
    values = [0.0, -0.5, 12.345, 999.4, -1234.5, 1.5e7, -2.5e-9, math.nan, -math.inf]
    texts = [number_text(value) for value in values]
    assert texts == ["0", "-0.500", "12.3", "999", "-1234", "1.5e+7", "-2.5e-9", "nan", "-inf"]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "00:00"), (65, "01:05"), (3599.6, "1:00:00"), (7325, "2:02:05")])
def test_times_left_read_as_a_clock(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(842, "842"), (101_376, "101 k"), (4_022_468_096, "4.02 B")])
def test_large_counts_have_three_digits(count: int, text: str) -> None:
    assert count_text(count) == text


def test_a_narrow_terminal_shows_the_important_columns() -> None:
    wide, with_phases = fitting_columns(COLUMNS, 140, 5)
    assert (len(wide), with_phases) == (8, True)
    narrow, with_phases = fitting_columns(COLUMNS, 40, 5)
    assert ([column.title for column in narrow], with_phases) == (["reward", "v_loss", "pg_loss"], False)


def test_columns_of_a_critic_need_one() -> None:
    assert [column.title for column in columns_of(has_critic=False)] == [
        "reward", "len", "pg_loss", "pg_clip", "kl", "tok/s"
    ]  # fmt: skip
    out = io.StringIO()
    StepDisplay(Console(file=out, width=80, _environ={}), 40, GRPO).show(FULL)
    assert "v_loss" not in out.getvalue()


def test_what_a_batch_cost_is_shown_where_prompts_are_drawn() -> None:
    out = io.StringIO()
    header = replace(GRPO, draws_more=True)
    StepDisplay(Console(file=out, width=80, _environ={}), 40, header).show(FULL | {"sampling/prompts": 96})
    assert "drawn 96" in out.getvalue()


# --- off a terminal ------------------------------------------------------------------------------------------------


def test_off_a_terminal_there_is_one_plain_line_per_step() -> None:
    clock = Clock()
    out = io.StringIO()
    with StepDisplay(Console(file=out, width=80, _environ={}), 3, clock=clock) as display:
        display.status("starting Ray")
        display.status("starting Ray")
        display.note("held-out [bold] 0.46")
        for step in range(1, 4):
            clock.now += 2.0
            display.status("saving")
            display.show(CRITIC_ONLY | {"step": step})
    lines = out.getvalue().splitlines()
    assert lines[:3] == ["starting Ray ...", "held-out [bold] 0.46", "saving ..."]
    assert [line.split()[1] for line in lines[3:]] == ["1/3", "2/3", "3/3"]
    assert "\x1b" not in out.getvalue()
    assert out.getvalue().isascii()


def test_phases_take_no_line_off_a_terminal() -> None:
    out = io.StringIO()
    display = StepDisplay(Console(file=out, width=80, _environ={}), 4)
    display.phase("rollout")
    display.show(FULL | {"step": 1})
    assert len(out.getvalue().splitlines()) == 1


def test_time_left_ignores_start_up_and_follows_the_last_steps() -> None:
    clock = Clock()
    out = io.StringIO()
    display = StepDisplay(Console(file=out, width=200, _environ={}), 10, clock=clock)
    clock.now += 60.0
    display.show({"step": 1, "phase_seconds": {"rollout": 2.0}})
    clock.now += 4.0
    display.show({"step": 2, "phase_seconds": {"rollout": 2.0}})
    etas = [line.split()[3] for line in out.getvalue().splitlines()]
    assert etas == ["00:18", "00:24"]


# --- on a terminal -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("height", [12, 24, 50])
@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_the_view_fits_and_keeps_what_is_read_together(width: int, height: int) -> None:
    console = terminal(width, height)
    display = trained(console, **{"entropy": 1.0, "actor/grad_norm": 2.0})
    for step, reward in ((0, 0.25), (12, 0.5)):
        display.evaluated({"step": step, "eval/heldout/reward/mean": reward})
    for number in range(5):
        display.warn(f"warning {number}\n    and where")
    display.phase("actor")
    lines = picture(display, console)
    text = "\n".join(lines)
    assert len(lines) <= height - (1 if height == 12 else 4), "finished steps need lines"
    assert max(map(len, lines)) <= width
    assert all(f"{name} " in text for name in TOGETHER)
    assert "runs/ppo-1   models/Qwen3-4B (4.02 B parameters)   ppo" in lines[1]
    assert "rollout 8  critic 8  advantages 1  actor 8   cuda, Ray" in lines[2]
    assert "step 12/40  30 %" in lines[3]
    assert "eta" in lines[3]
    assert "training the actor … 0 s   usually 2.5 s, 61 % of a step" in lines[4]
    assert lines[-1] == "! step 12: warning 4"
    if height > 12:
        assert "5234 tokens/s   memory 1.2 GB" in text
        assert "held-out set heldout, reward 0.250 after step 0, 0.500 after step 12" in text
        assert "! step 12: warning 2" in text
    (reward,) = (line for line in lines if "reward/mean" in line)
    assert "0.300 ▁" in reward
    assert "▁▂▂▃▄▄▅" in reward
    assert len(reward) > 0.75 * width


def test_finished_steps_stay_above_the_view() -> None:
    console = terminal(80, 24)
    trained(console, steps=40)
    lines = Text.from_ansi(shown(console)).plain.splitlines()
    assert [int(line.split("/")[0]) for line in lines if "/40" in line] == list(range(1, 41))
    assert sum("pg_loss" in line for line in lines) == 2, "titles come again after a screenful"


def drawn(output: str) -> list[str]:
    """The lines of a terminal, scrollback included, after this output."""
    lines, at = [""], 0
    for piece in re.findall(r"\x1b\[1A|\x1b\[2K|\x1b\[[?\d;]*[a-zA-Z]|[\r\n]|[^\x1b\r\n]+", output):
        if piece == "\x1b[1A":
            at -= 1
        elif piece in ("\x1b[2K", "\r"):
            lines[at] = "" if piece != "\r" else lines[at]
        elif piece == "\n":
            at += 1
            lines += [""] * (at == len(lines))
        elif not piece.startswith("\x1b"):
            lines[at] += piece
    return lines


def test_no_line_is_lost_while_the_view_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_cli.tracking.live.REDRAWN_EVERY", 0.0001)
    console = terminal(100, 30)
    with StepDisplay(console, 150, PPO) as display:
        for step in range(1, 151):
            display.phase("actor")
            display.show(FULL | {"step": step})
            if step % 50 == 0:
                display.warn(f"{step} " + "long " * 60)
    rows = [line for line in drawn(shown(console)) if re.match(r" *\d+/150", line)]
    assert [int(row.split("/")[0]) for row in rows] == list(range(1, 151))


def test_start_up_is_a_list_of_steps_with_their_times() -> None:
    clock = Clock()
    console = terminal(80)
    display = StepDisplay(console, 40, PPO, clock=clock)
    display.status("starting Ray")
    clock.now += 6.2
    assert picture(display, console)[-1] == "starting Ray … 6 s"
    display.status("loading the models")
    clock.now += 10.1
    lines = picture(display, console)
    assert "  starting Ray  6.2 s" in lines
    assert lines[-1] == "loading the models … 10 s"
    display.phase("rollout")
    clock.now += 3.0
    assert "generating … 3 s" in picture(display, console)
    assert "started in 16.3 s: starting Ray 6.2 s, loading the models 10.1 s" in shown(console).replace("\n", "")


def test_a_resumed_run_shows_what_was_before() -> None:
    console = terminal(120)
    display = StepDisplay(console, 40, PPO)
    display.remember([{"step": 0, "eval/held/reward/mean": 0.25}, *({**FULL, "step": s, "pg_loss": s} for s in (1, 2))])
    display.show(FULL | {"step": 3, "pg_loss": 3.0})
    text = "\n".join(picture(display, console))
    assert "▁▅█" in text
    assert "held-out set held, reward 0.250 after step 0" in text
    assert "1/40" not in shown(console)


def test_a_run_without_a_critic_shows_none() -> None:
    console = terminal(120)
    record = {name: value for name, value in FULL.items() if not name.startswith("value_")}
    display = StepDisplay(console, 40, GRPO)
    display.show(record)
    text = shown(console) + "\n".join(picture(display, console))
    assert "pg_loss" in text
    assert not any(name in text for name in ("v_loss", "v_clip", "value_", "critic"))


def test_texts_of_others_do_nothing_to_the_terminal() -> None:
    console = terminal(120)
    evil = "[bold]x[/] \x1b[2J\x1b]0;pwned\x07"
    display = StepDisplay(console, 40, RunHeader(evil, evil, 1, evil))
    display.status(evil)
    started = "\n".join(picture(display, console))
    display.warn(evil)
    display.show(FULL)
    display.evaluated({"step": 12, "eval/[bold]x[\\] \x1b[2J/reward/mean": 1.0})
    text = started + shown(console) + "\n".join(picture(display, console))
    assert text.count("[bold]x[/] \\x1b[2J") >= 6
    assert "\x1b[2J" not in text
    assert "\x07" not in text


def test_numbers_that_are_broken_are_red() -> None:
    console = terminal(80)
    StepDisplay(console, 40).show(FULL | {"pg_loss": math.nan})
    assert "\x1b[1;31mnan" in shown(console)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_cursor_comes_back_after_an_interruption(error: Callable[[], BaseException]) -> None:
    console = terminal(80)
    with pytest.raises(BaseException) as caught, StepDisplay(console, 4) as display:  # noqa: PT011, PT012
        display.show(FULL | {"step": 1})
        raise error()
    assert type(caught.value) is error
    assert shown(console).rindex("\x1b[?25h") > shown(console).rindex("\x1b[?25l")


SCRIPT = """
import os, subprocess, sys
from dataclasses import replace
from pathlib import Path
from relax_cli.cli.screen import Screen
from relax_cli.tracking.live import StepDisplay

with StepDisplay(Screen(stderr=True, force_terminal=True), 2, log=Path("logs/output.log")) as display:
    print("a print"); os.write(2, b"C code\\n"); subprocess.run(["echo", "a child"])
    print("a bar", file=sys.stderr)
    display.note("a note")
    if sys.argv[1:]:
        breakpoint()
        print("after it")
print("the end", file=sys.stderr)
"""


def on_a_terminal(folder: Path, *words: str, **environment: str) -> str:
    """What a program that displays steps writes to a terminal of its own."""
    ours, theirs = pty.openpty()
    root = str(Path(__file__).parents[2])
    env: Mapping[str, Any] = {**os.environ, "TERM": "xterm", "PYTHONPATH": root, **environment}
    command = [sys.executable, "-c", SCRIPT, *words]
    done = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=env)
    os.close(theirs)
    found = b""
    try:
        while piece := os.read(ours, 4096):
            found += piece
    except OSError:
        pass  # Linux reports the end of a terminal as an error.
    os.close(ours)
    assert done.wait(60) == 0
    return found.decode()


def test_prints_of_others_go_to_a_log_not_to_the_terminal(tmp_path: Path) -> None:
    seen = on_a_terminal(tmp_path)
    assert (tmp_path / "logs" / "output.log").read_text().splitlines() == ["a print", "C code", "a child", "a bar"]
    assert not any(word in seen for word in ("a print", "C code", "a child", "a bar"))
    assert "a note" in seen
    assert "printed: logs/output.log" in seen
    assert "the end" in seen


def test_a_debugger_gets_the_terminal(tmp_path: Path) -> None:
    assert "after it" in on_a_terminal(tmp_path, "debug", PYTHONBREAKPOINT="0")
