"""Pages that are written from the code: after a change, `python scripts/make_docs.py`."""

from __future__ import annotations

import re

from tests.support import docs
from tests.support.rule_ids import rule_ids


def test_the_page_of_options_is_what_the_schema_says() -> None:
    make_docs = docs.make_docs()
    assert make_docs.CONFIGURATION.read_text("utf-8") == make_docs.render_configuration()


def test_the_page_of_rules_is_what_the_kinds_say() -> None:
    make_docs = docs.make_docs()
    assert make_docs.RULES.read_text("utf-8") == make_docs.rules_page()


def test_every_problem_of_the_sources_has_a_heading() -> None:
    headings = re.findall(r"^### `(.+)`$", docs.make_docs().RULES.read_text("utf-8"), re.MULTILINE)
    assert len(headings) == len(set(headings))
    missing = {rule: place for rule, place in rule_ids().items() if not any(re.fullmatch(rule, h) for h in headings)}
    assert missing == {}
