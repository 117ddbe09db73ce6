"""Which tests `make test` runs: those of whole folders, and in divided ones those that show a claim of docs/proof.md.

With KVSTRATA_SIZE=claims a run of pytest leaves all others out; `make test-all` runs them, too.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

DIVIDED = (
    "e2e/scenarios",
    "tests/apiserver",
    "tests/cluster",
    "tests/dataplane",
    "tests/property",
    "tests/tiers",
    "tests/topology",
)
"""Folders of which `make test` runs only tests with the mark `claim`, which names the claim."""


def is_divided(path: Path) -> bool:
    """Whether a test file lies in a divided folder."""
    return any(path.is_relative_to(REPOSITORY / folder) for folder in DIVIDED)


def shows_a_claim(path: Path) -> bool:
    """Whether `make test` runs tests of a test file."""
    return not is_divided(path) or "pytest.mark.claim(" in path.read_text()


def leave_out_others(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of divided folders that show no claim, where only claims are to be shown."""
    if os.environ.get("KVSTRATA_SIZE") != "claims":
        return
    others = [item for item in items if is_divided(item.path) and item.get_closest_marker("claim") is None]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
