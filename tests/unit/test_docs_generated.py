"""Documents that have to follow the code."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.support.rule_ids import rule_ids

ROOT = Path(__file__).parent.parent.parent


def test_the_page_of_options_is_what_the_schema_says() -> None:
    """After a change: `python scripts/make_docs.py`."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from make_docs import TARGET, render
    finally:
        sys.path.pop(0)
    assert TARGET.read_text("utf-8") == render()


def test_every_rule_has_a_heading_and_every_heading_a_rule() -> None:
    headings = re.findall(r"^### `([a-z0-9-]+)`$", (ROOT / "docs" / "rules.md").read_text("utf-8"), re.MULTILINE)
    used = rule_ids()
    assert len(headings) == len(set(headings))
    assert {rule: place for rule, place in used.items() if not any(re.fullmatch(rule, h) for h in headings)} == {}
    assert [heading for heading in headings if not any(re.fullmatch(rule, heading) for rule in used)] == []


def test_the_finder_of_rules_sees_every_way_a_problem_is_made() -> None:
    found = rule_ids()
    # By keyword, by a helper's first argument, by either arm of a condition, put together, through a variable.
    for rule in ("reward-unknown", "resource-negative", "no-cuda-device", "too-few-gpus", "batch-arithmetic"):
        assert rule in found
    assert any(re.fullmatch(rule, "ppo-needs-critic") for rule in found)
