"""The site (mkdocs.yml) lists each page once, and its renderer reads pages as the code host does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def test_the_navigation_lists_each_page_once() -> None:
    navigation = (DOCS.parent / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"- (?:[\w ]+: )?(\S+\.md)$", navigation, re.M)
    pages = [path.relative_to(DOCS).as_posix() for path in PAGES]
    assert sorted(listed) == sorted(pages)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_blocks_begin_where_the_sites_renderer_sees_them(page: Path) -> None:
    """It takes a heading after a line of text for text, and a block in a numbered item needs four blanks."""
    text = FENCE.sub("", page.read_text())
    assert re.findall(r"^(?!<!--).*\S.*\n(#+ .*)$", text, re.M) == []
    assert re.findall(r"^\n {1,3}(\S.*)$", text, re.M) == []
