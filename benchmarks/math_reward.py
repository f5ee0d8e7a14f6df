"""Gradings per second of `--rm-type math`: half whole numbers in boxes, half LaTeX fractions, in groups of 8.

python benchmarks/math_reward.py [SAMPLES]
"""

from __future__ import annotations

import os
import resource
import sys
import time

from relax_cli.config.schema import RewardSection
from relax_cli.data.rewards import RewardInput, load_reward


def samples(count: int) -> list[RewardInput]:
    """Responses of some 200 characters; every second one is wrong."""
    made = []
    for i in range(count):
        k, wrong = i // 8, i % 2
        number = (f"We add the parts and get $x = {k}$. " * 5 + f"So the answer is \\boxed{{{k + wrong}}}.", str(k))
        answer = f"\\boxed{{\\frac{{{1 + wrong}}}{{{k + 2}}}}}"
        fraction = (f"With $\\frac{{1}}{{{k + 2}}}$ we go on. " * 5 + f"Thus {answer}.", f"\\frac{{1}}{{{k + 2}}}")
        response, label = number if k % 2 else fraction
        made.append(RewardInput("", response, label, {}, truncated=False, group=k))
    return made


def main(count: int) -> None:
    """Print wall-clock and CPU rates, the start of the workers aside."""
    reward = load_reward(RewardSection(rm_type="math"), {})
    reward(samples(64))
    batch, started = samples(count), time.perf_counter()
    results = reward(batch)
    seconds = time.perf_counter() - started
    reward.close()
    assert sum(result.reward for result in results) == count / 2
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{count} gradings in {seconds:.2f} s: {count / seconds:.0f}/s on {os.cpu_count()} cores")
    print(f"{used.ru_utime + used.ru_stime:.2f} CPU-s in the workers, their start included")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4000)
