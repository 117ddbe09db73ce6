"""The demo's chapters as tests, on real parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from e2e.product.chapters import CHAPTERS, Stage
from e2e.product.shortest import the_shortest_objects_serve_a_tenant

pytestmark = pytest.mark.cluster


def _claim(chapter: Callable[[Stage], None]) -> list[pytest.MarkDecorator]:
    """Mark a chapter with its title as a claim. The tutorial's story shows that of the shortest objects."""
    title = str(inspect.getdoc(chapter)).partition("\n")[0]
    return [] if chapter is the_shortest_objects_serve_a_tenant else [pytest.mark.claim(title)]


@pytest.mark.parametrize(
    "chapter",
    [pytest.param(chapter, id=chapter.__name__, marks=_claim(chapter)) for chapter in CHAPTERS],
)
def test_the_product_keeps_its_promise(stage: Stage, chapter: Callable[[Stage], None]) -> None:
    chapter(stage)
