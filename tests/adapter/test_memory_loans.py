"""A pool's blocks in memory, lent to its readers, with a stand-in for LMCache's manager.

That LMCache treats a loan like this is checked with the real one in tests/dataplane/test_loans.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata_sidecar.adapter.memory.lending import Borrowed
from kvstrata_sidecar.adapter.policy.pools import NOTHING_READABLE, Readable
from kvstrata_sidecar.adapter.tier.buffers import address_of
from tests.adapter.memory_readers import CHUNKS, P, content, found, from_the_pool
from tests.adapter.memory_server import PATIENCE_S, TIER, A, B, C, Server, keys_of
from tests.adapter.memory_stand_in import BLOCK_BYTES, LOCKED, READ_TTL_S, SUCCESS, Key, marker


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A pool of three chunks in memory, which A and B may read and C may not."""
    with closing(Server(**getattr(request, "param", {}))) as server:
        server.allow(a=None, b=None, c=None, p=None)
        server.share("p", "ab", range(CHUNKS))
        server.manager.store(*keys_of(P, CHUNKS))
        server.turn()
        yield server


class TestALoan:
    def test_readers_find_the_pools_own_memory_and_nobody_else_does(self, server: Server) -> None:
        own = [server.manager._objects[key].memory_obj for key in keys_of(P, CHUNKS)]
        free = server.free_blocks()
        assert found(server, *keys_of(A, CHUNKS)) == own
        assert found(server, *keys_of(B, CHUNKS)) == own
        assert found(server, *keys_of(C, CHUNKS)) == [None] * CHUNKS
        assert server.free_blocks() == free, "not a byte more"

    def test_what_is_no_chunk_of_the_pool_is_not_lent(self, server: Server) -> None:
        server.share("p", "ab", [0])
        assert [one is not None for one in found(server, *keys_of(A, CHUNKS))] == [True, False, False]

    def test_it_ends_with_its_last_reader_and_leaves_the_pools_block(self, server: Server) -> None:
        for _ in range(2):
            found(server, Key(A, 0))
        server.manager.finish_read([Key(A, 0)])
        assert Key(A, 0) in server.resident(), "another request reads it"
        server.manager.finish_read([Key(A, 0)])
        server.turn()
        assert server.resident() == keys_of(P, CHUNKS)
        assert server.has_bytes_of(Key(P, 0))
        assert not server.pool.in_use(Key(P, 0)), "its locks are undone"

    def test_a_readers_own_block_is_its_own(self, server: Server) -> None:
        server.manager.store(Key(A, 0))
        (own,) = found(server, Key(A, 0))
        assert own is not None
        assert content(own).startswith(marker(Key(A, 0)))

    def test_who_takes_blocks_up_for_other_tiers_is_lent_nothing(self, server: Server) -> None:
        """Or a pool's block would be stored under a reader's name."""
        found(server, Key(A, 0))
        answers = server.manager.reserve_read([Key(A, 0), Key(A, 1), Key(P, 2)])
        assert {key for key, answer in answers.items() if answer[0] == SUCCESS} == {Key(P, 2)}
        assert answers.keys() == {Key(A, 0), Key(A, 1), Key(P, 2)}
        server.manager.finish_read([Key(A, 0)])
        assert Key(A, 0) not in server.resident(), "it was locked by its reader alone"

    def test_what_is_read_by_several_ranks_ends_with_the_last(self, server: Server) -> None:
        server.manager.reserve_read([Key(A, 0)], 2)
        server.manager.finish_read([Key(A, 0)])
        assert server.pool.in_use(Key(A, 0))
        server.manager.finish_read([Key(A, 0)])
        assert Key(A, 0) not in server.resident()

    def test_a_temporary_block_is_not_lent(self, server: Server) -> None:
        """Its last reader frees it, and knows nothing of loans."""
        server.share("p", "ab", range(CHUNKS + 1))
        server.manager.load(Key(P, CHUNKS), temporary=True)
        assert found(server, Key(A, CHUNKS)) == [None]

    def test_two_who_ask_at_once_get_one_loan(self, server: Server) -> None:
        start = threading.Barrier(8)
        missed: list[int] = []

        def ask() -> None:
            start.wait()
            for _ in range(200):
                missed.append(found(server, *keys_of(A, CHUNKS)).count(None))
                server.manager.finish_read(keys_of(A, CHUNKS))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(missed) == 8 * 200
        assert not any(missed), "one that ends its reading takes nothing away from one that begins"
        server.now_s += 1
        server.turn()
        assert server.resident() == keys_of(P, CHUNKS)
        assert not any(server.pool.in_use(key) for key in keys_of(P, CHUNKS))


class TestThePolicy:
    def test_a_loan_is_nobodys_bytes(self, server: Server) -> None:
        server.allow(a=EnforcedBudget(TIER, limit_bytes=0), b=None, p=None)
        found(server, *keys_of(A, CHUNKS))
        server.turn()
        assert [row.scope for row in server.memory.usage()] == [P[:12]]
        assert server.memory.counters()["loans"] == CHUNKS
        answer = server.erase(A)
        assert (answer.deleted.blocks, answer.remaining.blocks) == (0, 0)
        assert server.pool.in_use(Key(A, 0)), "it is held for its reader"

    def test_loans_are_counted_for_the_reader(self, server: Server) -> None:
        found(server, *keys_of(A, CHUNKS))
        counted = server.memory.counts.by_scope()
        assert counted == {A[:12]: {"lent_blocks": CHUNKS, "lent_bytes": CHUNKS * BLOCK_BYTES}}

    def test_a_pool_that_goes_stays_for_who_reads_it_and_is_then_overwritten(self, server: Server) -> None:
        found(server, *keys_of(A, CHUNKS))
        server.allow(a=None, b=None)
        server.share("p", "", ())
        server.turn()
        assert server.erase(P).remaining.blocks == CHUNKS
        assert server.has_bytes_of(Key(P, 0))
        server.manager.finish_read(keys_of(A, CHUNKS))
        server.turn()
        assert server.resident() == []
        assert not server.has_bytes_of(Key(P, 0))
        assert server.erase(P).deleted.blocks == CHUNKS

    def test_who_reads_a_pool_no_more_gets_nothing_of_what_is_lent_to_him_still(self, server: Server) -> None:
        found(server, Key(A, 0))
        server.share("p", "b", range(CHUNKS))
        assert found(server, Key(A, 0)) == [None]
        assert found(server, Key(B, 0)) != [None]

    def test_nothing_is_lent_while_the_policy_is_not_fresh(self, server: Server) -> None:
        server.stale = True
        assert found(server, *keys_of(A, CHUNKS)) == [None] * CHUNKS

    def test_what_is_too_old_is_not_lent_anew_however_readers_overlap(self, server: Server) -> None:
        server.allow(a=None, b=None, p=EnforcedBudget(TIER, retention_s=100))
        server.turn()
        assert found(server, Key(A, 0)) != [None]
        server.now_s += 99
        assert found(server, Key(A, 0)) != [None]
        server.now_s += 1
        assert found(server, Key(A, 0), Key(B, 0)) == [None, None]
        server.manager.finish_read([Key(A, 0), Key(A, 0)])
        server.turn()
        assert server.resident() == []

    def test_what_was_told_to_go_is_not_lent_anew(self, server: Server) -> None:
        found(server, Key(A, 0))
        assert server.erase(P).remaining.blocks == 1
        assert found(server, Key(A, 0), Key(B, 0)) == [None, None]
        server.manager.finish_read([Key(A, 0)])
        server.turn()
        assert server.erase(P).remaining.blocks == 0

    def test_a_use_by_a_reader_counts_in_the_pools_order(self, server: Server) -> None:
        server.allow(a=None, p=EnforcedBudget(TIER, limit_bytes=BLOCK_BYTES))
        found(server, Key(A, CHUNKS - 1))
        server.manager._tell("on_l1_keys_accessed", [Key(A, CHUNKS - 1)])
        server.manager.finish_read([Key(A, CHUNKS - 1)])
        server.turn()
        assert server.resident() == [Key(P, CHUNKS - 1)]

    def test_a_reader_that_is_kept_off_the_tier_is_lent_nothing_and_others_are(self, server: Server) -> None:
        server.allow(a=EnforcedBudget.denying(TIER), b=None, p=None)
        assert [one is not None for one in found(server, Key(A, 0), Key(B, 0))] == [False, True]
        assert server.resident() == [*keys_of(P, CHUNKS), Key(B, 0)]
        assert server.memory.counts.by_scope().keys() == {A[:12], B[:12]}
        assert server.memory.counts.by_scope()[A[:12]] == {"refused_not_allowed": 1}

    def test_a_lookup_of_what_is_withheld_prolongs_no_lock(self, server: Server) -> None:
        found(server, Key(A, 0))
        server.share("p", "b", range(CHUNKS))
        server.now_s += READ_TTL_S - 1
        assert found(server, Key(A, 0)) == [None]
        server.now_s += 2
        server.turn()
        assert server.resident() == keys_of(P, CHUNKS)


class TestWhatSlowerTiersLoad:
    """The pool has no block 7 in memory, and another tier loads it for its readers."""

    @pytest.fixture
    def server(self, server: Server) -> Server:
        server.share("p", "ab", range(8))
        return server

    def load(self, server: Server, *keys: Key) -> None:
        server.manager.load(*keys, filled=from_the_pool(server))

    def test_it_becomes_the_pools_own_and_is_lent_to_who_asked(self, server: Server) -> None:
        free = server.free_blocks()
        self.load(server, Key(A, 7))
        assert server.free_blocks() == free - 1, "one copy"
        (memory,) = found(server, Key(B, 7))
        assert memory is server.manager._objects[Key(P, 7)].memory_obj, "who comes next is lent it too"
        for reader in (A, B):
            server.manager.finish_read([Key(reader, 7)])
        server.turn()
        assert server.resident() == [*keys_of(P, CHUNKS), Key(P, 7)]
        assert not server.pool.in_use(Key(P, 7))
        assert [(row.scope, row.blocks) for row in server.memory.usage()] == [(P[:12], CHUNKS + 1)]
        assert server.memory.counts.by_scope()[P[:12]]["promoted_blocks"] == 1

    def test_it_is_in_use_while_its_first_reader_reads(self, server: Server) -> None:
        self.load(server, Key(A, 7))
        assert server.pool.in_use(Key(P, 7))
        assert server.manager.delete([Key(P, 7)]) == {Key(P, 7): LOCKED}
        server.manager.finish_read([Key(A, 7)])
        assert not server.pool.in_use(Key(P, 7))

    def test_what_is_absent_or_lent_already_becomes_nobodys(self, server: Server) -> None:
        found(server, Key(A, 0))
        loan = server.manager._objects[Key(A, 0)]
        for key in (Key(A, 0), Key(A, 9)):
            assert server.pool.loans.adopt(key, C) is None
        assert server.manager._objects[Key(A, 0)] is loan
        assert server.resident() == [*keys_of(P, CHUNKS), Key(A, 0)]

    def test_it_is_as_old_as_it_was_in_the_other_tier(self, server: Server) -> None:
        server.allow(a=None, p=EnforcedBudget(TIER, retention_s=100))
        server.memory.inherit_age(Key(A, 7), 60.0)
        self.load(server, Key(A, 7))
        server.manager.finish_read([Key(A, 7)])
        server.turn()
        assert Key(P, 7) in server.resident()
        server.now_s += 40
        server.turn()
        assert server.resident() == keys_of(P, CHUNKS)

    def test_of_two_loads_at_once_one_stays(self, server: Server) -> None:
        free = server.free_blocks()
        self.load(server, Key(A, 7))
        self.load(server, Key(B, 7))
        server.manager.finish_read([Key(A, 7)])
        server.manager.finish_read([Key(B, 7)])
        server.turn()
        assert server.resident() == [*keys_of(P, CHUNKS), Key(P, 7)]
        assert server.free_blocks() == free - 1

    def test_of_a_pool_that_is_not_kept_in_memory_nothing_stays(self, server: Server) -> None:
        server.enforcement.readable = Readable({A: (P,)}, {P: frozenset({Key(P, 7).chunk_hash})}, {P: frozenset()})
        self.load(server, Key(A, 7))
        server.manager.finish_read([Key(A, 7)])
        server.turn()
        assert Key(A, 7) not in server.resident()
        assert Key(P, 7) not in server.resident()

    def test_a_pool_that_went_meanwhile_keeps_nothing(self, server: Server) -> None:
        def withdrawn(key: Key, view: memoryview) -> None:
            server.memory.borrowed.loaded(key, P, view)
            server.allow(a=None)
            server.enforcement.readable = NOTHING_READABLE

        server.manager.load(Key(A, 7), filled=withdrawn)
        assert Key(P, 7) not in server.resident()
        server.manager.finish_read([Key(A, 7)])
        server.turn()
        assert server.resident() == []

    def test_a_readers_own_copy_never_becomes_the_pools(self, server: Server) -> None:
        """A load from the pool that ended too late must not speak for the next one, which found the reader's own."""
        server.manager.load_in_vain(Key(A, 7), filled=from_the_pool(server))
        assert server.pool.settle(PATIENCE_S), "the next load gets the same memory"
        server.manager.load(Key(A, 7), filled=lambda key, view: server.memory.borrowed.loaded(key, A, view))
        server.manager.finish_read([Key(A, 7)])
        assert Key(P, 7) not in server.resident()
        assert found(server, Key(B, 7)) == [None]

    def test_of_two_loads_of_one_block_the_memory_tells_which_is_the_pools(self, server: Server) -> None:
        elsewhere = memoryview(bytearray(BLOCK_BYTES))
        server.manager.load(Key(A, 7), filled=lambda key, _: server.memory.borrowed.loaded(key, P, elsewhere))
        assert Key(P, 7) not in server.resident()
        assert found(server, Key(B, 7)) == [None]

    def test_a_readers_own_block_stays_its_own(self, server: Server) -> None:
        self.load(server, Key(A, 7))
        server.manager.finish_read([Key(A, 7)])
        server.manager.load(Key(A, 9))
        server.manager.finish_read([Key(A, 9)])
        assert Key(A, 9) in server.resident()
        assert Key(A, 7) not in server.resident()


class TestLocksOfReaders:
    def test_two_that_end_undo_their_own_locks_and_no_other(self, server: Server) -> None:
        for _ in range(2):
            found(server, Key(A, 0))
        server.manager.take_up(Key(P, 0))
        server.manager.finish_read([Key(A, 0), Key(A, 0)])
        assert Key(A, 0) not in server.resident()
        assert server.pool.in_use(Key(P, 0)), "it is being stored in another tier"
        server.manager.release(Key(P, 0))
        assert not server.pool.in_use(Key(P, 0))

    def test_a_block_that_had_to_go_goes_when_its_reader_returns_it(self, server: Server) -> None:
        found(server, Key(A, 0))
        server.allow(a=None, p=EnforcedBudget(TIER, limit_bytes=0))
        server.turn()
        assert Key(P, 0) in server.resident()
        server.manager.finish_read([Key(A, 0)])
        server.turn()
        assert server.resident() == [], "at once, not within a second"


class TestLocksThatRunOut:
    def test_a_reader_that_died_keeps_its_loan_until_its_lock_has_run_out(self, server: Server) -> None:
        found(server, Key(A, 0))
        server.now_s += READ_TTL_S - 1
        server.turn()
        assert Key(A, 0) in server.resident()
        server.now_s += 1
        server.turn()
        assert server.resident() == keys_of(P, CHUNKS)

    def test_a_reader_that_came_later_keeps_the_pools_block_as_long(self, server: Server) -> None:
        found(server, Key(A, 0))
        server.now_s += READ_TTL_S - 1
        found(server, Key(A, 0))
        server.now_s += 2
        server.manager.finish_read([Key(A, 0)])
        server.allow(a=None, b=None)
        server.turn()
        assert server.has_bytes_of(Key(P, 0)), "the first lock has run out, the second has not"
        assert Key(P, 0) in server.resident()

    def test_an_end_that_comes_too_late_undoes_no_lock_of_somebody_else(self, server: Server) -> None:
        found(server, Key(A, 0))
        server.now_s += READ_TTL_S
        server.manager.take_up(Key(P, 0))
        server.manager._objects[Key(A, 0)].read_lock.lock()
        server.manager.finish_read([Key(A, 0)])
        assert Key(A, 0) not in server.resident()
        assert server.pool.in_use(Key(P, 0)), "it is being stored in another tier"

    def test_locks_that_have_run_out_are_not_undone_with_a_later_one(self, server: Server) -> None:
        found(server, Key(A, 0))
        server.now_s += READ_TTL_S
        found(server, Key(A, 0))
        server.manager.take_up(Key(P, 0))
        server.manager.finish_read([Key(A, 0)])
        assert Key(A, 0) not in server.resident()
        assert server.pool.in_use(Key(P, 0)), "it is being stored in another tier"

    def test_memory_stays_with_the_last_loan_though_the_pools_block_was_forced_out(self, server: Server) -> None:
        (memory,) = found(server, Key(A, 0))
        assert memory is not None
        server.manager.delete([Key(P, 0)], force=True)
        server.turn()
        assert content(memory).startswith(marker(Key(P, 0)))
        assert found(server, Key(A, 0)) == [None], "what is read to its end is not read anew"
        server.manager.finish_read([Key(A, 0)])
        server.turn()
        assert not server.has_bytes_of(Key(P, 0))
        assert server.free_blocks() == server.blocks - CHUNKS + 1

    def test_a_table_that_is_emptied_at_once_gives_all_memory_back(self, server: Server) -> None:
        found(server, *keys_of(A, CHUNKS), *keys_of(B, CHUNKS))
        server.manager.clear()
        server.now_s += 1
        server.turn()
        assert server.free_blocks() == server.blocks
        assert not server.has_bytes_of(Key(P, 0))
        assert server.memory.counters()["loans"] == 0

    def test_what_was_lent_once_is_given_back_with_the_table_as_well(self, server: Server) -> None:
        found(server, Key(A, 0))
        server.manager.finish_read([Key(A, 0)])
        assert server.memory.counters()["loans"] == 0
        server.manager.clear()
        server.now_s += 1
        server.turn()
        assert server.free_blocks() == server.blocks

    def test_when_lending_ends_memory_that_only_loans_held_is_freed_and_no_other(self, server: Server) -> None:
        found(server, Key(A, 0), Key(A, 1))
        server.manager.delete([Key(P, 0)], force=True)
        server.pool.close()
        assert server.resident() == keys_of(P, CHUNKS)[1:]
        assert server.free_blocks() == server.blocks - CHUNKS + 1
        assert not server.has_bytes_of(Key(P, 0))
        assert server.has_bytes_of(Key(P, 1))

    def test_when_lending_ends_the_table_has_the_pools_blocks_alone(self, server: Server) -> None:
        found(server, *keys_of(A, CHUNKS))
        server.pool.loans.close()
        assert server.resident() == keys_of(P, CHUNKS)
        assert found(server, Key(A, 0)) == [None]


def test_of_blocks_that_never_arrive_the_eldest_are_forgotten() -> None:
    borrowed = Borrowed(lambda *_: True, limit=2)
    views = [memoryview(bytearray(8)) for _ in range(3)]
    addresses = {Key(A, number): address_of(view) for number, view in enumerate(views)}
    for number, view in enumerate(views):
        borrowed.loaded(Key(A, number), P, view)
    borrowed.loaded(Key(A, 1), P, views[1])
    assert borrowed.arrived(keys_of(A, 3), addresses.get) == [(Key(A, 1), P), (Key(A, 2), P)]
    assert borrowed.arrived(keys_of(A, 3), addresses.get) == [], "each arrives once"
