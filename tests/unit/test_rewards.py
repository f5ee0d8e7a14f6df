"""Reward functions and what they refuse."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from relax_cli.config.schema import DataSection, RewardSection
from relax_cli.data.prompts import load_prompts
from relax_cli.data.rewards import USER_FILE, RewardInput, RewardResult, find_custom, load_reward
from relax_cli.data.rewards.math import compare, is_usable
from relax_cli.data.rewards.pool import PooledReward
from relax_cli.data.rewards.reasoning_gym import extract_answer
from relax_cli.data.rewards.reasoning_gym import judge as reasoning_gym
from relax_cli.errors import ConfigError, Problem, RelaxError, RunError
from relax_cli.plugin import apart


def sample(response: str, label: str | None = "12", **metadata: Any) -> RewardInput:
    return RewardInput("What is 7 + 5?", response, label, metadata, truncated=False, group=4)


def problem_of(error: type[RelaxError], function: Any, *arguments: Any) -> Problem:
    with pytest.raises(error) as caught:
        function(*arguments)
    return caught.value.problems[0]


def custom(tmp_path: Path, body: str, key: str | None = None) -> Any:
    file = tmp_path / "mine.py"
    file.write_text(body)
    return load_reward(RewardSection(custom_rm_path=f"{file}:judge", reward_key=key), {})


def children() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid is not None}


def rewards(results: Sequence[RewardResult]) -> list[float]:
    return [result.reward for result in results]


def test_exact_compares_stripped_text() -> None:
    reward = load_reward(RewardSection(rm_type="exact"), {})
    assert rewards(reward([sample(" 12\n"), sample("12."), sample("1 2"), sample("a", " a ")])) == [
        1,
        0,
        0,
        1,
    ]


def test_a_reward_that_needs_labels_names_the_sample_without_one() -> None:
    problem = problem_of(RunError, load_reward(RewardSection(rm_type="exact"), {}), [sample("x", None)])
    assert problem.option == "--label-key"
    assert "group 4" in problem.where


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (RewardSection(), "no reward is given"),
        (RewardSection(rm_type="exact", custom_rm_path="a.py:b"), "exclude each other"),
        (RewardSection(rm_type="exakt"), "there is no reward 'exakt'"),
        (RewardSection(rm_type="gone"), "does not load"),
        (RewardSection(rm_type="math"), "a plugin also calls its reward 'math'"),
    ],
)
def test_a_reward_that_cannot_be_resolved_is_refused(section: RewardSection, message: str) -> None:
    named = {"gone": "relax_no_such_module:judge", "math": "builtins:len"}
    assert message in problem_of(ConfigError, load_reward, section, named).message


def test_the_nearest_reward_name_is_offered() -> None:
    assert problem_of(ConfigError, load_reward, RewardSection(rm_type="exakt"), {}).fix == "--rm-type exact"


def are_twelve(samples: list[RewardInput]) -> list[float]:
    return [float(sample.response == "12") for sample in samples]


def test_a_plugins_reward_is_found_by_name() -> None:
    reward = load_reward(RewardSection(rm_type="theirs"), {"theirs": f"{__name__}:are_twelve"})
    assert rewards(reward([sample("12")])) == [1.0]
    reward.close()


def test_a_custom_reward_sees_the_samples(tmp_path: Path) -> None:
    reward = custom(tmp_path, "def judge(samples):\n    return [len(s.response) + s.group for s in samples]\n")
    assert reward([sample("ab"), sample("")]) == [RewardResult(6.0), RewardResult(4.0)]


def test_a_custom_file_may_hold_dataclasses(tmp_path: Path) -> None:
    reward = custom(
        tmp_path,
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Grade:\n    value: float\n"
        "def judge(samples):\n    return [Grade(2.0).value for _ in samples]\n",
    )
    assert rewards(reward([sample("a")])) == [2.0]


PARTS = "def judge(samples):\n    return [{'form': 0.5, 'right': True} for s in samples]\n"


def test_reward_key_picks_the_part_that_trains(tmp_path: Path) -> None:
    reward = custom(tmp_path, PARTS, key="form")
    assert reward([sample("a")]) == [RewardResult(0.5, {"form": 0.5, "right": 1.0})]


def test_a_part_called_reward_trains_without_a_key(tmp_path: Path) -> None:
    body = "def judge(samples):\n    return [{'reward': 0.25, 'form': 1.0} for s in samples]\n"
    assert custom(tmp_path, body)([sample("a")]) == [RewardResult(0.25, {"form": 1.0})]
    assert custom(tmp_path, body, key="form")([sample("a")]) == [RewardResult(1.0, {"form": 1.0})]


@pytest.mark.parametrize(("key", "message"), [(None, "several parts"), ("fomr", "no part 'fomr'")])
def test_several_parts_need_a_known_reward_key(tmp_path: Path, key: str | None, message: str) -> None:
    problem = problem_of(RunError, custom(tmp_path, PARTS, key), [sample("a")])
    assert message in problem.message
    assert problem.fix == "--reward-key form"


def test_reward_key_without_parts_is_refused(tmp_path: Path) -> None:
    reward = custom(tmp_path, "def judge(samples):\n    return [1.0]\n", key="form")
    assert "no part to pick" in problem_of(RunError, reward, [sample("a")]).message


BAD_NUMBERS = [
    "float('nan')",
    "float('inf')",
    "'1.0'",
    "b'1'",
    "None",
    "[1.0]",
    "1j",
    "10**400",
    "1e308",
    "1e39",
    "-1e16",
    "object()",
    "__import__('numpy').ones(2)",
    "__import__('numpy').array('1.0')",
    "__import__('torch').ones(2)",
    "__import__('numpy').float32('nan')",
    "{'a': float('-inf')}",
    "{'reward': 1.0, 'a': None}",
    "{'reward': 1.0, 'a': 10**400}",
    "{'reward': '1.0'}",
    "RewardResult(1.0, {'a': 'x'})",
    "RewardResult(None)",
]


@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_what_is_not_a_usable_number_is_refused_with_its_sample(tmp_path: Path, value: str) -> None:
    body = "from relax_cli.data.rewards import RewardResult\n"
    reward = custom(tmp_path, f"{body}def judge(samples):\n    return [1.0, {value}]\n")
    problem = problem_of(RunError, reward, [sample("good one"), sample("bad one")])
    assert problem.id == "reward-failed"
    assert re.search("mine.py.* returned .*(finite number|too large)", problem.message)
    assert "group 4" in problem.where
    assert "bad one" in problem.where


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("True", 1.0),
        ("10**12", 1e12),
        ("-0.5", -0.5),
        ("1e-300", 1e-300),
        ("__import__('fractions').Fraction(1, 4)", 0.25),
        ("__import__('decimal').Decimal('0.25')", 0.25),
        ("__import__('numpy').float32(0.25)", 0.25),
        ("__import__('numpy').bool_(True)", 1.0),
        ("__import__('numpy').array([0.25])", 0.25),
        ("__import__('torch').tensor(0.25, requires_grad=True)", 0.25),
        ("__import__('torch').tensor([0.25])", 0.25),
        ("{'any': 0.25}", 0.25),
    ],
)
def test_every_kind_of_number_is_accepted(tmp_path: Path, value: str, number: float) -> None:
    assert rewards(custom(tmp_path, f"def judge(samples):\n    return [{value}]\n")([sample("a")])) == [number]


@pytest.mark.parametrize(
    "returned",
    ["None", "1.0", "'ab'", "b'ab'", "{'reward': [1.0, 1.0]}", "{}", "object()", "[1.0]", "[1.0] * 3", "[]",
     "iter(int, 1)", "(1.0 for _ in range(5))", "__import__('numpy').array(1.0)", "{1.0, 0.0}",
     "frozenset([1.0, 0.0])"],
)  # fmt: skip
def test_what_is_not_one_score_a_sample_is_refused(tmp_path: Path, returned: str) -> None:
    reward = custom(tmp_path, f"def judge(samples):\n    return {returned}\n")
    problem = problem_of(RunError, reward, [sample("a"), sample("b")])
    assert problem.id == "reward-failed"
    assert "mine.py" in problem.message


@pytest.mark.parametrize(
    "returned",
    ["(1.0, 2.0)", "(float(i + 1) for i in range(2))", "__import__('numpy').array([1.0, 2.0])",
     "__import__('torch').tensor([[1.0], [2.0]])", "map(float, [1, 2])"],
)  # fmt: skip
def test_scores_may_come_in_anything_that_is_iterated(tmp_path: Path, returned: str) -> None:
    reward = custom(tmp_path, f"def judge(samples):\n    return {returned}\n")
    assert rewards(reward([sample("a"), sample("b")])) == [1.0, 2.0]


ASYNC = {
    "function": "async def judge(samples):\n    await asyncio.sleep(0)\n    return [1.0 for _ in samples]\n",
    "object": "class J:\n    async def __call__(self, samples): return [1.0 for _ in samples]\njudge = J()\n",
    "class": "class judge:\n    async def __call__(self, samples): return [1.0 for _ in samples]\n",
    "each": "async def one(s): return 1.0\ndef judge(samples): return [one(s) for s in samples]\n",
    "lambda": "async def one(samples): return [1.0 for _ in samples]\njudge = lambda samples: one(samples)\n",
}


@pytest.mark.parametrize("kind", ASYNC)
def test_asynchronous_rewards_are_awaited(tmp_path: Path, kind: str) -> None:
    reward = custom(tmp_path, "import asyncio\n" + ASYNC[kind])

    async def inside_a_loop() -> list[RewardResult]:
        return reward([sample("a")])

    assert rewards(reward([sample("a"), sample("b")])) == [1.0, 1.0]
    assert rewards(asyncio.run(inside_a_loop())) == [1.0]
    reward.close()


def test_a_reward_is_not_called_without_samples(tmp_path: Path) -> None:
    assert custom(tmp_path, "def judge(samples):\n    return [1 / len(samples)]\n")([]) == []


RAISED = [
    ("raise KeyError('tests')", "KeyError: 'tests'"),
    ("raise SystemExit(0)", "SystemExit: 0"),
    ("__import__('sys').exit('no key')", "SystemExit: no key"),
    ("exit()", "SystemExit"),
    ("raise BaseException('x')", "BaseException: x"),
    ("raise GeneratorExit", "GeneratorExit"),
    ("raise __import__('asyncio').CancelledError", "CancelledError"),
    ("raise StopIteration(3)", "StopIteration"),
    ("raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})()", "Odd"),
    ("judge(samples)", "RecursionError"),
    ("raise ValueError('y' * 10**6)", "ValueError: yyy"),
]


# Where an asynchronous function calls itself, nothing happens: the call is not awaited.
FORMS = [
    (form, *case) for form in ("def", "async def") for case in RAISED if form == "def" or "(samples)" not in case[0]
]


@pytest.mark.parametrize(("kind", "statement", "text"), FORMS)
def test_whatever_a_reward_raises_names_function_and_line(tmp_path: Path, kind: str, statement: str, text: str) -> None:
    reward = custom(tmp_path, f"# first\n{kind} judge(samples):\n    {statement}\n")
    problem = problem_of(RunError, reward, [sample("a")])
    assert problem.id == "reward-failed"
    assert problem.message.startswith(f"the reward {tmp_path / 'mine.py'}:judge failed: ")
    assert text in problem.message
    assert "mine.py:3 in judge" in problem.where
    assert len(problem.message) < 1000


def test_the_sample_at_which_a_reward_failed_is_named(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("def grade(label):\n    return int(label)\n")
    body = "from neighbour import grade\ndef judge(samples):\n    return [grade(s.label) for s in samples]\n"
    problem = problem_of(RunError, custom(tmp_path, body), [sample("a", "1"), sample("b", "two"), sample("c", "3")])
    assert "response 'b'" in problem.where
    assert "neighbour.py:2 in grade" in problem.where
    assert "mine.py:3" in problem.got
    assert "return int(label)" in problem.got


def test_ctrl_c_in_a_reward_stays_ctrl_c(tmp_path: Path) -> None:
    reward = custom(tmp_path, "def judge(samples):\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        reward([sample("a")])


ENDLESS = {
    "loop": "while True: pass",
    "sleep": "time.sleep(60)",
    "caught": "while True:\n        try: time.sleep(60)\n        except Exception: pass",
    "lock": "threading.Lock().acquire(); lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "socket": "socket.create_server(('127.0.0.1', 0)).accept()",
    "child": "subprocess.run(['sleep', '60'])",
}


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("form", ["def", "async def"])
def test_a_reward_that_never_ends_is_ended(tmp_path: Path, kind: str, form: str) -> None:
    body = f"import socket, subprocess, threading, time\n{form} judge(samples):\n    {ENDLESS[kind]}\n"
    (tmp_path / "mine.py").write_text(body)
    section = RewardSection(custom_rm_path=f"{tmp_path / 'mine.py'}:judge", rm_timeout=0.3)
    started = time.monotonic()
    problem = problem_of(RunError, load_reward(section, {}), [sample("a")])
    assert time.monotonic() - started < 50
    assert "--rm-timeout 0.3" in problem.message
    assert "mine.py:" in problem.where
    assert "--rm-timeout 1.2" in problem.fix


def test_a_reward_that_no_signal_interrupts_ends_its_process(tmp_path: Path) -> None:
    body = "import re\ndef judge(samples):\n    return [re.match('(a+)+$', 'a' * 60 + 'b')]\n"
    (tmp_path / "mine.py").write_text(body)
    code = (
        "import relax_cli.plugin.user_code as deadline\n"
        "from relax_cli.config.schema import RewardSection\n"
        "from relax_cli.data.rewards import USER_FILE, RewardInput, load_reward\n"
        "deadline.GRACE = 0.3\n"
        "section = RewardSection(custom_rm_path='mine.py:judge', rm_timeout=0.3)\n"
        "load_reward(section, {})([RewardInput('p', 'r', '1', {}, truncated=False, group=0)])\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "mine.py" in done.stderr
    assert "line 3 in judge" in done.stderr


def test_the_deadline_leaves_no_trace(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    reward = custom(tmp_path, "def judge(samples):\n    return [1.0]\n")
    assert rewards(reward([sample("a")])) == [1.0]
    assert signal.getsignal(signal.SIGUSR2) == before
    with ThreadPoolExecutor(1) as thread:
        assert rewards(thread.submit(reward, [sample("a")]).result()) == [1.0]


PRINTS = {
    "print": "print('noise')",
    "write": "sys.stdout.write('noise')",
    "descriptor": "os.write(1, b'noise')",
    "child": "subprocess.run(['echo', 'noise'])",
}


@pytest.mark.parametrize("how", PRINTS)
def test_what_a_reward_prints_stays_out_of_stdout(tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str) -> None:
    body = f"import os, subprocess, sys\n{PRINTS[how]}\ndef judge(samples):\n    {PRINTS[how]}\n    return [1.0]\n"
    reward = custom(tmp_path, body)
    assert rewards(reward([sample("a")])) == [1.0]
    print("data")
    out, err = capfd.readouterr()
    assert out == "data\n"
    assert err.count("noise") == 2


STATE = {
    "set_grad_enabled(False)": "is_grad_enabled()",
    "set_default_dtype(torch.float64)": "get_default_dtype()",
    "set_num_threads(torch.get_num_threads() + 1)": "get_num_threads()",
    "use_deterministic_algorithms(True)": "are_deterministic_algorithms_enabled()",
    "set_default_device('meta')": "get_default_device()",
}


@pytest.mark.parametrize("change", STATE)
@pytest.mark.parametrize("end", ["return [1.0]", "raise ValueError"])
def test_a_reward_changes_no_setting_of_torch(tmp_path: Path, change: str, end: str) -> None:
    import torch

    read = f"torch.{STATE[change]}"
    before = eval(read)
    body = f"import os, torch\ndef judge(samples):\n    torch.{change}\n    os.chdir('/')\n    {end}\n"
    with contextlib.suppress(RunError):
        custom(tmp_path, body)([sample("a")])
    assert eval(read, {"torch": torch}) == before
    assert Path.cwd() != Path("/")


def test_a_reward_imports_its_neighbours_and_hides_no_module(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("SCORE = 0.5\n")
    (tmp_path / "later.py").write_text("SCORE = 0.25\n")
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('the neighbour instead of the module')\n")
    body = (
        "from beside_it import SCORE\n"
        "def judge(samples):\n    import later\n    import colorsys\n    return [SCORE + later.SCORE]\n"
    )
    sys.modules.pop("colorsys", None)
    assert rewards(custom(tmp_path, body)([sample("a")])) == [0.75]


def test_another_number_of_scores_is_refused(tmp_path: Path) -> None:
    reward = custom(tmp_path, "def judge(samples):\n    return [1.0]\n")
    problem = problem_of(RunError, reward, [sample("a"), sample("b")])
    assert (problem.got, problem.expected) == ("1", "2")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import relax_nothing\n", "fails to import"),
        ("judge = 3\n", "cannot be called"),
        ("def grade(samples): ...\n", "no function 'judge'"),
        ("(", "fails to import"),
    ],
)
def test_a_custom_file_that_does_not_load_is_refused(tmp_path: Path, body: str, message: str) -> None:
    problem = problem_of(ConfigError, custom, tmp_path, body)
    assert message in problem.message
    assert problem.where.split(":")[0] == str(tmp_path / "mine.py")


@pytest.mark.parametrize("spec", ["no/such/file.py:judge", "file.py", "", ":judge"])
def test_a_custom_path_to_nothing_is_refused(spec: str) -> None:
    problem = problem_of(ConfigError, load_reward, RewardSection(custom_rm_path=spec), {})
    assert problem.expected.startswith("FILE.py:function")


DEFINED = {
    "try": "try:\n    def judge(samples): return [1.0]\nexcept OSError: pass\n",
    "if": "if True:\n    def judge(samples): return [1.0]\n",
    "annotated": "from typing import Any\njudge: Any = lambda samples: [1.0]\n",
    "unpacked": "(judge, other) = (lambda samples: [1.0], 1)\n",
    "class": "class judge:\n    def __call__(self, samples): return [1.0]\n",
    "partial": "import functools\njudge = functools.partial(lambda n, samples: [n], 1.0)\n",
    "star": "from other_file import *\n",
    "exec": "exec('def judge(samples): return [1.0]')\n",
    "globals": "globals()['judge'] = lambda samples: [1.0]\n",
    "default": "def judge(samples, *, strict=True): return [1.0]\n",
    "coroutine": "async def judge(samples): return [1.0]\n",
}


@pytest.mark.parametrize("how", DEFINED)
def test_validation_finds_a_function_however_it_is_defined(tmp_path: Path, how: str) -> None:
    (tmp_path / "other_file.py").write_text("def judge(samples): return [1.0]\n")
    file = tmp_path / "mine.py"
    file.write_text(DEFINED[how])
    assert rewards(load_reward(RewardSection(custom_rm_path=f"{file}:judge"), {})([sample("a")])) == [1.0]
    assert find_custom(f"{file}:judge") is not None


UNUSABLE = {
    "judge = 3": "custom-reward",
    "def judge(a, b): ...": "custom-reward",
    "def judge(): ...": "custom-reward",
    "class judge: pass": "custom-reward",
    "def grade(samples): ...": "custom-rm-function",
    "def judge(samples:": "custom-rm-file",
    "import relax_nothing": "custom-reward",
    "raise SystemExit(0)": "custom-reward",
    "import sys; sys.exit('no key')": "custom-reward",
    "raise BaseException": "custom-reward",
}


@pytest.mark.parametrize("body", UNUSABLE)
def test_a_reward_file_that_cannot_be_used_is_one_problem(tmp_path: Path, body: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"# first\n{body}\n")
    problem = problem_of(ConfigError, find_custom, f"{file}:judge")
    assert problem.id == UNUSABLE[body]
    assert str(file) in problem.where
    if "import" in problem.message:
        assert problem.where.startswith(f"{file}:2")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def judge(samples): ...", None),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\ndef judge(s): ...", None),
        ("print('noise')\ndef judge(samples): ...", None),
        ("import os; os._exit(0)", "exit code 0"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import time; time.sleep(60)", "more than 1 s"),
        ("while True: pass", "more than 1 s"),
        ("raise SystemExit(0)", "SystemExit: 0"),
    ],
)
def test_a_reward_file_is_tried_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str | None
) -> None:
    if "more than" in (message or ""):
        monkeypatch.setattr(apart, "DEADLINE", 1.0)
    file = tmp_path / "mine.py"
    file.write_text(body + "\n")
    found = USER_FILE.check(f"{file}:judge")
    assert [problem.id for problem in dict.fromkeys(found)] == ([] if message is None else ["custom-reward"])
    assert message is None or message in found[0].message


def maths_of(deadline: float = 60.0) -> PooledReward:
    return PooledReward("math", "relax_cli.data.rewards.math:MathJudge", ["correct"], deadline=deadline, workers=1)


@pytest.fixture(scope="module")
def maths() -> Iterator[PooledReward]:
    reward = maths_of()
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("so x is $\\frac{1}{2}$", "0.5", 1.0),
        ("\\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("7 + 5 = 12.", "12", 1.0),
        ("$x = 13$", "12", 0.0),
        ("", "12", 0.0),
    ],
)
def test_math_compares_values(maths: PooledReward, response: str, label: str, expected: float) -> None:
    assert rewards(maths([sample(response, label)])) == [expected]


PERCENT = (
    ["\\boxed{28\\%}", "28 percent", "28%", "$28\\%$", "The answer is 28\\%.", "28 per cent", "28", "0.28"],
    ["\\boxed{2.8}", "29%", "0.28%", "2800", ""],
)
DOLLARS = (["18.90", "$18.90", "\\$18.90", "$18.9$", "\\boxed{18.90}", "It costs \\$18.90."], ["18.91", "1890", ""])
LETTER = (
    ["B", "(B)", "\\boxed{B}", "The answer is B.", "Answer: **B**", "\\boxed{\\text{(B)}}", "**B**", "answer: (b)"],
    ["C", "The answer is C.", "\\boxed{C}", "AB", "The answer is B or C.", ""],
)
WORD = (["yes", "Yes.", "\\boxed{yes}", "\\text{yes}", "The answer is yes"], ["no", "\\boxed{no}", "yes and no", ""])
SPELLINGS = {
    **dict.fromkeys(["28%", "28\\%", "$28\\%$", "$28%$", "28 percent", "28 \\text{ percent}"], PERCENT),
    **dict.fromkeys(["\\$18.90", "$18.90", "18.90", "$\\$18.90$", "18.9"], DOLLARS),
    **dict.fromkeys(["B", "(B)", "$B$", "\\text{B}"], LETTER),
    **dict.fromkeys(["yes", "Yes", "\\text{yes}"], WORD),
    "1e-7": (["0.0000001", "1e-7", "$10^{-7}$"], ["0.0000002", "1", "0"]),
    "0.0000001": (["0.0000001", "1e-7"], ["0.0000002", "0"]),
    "1234567.891": (["1234567.89"], ["1234667.89"]),
    "1000001": (["1000001"], ["1000000", "1000000.5"]),
    "0.5": (["\\frac{1}{2}", "1/2", ".5"], ["0.500002", "0.51"]),
    "\\frac{1}{3}": (["0.3333333", "1/3"], ["0.33", "3"]),
    "0.28": (["28%", "28\\%", "0.28"], ["28", "2.8"]),
    "(1,2)": (["$(1,2)$", "\\boxed{(1,2)}"], ["$(2,1)$"]),
    "x=5": (["$x=5$", "5"], ["6"]),
    "1.5e10": (["15000000000", "1.5e10"], ["1.5"]),
    "10000": (
        ["\\boxed{10 000}", "\\boxed{10\\,000}", "10,000", "\\boxed{10~000}", "\\boxed{10{,}000}"],
        ["\\boxed{0}"],
    ),
    "1 000": (["1000", "\\boxed{1000}"], ["0", "\\boxed{1}"]),
    "0": (["\\boxed{0}"], ["\\boxed{10 000}", "\\boxed{0.\\overline{3}}"]),
    "0.1\\overline{6}": (
        ["\\frac{1}{6}", "\\boxed{1/6}", "$0.1\\overline{6}$"],
        ["0.1", "\\boxed{0}", "\\boxed{0.1\\overline{5}}"],
    ),
    "3 1/2": (["\\boxed{3.5}", "3½", "7/2", "\\boxed{3\\frac12}"], ["\\boxed{2}", "1", "1/2"]),
    "\\frac{1}{2^{99}}": (["\\boxed{2^{-99}}"], ["\\boxed{2^{-98}}", "\\boxed{\\frac{1}{3^{99}}}", "0"]),
    "\\frac{1}{2004!}": (["\\boxed{1/2004!}"], ["\\boxed{\\frac{1}{2006!}}"]),
    "5": (
        [
            "<answer>5</answer>",
            "<think>6</think>\n<answer>The answer is 5.</answer>",
            "\\boxed{5.}",
            "\\boxed{\\approx 5}",
        ],
        [
            "\\boxed{\\geq 5}",
            "\\boxed{\\ne 5}",
            "\\boxed{1, 5, \\ldots}",
            "5 <answer>6</answer>",
            "\\boxed{n\\equiv 2\\pmod 5}",
        ],
    ),
    "90": (["\\boxed{90°}", "90^\\circ", "\\boxed{90 cm^2}", "90 km/h"], ["\\boxed{90k}"]),
    "-3": (["\\boxed{–3}", "\\boxed{−3}"], ["\\boxed{3}", "pages 2–3"]),
    "x²": (["\\boxed{x^2}"], ["\\boxed{x^3}", "\\boxed{x2}"]),
    "√2": (["\\boxed{\\sqrt{2}}", "\\boxed{√2}"], ["\\boxed{2}"]),
    "2+3i": (["\\boxed{2+3\\mathrm{i}}"], ["\\boxed{2+4\\mathrm{i}}", "\\boxed{5}"]),
    "(0,12.5]": (["\\boxed{0<x\\leq 12.5}"], ["\\boxed{0<x<12.5}", "\\boxed{x=12.5}"]),
    "a \\equiv 3 \\pmod 7": (["\\boxed{a \\equiv 3 \\pmod 7}"], ["\\boxed{a \\equiv 4 \\pmod 7}"]),
    "(D)": (["The answer is: D) 15", "\\boxed{\\textbf{(D) }15}"], ["The answer is: E) 15", "The answer is Dx"]),
}


@pytest.mark.parametrize("label", SPELLINGS)
def test_math_takes_the_spellings_that_people_use(label: str) -> None:
    right, wrong = SPELLINGS[label]
    assert {response: compare(label, response) for response in right} == dict.fromkeys(right, "right")
    assert {response: compare(label, response) for response in wrong} == dict.fromkeys(wrong, "wrong")


@pytest.mark.parametrize("label", ["", " ", "???", "#", "$$", "\\$", "%"])
def test_signs_alone_are_not_a_math_label(label: str) -> None:
    assert compare(label, "3") == "bad-label"
    assert not is_usable(label)


def test_math_scores_zero_at_the_deadline_and_goes_on() -> None:
    reward = maths_of(deadline=2.0)
    stuck, fine = reward([sample("$2^{3^{4^{5^{6}}}}$"), sample("12")])
    reward.close()
    assert stuck == RewardResult(0.0, {"correct": 0.0, "unjudged": 1.0})
    assert fine == RewardResult(1.0, {"correct": 1.0, "unjudged": 0.0})


def test_math_survives_a_killed_worker() -> None:
    before = children()
    reward = maths_of()
    reward([sample("12")])
    (victim,) = children() - before
    os.kill(victim, signal.SIGKILL)
    assert rewards(reward([sample("12"), sample("13")])) == [1.0, 0.0]
    assert victim not in children()
    reward.close()


def test_math_leaves_no_process_behind() -> None:
    before = children()
    reward = load_reward(RewardSection(rm_type="math"), {})
    reward([sample("12")])
    assert children() > before
    reward.close()
    reward.close()
    assert children() == before


@pytest.mark.parametrize(
    ("response", "expected", "answer"),
    [
        ("it is −5", "-5", "-5"),
        ("7 + 5 = 12.", "12", "12"),
        ("12 is the sum of 7 and 5", "12", "5"),
        ("<answer> 3 </answer> no, <answer>12</answer> 99", "12", "12"),
        ("that makes 1,012.50 in all", "1012.5", "1012.50"),
        ("7-5", "2", "5"),
        ("it is -5", "-5", "-5"),
        ("=-5", "-5", "-5"),
        ("(3)-5", "2", "5"),
        ("no idea ", "12", "no idea"),
        (" the cat, 3 ", "the cat, 3", "the cat, 3"),
        ("anything", None, "anything"),
    ],
)
def test_the_answer_is_taken_from_tag_number_or_text(response: str, expected: str | None, answer: str) -> None:
    assert extract_answer(response, expected) == answer


def entry(task: str) -> dict[str, Any]:
    pytest.importorskip("reasoning_gym")
    return load_prompts(DataSection(), f"reasoning-gym:{task}?size=1&seed=1")[0].metadata


def test_reasoning_gym_rewards_full_scores_only() -> None:
    facts = entry("chain_sum")
    right, wrong = f"so it is {facts['answer']}.", f"so it is {facts['answer']}1."
    assert reasoning_gym(sample(right, **facts)) == {"reward": 1.0, "score": 1.0, "correct": 1.0}
    bad = reasoning_gym(sample(wrong, **facts))
    assert (bad["reward"], bad["correct"]) == (0.0, 0.0)


def test_reasoning_gym_gives_partial_credit_when_asked() -> None:
    facts = entry("word_sorting")
    half = sample(facts["answer"].rpartition(",")[0], **facts)
    score = reasoning_gym(half)["score"]
    assert 0.0 < score < 1.0
    partial = load_reward(RewardSection(rm_type="reasoning_gym", reward_key="score"), {})
    assert partial([half]) == [RewardResult(score, {"score": score, "correct": 0.0, "unjudged": 0.0})]
    partial.close()


def test_an_answer_that_the_task_cannot_parse_is_wrong() -> None:
    assert reasoning_gym(sample("hello world", **entry("prime_factorization")))["reward"] == 0.0


def test_a_broken_reasoning_gym_entry_is_an_error() -> None:
    facts = {**entry("prime_factorization"), "answer": "not a number"}
    assert "refuses its own answer" in problem_of(RunError, reasoning_gym, sample("x", **facts)).message


def test_reasoning_gym_refuses_prompts_from_elsewhere() -> None:
    assert "not from reasoning-gym" in problem_of(RunError, reasoning_gym, sample("12")).message
