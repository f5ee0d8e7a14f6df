"""The `relax` command: its sub-commands, and how every error ends.

A sub-command is imported when it is used: `relax --help` needs neither the configuration nor the plugins.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import signature
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from relax_cli.cli.console import Output, command_of, is_debug
from relax_cli.errors import (
    MACHINE_THEME,
    ExitCode,
    Problem,
    RelaxError,
    RunError,
    Terminated,
    problem_kind,
    way_out,
)
from relax_cli.plugin.stdout import stdout_as_stderr

if TYPE_CHECKING:
    from relax_cli.plugin.manager import Plugins

PACKAGE = Path(__file__).parent.parent
CODE_EXITED = problem_kind(
    "code-exited",
    "During a run",
    "Code of a reward, a plugin or a library called `sys.exit`. Exit codes of `relax` are its own: this is a failure.",
)
SYSTEM_REFUSED = problem_kind(
    "system-refused",
    MACHINE_THEME,
    "A file could not be read or written, for example standard output on a full disk, or a limit of the machine or of "
    "`ulimit` was reached: memory, open files, threads, the size of a file.",
)
THREADS_MAY_TAKE = 10.0
"""Seconds for threads of a user's code after the last result."""
EXAMPLES = """\b
Start here:
  relax quickstart                          train a tiny model on this CPU
  relax recipes list                        ready configurations
  relax train --recipe NAME --dry-run       check one and show its plan
  relax validate-config --recipe FILE       everything that is wrong
  relax checkpoint check-resume --load DIR  what a run would resume from
  relax train --hf-checkpoint DIR --prompt-data FILE.jsonl --rm-type math"""

COMMANDS = {
    "quickstart": "Teach a tiny model to add, or to use a tool, with PPO on this CPU, in a few minutes.",
    "train": "Train a model.",
    "validate-config": "Check a configuration without Ray or a GPU, and show what its run will do.",
    "eval": "Evaluate a model or a checkpoint on held-out sets, without a trainer.",
    "doctor": "Check this machine: versions, imports, devices, memory, disk, plugins.",
    "report": "Show the curves, evaluations and warnings of runs and what they differ in; also as one HTML page.",
    "rollouts": "Read the samples of a run: texts, rewards, and every number of every token.",
    "replay": "Recompute a stored step with the installed reward and plugin, and show the first difference.",
    "up": "Start a warm process, from which later runs start in less than half the time.",
    "down": "End the warm process.",
    "plugins": "Estimator and reward plugins.",
    "recipes": "Recipes: ready configurations for `relax train --recipe`.",
    "checkpoint": "Checkpoints: what a run would resume from, and whether they are whole.",
}
"""Sub-commands in the order of `relax --help`, each with its line there, which a test compares with the command's own.

The module of that name in this folder, or that of `MODULES`, has the command's function (see `console.command_of`), or
a table of `SUB_COMMANDS`.
"""
MODULES = {
    "runs": ("report", "rollouts", "replay"),
    "train": ("validate-config", "quickstart", "eval"),
    "warm": ("up", "down"),
}
WARM_COMMANDS = ("train", "quickstart", "eval")
"""Those that import torch, and so start from the warm process of `relax up`."""


class LazyCommands(dict[str, Any]):
    """Commands by name; those of `COMMANDS` are imported when they are looked up."""

    def __init__(self, plugins: Plugins | None) -> None:
        super().__init__(dict.fromkeys(COMMANDS))
        self._plugins = plugins

    def __getitem__(self, name: str) -> Any:
        if name in COMMANDS and super().__getitem__(name) is None:
            holder = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
            # A plugin that prints when it is imported does not do so among the results.
            with stdout_as_stderr():
                from relax_cli.plugin.manager import load_plugins

                self._plugins = self._plugins or load_plugins()
                _add_command(holder, name, self._plugins)
            self[name] = typer.main.get_group(holder).commands[name]
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As of every mapping; dict's own would not import."""
        return self[name] if name in COMMANDS else super().get(name, default)


def _add_command(app: typer.Typer, name: str, plugins: Plugins) -> None:
    module_name = next((module for module, names in MODULES.items() if name in names), name)
    module = import_module(f"relax_cli.cli.{module_name}")
    if not hasattr(module, "SUB_COMMANDS"):
        _add_function(app, name, getattr(module, name.replace("-", "_")), plugins)
        return
    group = typer.Typer(cls=CommandGroup, no_args_is_help=True, help=COMMANDS[name])
    for sub_name, function in module.SUB_COMMANDS.items():
        _add_function(group, sub_name, function, plugins)
    app.add_typer(group, name=name)


def _add_function(app: typer.Typer, name: str, function: Callable[..., Any], plugins: Plugins) -> None:
    parameters = signature(function).parameters
    if "layers" in parameters:
        from relax_cli.cli.options import ConfigCommand, config_command

        app.command(name, cls=ConfigCommand)(config_command(function, plugins))
    else:
        app.command(name)(command_of(function, plugins) if "output" in parameters else function)


class CommandGroup(TyperGroup):
    """Shows the whole first paragraph of each sub-command."""

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """The list of sub-commands."""
        texts = {name: (self.commands[name].help or "").strip() for name in self.commands}
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(text.partition("\n\n")[0].split())) for name, text in texts.items()])


class RelaxGroup(TyperGroup):
    """Ends every `RelaxError` of a command in its screen and exit code."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the command."""
        try:
            return super().invoke(ctx)
        except RelaxError as error:
            _output(ctx).fail(error)
            raise typer.Exit(error.exit_code) from error
        except SystemExit as end:
            # click raises its own exceptions: this is code of a plugin or a reward, or of a library.
            _output(ctx).fail(RunError(_code_exited(end)))
            raise typer.Exit(ExitCode.FAILED) from end
        except (KeyboardInterrupt, Terminated) as end:
            is_ctrl_c = isinstance(end, KeyboardInterrupt)
            how = "interrupted" if is_ctrl_c else "ended by a signal"
            _output(ctx).note(f"{how} before the first step finished; all processes have exited")
            raise typer.Exit(ExitCode.INTERRUPTED if is_ctrl_c else ExitCode.TERMINATED) from end

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """The list of sub-commands, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def build_app(plugins: Plugins | None = None) -> typer.Typer:
    """The application, with the options that the plugins add; those that are installed, where none are given."""

    class Group(RelaxGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            self.commands = LazyCommands(plugins)

    app = typer.Typer(
        cls=Group,
        epilog=EXAMPLES,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        # Plain help, like that of `train`: importing rich for its panels would take longer than all the rest.
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )

    @app.callback(help="Reinforcement-learning post-training of language models.")
    def root(
        show_version: Annotated[
            bool, typer.Option("--version", help="print the version and stop", is_eager=True, callback=_print_version)
        ] = False,
    ) -> None:
        pass

    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run `relax` and return its exit code."""
    code = _run(argv)
    if argv is None and _threads():
        timer = threading.Timer(THREADS_MAY_TAKE, _end_threads, [code])
        timer.daemon = True
        timer.start()
    return code


def _run(argv: Sequence[str] | None) -> int:
    # Here, because a library reads it when torch is imported: waiting OpenMP threads sleep instead of spinning.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")  # Bars of libraries belong neither on the screen nor in a log.
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A terminal that cannot show a character shows a question mark.
            stream.reconfigure(errors="replace")
    try:
        if argv is None and sys.argv[1:2] and sys.argv[1] in WARM_COMMANDS:
            from relax_cli.cli.warm import run_warm

            code = run_warm(sys.argv[1:])
            if code is not None:
                return code
        build_app()(args=list(sys.argv[1:] if argv is None else argv), prog_name="relax")
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code
        return ExitCode.OK if end.code is None else ExitCode.FAILED
    except RelaxError as error:
        Output().fail(error)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Terminated:
        return ExitCode.TERMINATED
    except Exception as error:  # noqa: BLE001 - the last frame: whatever is left is the system's doing, or our bug
        _unexpected(error)
    return ExitCode.FAILED


def _open_closed_streams() -> None:
    """What the caller closed (`>&-`) is /dev/null: a file that is opened later must not become a standard stream."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)


def _refused(error: Exception) -> Problem | None:
    """What to say of an error that the system made; None for any other."""
    is_system, said = isinstance(error, OSError), f"{type(error).__name__}: {error}"
    advice = way_out(said)
    if advice is None and not is_system:
        return None
    no_name = "standard output, or a file or connection that has no name" if is_system else "this machine"
    return SYSTEM_REFUSED(
        f"the system refused: {getattr(error, 'strerror', None) or 'a limit was reached'}",
        where=str(getattr(error, "filename", None) or no_name),
        got=next((line for line in said.splitlines() if way_out(line)), said)[:300],
        fix=advice or "see to the disk, the folder or the permissions; RELAX_DEBUG=1 shows what relax was doing",
    )


def _threads() -> list[str]:
    """Names of the threads that Python waits for before it ends the process."""
    return [thread.name for thread in threading.enumerate() if not thread.daemon and thread.name != "MainThread"]


def _end_threads(code: int) -> None:
    if names := _threads():
        Output().note(f"ending threads that a reward, an environment or a plugin left running: {', '.join(names)}")
        sys.stdout.flush()
        os._exit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"relax {version('relax-cli')}")
        raise typer.Exit()


def _output(ctx: typer.Context) -> Output:
    return ctx.obj if isinstance(ctx.obj, Output) else Output()


def _code_exited(end: SystemExit) -> Problem:
    frames = traceback.extract_tb(end.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(str(PACKAGE))]
    last = (own or frames)[-1]
    return CODE_EXITED(
        f"code outside relax called exit in {last.name}",
        where=f"{last.filename}:{last.lineno}",
        got=f"SystemExit: {end.code}",
        expected="an exception, or a return value",
        fix="raise an exception there instead of calling sys.exit",
    )


def _unexpected(error: Exception) -> None:
    output, problem = Output(), _refused(error)
    if problem is not None:
        fault = RunError(problem)
        fault.__cause__ = error
        output.fail(fault)
    elif is_debug():
        output.note("".join(traceback.format_exception(error)))
    else:
        output.note(f"error: {type(error).__name__}: {error}")
        output.note("  where     inside relax: this is a bug, not your doing")
        output.note("  fix       run the command again with RELAX_DEBUG=1 to see the traceback, and report it")
    for note in getattr(error, "__notes__", ()):
        output.note(note)
