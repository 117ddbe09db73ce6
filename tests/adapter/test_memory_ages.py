"""How old blocks in the cache server's memory are, and that they go when they are too old."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from tests.adapter.memory_server import TIER, A, Server
from tests.adapter.memory_stand_in import (
    Key,
)


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server()) as server:
        yield server


def test_a_turn_is_due_when_the_next_block_becomes_too_old(server: Server) -> None:
    server.allow(a=EnforcedBudget(TIER, retention_s=60))
    server.manager.store(Key(A, 1))
    server.turn()
    server.now_s += 59.75
    assert server.turn() == pytest.approx(0.25)
    server.now_s += 0.25
    server.turn()
    assert server.resident() == []
    assert not server.has_bytes_of(Key(A, 1))


def test_a_retention_that_was_shortened_holds_at_once(server: Server) -> None:
    server.allow(a=EnforcedBudget(TIER, retention_s=60))
    server.manager.store(Key(A, 1))
    server.turn()
    server.now_s += 10
    server.manager.store(Key(A, 2))
    server.turn()
    server.allow(a=EnforcedBudget(TIER, retention_s=10))
    server.turn()
    assert server.resident() == [Key(A, 2)]


def test_a_block_from_another_tier_brings_its_age_along(server: Server) -> None:
    server.allow(a=EnforcedBudget(TIER, retention_s=60))
    server.memory.inherit_age(Key(A, 1), age_s=59.5)
    server.manager.store(Key(A, 1), Key(A, 2))
    assert server.turn() <= 0.5
    assert server.memory.age_s(Key(A, 1)) == pytest.approx(59.5)
    assert server.memory.age_s(Key(A, 2)) == 0
    server.now_s += 0.5
    server.turn()
    assert server.resident() == [Key(A, 2)]


def test_a_block_that_is_nearly_too_old_when_it_comes_is_not_kept_until_the_next_look(server: Server) -> None:
    server.allow(a=EnforcedBudget(TIER, retention_s=60))
    server.turn()
    server.memory.inherit_age(Key(A, 1), age_s=59.75)
    server.manager.store(Key(A, 1))
    assert server.turn() == pytest.approx(0.25)


def test_a_block_that_is_written_anew_starts_anew(server: Server) -> None:
    server.allow(a=EnforcedBudget(TIER, retention_s=60))
    server.memory.inherit_age(Key(A, 1), age_s=59.5)
    server.manager.store(Key(A, 1))
    server.turn()
    server.manager.delete([Key(A, 1)])
    server.manager.store(Key(A, 1))
    server.now_s += 1
    server.turn()
    assert server.resident() == [Key(A, 1)]


def test_a_block_that_comes_back_from_a_tier_has_its_age_before_it_has_arrived(server: Server) -> None:
    server.allow(a=None)
    server.memory.inherit_age(Key(A, 1), age_s=40)
    assert server.memory.age_s(Key(A, 1)) == pytest.approx(40), "its copy may go to another tier at once"
    server.manager.store(Key(A, 1))
    server.now_s += 1
    server.turn()
    assert server.memory.age_s(Key(A, 1)) == pytest.approx(41)


def test_a_block_that_comes_back_right_behind_its_forerunner_keeps_its_age(server: Server) -> None:
    server.allow(a=EnforcedBudget(TIER, retention_s=100))
    server.manager.store(Key(A, 1))
    server.manager.delete([Key(A, 1)])
    server.memory.inherit_age(Key(A, 1), age_s=90)
    server.manager.store(Key(A, 1))
    server.turn()
    assert server.memory.age_s(Key(A, 1)) == pytest.approx(90)
    assert server.gone == [], "one of this name is there"
    server.now_s += 11
    server.turn()
    assert server.resident() == []
    server.turn()
    assert server.gone == [Key(A, 1)]
    server.manager.store(Key(A, 1))
    server.turn()
    assert server.memory.age_s(Key(A, 1)) == 0, "computed anew"


def test_a_block_that_is_being_loaded_while_its_forerunner_goes_keeps_its_age(server: Server) -> None:
    server.allow(a=None)
    server.manager.store(Key(A, 1))
    server.turn()
    server.manager.delete([Key(A, 1)])
    server.manager.reserve(Key(A, 1))
    server.memory.inherit_age(Key(A, 1), age_s=90)
    server.turn()
    server.manager.commit(Key(A, 1))
    server.turn()
    assert server.memory.age_s(Key(A, 1)) == pytest.approx(90)


def counted(server: Server, moment: str) -> tuple[int, float]:
    """How many ages were counted at a moment, and their sum."""
    one = server.memory.counts.ages().get(moment)
    return (sum(one.buckets), one.sum_s) if one is not None else (0, 0.0)


def test_ages_are_counted_when_blocks_are_used_and_when_they_make_room(server: Server) -> None:
    server.allow(a=None)
    server.memory.inherit_age(Key(A, 1), age_s=50)
    server.manager.store(Key(A, 1), Key(A, 2))
    server.turn()
    server.now_s += 10
    server.manager.read(Key(A, 1))
    server.manager.release(Key(A, 1))
    server.turn()
    count, seconds = counted(server, "hit")
    assert (count, seconds) == (1, pytest.approx(60))
    assert counted(server, "eviction") == (0, 0.0)
    server.now_s += 10
    server.allow(a=EnforcedBudget(TIER, limit_bytes=server.held_bytes(A) // 2))
    server.turn()
    assert server.resident() == [Key(A, 1)]
    assert counted(server, "eviction") == (1, pytest.approx(20))


def test_blocks_that_are_taken_away_by_a_policy_are_no_evictions(server: Server) -> None:
    server.allow(a=None)
    server.manager.store(Key(A, 1))
    server.turn()
    server.allow(b=None)
    server.turn()
    assert server.resident() == []
    assert counted(server, "eviction") == (0, 0.0)


def test_what_is_in_use_is_counted_or_shown_as_drift(server: Server) -> None:
    server.allow(a=None)
    server.manager.store(Key(A, 1), Key(A, 2))
    size = server.manager.get_memory_usage()[0]
    assert server.memory.drift_bytes() == size, "nothing was entered yet"
    server.turn()
    assert server.memory.drift_bytes() == 0
    server.manager.reserve(Key(A, 3))
    assert server.memory.drift_bytes() == 0, "what is being written is known"
