"""Plugins are other people's code: whatever they print, raise, return or change stays named and contained."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from relax_cli import AdvantageInputs, ClipOptions, Config, Estimator, LossInputs
from relax_cli.config.schema import AlgorithmSection, BatchSection, RewardSection
from relax_cli.errors import ConfigError, Problem, RunError
from relax_cli.plugin import apart, manager
from relax_cli.plugin.manager import Plugins, load_plugins
from relax_cli.plugin.records import EstimatorMath
from relax_cli.plugin.user_code import user_code
from tests.support.plugin_files import estimator_source, write_plugin

Write = Callable[[str, str], Path]
LOUD = """
    import os, subprocess, sys
    print("printed")
    sys.__stdout__.write("written")
    os.write(1, b"by number")
    subprocess.run(["echo", "by a child"])
"""
RAISE = {
    "an error": ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
    "exit 0": ("import sys; sys.exit(0)", "SystemExit: 0"),
    "exit with a text": ("import sys; sys.exit('no key')", "SystemExit: no key"),
    "exit without anything": ("raise SystemExit", "SystemExit"),
    "its own BaseException": ("raise type('Mine', (BaseException,), {})('x')", "Mine: x"),
    "a generator's end": ("raise GeneratorExit", "GeneratorExit"),
    "no text": ("raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})", "Odd: (its text cannot be shown)"),
    "recursion": ("f = lambda: f()\n    f()", "RecursionError: maximum recursion depth exceeded"),
}
HOOK = "@hookimpl\ndef relax_{}:\n    {}\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Install a plugin of that name and source; returns its file."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name, source: write_plugin(tmp_path, name, source)


def hooks_of(name: str, *hooks: tuple[str, str]) -> str:
    return estimator_source(name, "".join(HOOK.format(hook, body) for hook, body in hooks))


def chosen(name: str) -> Config:
    return Config(algorithm=AlgorithmSection(advantage_estimator=name), batch=BatchSection(n_samples_per_prompt=2))


def relax(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, which sees the plugins of `folder`."""
    path = f"import sys; sys.path.insert(0, {str(folder)!r})"
    start = f"{path}; from relax_cli.cli.app import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", start, *words, "--format", "json"], capture_output=True, text=True)


def line_of(file: Path, text: str) -> str:
    """`file:line` of the last line that has the text."""
    return f"{file}:{max(n for n, line in enumerate(file.read_text().splitlines(), 1) if text in line)}"


# -- printing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["plugins", "list"], ["recipes", "list"]])
def test_a_plugin_that_prints_leaves_stdout_to_data(write: Write, tmp_path: Path, command: list[str]) -> None:
    source = LOUD.replace("\n    ", "\n") + hooks_of("loud")
    write("loud", source.replace("    return [", "    print('hook'); return ["))
    done = relax(tmp_path, *command)
    json.loads(done.stdout)
    assert all(text in done.stderr for text in ("printed", "written", "by number", "by a child", "hook"))


def test_what_a_hook_prints_goes_to_stderr(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    write("loud", "from relax_cli import hookimpl\n" + HOOK.format("step_end(step)", LOUD.strip()))
    assert load_plugins().step_end(1, {}) == []
    out, err = capfd.readouterr()
    assert out == ""
    assert all(text in err for text in ("printed", "by number", "by a child"))


# -- raising ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", RAISE)
def test_a_plugin_that_raises_on_import_is_a_broken_row(write: Write, case: str) -> None:
    code, reason = RAISE[case]
    file = write("sick", f"def start():\n    {code}\nstart()\n")
    (plugin,) = load_plugins().named("sick")
    assert (plugin.row.status, plugin.row.reason.startswith(reason)) == ("broken", True)
    assert plugin.where.startswith(f"{file}:")
    with pytest.raises(ConfigError, match="'sick'") as caught:
        load_plugins().estimator("sick")
    assert plugin.where in str(caught.value)


def test_a_syntax_error_is_named_with_its_line(write: Write) -> None:
    file = write("sick", "x = 1\nif x\n    y = 2\n")
    (plugin,) = load_plugins().named("sick")
    assert (plugin.row.status, plugin.where) == ("broken", f"{file}:2")


@pytest.mark.parametrize("case", RAISE)
def test_a_rule_that_raises_is_a_problem_with_its_line(write: Write, case: str) -> None:
    code, reason = RAISE[case]
    file = write("mine", hooks_of("mine", ("check_config(config)", "helper()")) + f"\ndef helper():\n    {code}\n")
    (problem,) = load_plugins().check(chosen("mine"))
    assert (problem.id, problem.got.startswith(reason)) == ("plugin-failed", True)
    assert problem.where.startswith(f"{file}:")
    assert "'mine' (dist-mine) failed in relax_check_config" in problem.message
    # The user's own frames, none of relax or pluggy.
    frames = problem.got.splitlines()[1:]
    assert frames
    assert all(str(file) in frame for frame in frames)


@pytest.mark.parametrize("case", RAISE)
def test_a_tracker_or_launcher_that_raises_is_named(write: Write, case: str) -> None:
    code, reason = RAISE[case]
    write("sick", hooks_of("sick", ("step_end(step)", code), ("launch(plan)", code)))
    plugins = load_plugins()
    (warning,) = plugins.step_end(3, {})
    assert (warning.severity, warning.got.startswith(reason)) == ("warning", True)
    with pytest.raises(RunError, match=r"'sick' .* failed in relax_launch"):
        plugins.launch(SimpleNamespace(config=chosen("mine")))  # type: ignore[arg-type]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, ConfigError([])])
def test_interrupts_and_our_own_errors_pass_through(interrupt: BaseException) -> None:
    with pytest.raises((KeyboardInterrupt, ConfigError)), user_code():
        raise interrupt


def test_frames_of_libraries_are_not_the_users(write: Write) -> None:
    file = write("mine", "import json\n" + hooks_of("mine", ("check_config(config)", "return json.loads('{')")))
    (problem,) = load_plugins().check(chosen("mine"))
    assert problem.where == line_of(file, "json.loads")
    assert len(problem.got.splitlines()) == 2


@pytest.mark.parametrize("hook", ["import", "estimators()", "check_config(config)", "step_end(step)"])
def test_a_plugin_that_never_ends_is_named(write: Write, monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    monkeypatch.setattr(manager, "HOOK_SECONDS", 0.5)
    monkeypatch.setattr(manager, "TRACKER_SECONDS", 0.5)
    wait = "import time; time.sleep(60)"
    sources = {
        "import": wait,
        "estimators()": "from relax_cli import hookimpl\n" + HOOK.format(hook, wait),
    }
    file = write("slow", sources.get(hook) or hooks_of("slow", (hook, wait)))
    plugins = load_plugins()
    (plugin,) = plugins.named("slow")
    reason, place = plugin.row.reason, plugin.where
    if hook not in sources:
        found = plugins.check(chosen("slow")) if hook.startswith("check") else plugins.step_end(1, {})
        reason, place = found[0].got, found[0].where
    assert "no result after 0.5 s" in reason
    assert place == line_of(file, wait)


# -- the math of an estimator ----------------------------------------------------------------------

GOOD = {
    "advantages": "return AdvantageOutputs(torch.zeros(inputs.mask.shape))",
    "policy_loss": "return LossTerms(torch.zeros(inputs.mask.shape), {'x': torch.zeros(inputs.mask.shape)})",
}
BAD_MATH = {
    "raises": ("advantages", "raise KeyError('x')", "KeyError"),
    "exits": ("policy_loss", "import sys; sys.exit(0)", "SystemExit: 0"),
    "returns nothing": ("advantages", "return None", "AttributeError"),
    "returns a tensor": ("policy_loss", "return inputs.logp", "AttributeError"),
    "advantages of samples": (
        "advantages",
        "return AdvantageOutputs(inputs.rewards)",
        "advantages must have shape (2, 3)",
    ),
    "a list": (
        "advantages",
        "return AdvantageOutputs([[0.0] * 3] * 2)",
        "advantages must have shape (2, 3), got a list",
    ),
    "returns of samples": (
        "advantages",
        "return AdvantageOutputs(torch.zeros(2, 3), inputs.rewards)",
        "returns must have shape (2, 3), got shape (2,)",
    ),
    "a scalar loss": ("policy_loss", "return LossTerms(inputs.logp.sum())", "loss_per_token must have shape (2, 3)"),
    "a scalar metric": (
        "policy_loss",
        "return LossTerms(torch.zeros(2, 3), {'kl': 0.1})",
        "kl must have shape (2, 3), got a float",
    ),
}


@pytest.mark.parametrize("case", [*BAD_MATH, "is fine"])
def test_wrong_math_ends_a_run_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    part, code, reason = BAD_MATH.get(case, ("advantages", "print('seen'); " + GOOD["advantages"], ""))
    functions = "".join(f"def {name}(inputs):\n    {body}\n" for name, body in (GOOD | {part: code}).items())
    name = f"math_of_{tmp_path.name}"
    imports = "import torch\nfrom relax_cli import AdvantageOutputs, LossTerms\n"
    (tmp_path / f"{name}.py").write_text(imports + functions)
    monkeypatch.syspath_prepend(str(tmp_path))
    math = EstimatorMath(Estimator("mine", "s", "p", ClipOptions, f"{name}:advantages", f"{name}:policy_loss"))
    grid, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    inputs = {
        "advantages": AdvantageInputs(torch.zeros(2), mask, torch.zeros(2), ClipOptions()),
        "policy_loss": LossInputs(grid, grid, grid, mask),
    }
    if case == "is fine":
        assert math.advantages(inputs["advantages"]).returns is None
        assert math.policy_loss(inputs["policy_loss"]).metrics.keys() == {"x"}
        assert capsys.readouterr() == ("", "seen\n")
        return
    with pytest.raises(RunError) as caught:
        getattr(math, part)(inputs[part])
    (problem,) = caught.value.problems
    assert (problem.id, reason in problem.got) == ("estimator-failed", True)
    assert f"{name}:{part} of the estimator mine" in problem.message


# -- returning -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["7", "[7]", "'text'", "object()", "iter([7])"])
@pytest.mark.parametrize("hook", ["estimators()", "rewards()"])
def test_records_of_the_wrong_type_make_a_broken_row(write: Write, hook: str, value: str) -> None:
    write("odd", "from relax_cli import hookimpl\n" + HOOK.format(hook, f"return {value}"))
    (plugin,) = load_plugins().named("odd")
    assert plugin.row.status == "broken"
    assert f"relax_{hook[:-2]}" in plugin.row.reason


@pytest.mark.parametrize("value", ["7", "[7]", "'text'", "config", "(config, ())"])
@pytest.mark.parametrize(
    ("hook", "call"),
    [
        ("check_config(config)", Plugins.check),
        ("normalize_config(config)", Plugins.normalize),
        ("service_graph(config)", Plugins.service_graph),
    ],
)
def test_a_hook_that_returns_nonsense_is_a_problem(
    write: Write, hook: str, call: Callable[[Plugins, Config], Any], value: str
) -> None:
    write("odd", hooks_of("odd", (hook, f"return {value}")))
    try:
        problems = call(load_plugins(), chosen("odd"))
    except ConfigError as error:
        problems = error.problems
    assert [problem.id for problem in problems] == ["plugin-failed"]


# -- changing --------------------------------------------------------------------------------------


def test_hooks_get_copies(write: Write, tmp_path: Path) -> None:
    spoil = "config.parallel.resource.clear()"
    note = tmp_path / "seen"
    seen = "{dict(metrics)} {config.parallel.resource} {run_dir}"
    look = f"open({str(note)!r}, 'a').write(f'{seen}'); metrics.clear(); {spoil}"
    tracker = ("step_end(metrics, config, run_dir)", look)
    write("a", hooks_of("a", ("check_config(config)", f"{spoil}; return []"), tracker))
    write("b", hooks_of("b", tracker))
    config, metrics = chosen("a"), {"reward/mean": 1.0}
    resource = dict(config.parallel.resource)
    plugins = load_plugins()
    assert plugins.check(config) == []
    assert plugins.step_end(1, metrics, config, tmp_path) == []
    assert metrics == {"reward/mean": 1.0}
    assert config.parallel.resource == resource
    assert note.read_text() == 2 * f"{metrics} {resource} {tmp_path}"


# -- references ------------------------------------------------------------------------------------

JUDGES = {
    "no such module": ("", "no_such_module_of_tests:judge"),
    "no such function": ("", "{module}:jugde"),
    "not a function": ("judge = 7", "{module}:judge"),
    "not a reference": ("", "judge"),
    "raises on import": ("raise KeyError('oops')", "{module}:judge"),
    "exits on import": ("import sys\nsys.exit(0)", "{module}:judge"),
    "ends its process": ("import os\nos._exit(3)", "{module}:judge"),
    "never ends": ("import time\ntime.sleep(60)", "{module}:judge"),
    "is fine": ("def judge(samples):\n    return [1.0 for _ in samples]", "{module}:judge"),
}


@pytest.mark.parametrize("case", JUDGES)
def test_a_broken_reference_is_found_before_a_launch(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    source, reference = JUDGES[case]
    module = f"judges_of_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(source)
    record = f"return [Reward('mine', 's', '{reference.format(module=module)}')]"
    write("judge", "from relax_cli import Reward, hookimpl\n" + HOOK.format("rewards()", record))
    monkeypatch.setattr(apart, "DEADLINE", 5.0 if case == "never ends" else 60.0)
    plugins = load_plugins()
    assert plugins.broken_references(Config()) == []
    problems: list[Problem] = plugins.broken_references(Config(reward=RewardSection(rm_type="mine")))
    assert [problem.id for problem in problems] == ([] if case == "is fine" else ["plugin-reference"])
    assert all("mine" in problem.message or "'judge' (dist-judge)" in problem.message for problem in problems)


def test_list_check_and_validate_name_a_broken_reference(write: Write, tmp_path: Path) -> None:
    record = "return [Reward('mine', 's', 'relax_cli.errors:nothing')]"
    write("judge", "from relax_cli import Reward, hookimpl\n" + HOOK.format("rewards()", record))

    (row,) = (row for row in json.loads(relax(tmp_path, "plugins", "list").stdout) if row["name"] == "judge")
    assert (row["status"], "relax_cli.errors:nothing" in row["reason"]) == ("broken", True)
    checked = relax(tmp_path, "plugins", "check", "judge")
    assert checked.returncode == 1
    failed = [check for check in json.loads(checked.stdout)["checks"] if check["status"] == "failed"]
    assert [(check["check"], check["subject"]) for check in failed] == [("references", "mine")]
    validated = relax(tmp_path, "validate-config", "--rm-type", "mine")
    assert validated.returncode == 2
    assert "plugin-reference" in {problem["id"] for problem in json.loads(validated.stdout)["problems"]}
