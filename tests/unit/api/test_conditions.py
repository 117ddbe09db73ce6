"""Conditions and reasons: each is documented, and belongs to a kind."""

from __future__ import annotations

import re

import pytest

from kvstrata.api import KINDS
from kvstrata.api.conditions import ConditionType
from tools.generate.conditions import REASONS, condition_types


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.INFO.kind)
def test_every_reason_is_one_word_with_a_sentence(kind: type) -> None:
    for reason in REASONS[kind.INFO.kind]:  # type: ignore[attr-defined]
        assert re.fullmatch(r"[A-Z][A-Za-z]{2,62}", reason.value), reason
        assert reason.meaning.endswith("."), reason
        assert reason.meaning[0].isupper(), reason


def test_a_reason_means_the_same_on_every_kind() -> None:
    meanings: dict[str, set[str]] = {}
    for enumeration in REASONS.values():
        for reason in enumeration:
            meanings.setdefault(reason.value, set()).add(reason.meaning)
    differing = {name for name, several in meanings.items() if len(several) > 1}
    assert differing <= {"GroupNotFound"}


def test_every_condition_type_belongs_to_a_kind() -> None:
    used = {one for kind in KINDS for one in condition_types(kind.INFO.kind)}
    assert used == set(ConditionType)
    assert all(one.meaning.endswith(".") for one in ConditionType)
