"""Decisions are numbered without gaps, and the index lists each with its title."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / "docs/adr"


def test_decisions_have_no_gap_and_are_listed_by_their_titles() -> None:
    files = sorted(FOLDER.glob("0*.md"))
    titles = [file.read_text().partition("\n")[0] for file in files]
    numbers = [int(file.name[:4]) for file in files]
    assert numbers == list(range(1, len(files) + 1))
    listed = re.findall(r"^\| \[(\d{4})\]\(([\w-]+\.md)\) \| ([^|]+) \|", (FOLDER / "README.md").read_text(), re.M)
    assert [(name, f"# {number}: {title}") for number, name, title in listed] == [
        (file.name, title) for file, title in zip(files, titles, strict=True)
    ]
