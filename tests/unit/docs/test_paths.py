"""Modules and scripts that the documentation names exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
NAMED = re.compile(r"(?<![\w/.*<-])((?:[\w.-]+/)*[\w-]+\.(?:py|lua|sh))\b")


def tracked() -> frozenset[str]:
    """Return each file of the repository by its path and by every end of it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    )
    paths = [path.split("/") for path in listed.stdout.decode().splitlines()]
    assert len(paths) > 1000
    return frozenset("/".join(parts[first:]) for parts in paths for first in range(len(parts)))


@pytest.fixture(scope="module")
def known() -> frozenset[str]:
    return tracked()


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent.name != "adr"],
    ids=lambda page: page.relative_to(REPOSITORY).as_posix(),
)
def test_a_page_names_files_that_exist(page: Path, known: frozenset[str]) -> None:
    spans = re.findall(r"`([^`\n]+)`", page.read_text())
    assert {name for span in spans for name in NAMED.findall(span)} <= known
