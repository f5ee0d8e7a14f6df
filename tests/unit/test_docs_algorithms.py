"""The documentation keeps up with the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import relax_cispo
import relax_grpo
import relax_gspo
import relax_ppo
import relax_sapo
from pydantic.fields import FieldInfo

from relax_cli import Estimator
from relax_cli.config.schema import AlgorithmSection, CriticSection

ROOT = Path(__file__).parents[2]
ALGORITHMS = (ROOT / "docs" / "algorithms.md").read_text()
ESTIMATORS: list[Estimator] = [
    estimator
    for plugin in (relax_ppo, relax_grpo, relax_gspo, relax_cispo, relax_sapo)
    for estimator in plugin.relax_estimators()
]
ELSEWHERE = {
    "advantage_estimator",
    "critic_init_from_actor",
    "critic_load",
    "critic_lora_rank",
    "critic_save",
    "mask_truncated",
}
"""Fields of the algorithm and critic sections that are no part of a formula."""
each_estimator = pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: estimator.name)


def section(heading: str) -> str:
    """The text from `## heading` to the next heading of that level."""
    _, found, rest = ALGORITHMS.partition(f"\n## {heading}\n")
    assert found, f"docs/algorithms.md has no heading '## {heading}'"
    return rest.partition("\n## ")[0]


def table_row(name: str, field: FieldInfo) -> str:
    """How the row of an option begins: its flag and its default."""
    default: Any = field.default
    if default is None:
        shown = "unset"
    elif isinstance(default, bool):
        shown = "on" if default else "off"
    else:
        shown = f"`{default}`"
    return f"\n| `--{name.replace('_', '-')}` | {shown} |"


def test_the_built_in_estimators_are_all_here() -> None:
    entry_points = (ROOT / "pyproject.toml").read_text().partition('[project.entry-points."relax.plugins"]')[2]
    names = re.findall(r"^(\w+) = ", entry_points.partition("\n[")[0], flags=re.MULTILINE)
    assert sorted(names) == sorted(estimator.name for estimator in ESTIMATORS)


@each_estimator
def test_every_estimator_option_is_documented_with_its_default(estimator: Estimator) -> None:
    text = section(estimator.name)
    missing = [row for row in (table_row(*item) for item in estimator.options.model_fields.items()) if row not in text]
    assert not missing


@each_estimator
def test_every_estimator_page_names_paper_needs_and_metrics(estimator: Estimator) -> None:
    text = section(estimator.name)
    assert estimator.paper in text
    assert f"plugins/relax_{estimator.name}/" in text
    for part in ("    loss = ", "**Needs**", "**Watch**", "**Differs from the paper**"):
        assert part in text


def test_every_option_of_the_loss_is_documented_with_its_default() -> None:
    fields = AlgorithmSection.model_fields | CriticSection.model_fields
    fields = {name: field for name, field in fields.items() if name not in ELSEWHERE}
    missing = [row for row in (table_row(*item) for item in fields.items()) if row not in ALGORITHMS]
    assert not missing
    assert "--advantage-estimator" in ALGORITHMS


def test_links_inside_the_page_lead_somewhere() -> None:
    headings = {h.lower().replace(" ", "-") for h in re.findall(r"^## (.+)$", ALGORITHMS, flags=re.MULTILINE)}
    links = set(re.findall(r"\]\(#([^)]+)\)", ALGORITHMS))
    assert links
    assert links <= headings


def test_files_that_the_page_names_exist() -> None:
    names = set(re.findall(r"`((?:plugins|relax_cli|tests)/[\w/.]+)`", ALGORITHMS))
    assert names
    assert not [name for name in names if not (ROOT / name).exists()]


def test_recipes_that_the_page_names_exist() -> None:
    names = set(re.findall(r"`(tiny-\w+-cpu)`", ALGORITHMS))
    assert len(names) == len(ESTIMATORS)
    assert not [name for name in names if not (ROOT / "relax_cli" / "recipes" / f"{name}.yaml").exists()]
