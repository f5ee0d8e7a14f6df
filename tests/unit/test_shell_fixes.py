"""Fixes that are commands of a shell are run in one, in the situation that they are for, and then it is gone."""

from __future__ import annotations

import ast
import os
import re
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import relax_cli
from relax_cli.cli import doctor
from relax_cli.cli.doctor import allocator_conflict
from relax_cli.config.layers import Layers
from relax_cli.config.recipes import read_recipe
from relax_cli.config.schema import Config, ParallelSection, RolloutSection
from relax_cli.engine.ray.start import start_failed
from relax_cli.preflight import check_run
from relax_cli.preflight.machine import Machine, ray_temp_trouble
from relax_cli.preflight.rules import machine as rules
from tests.support.cli_app import built_in_plugins
from tests.support.rules import problems_by

LONG = f"/tmp/{'x' * 80}"
SEGMENTS = "expandable_segments:True"
LIMITS = {"n": resource.RLIMIT_NOFILE, "u": resource.RLIMIT_NPROC}


def rule_on_ray() -> list[str]:
    return [p.fix for p in problems_by(rules.ray_temp_folder, Config(parallel=ParallelSection(launcher="ray")))]


def rule_on_the_allocator() -> list[str]:
    config = Config(parallel=ParallelSection(device="cuda"), rollout=RolloutSection(rollout_engine="sglang"))
    return [p.fix for p in problems_by(rules.expandable_segments, config, machine=Machine(gpus=1))]


def doctor_on_ray() -> list[str]:
    return [check.fix for check in doctor._ray()]


def doctor_on_the_allocator() -> list[str]:
    return [check.fix for check in allocator_conflict(os.environ, has_gpu=True)]


def doctor_on_limits() -> list[str]:
    return [check.fix for check in doctor._limits(has_gpu=False) if check.status != "ok"]


def ray_in_a_long_folder() -> list[str]:
    error = OSError("AF_UNIX path length cannot exceed 107 bytes")
    return [start_failed("local", error).fix] if ray_temp_trouble() else []


def ray_with_a_limit(kind: str, number: int) -> Callable[[], list[str]]:
    def found() -> list[str]:
        soft, _ = resource.getrlimit(LIMITS[kind])
        return [start_failed("local", OSError(number, "too many")).fix] if 0 <= soft < 16384 else []

    return found


def a_variable_of_a_recipe() -> list[str]:
    Path("mine.yaml").write_text("checkpoint:\n  save: ${MY_DISK}/run\n")
    settings, _ = read_recipe(Path("mine.yaml"), os.environ, Config)
    return [p.fix for setting in settings for p in setting.problems]


def checked(kind: str, **flags: str) -> list[str]:
    checked = check_run.check_run(built_in_plugins(), Layers(flags=flags, env=os.environ), here=False)
    return [p.fix for p in checked.problems if p.id == kind]


def a_variable_of_a_flag() -> list[str]:
    return checked("path-variable", save="$MY_DISK/run")


def a_variable_of_no_option() -> list[str]:
    return checked("unknown-environment")


def a_cluster_that_ended() -> list[str]:
    address = os.environ.get("RAY_ADDRESS")
    return [start_failed(address, ConnectionError("no answer")).fix] if address else []


Found = Callable[[], list[str]]
FEW = 256
EXECUTED: list[tuple[str, Found, dict[str, str]]] = [
    ("export RAY_TMPDIR=/tmp (or", rule_on_ray, {"RAY_TMPDIR": LONG}),
    ("export RAY_TMPDIR=/tmp (or", rule_on_ray, {"TMPDIR": LONG}),
    ("export RAY_TMPDIR=/tmp (or", doctor_on_ray, {"RAY_TMPDIR": LONG}),
    ("export RAY_TMPDIR=/tmp (or", ray_in_a_long_folder, {"RAY_TMPDIR": LONG}),
    ("unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF", rule_on_the_allocator, {"PYTORCH_ALLOC_CONF": SEGMENTS}),
    ("unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF", rule_on_the_allocator, {"PYTORCH_CUDA_ALLOC_CONF": SEGMENTS}),
    ("unset {name}", doctor_on_the_allocator, {"PYTORCH_ALLOC_CONF": SEGMENTS}),
    ("unset {name}", doctor_on_the_allocator, {"PYTORCH_CUDA_ALLOC_CONF": SEGMENTS}),
    ("unset RAY_ADDRESS, to", doctor_on_ray, {"RAY_ADDRESS": "10.0.0.1:6379"}),
    ("unset {variable}", a_variable_of_no_option, {"RELAX_ZZZQ": "1"}),
    ("unset {variable}", a_variable_of_no_option, {"RELAX_NUM_ROLOUT": "1"}),
    ("unset RAY_ADDRESS starts", a_cluster_that_ended, {"RAY_ADDRESS": "10.0.0.1:6379"}),
    ("ulimit -n {most}", doctor_on_limits, {"n": str(FEW)}),
    ("ulimit -u {most}", doctor_on_limits, {"u": str(FEW)}),
    ("ulimit -n $(ulimit -Hn), then", ray_with_a_limit("n", 24), {"n": str(FEW)}),
    ("ulimit -u $(ulimit -Hu), then", ray_with_a_limit("u", 11), {"u": str(FEW)}),
    ("export {name}=…, or write ${{{name}:-default}}", a_variable_of_a_recipe, {}),
    ("export {name}=…, or write the path out", a_variable_of_a_flag, {}),
]
"""How the fix begins in the source, what finds the problem, and the environment or the limits it is found in."""
EXECUTED_ELSEWHERE = {
    "relax checkpoint align": "tests/unit/test_resume_fixes.py",
    "relax checkpoint list": "tests/unit/test_resume_fixes.py",
    "echo {": "tests/unit/test_resume_fixes.py",
    "relax quickstart --prepare-only": "tests/integration/test_page_commands.py",
}
NOT_EXECUTED = {
    "export {API_KEY}=...": "the key is the server's owner's to say",
    "export HOME and RAY_TMPDIR": "which folders is the user's to say",
    "export {LOOPBACK_SWITCH}=0 before": "Ray reads it while it is imported, and is imported by then",
    "ulimit -l unlimited": "a hard limit is raised by the owner of the machine",
    "ulimit -f unlimited": "a hard limit is raised by the owner of the machine",
    "relax doctor --timeout 600": "a machine that is too busy gets idle by waiting",
    "relax train {chosen} {name} ...": "how an estimator that was just written is used",
    "relax plugins check": "finds what is wrong in an estimator, and its author corrects it",
    "relax plugins new": "the name is the user's to say",
    "relax quickstart OTHER_DIR": "the folder is the user's to say",
}
"""Commands that a test cannot run for a user, and why."""
COMMAND = re.compile(r"(?:^|[:;,] )((?:export|unset) [A-Z{]|ulimit -|relax [a-z]+ [\w{-]|echo {)")


def typed(fix: str) -> str:
    """The command that a fix begins with; a value to fill in is filled in."""
    return re.split(r" \(or|, (?:or|to|then) | starts |: |`", fix)[0].replace("=…", "=/tmp")


@pytest.mark.parametrize(("text", "found", "before"), EXECUTED)
def test_the_problem_is_gone_after_the_command(
    text: str, found: Found, before: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_ADDRESS", "RAY_TMPDIR", "TMPDIR", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "MY_DISK"):
        monkeypatch.delenv(name, raising=False)
    soft = {kind: int(before.get(kind, 1 << 20)) for kind in LIMITS}
    hard = {number: resource.getrlimit(number)[1] for number in LIMITS.values()}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits_of(soft).get(kind, -1), hard.get(kind, -1)))
    for name, value in before.items():
        if name not in LIMITS:
            monkeypatch.setenv(name, value)
    (fix,) = found()
    command = as_pattern(text).search(fix)
    assert command is not None, fix
    lower = "".join(f"ulimit -S -{kind} {before[kind]}; " for kind in LIMITS if kind in before)
    script = f"set -e; {lower}{typed(fix[command.start() :])}; ulimit -S -n; ulimit -S -u; env -0"
    output = subprocess.run(["bash", "-c", script], capture_output=True, encoding="utf-8", check=True).stdout
    *shown, environment = output.split("\n", 2)
    soft.update(
        {kind: -1 if n == "unlimited" else int(n) for kind, n in zip(LIMITS, shown, strict=True) if kind in before}
    )
    after = dict(line.split("=", 1) for line in environment.split("\0") if line)
    for name in {*os.environ} - {*after}:
        monkeypatch.delenv(name)
    for name, value in after.items():
        monkeypatch.setenv(name, value)
    assert found() == []


def limits_of(soft: dict[str, int]) -> dict[int, int]:
    return {LIMITS[kind]: number for kind, number in soft.items()}


def as_pattern(text: str) -> re.Pattern[str]:
    """A text of the source as what it looks like with values."""
    doubled = {"{{": "\\{", "}}": "\\}"}
    words = re.split(r"({{|}}|{\w+})", text)
    return re.compile("".join(doubled.get(w) or (r"\w+" if w.startswith("{") else re.escape(w)) for w in words))


def texts(source: str) -> Iterator[str]:
    """Every text of a module, with the places of its values as the source has them."""
    tree = ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield ast.unparse(node)[2:-1]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def test_every_command_of_a_fix_is_executed_or_explained() -> None:
    known = [text for text, _, _ in EXECUTED] + [*EXECUTED_ELSEWHERE, *NOT_EXECUTED]
    root = Path(relax_cli.__file__).parent
    said = [
        text[match.start(1) :]
        for path in sorted(root.rglob("*.py"))
        for text in texts(path.read_text("utf-8"))
        if "\n" not in text and (match := COMMAND.search(text))
    ]
    assert [text for text in said if not text.startswith(tuple(known))] == []
    assert [text for text in known if not any(one.startswith(text) for one in said)] == []


def test_what_is_not_executed_has_something_to_say_or_wait_for() -> None:
    """A command that is complete as it stands, and concerns this machine alone, belongs among those executed."""
    complete = re.compile(r"unset |export \w+=[/\w]|ulimit -[nu] |relax (checkpoint|recipes|validate-config)")
    assert [text for text in NOT_EXECUTED if complete.match(text)] == []
    for path in EXECUTED_ELSEWHERE.values():
        assert (Path(__file__).parents[2] / path).is_file()
