"""Which of a pod's words are worth an answer to who waits for news: a busy tier must not be news at each block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstrata.contract.messages.adapter import RestoreState, ScopeUsage, TierState
from kvstrata.contract.messages.pod_state import PodState
from kvstrata_sidecar.gate.control.service import entity_tag

TIER = TierState("disk", "NVMe", "closed")
STATE = PodState("pod-0", "uid", "demo", "chat", "i", "g", "c", 1, 2, 2, True, 10, True, tiers=(TIER,))


def told(**changed: Any) -> bytes:
    return entity_tag(replace(STATE, tiers=(replace(TIER, **changed),)))


@pytest.mark.parametrize("what", ["stored", "loaded", "refused", "errors", "settling", "used_bytes"])
def test_counters_and_use_are_no_news(what: str) -> None:
    assert told(**{what: 7}) == entity_tag(STATE)
    assert told(restore=RestoreState(*range(9))) == entity_tag(STATE)
    assert entity_tag(replace(STATE, fresh_age_ms=99, usage=(ScopeUsage("a", "disk", 1, 1),))) == entity_tag(STATE)


@pytest.mark.parametrize(
    "changed",
    [
        {"breaker": "open"},
        {"detail": "cannot write a block"},
        {"full": True},
        {"read_only": True},
        {"recovering": True},
        {"floor_reached": True},
        {"encrypted": True},
        {"keyless": 1},
        {"capacity_bytes": 1},
        {"declining": True},
    ],
    ids=str,
)
def test_what_a_condition_depends_on_is(changed: dict[str, Any]) -> None:
    assert told(**changed) != entity_tag(STATE)
