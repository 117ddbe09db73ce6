"""Conditions and reasons: set by one function, documented one by one."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from kvstrata.api import KINDS
from kvstrata.api.common import ConditionStatus
from kvstrata.api.conditions import ConditionType, condition, condition_types, set_conditions
from kvstrata.api.reasons import REASONS, PolicyReason

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
LATER = NOW + timedelta(minutes=5)


def test_a_condition_keeps_its_time_while_its_status_stays() -> None:
    first = condition(ConditionType.READY, False, PolicyReason.AWAITING_ACKS, "1 of 2", generation=1, now=NOW)
    same = condition(ConditionType.READY, False, PolicyReason.NOT_COMMITTED, "0 of 2", generation=2, now=LATER)
    (result,) = set_conditions([first], [same])
    assert result.last_transition_time == NOW
    assert (result.reason, result.message, result.observed_generation) == ("NotCommitted", "0 of 2", 2)


def test_a_condition_takes_the_new_time_when_its_status_changes() -> None:
    first = condition(ConditionType.READY, None, PolicyReason.NO_LIVE_PODS, "", generation=1, now=NOW)
    changed = condition(ConditionType.READY, True, PolicyReason.ALL_PODS_ACKNOWLEDGED, "", generation=1, now=LATER)
    (result,) = set_conditions([first], [changed])
    assert first.status is ConditionStatus.UNKNOWN
    assert result.last_transition_time == LATER


def test_conditions_of_other_types_stay_where_they_are() -> None:
    ready, stalled, enforced = (
        condition(one, True, PolicyReason.SETTLED, "", generation=1, now=NOW)
        for one in (ConditionType.READY, ConditionType.STALLED, ConditionType.ENFORCED)
    )
    assert [one.type for one in set_conditions([ready, stalled], [enforced, ready])] == ["Ready", "Stalled", "Enforced"]


def test_a_reason_is_its_text() -> None:
    made = condition(ConditionType.READY, True, PolicyReason.SETTLED, "", generation=1, now=NOW).to_kubernetes()
    assert made["reason"] == "Settled"
    assert made["lastTransitionTime"] == "2026-11-21T12:00:00Z"


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
