"""The site's navigation (mkdocs.yml) lists each page of the documentation once."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


def test_the_navigation_lists_each_page_once() -> None:
    navigation = (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"- (?:[\w ]+: )?(\S+\.md)$", navigation, re.M)
    pages = [path.relative_to(REPOSITORY / "docs").as_posix() for path in (REPOSITORY / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(pages)
