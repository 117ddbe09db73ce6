"""Planted defects: each applies to the product as it is, names a row of docs/proof.md, and a test of the row."""

from __future__ import annotations

import subprocess

import pytest

from e2e.claims import REPOSITORY
from e2e.defects import Defect, defects
from tests.unit.docs.test_proof import PROOF, Row, rows

DEFECTS = defects()
WITH_ENGINES = ("In 300 pairs of requests", "An engine whose prefix cache is reset", "The cache container killed")
"""Rows whose tests run engines: like those that only stories show, they have no defect yet."""


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


def test_every_row_that_a_test_without_engines_shows_has_a_defect() -> None:
    planted = {row.claim for defect in DEFECTS for row in rows_of(defect)}
    shown = {row.claim for row in rows(PROOF.read_text()) if any(path.startswith("tests/") for path in row.tests)}
    assert [claim[:70] for claim in sorted(shown - planted) if not claim.startswith(WITH_ENGINES)] == []
