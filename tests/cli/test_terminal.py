"""What reaches a terminal: no code of others, no character that it cannot show, data alone on stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from relax_cli.cli.app import build_app
from relax_cli.cli.console import Format, Output
from relax_cli.cli.screen import Screen
from relax_cli.config import text
from relax_cli.config.text import printable
from relax_cli.errors import ConfigError, Problem, RunError
from relax_cli.plugin.manager import GROUP
from tests.support.cli_app import Invoke

EVIL = "\x1b[2J\x1b]0;pwned\x07\x9b31m\r\u202e"
CODES = ("\x1b", "\x07", "\x9b", "\r", "\u202e")


@pytest.mark.parametrize(
    ("given", "shown"),
    [("a\tb\nc", "a\tb\nc"), ("\x1b[2J", "\\x1b[2J"), ("\x9b", "\\x9b"), ("\x7f", "\\x7f"), ("Ωé…┤", "Ωé…┤"),
     ("\ud835", "\\ud835"), ("\u202e", "\\u202e"), ("\r\n", "\\x0d\n"), ("\x00", "\\x00")],
)  # fmt: skip
def test_control_characters_are_written_out(given: str, shown: str) -> None:
    assert printable(given) == shown


def test_rich_makes_its_own_codes_and_others_make_none() -> None:
    stream = StringIO()
    screen = Screen(file=stream, force_terminal=True, color_system="standard", width=100)
    screen.print(f"[bold red]error[/] {EVIL}", markup=True)
    shown = stream.getvalue()
    assert shown.count("\x1b[1;31m") == 1
    assert not any(code in shown for code in ("\x1b[2J", "\x07", "\x9b", "\r", "\u202e"))


@pytest.mark.parametrize("fmt", [Format.TEXT, Format.JSON])
def test_texts_of_others_are_cleaned_wherever_they_are_shown(fmt: Format, capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(fmt)
    problem = Problem("an-id", EVIL, EVIL, EVIL, EVIL, EVIL, EVIL)
    error = RunError(problem)
    error.add_note(EVIL)
    output.fail(error)
    output.warn(problem)
    output.note(EVIL)
    output.result({"a": EVIL}, EVIL)
    shown = "".join(capsys.readouterr())
    assert "pwned" in shown
    assert not any(code in shown for code in CODES)


def test_bad_recipes_and_rows_cannot_steer_the_terminal(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke("quickstart", "--prepare-only").exit_code == 0
    Path("bad.jsonl").write_bytes(b'{"input": "1", "label": "2"}\n' + EVIL.encode() + b"\n")
    Path("bad.yaml").write_text(json.dumps({"op" + EVIL: {"lr": 1}, "optimizer": {"lr" + EVIL: 1, "lr": EVIL}}))
    words = ("--recipe", "tiny-ppo-cpu", "--recipe", "bad.yaml", "--prompt-data", "bad.jsonl", f"--rm-type={EVIL}")
    for command in ("validate-config", "train"):
        shown = invoke(command, *words)
        assert shown.exit_code == 2
        assert not any(code in shown.stdout + shown.stderr for code in CODES)


PRINTS = """
import sys
from relax_cli import Reward, hookimpl
print("loading")
sys.stdout.write("raw ")

@hookimpl
def relax_rewards():
    print("rewards")
    return [Reward("noisy", "a reward", "noisy_plugin:judge")]

@hookimpl
def relax_check_config(config):
    print("checking")
"""


@pytest.mark.parametrize(
    "words",
    [("plugins", "list"), ("plugins", "show", "noisy"), ("validate-config",), ("train",), ("recipes", "list"),
     ("train", "--show-config"), ("train", "--dry-run")],
)  # fmt: skip
def test_stdout_is_one_object_whatever_plugins_print(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import EntryPoint

    (tmp_path / "noisy_plugin.py").write_text(PRINTS)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("noisy_plugin", None)
    entries = [EntryPoint("grpo", "relax_grpo", GROUP), EntryPoint("noisy", "noisy_plugin", GROUP)]
    monkeypatch.setattr("relax_cli.plugin.manager.installed_plugins", lambda: entries)
    shown = CliRunner().invoke(build_app(), [*words, "--format", "json"])
    json.loads(shown.stdout)
    assert "loading" in shown.stderr


def test_even_processes_and_descriptors_leave_stdout_alone(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, typer\n"
        "from relax_cli.cli.console import Format, output_of\n"
        "app = typer.Typer()\n"
        "@app.command()\n"
        "def main(ctx: typer.Context):\n"
        "    output = output_of(ctx, Format.JSON)\n"
        "    print('print'); os.write(1, b'descriptor'); subprocess.run(['echo', 'child'])\n"
        "    output.result({'ok': True}, '')\n"
        "app()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, encoding="utf-8")
    assert json.loads(done.stdout) == {"ok": True}
    assert all(word in done.stderr for word in ("print", "descriptor", "child"))


def test_libraries_draw_no_bars() -> None:
    code = (
        "from relax_cli.cli.app import main; main(['--version'])\n"
        "from huggingface_hub.utils import are_progress_bars_disabled as off; from tqdm import tqdm\n"
        "print(off(), list(tqdm(range(3))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[1:] == ["True [0, 1, 2]"]
    assert done.stderr == ""


@pytest.mark.parametrize("fmt", ["json", "text"])
def test_errors_reach_a_real_stdout(fmt: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "relax_cli", "train", "--rm-type", "exakt", "--format", fmt]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, encoding="utf-8", timeout=60)
    assert done.returncode == 2
    assert "[reward-unknown]" in done.stderr
    assert "this is a bug" not in done.stderr
    if fmt == "json":
        assert "reward-unknown" in {problem["id"] for problem in json.loads(done.stdout)["problems"]}


@pytest.mark.parametrize("code", ["0", "'no key'", "3", "None"])
def test_exit_codes_are_not_those_of_code_outside_relax(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, app: typer.Typer
) -> None:
    (tmp_path / "leaves.py").write_text(f"import sys\n\ndef leave(*_):\n    sys.exit({code})\n")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("leaves", None)
    from leaves import leave

    monkeypatch.setattr("relax_cli.cli.recipes.bundled_recipes", leave)
    shown = CliRunner().invoke(app, ["recipes", "list", "--format", "json"])
    assert shown.exit_code == 1
    (problem,) = json.loads(shown.stdout)["problems"]
    assert problem["id"] == "code-exited"
    assert problem["where"] == f"{tmp_path}/leaves.py:4"
    assert code.strip("'") in problem["got"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
@pytest.mark.parametrize("words", [["recipes", "show", "tiny-ppo-cpu"], ["validate-config", "--rm-type", "Ω┤"]])
def test_what_a_terminal_cannot_show_becomes_a_question_mark(encoding: str, words: list[str]) -> None:
    code = f"import sys; from relax_cli.cli.app import main; sys.exit(main({words!r}))"
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, timeout=60)
    assert done.returncode == (0 if words[0] == "recipes" else 2), done.stderr
    assert b"this is a bug" not in done.stderr
    done.stdout.decode(encoding)


def test_problems_come_last_on_a_terminal(invoke: Invoke) -> None:
    from relax_cli.cli.text import problems_text

    error, warning = Problem("e", "wrong", "repair it"), Problem("w", "odd", "look", severity="warning")
    assert problems_text([error, warning], verdict_last=True).splitlines() == [
        "warning: odd  [w]", "  fix       look", "error: wrong  [e]", "  fix       repair it",
        "not valid: 1 error, 1 warning",
    ]  # fmt: skip


def test_a_command_within_a_fix_stays_on_one_line() -> None:
    from relax_cli.cli.text import problem_lines

    fix = "give an existing folder; one from a hub: hf download Qwen/Qwen3-30B-A3B --local-dir models/Qwen3-30B-A3B"
    lines = problem_lines(Problem("e", "wrong " * 20, fix))
    assert f"  fix       {fix}" in lines
    assert max(len(line) for line in lines if line != f"  fix       {fix}") <= 80


@pytest.mark.parametrize(
    ("typed", "on_path", "shown"),
    [
        ("/usr/bin/relax", "/usr/bin/relax", "relax"),
        (".venv/bin/relax", "/usr/bin/relax", ".venv/bin/relax"),
        (".venv/bin/relax", None, ".venv/bin/relax"),
        ("/a b/relax", None, "'/a b/relax'"),
        ("pytest", None, "relax"),
    ],
)
def test_commands_name_the_program_as_it_was_typed(
    typed: str, on_path: str | None, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [typed])
    monkeypatch.setattr(text.shutil, "which", lambda name: on_path)
    text.program.cache_clear()
    try:
        Output().fail(ConfigError(Problem("x", "wrong", "type `relax train --lr 1`, not relaxed training")))
        Output().result(None, "Continue:\n  relax train --load a")
        written = capsys.readouterr()
    finally:
        text.program.cache_clear()
    assert f"type `{shown} train --lr 1`, not relaxed training" in written.err
    assert written.out == f"Continue:\n  {shown} train --load a\n"


@pytest.mark.parametrize(
    ("typed", "on_path", "shown"),
    [
        ("{env}/relax", "{env}/pip", "pip"),
        ("{env}/relax", "/usr/bin/pip", "{env}/pip"),
        ("{env}/relax", None, "{env}/pip"),
        ("{env}/without/relax", "/usr/bin/pip", "{env}/without/python -m pip"),
        ("/elsewhere/relax", "/usr/bin/pip", "pip"),
        (str(Path(text.__file__).parent.parent / "__main__.py"), None, f"{sys.executable} -m pip"),
    ],
)
def test_pip_is_that_of_the_environment_of_the_program(
    typed: str,
    on_path: str | None,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "without").mkdir()
    for tool in ("pip", "python", "without/python"):
        (tmp_path / tool).touch()
    found = None if on_path is None else on_path.format(env=tmp_path)
    monkeypatch.setattr(sys, "argv", [typed.format(env=tmp_path)])
    monkeypatch.setattr(text.shutil, "which", lambda name: found if name == "pip" else None)
    caches = (text.program.cache_clear, text.pip.cache_clear)
    try:
        for clear in caches:
            clear()
        Output().result(None, "pip install 'ray>=2', or /opt/bin/python -m pip install ray; pip is not pipx install")
    finally:
        for clear in caches:
            clear()
    written = capsys.readouterr().out
    expected = shown.format(env=tmp_path)
    assert written == f"{expected} install 'ray>=2', or /opt/bin/python -m pip install ray; pip is not pipx install\n"
