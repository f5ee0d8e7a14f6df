"""Files, pages and headings that the docs name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    missing = []
    for line in (ROOT / page).read_text("utf-8").splitlines():
        folders = [ROOT, ROOT / "relax_cli"]
        for name in re.findall(r"`((?:[a-z_]+/)+[a-z_0-9.]*|[a-z_0-9]+\.py)`", line):
            found = [folder / name for folder in folders if (folder / name).exists()]
            # A name without a folder stands behind the file whose folder it shares.
            folders += [found[0].parent] if found else []
            missing += [] if found else [f"{line[:60]}: {name}"]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_every_link_to_a_page_or_heading_works(page: str) -> None:
    path = ROOT / page
    broken = []
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", path.read_text("utf-8")):
        name, _, heading = target.partition("#")
        file = path.parent / name if name else path
        if not file.exists():
            broken.append(target)
        elif heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            broken += [] if heading in anchors else [target]
    assert broken == []


def test_the_navigation_of_the_site_has_every_page() -> None:
    site = YAML(typ="safe").load((ROOT / "mkdocs.yml").read_text("utf-8"))
    entries = [entry for section in site["nav"] for entry in next(iter(section.values()))]
    pages = [page if isinstance(page, str) else next(iter(page.values())) for page in entries]
    assert sorted(pages) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
