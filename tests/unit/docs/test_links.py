"""Every relative link of the documentation leads somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
PAGES = (
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted((REPOSITORY / "charts").rglob("*.md")),
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s\[\]*]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that a code host makes from a page's headings."""
    text = FENCE.sub("", page.read_text())
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in HEADING.findall(text)}


def relative_links(page: Path) -> Iterator[tuple[Path, str]]:
    """Where a page's relative links lead: a path and an anchor, which may be empty."""
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        yield (page.parent / path).resolve() if path else page, anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_relative_links_lead_to_files_of_the_repository(page: Path) -> None:
    broken = [
        f"{path}#{anchor}" if anchor else str(path)
        for path, anchor in relative_links(page)
        if not path.is_relative_to(REPOSITORY)
        or not path.exists()
        or (anchor and path.suffix == ".md" and anchor not in anchors(path))
    ]
    assert not broken


def test_links_are_found_at_all() -> None:
    assert (REPOSITORY / "docs/operations/install.md", "") in set(relative_links(REPOSITORY / "README.md"))
