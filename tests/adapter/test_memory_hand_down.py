"""What leaves the memory is in the next slower tier before, and nothing waits for that; on stand-ins of both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata_sidecar.adapter.index.scope_index import ScopeIndex
from kvstrata_sidecar.adapter.index.victims import Cause, Fill, Situation, choose, next_victims
from kvstrata_sidecar.adapter.memory import write_back as cleaner
from kvstrata_sidecar.adapter.memory.presence import PresenceCache
from kvstrata_sidecar.adapter.policy.limits import Bounds
from tests.adapter.memory_server import PATIENCE_S, TIER, A, B, Server, keys_of, until
from tests.adapter.memory_stand_in import BLOCK_BYTES, Key, marker
from tests.adapter.slower_tier import SlowerTier
from tests.support.amounts import examples

BLOCKS = 200


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server(blocks=BLOCKS)) as server:
        server.lower.append(SlowerTier())
        yield server


def turns(server: Server, count: int = 1, apart_s: float = 0.25) -> None:
    for _ in range(count):
        server.now_s += apart_s
        server.turn()


def counted(server: Server, name: str) -> int:
    return server.memory.counters().get(name, 0)


def test_while_there_is_room_nothing_is_copied(server: Server) -> None:
    server.allow(a=None)
    server.manager.store(*keys_of(A, BLOCKS * 9 // 10))
    turns(server, 3)
    assert server.lower[0].handed == []


def test_what_goes_next_is_copied_before_it_goes(server: Server) -> None:
    """The least recently used first, and of a prompt the last."""
    tier = server.lower[0]
    server.allow(a=None)
    server.manager.store(*keys_of(A, BLOCKS - 1))
    turns(server)
    tier.answer()
    assert tier.handed_keys()[:2] == [Key(A, BLOCKS - 2), Key(A, BLOCKS - 3)]
    assert all(tier.kept[key].startswith(marker(key)) for key in tier.handed_keys())
    turns(server, 40)
    tier.answer()
    first = tier.handed_keys()[0]
    server.manager.store(*keys_of(B, 1))
    server.lack(2)
    turns(server)
    assert first not in server.resident()
    assert counted(server, "handed_down_blocks") == len(tier.kept)
    assert counted(server, "handed_down_bytes") == len(tier.kept) * BLOCK_BYTES
    assert counted(server, "left_uncopied_blocks") == 0


def test_no_more_than_a_share_of_the_memory_is_under_way_at_once(server: Server) -> None:
    tier = server.lower[0]
    server.allow(a=None)
    server.manager.store(*keys_of(A, BLOCKS))
    turns(server, 20)
    assert len(tier.handed_keys()) == BLOCKS * cleaner.IN_FLIGHT_SHARE
    tier.answer()
    turns(server)
    assert len(tier.handed_keys()) == 2 * BLOCKS * cleaner.IN_FLIGHT_SHARE


def test_eviction_waits_for_no_copy_and_what_was_not_copied_is_counted(server: Server) -> None:
    """A tier that never answers."""
    tier = server.lower[0]
    server.allow(a=None, b=None)
    server.manager.store(*keys_of(A, BLOCKS))
    turns(server)
    copying = set(tier.handed_keys())
    assert copying
    for number in range(10):
        server.lack(1)
        turns(server)
        assert server.manager.reserve(*keys_of(B, 1, first=number))
    gone = set(keys_of(A, BLOCKS)) - set(server.resident())
    assert gone
    assert not gone & copying
    assert counted(server, "left_uncopied_blocks") == len(gone)


def test_a_scopes_blocks_are_copied_before_its_limit_takes_them(server: Server) -> None:
    tier = server.lower[0]
    server.allow(a=EnforcedBudget(TIER, limit_bytes=40 * BLOCK_BYTES))
    server.manager.store(*(key for key in keys_of(A, 40)))
    turns(server)
    assert tier.handed_keys()[:2] == [Key(A, 39), Key(A, 38)]
    tier.answer()
    server.manager.store(*keys_of(A, 2, first=100))
    turns(server)
    assert not {Key(A, 39), Key(A, 38)} & set(server.resident())
    assert counted(server, "left_uncopied_blocks") == 0


def test_a_block_whose_time_in_memory_ends_is_copied_where_it_may_live_longer(server: Server) -> None:
    tier = server.lower[0]
    server.allow(a=EnforcedBudget(TIER, retention_s=60))
    server.manager.store(Key(A, 1))
    server.turn()
    server.now_s += 49
    server.turn()
    assert tier.handed == []
    server.now_s += 2
    server.turn()
    assert tier.handed_keys() == [Key(A, 1)]
    assert tier.handed[0].within_s <= 9, "its end is not put off by the copy"
    tier.answer()
    server.now_s += 10
    server.turn()
    assert server.resident() == []
    assert counted(server, "left_uncopied_blocks") == 0


@pytest.mark.parametrize("life_s", [0.0, 30.0, 60.0])
def test_a_block_that_may_live_no_longer_elsewhere_is_neither_copied_nor_missed(server: Server, life_s: float) -> None:
    server.lower[0].life = life_s
    server.allow(a=EnforcedBudget(TIER, retention_s=60))
    server.manager.store(Key(A, 1))
    server.turn()
    for _ in range(70):
        server.now_s += 1
        server.turn()
    assert server.resident() == []
    assert server.lower[0].handed == []
    assert counted(server, "left_uncopied_blocks") == 0


def test_what_the_tier_has_is_not_copied(server: Server) -> None:
    server.allow(a=None)
    server.lower[0].kept |= dict.fromkeys(keys_of(A, BLOCKS), b"")
    server.manager.store(*keys_of(A, BLOCKS))
    turns(server, 3)
    assert server.lower[0].handed == []


def test_a_tier_of_servers_is_trusted_for_a_while_and_asked_again_then(server: Server) -> None:
    tier: Any = SlowerTier(tells=False, per_pod=False)
    server.lower[0] = tier
    server.allow(a=None)
    keys = keys_of(A, BLOCKS)
    server.manager.store(*keys)
    server.memory.confirm(tier, keys)
    turns(server, 20)
    assert tier.handed == []
    tier.kept |= dict.fromkeys(keys, b"")
    server.now_s += cleaner.TRUST_S
    turns(server)
    assert tier.handed
    tier.answer()
    server.manager.store(*keys_of(B, 1))
    turns(server)
    assert counted(server, "handed_down_blocks") == 0, "it had them"
    assert counted(server, "left_uncopied_blocks") == 0, "an old word counts when it is too late to ask"


def test_a_word_about_a_block_that_left_is_forgotten(server: Server) -> None:
    tier: Any = SlowerTier(tells=False, per_pod=False)
    server.lower[0] = tier
    server.allow(a=None)
    server.manager.store(Key(A, 1))
    server.memory.confirm(tier, [Key(A, 1)])
    server.turn()
    server.manager.delete([Key(A, 1)])
    server.turn()
    assert server.memory.write_back.presence.age_s(tier, Key(A, 1)) is None


def test_the_next_tier_that_takes_it_gets_it_and_no_other(server: Server) -> None:
    full, other = server.lower[0], SlowerTier()
    server.lower.append(other)
    full.life = lambda block: 0.0 if block.keyspace == B else float("inf")
    server.allow(a=None, b=None)
    server.manager.store(*keys_of(A, 100))
    server.manager.store(*keys_of(B, 100))
    turns(server, 3)
    full.answer()
    other.answer()
    assert {key.cache_salt for key in full.handed_keys()} == {A}
    full.is_open = False
    full.kept.clear()
    server.now_s += cleaner.RETRY_S
    turns(server, 3)
    assert {key.cache_salt for key in other.handed_keys()} == {A}


def test_what_leaves_while_no_tier_takes_it_is_counted(server: Server) -> None:
    server.lower[0].is_open = False
    server.allow(a=EnforcedBudget(TIER, limit_bytes=10 * BLOCK_BYTES))
    server.manager.store(*keys_of(A, 15))
    turns(server)
    assert server.lower[0].handed == []
    assert counted(server, "left_uncopied_blocks") == 5
    assert server.memory.by_scope()[A[:12]]["left_uncopied_blocks"] == 5


def test_what_left_the_policy_is_neither_copied_nor_missed(server: Server) -> None:
    server.allow(a=None)
    server.manager.store(*keys_of(A, BLOCKS))
    server.allow()
    turns(server, 3)
    assert server.resident() == []
    assert server.lower[0].handed == []
    assert counted(server, "left_uncopied_blocks") == 0


def test_what_was_erased_is_not_copied_when_its_reader_lets_go(server: Server) -> None:
    server.allow(a=None)
    keys = keys_of(A, BLOCKS)
    server.manager.store(*keys)
    server.manager.read(*keys)
    server.turn()
    server.erase(A)
    turns(server, 3)
    server.manager.release(*keys)
    turns(server, 3)
    assert server.resident() == []
    assert server.lower[0].handed == []


def test_a_block_that_a_tier_refused_is_tried_again_later(server: Server) -> None:
    tier = server.lower[0]
    server.allow(a=EnforcedBudget(TIER, limit_bytes=10 * BLOCK_BYTES))
    server.manager.store(*keys_of(A, 10))
    turns(server)
    tier.answer(succeed=False)
    turns(server, 4)
    assert len(tier.handed) == 1
    server.now_s += cleaner.RETRY_S
    turns(server)
    assert len(tier.handed) == 2
    assert set(tier.handed[0].blocks) == set(tier.handed[1].blocks)


def test_memory_that_is_emptied_under_a_copy_is_nobodys_until_the_copy_ended(server: Server) -> None:
    tier = server.lower[0]
    server.allow(a=EnforcedBudget(TIER, limit_bytes=40 * BLOCK_BYTES))
    server.manager.store(*keys_of(A, 40))
    turns(server)
    (copying,) = tier.waiting
    server.manager.clear()
    server.memory.evictor.turn()
    until(lambda: server.free_blocks() == BLOCKS - len(copying.blocks))
    assert [bytes(view[:8]) for view in copying.views] == [marker(block.key)[:8] for block in copying.blocks]
    server.manager.store(*keys_of(A, 40))
    server.manager.read(*keys_of(A, 40))
    server.now_s += 1
    tier.answer()
    assert all(entry.read_lock.is_locked() for entry in server.manager._objects.values()), "another's lock stands"
    assert server.pool.settle(PATIENCE_S)
    assert server.free_blocks() == BLOCKS - 40


def test_a_pools_blocks_are_handed_down_as_the_pools(server: Server) -> None:
    pool, tier = "f" * 32, server.lower[0]
    server.allow(a=None, f=EnforcedBudget(TIER, limit_bytes=40 * BLOCK_BYTES))
    server.share("f", "a", range(40))
    server.manager.store(*keys_of(pool, 10, first=30))
    server.turn()
    lent = [Key(A, 38)]
    server.manager.reserve_read(lent, 1)
    server.manager.store(*keys_of(pool, 30))
    turns(server)
    assert tier.handed_keys()[:2] == [Key(pool, 39), Key(pool, 37)], "what is lent is in use"
    assert [key for key in server.resident() if key.cache_salt == A] == lent, "nothing is lent for the copy"


@settings(max_examples=examples(60))
@given(st.data())
def test_what_is_named_are_the_next_to_be_evicted(data: st.DataObject) -> None:
    """Whatever comes next, without further uses: the next blocks to go for want of room or by a limit were named."""
    index = ScopeIndex()
    bounds = {
        keyspace: Bounds(limit_bytes=data.draw(st.none() | st.integers(1, 30)), guaranteed_bytes=0)
        for keyspace in (A, B)
    }
    for number, keyspace in enumerate(data.draw(st.lists(st.sampled_from([A, B]), max_size=60))):
        index.add(Key(keyspace, number), keyspace, 1, 0.0)
    for number in data.draw(st.lists(st.integers(0, 59), max_size=20)):
        index.touch(Key(A, number))
        index.touch(Key(B, number))

    def situation(need_bytes: float) -> Situation:
        return Situation(bounds, {}, {}, lambda _: False, 0.0, need_bytes)

    for key in choose(index, situation(0.0)).victims:
        index.remove(key)
    fill = Fill(len(index), len(index), max(1, len(index)))
    named = next_victims(index, bounds, {}, fill, {}, lambda _: False, 0.0)
    wanted = data.draw(st.integers(1, 60))
    assert choose(index, situation(float(wanted))).victims.keys() <= named.keys()
    for keyspace, bound in bounds.items():
        scope = index.scope(keyspace)
        if scope is not None and bound.limit_bytes is not None and scope.used_bytes == bound.limit_bytes:
            first = next(iter(scope.blocks))
            assert first in named


@settings(max_examples=examples(100))
@given(st.integers(0, 30), st.integers(1, 40), st.integers(0, 100))
def test_a_block_is_named_from_ten_seconds_before_its_retention_ends(
    computed_s: int, retention_s: int, now_s: int
) -> None:
    index = ScopeIndex()
    index.add(Key(A, 1), A, 1, float(computed_s))
    fill = Fill(1, 1000, 1000)
    named = next_victims(index, {A: Bounds(retention_s=retention_s)}, {}, fill, {}, lambda _: False, float(now_s))
    near = now_s >= computed_s + max(0, retention_s - 10)
    assert named == ({Key(A, 1): Cause.RETENTION} if near else {})


def test_presence_entries_are_bounded() -> None:
    presence, tier = PresenceCache(lambda: 1.0, max_entries=3), object()
    presence.confirm(tier, range(5))
    assert [presence.age_s(tier, number) is not None for number in range(5)] == [False, False, True, True, True]
