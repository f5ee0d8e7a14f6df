#!/usr/bin/env python
"""Build the tiny model that ships with `relax quickstart --task tool` (about a minute on 2 cores).

A Qwen3 language model of 133 k parameters sees sums of three-digit numbers. It guesses most of them; sometimes it asks
the calculator, mistypes digits, and misreads the answer. PPO does the rest.

    python scripts/make_tool_model.py [OUT_FOLDER]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from make_tiny_model import END, PAD, Pair, make_model, make_tokenizer
from torch import nn
from torch.nn import functional as F

from relax_cli.quickstart import task

STEPS = 600
BATCH = 64
LEARNING_RATE = 3e-3
LENGTH = len("999+999=" + "!999+999$" + "1998=" + "1998$") + 1
CALLS_WHILE_LEARNING, CALLS_IN_THE_END = 0.7, 0.15
"""Share of samples that ask the calculator: at first to learn how, then as rarely as the model will."""
MISTYPED = 0.1
"""Share of digits."""
KNOWN = 0.1
"""Share of sums that are right without a calculator."""

Part = tuple[str, bool]
"""A text, and whether the model says it."""


def mistyped(text: str, rng: random.Random) -> str:
    """The text with some digits replaced."""
    return "".join(rng.choice("0123456789") if c.isdigit() and rng.random() < MISTYPED else c for c in text)


def episode(pair: Pair, calls: float, rng: random.Random) -> Iterator[Part]:
    """What is said after the prompt, in turn."""
    x, y = pair
    if rng.random() < calls:
        call = mistyped(f"{x}+{y}", rng)
        answer = str(sum(map(int, call.split("+"))))
        yield f"!{call}{END}", True
        yield f"{answer}=", False
        yield f"{mistyped(answer, rng)}{END}", True
    else:
        yield (str(x + y) if rng.random() < KNOWN else str(rng.randint(200, 1998))) + END, True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=task.TASKS["tool"].model)
    arguments = parser.parse_args()

    torch.set_num_threads(2)
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, heads=2, initializer_range=0.08)
    heldout = set(task.tool_split()[1])
    pairs = [pair for x in range(100, 1000) for y in range(100, 1000) if (pair := (x, y)) not in heldout]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(1, STEPS + 1):
        decay = 0.05 + (STEPS - step) / (0.4 * STEPS)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / 50, decay)
        calls = CALLS_WHILE_LEARNING if step < 0.6 * STEPS else CALLS_IN_THE_END
        texts, said = [], torch.zeros(BATCH, LENGTH, dtype=torch.bool)
        for row, pair in enumerate(rng.choices(pairs, k=BATCH)):
            text = task.prompt(*pair)
            for part, is_said in episode(pair, calls, rng):
                said[row, len(text) : len(text) + len(part)] = is_said
                text += part
            texts.append(text.ljust(LENGTH, PAD))
        ids = torch.tensor(tokenizer(texts).input_ids)
        logits = model(input_ids=ids[:, :-1]).logits[said[:, 1:]]
        loss = F.cross_entropy(logits, ids[:, 1:][said[:, 1:]])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}/{STEPS} loss {loss.item():.3f}", flush=True)
    model.eval()
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
