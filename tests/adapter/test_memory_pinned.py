"""A scope's locked blocks count for its limit: nothing else is locked, loaded or stored beyond it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata_sidecar.adapter.memory.evictor import PASSAGE_S
from kvstrata_sidecar.adapter.memory.write_back import GRACE_S
from tests.adapter.memory_server import TIER, A, B, C, Server, keys_of
from tests.adapter.memory_stand_in import BLOCK_BYTES, NO_MEMORY, READ_TTL_S, STORE_TAG, SUCCESS, Key

LIMIT = 4


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with closing(Server(**getattr(request, "param", {}))) as server:
        server.allow(a=EnforcedBudget(TIER, limit_bytes=LIMIT * BLOCK_BYTES), b=None)
        server.turn()
        yield server


def looked_up(server: Server, *keys: Key) -> int:
    """How many of these blocks a lookup finds and locks."""
    return sum(error == SUCCESS for error, _ in server.manager.reserve_read(keys, 1).values())


def written(server: Server, keys: Sequence[Key], tag: str = STORE_TAG) -> int:
    """How many of these blocks get memory; they are filled and found, and those of a load locked."""
    answers = server.manager.reserve_write(keys, [False] * len(keys), None, tag=tag)
    filled = [key for key, (error, _) in answers.items() if error == SUCCESS]
    assert {error for key, (error, _) in answers.items() if key not in filled} <= {NO_MEMORY}
    server.manager.commit(*filled, tag=tag)
    if tag != STORE_TAG:
        for key in filled:
            server.manager._objects[key].read_lock.lock()
        server.manager._tell("on_l1_keys_finish_write_and_reserve_read", filled)
    server.turn()
    return len(filled)


def used(server: Server, keyspace: str = A) -> int:
    return sum(key.cache_salt == keyspace for key in server.resident())


def test_a_scope_whose_limit_is_locked_stores_nothing_until_a_lock_ends(server: Server) -> None:
    assert written(server, keys_of(A, LIMIT)) == LIMIT
    assert looked_up(server, *keys_of(A, LIMIT)) == LIMIT
    assert written(server, keys_of(A, 3, first=10)) == 0
    assert written(server, keys_of(B, 3)) == 3
    server.manager.finish_read(keys_of(A, 2))
    assert written(server, keys_of(A, 3, first=10)) == 2
    assert used(server) == LIMIT
    assert server.memory.counts.by_scope()[A[:12]]["refused_over_budget"] == 4


def test_locks_that_expire_without_notice_count_no_longer(server: Server) -> None:
    written(server, keys_of(A, LIMIT))
    looked_up(server, *keys_of(A, LIMIT))
    server.now_s += READ_TTL_S
    assert written(server, keys_of(A, LIMIT, first=10)) == LIMIT
    assert used(server) == LIMIT


def test_of_a_prompt_beyond_the_limit_the_first_blocks_are_stored(server: Server) -> None:
    written(server, keys_of(A, 1, first=50))
    assert written(server, keys_of(A, 9)) == LIMIT
    assert set(server.resident()) == set(keys_of(A, LIMIT))


@pytest.mark.parametrize("server", [{"passes_on": True}], indirect=True)
def test_loads_of_a_scope_lock_no_more_than_its_limit(server: Server) -> None:
    written(server, keys_of(A, 2))
    looked_up(server, *keys_of(A, 2))
    assert written(server, keys_of(A, 9, first=10), tag="load") == LIMIT - 2
    assert written(server, keys_of(A, 1, first=30), tag="load") == 0
    assert used(server) == LIMIT


def test_an_emptied_memory_is_loaded_up_to_the_limit_at_once(server: Server) -> None:
    written(server, keys_of(B, 1))
    server.manager.clear()
    server.turn()
    assert written(server, keys_of(A, 9), tag="load") == LIMIT


def test_after_a_lower_limit_a_lookup_finds_only_what_it_may_lock(server: Server) -> None:
    written(server, keys_of(A, LIMIT))
    looked_up(server, *keys_of(A, LIMIT))
    server.allow(a=EnforcedBudget(TIER, limit_bytes=2 * BLOCK_BYTES), b=None)
    server.turn()
    assert used(server) == LIMIT
    server.manager.finish_read(keys_of(A, LIMIT))
    # Before the evictor's next turn a reader comes; it may not keep all of them.
    assert looked_up(server, *keys_of(A, LIMIT)) == 2
    server.turn()
    assert server.resident() == keys_of(A, 2)


@pytest.mark.parametrize("server", [{"passes_on": True}], indirect=True)
def test_locks_of_lmcaches_store_loop_count_for_the_scope_of_the_blocks(server: Server) -> None:
    written(server, keys_of(A, LIMIT))
    server.manager.take_up(*keys_of(A, LIMIT))
    assert written(server, keys_of(A, 6, first=10)) == 0
    assert written(server, keys_of(B, 6)) == 6, "the other scope has its own"
    server.manager.release(*keys_of(A, 1))
    assert written(server, keys_of(A, 6, first=10)) == 1
    assert used(server) == LIMIT


@pytest.mark.parametrize("server", [{"passes_on": True}], indirect=True)
def test_new_blocks_count_while_they_wait_for_the_store_loop(server: Server) -> None:
    assert written(server, keys_of(A, 3)) == 3
    assert written(server, keys_of(A, 6, first=10)) == LIMIT - 3
    server.now_s += GRACE_S
    assert written(server, keys_of(A, 6, first=20)) == LIMIT
    assert used(server) == LIMIT


@pytest.mark.parametrize("server", [{"passes_on": True, "blocks": 32}], indirect=True)
class TestPassage:
    """Scopes without room for a block: together they hold at most half of the memory."""

    HALF = 16

    @pytest.fixture(autouse=True)
    def passage(self, server: Server) -> None:
        nothing, too_little = EnforcedBudget(TIER, limit_bytes=0), EnforcedBudget(TIER, limit_bytes=BLOCK_BYTES - 1)
        server.allow(a=nothing, b=too_little, c=None)
        server.turn()
        written(server, keys_of(C, 1))

    def test_stores_of_all_such_scopes_hold_half_of_the_memory_until_slower_tiers_have_them(
        self, server: Server
    ) -> None:
        assert written(server, keys_of(A, 10)) == 10
        server.manager.take_up(*keys_of(A, 10))
        assert written(server, keys_of(B, 10)) == self.HALF - 10
        assert server.memory.counts.by_scope()[B[:12]]["refused_over_budget"] == 10 - (self.HALF - 10)
        assert written(server, keys_of(C, 5, first=10)) == 5, "other scopes have the rest"
        server.manager.release(*keys_of(A, 10))
        server.turn()
        assert used(server) == 0, "nothing is kept"
        assert written(server, keys_of(B, 9, first=20)) == 9

    def test_loads_are_bounded_alike_and_end_with_their_readers(self, server: Server) -> None:
        assert written(server, keys_of(A, 20), tag="load") == self.HALF
        assert written(server, keys_of(B, 1), tag="load") == 0
        server.manager.finish_read(keys_of(A, self.HALF))
        server.now_s += GRACE_S
        server.turn()
        assert used(server) == 0
        assert written(server, keys_of(B, 1), tag="load") == 1


@pytest.mark.parametrize("limit", [None, 0, 100 * BLOCK_BYTES])
def test_requests_that_were_aborted_leave_no_record_of_their_locks(server: Server, limit: int | None) -> None:
    server.allow(a=EnforcedBudget(TIER, limit_bytes=limit), b=None)
    server.turn()
    for first in range(0, 9, 3):
        written(server, keys_of(A, 3, first), tag="load")
        looked_up(server, *keys_of(A, 3, first))
    server.allow(b=None)
    server.now_s += READ_TTL_S
    server.turn()
    assert not server.memory.pinned._noted
    assert not server.memory.pinned._locked
    assert not server.memory.pinned._check_above


def test_reports_show_an_excess_that_lasts_and_none_that_passes(server: Server) -> None:
    written(server, keys_of(A, LIMIT))
    looked_up(server, *keys_of(A, LIMIT))
    server.allow(a=EnforcedBudget(TIER, limit_bytes=BLOCK_BYTES), b=None)
    for after_s, blocks in ((0.0, 1), (PASSAGE_S - 1, 1), (1.0, LIMIT)):
        server.now_s += after_s
        server.turn()
        (row,) = server.memory.usage()
        assert row.used_bytes == blocks * BLOCK_BYTES
    server.manager.finish_read(keys_of(A, LIMIT))
    server.turn()
    assert server.memory.usage()[0].used_bytes == BLOCK_BYTES
    looked_up(server, Key(A, 0))
    server.allow(a=EnforcedBudget(TIER, limit_bytes=0), b=None)
    server.turn()
    assert server.memory.usage()[0].used_bytes == 0, "a new excess has its own time"


@pytest.mark.parametrize("server", [{"passes_on": True}], indirect=True)
def test_reports_of_a_busy_passage_show_only_blocks_that_stay(server: Server) -> None:
    server.allow(a=EnforcedBudget(TIER, limit_bytes=0))
    for number in range(2 * int(PASSAGE_S)):
        server.manager.store(Key(A, number))
        server.manager.take_up(Key(A, number))
        server.turn()
        if number:
            server.manager.release(Key(A, number - 1))
        server.now_s += 1
        server.turn()
        assert server.memory.usage()[0].used_bytes == 0
    for _ in range(int(PASSAGE_S)):
        server.now_s += 1
        server.turn()
    assert server.memory.usage()[0].used_bytes == BLOCK_BYTES


@pytest.mark.parametrize("passes_on", [False, True])
@given(st.lists(st.tuples(st.sampled_from("slLfetu"), st.integers(0, 9), st.integers(1, 6)), max_size=12))
def test_use_never_exceeds_the_limit_after_a_turn(passes_on: bool, steps: list[tuple[str, int, int]]) -> None:
    with closing(Server(blocks=64, passes_on=passes_on)) as server:
        server.allow(a=EnforcedBudget(TIER, limit_bytes=LIMIT * BLOCK_BYTES), b=None)
        server.turn()
        written(server, keys_of(B, 1))
        for step, first, count in steps:
            keys = keys_of(A, count, first)
            there = [key for key in keys if key in server.resident()]
            match step:
                case "s" | "l":
                    written(server, [key for key in keys if key not in there], STORE_TAG if step == "s" else "load")
                case "L":
                    looked_up(server, *keys)
                case "u":
                    server.manager.take_up(*there)
                case "f":
                    server.manager.finish_read(there)
                case "e":
                    server.now_s += READ_TTL_S
                case "t":
                    pass
            server.turn()
            assert used(server) <= LIMIT
