"""The demo's chapters as tests, on real parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from e2e.product.chapters import CHAPTERS, Stage

pytestmark = pytest.mark.cluster


def _claim(chapter: Callable[[Stage], None]) -> str:
    """The chapter's title, as a claim."""
    return str(inspect.getdoc(chapter)).partition("\n")[0]


@pytest.mark.parametrize(
    "chapter",
    [pytest.param(chapter, id=chapter.__name__, marks=pytest.mark.claim(_claim(chapter))) for chapter in CHAPTERS],
)
def test_the_product_keeps_its_promise(stage: Stage, chapter: Callable[[Stage], None]) -> None:
    chapter(stage)
