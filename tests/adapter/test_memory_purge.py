"""Erasure from the cache server's memory: what goes at once, what goes when it is let go, and what is said of it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvstrata.contract.messages.erase import Amount, Check
from kvstrata.contract.policy.bundle import EnforcedBudget, Rules
from kvstrata.contract.policy.cache_view import CacheView
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata_sidecar.adapter.index import Kept
from kvstrata_sidecar.adapter.memory import erase
from kvstrata_sidecar.adapter.memory import evictor as evicting
from kvstrata_sidecar.adapter.tier.interface import block_of
from tests.adapter.memory_server import PATIENCE_S, TIER, A, B, Server, keys_of
from tests.adapter.memory_stand_in import (
    BLOCK_BYTES,
    Entry,
    Key,
    Manager,
)
from tests.support.amounts import examples


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer waits until all is overwritten, however busy the machine."""
    monkeypatch.setattr(erase, "WITHIN_S", PATIENCE_S)


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server()) as server:
        yield server


def test_what_is_read_and_what_is_written_is_counted_and_goes_when_it_can(server: Server) -> None:
    server.allow(a=None, b=None)
    free, read, written = keys_of(A, 3)
    server.manager.store(free, read, Key(B, 1))
    server.manager.read(read)
    server.manager.reserve(written)
    answer = server.erase(A)
    assert (answer.deleted.blocks, answer.remaining.blocks, answer.remaining.bytes) == (1, 2, 2 * BLOCK_BYTES)
    assert [server.has_bytes_of(key) for key in (free, read, written, Key(B, 1))] == [False, True, True, True]
    server.manager.commit(written)
    server.turn()
    assert not server.has_bytes_of(written)
    server.manager.release(read)
    server.turn()
    assert not server.has_bytes_of(read)
    answer = server.erase(A)
    assert (answer.deleted.blocks, answer.remaining.blocks) == (3, 0)
    assert server.resident() == [Key(B, 1)]


def test_what_was_stored_afterwards_stays(server: Server) -> None:
    server.allow(a=None)
    server.manager.store(Key(A, 1))
    server.manager.read(Key(A, 1))
    server.erase(A)
    server.manager.store(Key(A, 2))
    server.manager.release(Key(A, 1))
    server.turn()
    assert server.resident() == [Key(A, 2)]


def test_the_sum_holds_what_went_since_the_keyspace_left_the_policy(server: Server) -> None:
    server.allow(a=None)
    server.manager.store(*keys_of(A, 3))
    server.turn()
    server.allow()
    server.turn()
    assert server.erase(A).deleted.blocks == 3
    assert server.erase(A).deleted.bytes == 3 * BLOCK_BYTES, "asked again, it tells the same"


def test_a_policy_that_was_replaced_at_once_counts_too(server: Server) -> None:
    server.allow(a=None)
    server.manager.store(*keys_of(A, 3))
    server.allow()
    server.turn()
    assert server.erase(A).deleted.blocks == 3


def test_a_block_is_not_counted_twice_by_policy_and_erasure(server: Server) -> None:
    server.allow(a=None)
    server.manager.store(Key(A, 1))
    server.manager.read(Key(A, 1))
    server.turn()
    server.allow()
    server.erase(A)
    server.manager.release(Key(A, 1))
    server.turn()
    assert server.erase(A).deleted.blocks == 1


def test_what_an_erasure_waits_for_is_left_to_it(server: Server) -> None:
    server.manager.store(Key(A, 1))
    server.manager.read(Key(A, 1))
    server.erase(A)
    server.manager._objects[Key(A, 1)].read_lock.count = 0
    assert server.memory.eraser.delete({Key(A, 1): Kept(A, BLOCK_BYTES, 0.0, 1)}) == set()
    assert server.erase(A).deleted.blocks == 1


def test_sums_are_kept_for_a_bounded_number_of_keyspaces(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erase, "MAX_TALLIES", 2)
    server.manager.store(Key(A, 1))
    server.manager.read(Key(A, 1))
    server.erase(A)
    for number in range(10):
        server.erase(f"{number:032x}")
    assert len(server.memory.eraser._waiting[A].doomed) == 1, "what has yet to go is not forgotten"
    assert len(server.memory.eraser._tallies) == 2


steps = st.tuples(st.sampled_from("sswwcrlpdt"), st.sampled_from([A, B]), st.integers(0, 5))


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(steps, max_size=60))
@example([("w", A, 0)] * 6 + [("p", A, 0)])
def test_whatever_happens_an_erased_block_leaves_no_byte_and_free_memory_holds_zeros(
    steps: list[tuple[str, str, int]],
) -> None:
    server = Server(blocks=12)
    server.allow(a=EnforcedBudget(TIER, limit_bytes=5 * BLOCK_BYTES), b=None)
    doomed: dict[int, Entry] = {}
    fresh = itertools.count(100)
    try:
        for what, keyspace, number in steps:
            manager, known = server.manager, [key for key in server.resident() if key.cache_salt == keyspace]
            chosen = known[number % len(known)] if known else None
            if what == "s":
                manager.store(Key(keyspace, next(fresh)))
            elif what == "w":
                manager.reserve(Key(keyspace, next(fresh)))
            elif what == "c":
                for key in [key for key in manager._staging if key.cache_salt == keyspace][:1]:
                    manager.commit(key)
            elif what == "r" and chosen:
                manager.read(chosen)
            elif what == "l" and chosen and manager._objects[chosen].read_lock.count:
                manager.release(chosen)
            elif what == "d" and chosen:
                manager.delete([chosen])
            elif what == "p":
                before = {id(entry): entry for key, entry in _entries(manager) if key.cache_salt == keyspace}
                doomed |= before
                answer = server.erase(keyspace)
                still = [entry for entry in before.values() if entry.memory_obj.valid]
                assert answer.remaining.blocks == len(still)
                assert all(entry.write_lock.count or entry.read_lock.count for entry in still)
            elif what == "t":
                server.turn()
        for key, entry in _entries(server.manager):
            entry.read_lock.count = 0
            if key in server.manager._staging:
                server.manager.commit(key)
        server.now_s += evicting.LOOK_S
        server.turn()
        assert not any(entry.memory_obj.valid for entry in doomed.values())
        memory = server.manager._memory_manager
        for block in memory.free_blocks:
            assert not any(memory.buffer.raw[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])
        held = sum(row.used_bytes for row in server.memory.usage() if row.scope == A[:SCOPE_DIGITS])
        assert held <= 5 * BLOCK_BYTES
    finally:
        server.close()


def _entries(manager: Manager) -> list[tuple[Key, Entry]]:
    staged = [(key, entry) for key, writers in manager._staging.items() for entry in writers.values()]
    return [*staged, *manager._objects.items()]


def test_an_erasure_counts_readers_and_writers_apart(server: Server) -> None:
    free, read, written = keys_of(A, 3)
    server.manager.store(free, read, Key(B, 1))
    server.manager.read(read)
    server.manager.reserve(written)
    said = server.erase(A)
    assert (said.found.blocks, said.deleted.blocks, said.remaining) == (3, 1, Amount(2, 2 * BLOCK_BYTES))
    assert (said.reading, said.writing, said.checked) == (1, 1, (Check.OVERWRITTEN,))
    server.manager.commit(written)
    server.manager.release(read)
    said = server.erase(A)
    assert said.complete
    assert (said.deleted.blocks, server.resident()) == (3, [Key(B, 1)])


def test_what_an_engine_stores_late_is_seen_by_the_next_look(server: Server) -> None:
    server.manager.store(Key(A, 1))
    assert server.erase(A).complete
    server.manager.store(Key(A, 2))
    server.manager.read(Key(A, 2))
    assert server.erase(A).reading == 1


def test_memory_that_is_freed_and_not_overwritten_keeps_an_erasure_from_being_complete(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.manager.store(Key(A, 1))
    going_on = threading.Event()
    monkeypatch.setattr(server.pool, "overwrite", lambda *_: going_on.wait(20))
    monkeypatch.setattr(erase, "WITHIN_S", 0.05)
    said = server.erase(A)
    assert (said.complete, said.remaining, said.unoverwritten_bytes) == (False, Amount(), BLOCK_BYTES)
    going_on.set()
    monkeypatch.setattr(erase, "WITHIN_S", PATIENCE_S)
    assert server.erase(A).complete


def test_a_pools_block_that_only_a_loan_keeps_is_still_there(server: Server) -> None:
    pool, reader = Key("c" * 32, 1), Key(A, 1)
    server.allow(a=None, c=None)
    server.share("c", "a", [1])
    server.turn()
    server.manager.store(pool)
    assert server.manager.reserve_read([reader], 1)[reader][0] == "success"
    assert server.erase("c" * 32).reading == 1, "the block itself, which its loan locks"
    server.manager.delete([pool], force=True)
    said = server.erase("c" * 32)
    assert (said.complete, said.reading) == (False, 1)
    assert server.has_bytes_of(pool)
    server.manager.finish_read([reader])
    server.turn()
    assert server.erase("c" * 32).complete
    assert not server.has_bytes_of(pool)


def test_what_a_turn_deletes_before_it_hears_of_the_new_policy_counts_too(server: Server) -> None:
    server.allow(a=None)
    server.manager.store(*keys_of(A, 3))
    server.turn()
    server.enforcement.view = CacheView("d" * 16, 2, 1, Rules(), {})
    server.turn()
    assert server.resident() == []
    assert server.erase(A).deleted.blocks == 3


def test_the_sum_begins_anew_with_a_keyspace_that_comes_back_but_not_while_something_of_it_has_yet_to_go(
    server: Server,
) -> None:
    server.allow(a=None, b=None)
    server.manager.store(*keys_of(A, 2), *keys_of(B, 2))
    server.manager.read(Key(B, 0))
    server.turn()
    server.allow()
    server.turn()
    server.erase(B)
    server.allow(a=None, b=None)
    server.manager.release(Key(B, 0))
    server.turn()
    server.manager.store(Key(A, 9))
    server.allow()
    server.turn()
    assert server.erase(A).deleted == Amount(1, BLOCK_BYTES)
    assert server.erase(B).deleted == Amount(2, 2 * BLOCK_BYTES)


def test_the_sum_of_several_keyspaces_is_theirs_alone_and_each_block_is_shown_once(server: Server) -> None:
    server.allow(a=None, b=None)
    server.manager.store(*keys_of(A, 2), *keys_of(B, 3), Key("c" * 32, 1))
    server.manager.reserve(Key(A, 7))
    server.turn()
    seen: list[tuple[str, bytes]] = []
    said = server.memory.erase([A, B], lambda *block: seen.append(block))
    assert (said.deleted, said.remaining) == (Amount(5, 5 * BLOCK_BYTES), Amount(1, BLOCK_BYTES))
    assert (said.reading, said.writing, said.unoverwritten_bytes) == (0, 1, 0)
    assert sorted(seen) == sorted(
        (key.cache_salt, key.chunk_hash) for key in [*keys_of(A, 2), Key(A, 7), *keys_of(B, 3)]
    )
    assert (said.tier, said.medium, said.residue) == (TIER, "CPU", "")
    server.manager.commit(Key(A, 7))
    assert server.erase(A).deleted == Amount(3, 3 * BLOCK_BYTES)
    assert server.erase(B).deleted == Amount(3, 3 * BLOCK_BYTES)


def test_of_two_writers_of_a_block_both_have_to_go(server: Server) -> None:
    server.manager.reserve(Key(A, 1), tag="x")
    server.manager.reserve(Key(A, 1), tag="y")
    assert server.erase(A).remaining == Amount(2, 2 * BLOCK_BYTES)
    assert server.erase(A).remaining == Amount(2, 2 * BLOCK_BYTES), "asked again, none is doomed twice"
    server.manager.commit(Key(A, 1), tag="x")
    server.turn()
    assert server.memory.kept([block_of(Key(A, 1))]) == 1, "a writer pins both"
    server.manager.commit(Key(A, 1), tag="y")
    server.turn()
    assert server.resident() == []
    assert server.memory.kept([block_of(Key(A, 1))]) == 0
    assert server.erase(A).deleted == Amount(2, 2 * BLOCK_BYTES)


def test_blocks_that_are_named_are_deleted_unless_they_are_in_use(server: Server) -> None:
    server.allow(a=None)
    free, read, written = keys_of(A, 3)
    server.manager.store(free, read)
    server.manager.read(read)
    server.manager.reserve(written)
    blocks = [block_of(key) for key in keys_of(A, 4)]
    assert server.memory.sizes(blocks) == [BLOCK_BYTES, BLOCK_BYTES, 0, 0]
    assert server.memory.kept(blocks) == 3
    assert server.memory.delete(blocks) == [free]
    assert server.memory.sizes(blocks) == [0, BLOCK_BYTES, 0, 0]
    assert server.memory.kept(blocks) == 2
    assert [server.memory.holds(A, block) for block in blocks] == [False, True, False, False]
