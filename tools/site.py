"""A hook of the site (mkdocs.yml): links to files of the repository, which the site lacks, become paths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, /, *, page: Any, **_: Any) -> str:
    """Return the page with each link to a file outside of the documentation replaced by its text and the path."""
    folder = Path(page.file.abs_src_path).parent

    def replaced(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if "://" in link[2] or target.is_relative_to(DOCS):
            return link[0]
        path = f"`{target.relative_to(DOCS.parent)}`"
        return path if link[1].strip("`") in path else f"{link[1]} ({path})"

    return LINK.sub(replaced, markdown)
