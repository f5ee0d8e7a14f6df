"""Speed of `gae` against a loop over tokens that carries the next value and advantage, in one run.

    python benchmarks/gae.py [--rows 256] [--tokens 8192] [--threads 1] [--holes] [--format text|json]

Rows are ragged: lengths uniform in [tokens/4, tokens]. With --holes a block inside each row is also masked,
as a tool's output would be. All are timed in turns, and the fastest run of each counts. Where numba is installed, the
loop compiled by it is timed as well: the fastest that one pass over memory can be.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_cli.algorithms.gae import gae, score_on_last_token

GAMMA, LAM = 1.0, 0.95


def carry_loop(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """One step per token; a masked token leaves both carries as they are."""
    on_BT = mask_BT.to(rewards_BT.dtype)
    next_value_B = torch.zeros_like(rewards_BT[:, 0])
    carry_B = torch.zeros_like(next_value_B)
    advantages_BT = torch.empty_like(rewards_BT)
    for t in range(rewards_BT.shape[1] - 1, -1, -1):
        on_B = on_BT[:, t]
        here_B = rewards_BT[:, t] + GAMMA * next_value_B - values_BT[:, t] + GAMMA * LAM * carry_B
        next_value_B = on_B * values_BT[:, t] + (1 - on_B) * next_value_B
        carry_B = on_B * here_B + (1 - on_B) * carry_B
        advantages_BT[:, t] = carry_B
    return advantages_BT * on_BT


def ours(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return gae(rewards_BT, values_BT, mask_BT, gamma=GAMMA, lam=LAM)[0]


def compiled_loop() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`carry_loop` row by row, compiled."""
    import numba

    @numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
    def scan(rewards: Any, values: Any, mask: Any, advantages: Any, returns: Any, gamma: Any, decay: Any) -> None:
        for b in range(rewards.shape[0]):
            next_value = carry = np.float32(0)
            for t in range(rewards.shape[1] - 1, -1, -1):
                if mask[b, t]:
                    carry = rewards[b, t] + gamma * next_value - values[b, t] + decay * carry
                    next_value = values[b, t]
                    advantages[b, t] = carry
                    returns[b, t] = carry + next_value

    def run(*batch: Tensor) -> Tensor:
        advantages_BT, returns_BT = torch.zeros_like(batch[0]), torch.zeros_like(batch[0])
        outputs = advantages_BT.numpy(), returns_BT.numpy()
        scan(*(x.numpy() for x in batch), *outputs, np.float32(GAMMA), np.float32(GAMMA * LAM))
        return advantages_BT

    return run


def make_batch(rows: int, tokens: int, holes: bool) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    length_B = torch.randint(tokens // 4, tokens + 1, (rows,), generator=generator)
    position_T = torch.arange(tokens)
    mask_BT = position_T < length_B[:, None]
    if holes:
        start_B = (torch.rand(rows, generator=generator) * (length_B - tokens // 16)).long()[:, None]
        mask_BT &= (position_T < start_B) | (position_T >= start_B + tokens // 32)
    values_BT = torch.randn(rows, tokens, generator=generator)
    penalty_BT = 0.01 * torch.randn(rows, tokens, generator=generator)
    return score_on_last_token(torch.ones(rows), mask_BT) - penalty_BT * mask_BT, values_BT, mask_BT


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--holes", action="store_true")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    batch = make_batch(args.rows, args.tokens, args.holes)
    exact_BT = carry_loop(*(x.double() for x in batch))
    ways: dict[str, Callable[..., Tensor]] = {"carry_loop": carry_loop, "gae": ours}
    if find_spec("numba"):
        ways["compiled_loop"] = compiled_loop()
    error = max(float((way(*batch) - exact_BT).abs().max()) for way in ways.values())
    times = [[seconds(partial(way, *batch)) for way in ways.values()] for _ in range(args.repeats)]
    fastest = {name: min(column) for name, column in zip(ways, zip(*times, strict=True), strict=True)}
    result = {
        "rows": args.rows,
        "tokens": args.tokens,
        "threads": args.threads,
        "holes": args.holes,
        **{f"{name}_ms": round(1e3 * taken, 2) for name, taken in fastest.items()},
        **{f"{name}_ratio": round(fastest["carry_loop"] / taken, 2) for name, taken in fastest.items()},
        "max_abs_error": error,
    }
    if args.format == "json":
        print(json.dumps(result))
    else:
        print("\n".join(f"{name:>20}  {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
