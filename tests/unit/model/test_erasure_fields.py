"""The operator sets every field of what it knows of an erasure: a rule never waits for something that cannot occur."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import kvstrata
from kvstrata.model.erasure.facts import Fact
from kvstrata.model.erasure.record import ErasedPrefix, ErasureNow, ErasureOrder, ErasureRecord, Observed, TierNow

KNOWN: tuple[type[Any], ...] = (
    *get_args(Fact), Observed, TierNow, ErasureNow, ErasureOrder, ErasedPrefix, ErasureRecord,
)  # fmt: skip


def test_every_field_is_set_somewhere_in_the_operator() -> None:
    calls = list(calls_in(Path(kvstrata.__file__).parent))
    replaced = {word for name, _, words in calls if name == "replace" for word in words}
    unset = {
        f"{kind.__name__}.{field.name}"
        for kind in KNOWN
        for place, field in enumerate(fields(kind))
        if field.name not in replaced
        and not any(name == kind.__name__ and (place < count or field.name in words) for name, count, words in calls)
    }
    assert unset == set()


def calls_in(folder: Path) -> Iterator[tuple[str, float, set[str]]]:
    """Yield the name, the number of positions, and the keywords of each call; anything may be in a `*` or `**`."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                words = {word.arg for word in node.keywords if word.arg}
                starred = any(word.arg is None for word in node.keywords) or any(
                    isinstance(one, ast.Starred) for one in node.args
                )
                yield name, float("inf") if starred else len(node.args), words
