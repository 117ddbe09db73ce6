"""Blocks that pass through the memory to other tiers, and blocks that come from there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata_sidecar.adapter.memory.write_back import GRACE_S
from tests.adapter.memory_server import TIER, A, B, Server, keys_of
from tests.adapter.memory_stand_in import BLOCK_BYTES, SUCCESS, Key


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with closing(Server(**{"passes_on": True, **getattr(request, "param", {})})) as server:
        yield server


def test_what_may_not_stay_waits_until_lmcache_has_taken_it_up_for_other_tiers(server: Server) -> None:
    server.allow(a=EnforcedBudget(TIER, limit_bytes=0))
    keys = keys_of(A, 3)
    server.manager.store(*keys)
    server.turn()
    assert server.resident() == keys, "nobody has stored it elsewhere yet"
    server.manager.take_up(*keys)
    server.turn()
    assert server.resident() == keys, "it is being stored"
    server.manager.release(*keys)
    server.turn()
    assert server.resident() == []


def test_what_nobody_takes_up_goes_soon(server: Server) -> None:
    server.allow(a=EnforcedBudget(TIER, limit_bytes=0))
    server.manager.store(*keys_of(A, 3))
    assert server.turn() <= GRACE_S, "it is looked at again in time"
    server.now_s += GRACE_S
    server.turn()
    assert server.resident() == []


def test_a_limit_waits_for_nobody_else(server: Server) -> None:
    """What is there longer makes room at once, and what comes later has its own time."""
    server.allow(a=EnforcedBudget(TIER, limit_bytes=2 * BLOCK_BYTES))
    server.manager.store(*keys_of(A, 2))
    server.now_s += GRACE_S
    server.manager.store(*keys_of(A, 2, first=2))
    server.turn()
    assert server.resident() == keys_of(A, 2, first=2)


def test_keyspaces_outside_of_the_policy_get_no_time(server: Server) -> None:
    server.allow(a=None)
    server.manager.store(Key(B, 1))
    server.turn()
    assert server.resident() == []


def test_what_is_too_old_gets_no_time(server: Server) -> None:
    server.allow(a=EnforcedBudget(TIER, retention_s=5))
    server.memory.inherit_age(Key(A, 1), 5.0)
    server.manager.store(Key(A, 1))
    server.turn()
    assert server.resident() == []


@pytest.mark.parametrize("server", [{"passes_on": False}], indirect=True)
def test_without_other_tiers_there_is_nothing_to_wait_for(server: Server) -> None:
    server.allow(a=EnforcedBudget(TIER, limit_bytes=0))
    server.manager.store(*keys_of(A, 3))
    server.turn()
    assert server.resident() == []


def test_what_was_loaded_is_offered_to_nobody(server: Server) -> None:
    server.allow(a=EnforcedBudget(TIER, limit_bytes=0))
    server.manager.load(Key(A, 1))
    server.manager.release(Key(A, 1))
    server.turn()
    assert server.resident() == []


def test_what_came_from_another_tier_to_stay_is_counted(server: Server) -> None:
    server.allow(a=None)
    server.manager.load(*keys_of(A, 3))
    server.manager.load(*keys_of(A, 2, first=3), temporary=True)
    server.manager.store(Key(A, 9))
    server.turn()
    counts = server.memory.counters()
    assert (counts["promoted_blocks"], counts["promoted_bytes"]) == (3, 3 * BLOCK_BYTES)
    assert server.memory.counts.by_scope() == {A[:12]: {"promoted_blocks": 3, "promoted_bytes": 3 * BLOCK_BYTES}}


class TestTiersThatAScopeIsKeptOff:
    def test_nothing_is_found_in_a_closed_tier_and_what_is_stored_passes_through(self, server: Server) -> None:
        server.allow(a=EnforcedBudget.denying(TIER), b=None)
        keys, others = keys_of(A, 3), keys_of(B, 2)
        server.manager.store(*keys, *others)
        found = server.manager.reserve_read([*keys, *others], 1)
        assert [key for key, (error, _) in found.items() if error == SUCCESS] == others
        assert server.memory.counts.snapshot()["refused_not_allowed"] == 3
        assert {error for error, _ in server.manager.reserve_read(keys).values()} == {SUCCESS}, "taken up for others"
        server.manager.release(*keys)
        server.turn()
        assert server.resident() == others

    def test_what_is_found_is_counted_for_nobody(self, server: Server) -> None:
        server.allow(a=EnforcedBudget(TIER, limit_bytes=1 << 20))
        server.manager.store(*keys_of(A, 3))
        assert {error for error, _ in server.manager.reserve_read(keys_of(A, 3), 1).values()} == {SUCCESS}
        assert "refused" not in server.memory.counts.snapshot()
