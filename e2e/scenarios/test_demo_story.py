"""The demo's chapters as tests, on real parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from e2e.product.chapters import CHAPTERS, Stage

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.__name__)
def test_the_product_keeps_its_promise(stage: Stage, chapter: Callable[[Stage], None]) -> None:
    chapter(stage)
