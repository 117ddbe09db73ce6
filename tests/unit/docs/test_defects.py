"""Planted defects: each applies to the product as it is, names a row of docs/proof.md, and a test of the row."""

from __future__ import annotations

import subprocess

import pytest

from e2e.claims import REPOSITORY
from e2e.defects import Defect, defects
from e2e.parts import STORIES
from tests.unit.docs.test_proof import PROOF, Row, rows

DEFECTS = defects()


def rows_of(defect: Defect) -> list[Row]:
    return [row for row in rows(PROOF.read_text()) if row.claim.startswith(defect.claim)]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.patch.relative_to(REPOSITORY).as_posix())
def test_a_defect_applies_and_names_a_row_and_a_test_of_it(defect: Defect) -> None:
    ended = subprocess.run(
        ("git", "apply", "--check", str(defect.patch)), cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    (row,) = rows_of(defect)
    path, *names = defect.test.split("::")
    assert any(path == shown or path.startswith(f"{shown}/") for shown in row.tests)
    text = (REPOSITORY / path).read_text()
    assert all(f" {name.partition('[')[0]}(" in text or f"class {name}:" in text for name in names)


def test_every_row_that_a_test_shows_has_a_defect() -> None:
    planted = {row.claim for defect in DEFECTS for row in rows_of(defect)}
    shown = {row.claim for row in rows(PROOF.read_text()) if any(is_test(path) for path in row.tests)}
    assert [claim[:70] for claim in sorted(shown - planted)] == []


def is_test(path: str) -> bool:
    """Whether a row's path is one of tests or stories, and not a benchmark's range."""
    return path.startswith(("tests/", STORIES))
