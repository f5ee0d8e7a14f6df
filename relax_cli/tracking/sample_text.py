"""Samples as pictures of rich. Text of others is never markup; the console writes control codes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.style import Style
from rich.table import Table
from rich.text import Text

from relax_cli.roles.sample_files import Sample
from relax_cli.tracking.numbers import number_text
from relax_cli.tracking.run_files import COLUMNS, Numbers, is_trainable, token_numbers

LINE = 76
MASKED = Style(dim=True)
"""Tokens that are not trained: observations of an episode."""
SIGNED = {"advantages", "ratio"}
"""Numbers that are coloured by the side of their neutral value on which they are; others by their size."""
COLOURED = ("advantages", "values", "ratio")


def overview(every: Sequence[Sample], kept: Sequence[Sample], chosen: Sequence[Sample]) -> list[Any]:
    """What the step has, and the samples chosen."""
    rewards = [sample["reward"] for sample in kept if sample["reward"] is not None]
    mean = number_text(float(np.mean(rewards))) if rewards else "-"
    groups = len({sample["group"] for sample in every})
    head = f"{len(every)} samples of {groups} prompts; {len(kept)} chosen from, mean reward {mean}"
    pictures: list[RenderableType] = [Text(head, style="bold")]
    for sample in chosen:
        pictures += [Rule(_title(sample), align="left", style="dim"), *_texts(sample)]
    if more := len(kept) - len(chosen):
        pictures.append(Text(f"… {more} more: --worst K, --best K, --random K, --filter; --sample ROW shows tokens"))
    return pictures


def side_by_side(members: Sequence[Sample]) -> list[Any]:
    """The samples of one prompt."""
    panels = [
        Panel(Group(_title(sample), Text(""), Text(str(sample["response"]))), width=LINE // 2) for sample in members
    ]
    return [Text(str(members[0]["prompt"]), style="bold"), _label(members[0]), Columns(panels)]


def one_sample(sample: Sample, texts: Any) -> list[Any]:
    """One sample token by token: who gets the credit."""
    tokens = [texts[int(token)] for token in sample["response_token_ids"]]
    numbers = token_numbers(sample)
    styles = {name: _style(name, values) for name, values in numbers.items()}
    pictures: list[RenderableType] = [Rule(_title(sample), align="left"), *_texts(sample)]
    for name in COLOURED:
        if name in numbers:
            painted = zip((token.replace("\n", "⏎\n") for token in tokens), styles[name], strict=True)
            pictures += [Text(f"\n{COLUMNS[name]}", style="bold"), Text.assemble(*painted)]
    table = Table("token", *(COLUMNS[name] for name in numbers), box=None, padding=(0, 1), header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    trainable = is_trainable(sample)
    for place, token in enumerate(tokens):
        shown = {name: "" if np.isnan(values[place]) else f"{values[place]:.4g}" for name, values in numbers.items()}
        cells = [Text(text, style=styles[name][place]) for name, text in shown.items()]
        table.add_row(Text(repr(token)[1:-1], style=Style() if trainable[place] else MASKED), *cells)
    return [*pictures, Text(""), table]


def _title(sample: Mapping[str, Any]) -> Text:
    words = [f"sample {sample['row']}", f"group {sample['group']}", f"reward {number_text(sample['reward'])}"]
    if sample.get("advantage") is not None:
        words.append(f"advantage {number_text(sample['advantage'])}")
    parts = [f"{name} {number_text(value)}" for name, value in sample.get("reward_parts", {}).items()]
    return Text("  ".join([*words, *parts, f"{sample['length']} tokens", str(sample["finish_reason"])]))


def _texts(sample: Mapping[str, Any]) -> list[RenderableType]:
    return [Text(str(sample["prompt"]), style="dim"), Text(str(sample["response"])), _label(sample)]


def _label(sample: Mapping[str, Any]) -> Text:
    return Text(f"label {sample['label']}" if sample.get("label") is not None else "no label", style="dim")


def _style(name: str, values: Numbers) -> list[Style]:
    """A background for each token: green above and red below the neutral value, or blue by size."""
    centred = values - (1.0 if name == "ratio" else 0.0)
    finite = np.abs(centred[np.isfinite(centred)])
    # Rounding between engine and trainer is not worth a colour.
    largest = max(float(finite.max()) if finite.size else 0.0, 0.05 if name == "ratio" else 0.0)
    return [_shade(float(v) / largest if largest else 0.0, signed=name in SIGNED) for v in centred]


def _shade(part: float, *, signed: bool) -> Style:
    if not np.isfinite(part):
        return MASKED
    depth = round(170 * abs(part))
    if not signed:
        return Style(color="white", bgcolor=f"rgb(20,40,{60 + depth})")
    rgb = f"rgb(20,{40 + depth},30)" if part >= 0 else f"rgb({40 + depth},20,30)"
    return Style(color="white", bgcolor=rgb)
