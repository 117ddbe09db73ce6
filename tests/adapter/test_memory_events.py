"""What the policy of the memory learns of LMCache's events, of lost ones too, and when it looks by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata_sidecar.adapter import index as choice
from kvstrata_sidecar.adapter.memory import events
from kvstrata_sidecar.adapter.memory import evictor as evicting
from tests.adapter.memory_server import TIER, A, B, C, Server, keys_of
from tests.adapter.memory_stand_in import (
    BLOCK_BYTES,
    LOCKED,
    Key,
)


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server()) as server:
        yield server


def test_events_that_were_lost_are_made_up_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.allow(a=None, b=None)
    server.manager.store(Key(B, 1))
    server.turn()
    monkeypatch.setattr(events, "MAX_EVENTS", 0)
    server.manager.store(Key(A, 1))
    server.manager.delete([Key(B, 1)])
    server.turn()
    assert [row.scope for row in server.memory.usage()] == [A[:SCOPE_DIGITS]]


def test_what_was_lost_is_made_up_for_a_piece_at_a_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.allow(a=None, b=None)
    server.manager.store(*keys_of(B, 5))
    server.turn()
    monkeypatch.setattr(events, "MAX_EVENTS", 0)
    monkeypatch.setattr(events, "COMPARED_AT_ONCE", 4)
    server.manager.delete(keys_of(B, 5))
    server.manager.store(*keys_of(A, 6))
    turns = 1
    while server.turn() == 0:
        turns += 1
    assert turns == 3, "eleven names, four at once"
    assert [(row.scope, row.blocks) for row in server.memory.usage()] == [(A[:SCOPE_DIGITS], 6)]


def test_a_scope_in_which_nothing_happens_is_looked_at_when_something_in_it_is_due(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    bounded = choice._bound

    def bound(chosen: Any, keyspace: str, *rest: Any) -> int:
        looked.append(keyspace)
        return bounded(chosen, keyspace, *rest)

    monkeypatch.setattr(choice, "_bound", bound)
    server.allow(a=EnforcedBudget(TIER, retention_s=100), b=EnforcedBudget(TIER, retention_s=50), c=None)
    for keyspace in (A, B, C):
        server.manager.store(Key(keyspace, 1))
    server.turn()
    looked.clear()
    for _ in range(3):
        server.now_s += evicting.LOOK_S
        assert server.turn() == pytest.approx(evicting.LOOK_S)
    assert looked == []
    server.now_s += 50 - 3 * evicting.LOOK_S
    server.turn()
    assert looked == [B]
    assert server.resident() == [Key(A, 1), Key(C, 1)]


def test_what_could_not_be_deleted_is_tried_again_although_nothing_tells_of_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.allow(a=EnforcedBudget(TIER, limit_bytes=BLOCK_BYTES))
    delete = server.manager.delete
    monkeypatch.setattr(server.manager, "delete", lambda keys: dict.fromkeys(keys, LOCKED))
    server.manager.store(*keys_of(A, 2))
    server.turn()
    monkeypatch.setattr(server.manager, "delete", delete)
    server.now_s += evicting.LOOK_S
    server.turn()
    assert server.resident() == [Key(A, 0)]


def test_whatever_left_the_memory_is_told_once_it_is_gone_also_if_its_event_was_lost(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.allow(a=EnforcedBudget(TIER, limit_bytes=BLOCK_BYTES))
    server.manager.store(*keys_of(A, 2))
    server.turn()
    server.turn()
    assert server.gone == [Key(A, 1)], "evicted: of a prompt the last goes first"
    monkeypatch.setattr(events, "MAX_EVENTS", 0)
    server.manager.delete([Key(A, 0)])
    server.turn()
    assert server.gone == [Key(A, 1), Key(A, 0)]
