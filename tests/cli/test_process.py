"""What only a real process shows: start-up, imports, streams, colour."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import resource
import sys

import pytest

from tests.support.cli_app import HEAVY, MAIN, Process


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"], ["plugins", "list"], ["recipes", "list"]])
def test_small_commands_import_nothing_heavy(process: Process, argv: list[str]) -> None:
    code = (
        MAIN.format(argv=argv) + f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = process(code)
    assert (done.returncode, done.stderr) == (0, "[]\n")


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"]])
def test_help_takes_less_than_a_second_of_cpu(process: Process, argv: list[str]) -> None:
    def cpu_seconds() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    seconds = []
    for _ in range(3):
        before = cpu_seconds()
        process(MAIN.format(argv=argv))
        seconds.append(cpu_seconds() - before)
    assert min(seconds) < 1.0


def test_a_thread_of_user_code_does_not_keep_the_process(process: Process) -> None:
    code = (
        "import sys, threading, time; from relax_cli.cli import app; app.THREADS_MAY_TAKE = 0.1; "
        "threading.Thread(target=time.sleep, args=(600,), name='mine').start(); "
        "sys.argv = ['relax', 'train']; sys.exit(app.main())"
    )
    done = process(code)
    assert done.returncode == 2
    assert "left running: mine" in done.stderr


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}, {"FORCE_COLOR": "1", "NO_COLOR": "1"}])
def test_errors_have_no_escape_codes_off_a_terminal(process: Process, env: dict[str, str]) -> None:
    done = process(MAIN.format(argv=["train"]) + "sys.exit(code)", **env)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "[model-missing]" in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(("env", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_errors_are_coloured_on_a_terminal_unless_no_color(env: dict[str, str], coloured: bool) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        kept = {**os.environ, "TERM": "xterm-256color", **env}
        os.execve(sys.executable, [sys.executable, "-c", MAIN.format(argv=["train"])], kept)
    shown = b""
    # Linux ends a pseudo-terminal whose process is gone with EIO.
    with contextlib.suppress(OSError):
        while chunk := os.read(terminal, 4096):
            shown += chunk
    os.waitpid(pid, 0)
    os.close(terminal)
    assert b"[model-missing]" in shown
    # A progress bar may hide the cursor; what NO_COLOR forbids is colours.
    assert bool(re.search(rb"\x1b\[(\d+;)*[39][0-7](;\d+)*m", shown)) is coloured


def test_the_installed_plugins_are_listed_as_one_json_array(process: Process) -> None:
    done = process(MAIN.format(argv=["plugins", "list", "--format", "json"]))
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert {"ppo", "grpo", "gspo", "cispo", "sapo"} <= set(rows)
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert rows["ppo"]["distribution"] == "relax-cli"


def test_the_version_is_that_of_the_distribution(process: Process) -> None:
    from importlib.metadata import version

    assert process(MAIN.format(argv=["--version"])).stdout == f"relax {version('relax-cli')}\n"


def test_completion_can_be_installed(process: Process) -> None:
    assert "--install-completion" in process(MAIN.format(argv=["--help"])).stdout


def test_a_worker_rebuilds_the_configuration_without_torch(process: Process) -> None:
    done = process(
        "import sys\n"
        "from relax_cli.config.layers import Layers\n"
        "from relax_cli.preflight.check_run import check_run\n"
        "from relax_cli.plugin.config_model import rebuild_config\n"
        "from relax_cli.plugin.manager import load_plugins\n"
        "tau = ['sapo.sapo_tau_pos=2']\n"
        "config = check_run(load_plugins(), Layers(['tiny-ppo-cpu'], {}, tau), skip_files=True).config\n"
        "dump = config.model_dump(mode='json')\n"
        "print(rebuild_config(dump).model_dump(mode='json') == dump, dump['sapo']['sapo_tau_pos'])\n"
        "print('torch' in sys.modules)\n"
    )
    assert done.stdout == "True 2.0\nFalse\n", done.stderr
