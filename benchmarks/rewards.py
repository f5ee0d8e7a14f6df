"""Gradings per second of `--rm-type math` and `code`; half of the responses are wrong.

python benchmarks/rewards.py [SAMPLES]
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from relax_cli.config.schema import RewardSection
from relax_cli.data.rewards import RewardInput, load_reward


def mathematics(count: int) -> list[RewardInput]:
    """Responses of some 200 characters: half whole numbers in boxes, half LaTeX fractions, in groups of 8."""
    made = []
    for i in range(count):
        k, wrong = i // 8, i % 2
        number = (f"We add the parts and get $x = {k}$. " * 5 + f"So the answer is \\boxed{{{k + wrong}}}.", str(k))
        answer = f"\\boxed{{\\frac{{{1 + wrong}}}{{{k + 2}}}}}"
        fraction = (f"With $\\frac{{1}}{{{k + 2}}}$ we go on. " * 5 + f"Thus {answer}.", f"\\frac{{1}}{{{k + 2}}}")
        response, label = number if k % 2 else fraction
        made.append(RewardInput("", response, label, {}, truncated=False, group=k))
    return made


def programs(count: int) -> list[RewardInput]:
    """A function and three asserts, as in MBPP."""
    tests = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(10, 20) == 30"]
    code = "So:\n```python\ndef add(a, b):\n    return a {} b\n```"
    return [RewardInput("", code.format("+-"[i % 2]), tests, {}, truncated=False, group=i) for i in range(count)]


def measure(name: str, samples: Callable[[int], list[RewardInput]], count: int) -> None:
    """Print the rate, the start of the workers aside."""
    reward = load_reward(RewardSection(rm_type=name), {})
    reward(samples(64))
    batch, started = samples(count), time.perf_counter()
    results = reward(batch)
    seconds = time.perf_counter() - started
    reward.close()
    assert sum(result.reward for result in results) == count / 2
    print(f"{name}: {count} gradings in {seconds:.2f} s, {count / seconds:.0f}/s on {os.cpu_count()} cores")


if __name__ == "__main__":
    asked = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    measure("math", mathematics, asked)
    measure("code", programs, asked // 8)
