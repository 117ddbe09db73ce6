"""The cache server's memory under the policy, with a stand-in for LMCache's manager: events, purges, overwriting."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.contract import ContractError
from kvstrata.contract.bundle import Rules, TierBudget
from kvstrata.contract.cacheview import CacheView
from kvstrata.contract.link import SCOPE_DIGITS, ScopeUsage
from kvstrata_sidecar.adapter.memory import choice, notes
from kvstrata_sidecar.adapter.memory import governor as governing
from kvstrata_sidecar.adapter.memory import purge as purging
from kvstrata_sidecar.adapter.memory.governor import Governor
from kvstrata_sidecar.adapter.memory.notes import Note
from kvstrata_sidecar.adapter.memory.pool import Pool
from kvstrata_sidecar.adapter.memory.scrub import Scrubber, joined
from tests.tiers.memory_stand_in import (
    BLOCK_BYTES,
    LOCKED,
    SUCCESS,
    Entry,
    Key,
    Listener,
    Manager,
    MemoryObject,
    marker,
)

A, B, C = "a" * 32, "b" * 32, "c" * 32
TIER = "dram"
BOOT = "boot"


@dataclass
class Server:
    """A stand-in of the manager with the real policy on top, whose turns and time are the test's."""

    blocks: int = 16
    now_s: float = 1000.0
    high_percent: int = 100
    tier: str | None = TIER
    view: CacheView | None = None
    eviction: str = "LRU"
    gone: list[Any] = field(default_factory=list)
    manager: Manager = field(init=False)

    def __post_init__(self) -> None:
        self.manager = Manager(self.blocks)
        self.pool = Pool(self.manager, SUCCESS, LOCKED)
        enforcement: Any = SimpleNamespace(view=None)
        self.enforcement = enforcement
        self.governor = Governor(
            self.pool,
            enforcement,
            tier=self.tier,
            high_watermark_percent=self.high_percent,
            eviction=self.eviction,
            gone=self.gone.append,
            clock=lambda: self.now_s,
        )
        self.pool.guard()
        self.pool.listen(Listener(self.governor.note, Note))

    def allow(self, **budgets: TierBudget | None) -> None:
        """Put a policy in force: `allow(a=None, b=TierBudget(…))`."""
        keyspaces = {name * 32: (budget,) if budget else () for name, budget in budgets.items()}
        self.enforcement.view = CacheView("d" * 16, 1, 1, Rules(), keyspaces)
        self.governor.policy_changed()

    def turn(self) -> float:
        """One turn, and all that it freed overwritten."""
        wait_s = self.governor.turn()
        assert self.pool.settle(10)
        return wait_s

    def resident(self) -> list[Key]:
        return list(self.manager._objects)

    def has_bytes_of(self, key: Key) -> bool:
        return marker(key) in self.manager._memory_manager.buffer.raw

    def free_blocks(self) -> int:
        return len(self.manager._memory_manager.free_blocks)

    def close(self) -> None:
        self.governor.close()
        self.pool.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(**options: Any) -> Server:
        servers.append(Server(**options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start()


def keys_of(keyspace: str, count: int, first: int = 0) -> list[Key]:
    return [Key(keyspace, number) for number in range(first, first + count)]


class TestTurns:
    def test_without_a_policy_nothing_is_kept(self, server: Server) -> None:
        server.manager.store(Key(A, 1))
        server.turn()
        assert server.resident() == []
        assert not server.has_bytes_of(Key(A, 1))

    def test_a_keyspace_that_leaves_the_policy_is_emptied_by_the_next_turn(self, server: Server) -> None:
        server.allow(a=None, b=None)
        server.manager.store(*keys_of(A, 3), *keys_of(B, 2))
        server.turn()
        assert len(server.resident()) == 5
        server.allow(b=None)
        server.turn()
        assert server.resident() == keys_of(B, 2)
        assert server.free_blocks() == 14

    def test_of_a_prompt_the_last_blocks_go_first(self, server: Server) -> None:
        """Without its first block the rest of a prompt cannot be found."""
        server.allow(a=TierBudget(TIER, limit_bytes=2 * BLOCK_BYTES))
        server.manager.store(*keys_of(A, 5))
        server.turn()
        assert server.resident() == keys_of(A, 2)

    def test_use_counts_for_the_order(self, server: Server) -> None:
        server.allow(a=TierBudget(TIER, limit_bytes=2 * BLOCK_BYTES))
        server.manager.store(Key(A, 1))
        server.manager.store(Key(A, 2))
        server.manager.read(Key(A, 1))
        server.manager.release(Key(A, 1))
        server.manager.store(Key(A, 3))
        server.turn()
        assert server.resident() == [Key(A, 1), Key(A, 3)]

    def test_a_block_in_use_goes_when_it_is_let_go(self, server: Server) -> None:
        server.allow(a=None)
        server.manager.store(Key(A, 1))
        server.manager.read(Key(A, 1))
        server.allow()
        server.turn()
        assert server.resident() == [Key(A, 1)]
        assert server.governor.counters()["locked_bytes"] == BLOCK_BYTES
        server.manager.release(Key(A, 1))
        server.turn()
        assert server.resident() == []

    def test_a_lock_that_expired_without_a_word_is_noticed_within_a_second(self, server: Server) -> None:
        server.manager.store(Key(A, 1))
        server.manager.read(Key(A, 1))
        assert server.turn() <= governing.LOOK_S
        server.manager._objects[Key(A, 1)].read_lock.count = 0
        server.now_s += governing.LOOK_S
        server.turn()
        assert server.resident() == []

    def test_a_turn_is_due_when_the_next_block_becomes_too_old(self, server: Server) -> None:
        server.allow(a=TierBudget(TIER, retention_s=60))
        server.manager.store(Key(A, 1))
        server.turn()
        server.now_s += 59.75
        assert server.turn() == pytest.approx(0.25)
        server.now_s += 0.25
        server.turn()
        assert server.resident() == []
        assert not server.has_bytes_of(Key(A, 1))

    def test_a_retention_that_was_shortened_holds_at_once(self, server: Server) -> None:
        server.allow(a=TierBudget(TIER, retention_s=60))
        server.manager.store(Key(A, 1))
        server.turn()
        server.now_s += 10
        server.manager.store(Key(A, 2))
        server.turn()
        server.allow(a=TierBudget(TIER, retention_s=10))
        server.turn()
        assert server.resident() == [Key(A, 2)]

    def test_a_block_from_another_tier_brings_its_age_along(self, server: Server) -> None:
        server.allow(a=TierBudget(TIER, retention_s=60))
        server.governor.inherit_age(Key(A, 1), age_s=59.5)
        server.manager.store(Key(A, 1), Key(A, 2))
        assert server.turn() <= 0.5
        assert server.governor.age_s(Key(A, 1)) == pytest.approx(59.5)
        assert server.governor.age_s(Key(A, 2)) == 0
        server.now_s += 0.5
        server.turn()
        assert server.resident() == [Key(A, 2)]

    def test_a_block_that_is_nearly_too_old_when_it_comes_is_not_kept_until_the_next_look(self, server: Server) -> None:
        server.allow(a=TierBudget(TIER, retention_s=60))
        server.turn()
        server.governor.inherit_age(Key(A, 1), age_s=59.75)
        server.manager.store(Key(A, 1))
        assert server.turn() == pytest.approx(0.25)

    def test_a_block_that_is_written_anew_starts_anew(self, server: Server) -> None:
        server.allow(a=TierBudget(TIER, retention_s=60))
        server.governor.inherit_age(Key(A, 1), age_s=59.5)
        server.manager.store(Key(A, 1))
        server.turn()
        server.manager.delete([Key(A, 1)])
        server.manager.store(Key(A, 1))
        server.now_s += 1
        server.turn()
        assert server.resident() == [Key(A, 1)]

    def test_above_the_mark_the_oldest_go_and_guarantees_stay(self, start: Callable[..., Server]) -> None:
        server = start(blocks=20, high_percent=50)
        server.allow(a=TierBudget(TIER, guaranteed_bytes=3 * BLOCK_BYTES), b=None)
        server.manager.store(*keys_of(A, 3))
        for number in range(12):
            server.manager.store(Key(B, number))
            server.turn()
        assert set(keys_of(A, 3)) <= set(server.resident())
        assert server.free_blocks() >= 10
        assert Key(B, 11) in server.resident()

    def test_a_store_that_found_no_memory_makes_room_though_the_mark_was_not_reached(self, server: Server) -> None:
        server.allow(a=None)
        server.manager.store(*keys_of(A, 16))
        server.turn()
        assert not server.manager.reserve(Key(A, 99))
        server.turn()
        assert server.manager.reserve(Key(A, 99))
        assert server.governor.counters()["allocation_failed"] == 1

    def test_what_a_writer_reserved_and_never_wrote_is_freed(self, server: Server) -> None:
        server.allow(a=None)
        server.manager.reserve(Key(A, 1))
        server.turn()
        assert server.free_blocks() == 15
        server.manager._staging[Key(A, 1)]["w"].write_lock.count = 0
        server.now_s += governing.LOOK_S
        server.turn()
        assert server.free_blocks() == 16
        assert not server.has_bytes_of(Key(A, 1))

    def test_a_writer_that_never_wrote_takes_no_block_of_the_same_name_along(self, server: Server) -> None:
        server.allow(a=None)
        server.manager.reserve(Key(A, 1), tag="dead")
        server.manager.store(Key(A, 1))
        server.manager._staging[Key(A, 1)]["dead"].write_lock.count = 0
        server.turn()
        server.now_s += governing.LOOK_S
        server.turn()
        assert server.resident() == [Key(A, 1)]
        server.allow()
        server.turn()
        assert server.free_blocks() == 16, "it goes with the block"

    def test_events_that_were_lost_are_made_up_for(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        server.allow(a=None, b=None)
        server.manager.store(Key(B, 1))
        server.turn()
        monkeypatch.setattr(notes, "MAX_NOTES", 0)
        server.manager.store(Key(A, 1))
        server.manager.delete([Key(B, 1)])
        server.turn()
        assert [row.scope for row in server.governor.usage()[0]] == [A[:SCOPE_DIGITS]]

    def test_what_was_lost_is_made_up_for_a_piece_at_a_time(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.allow(a=None, b=None)
        server.manager.store(*keys_of(B, 5))
        server.turn()
        monkeypatch.setattr(notes, "MAX_NOTES", 0)
        monkeypatch.setattr(governing, "COMPARED_AT_ONCE", 4)
        server.manager.delete(keys_of(B, 5))
        server.manager.store(*keys_of(A, 6))
        turns = 1
        while server.turn() == 0:
            turns += 1
        assert turns == 3, "eleven names, four at once"
        assert [(row.scope, row.blocks) for row in server.governor.usage()[0]] == [(A[:SCOPE_DIGITS], 6)]

    def test_a_scope_in_which_nothing_happens_is_looked_at_when_something_in_it_is_due(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looked: list[str] = []
        bounded = choice._bound

        def bound(chosen: Any, keyspace: str, *rest: Any) -> int:
            looked.append(keyspace)
            return bounded(chosen, keyspace, *rest)

        monkeypatch.setattr(choice, "_bound", bound)
        server.allow(a=TierBudget(TIER, retention_s=100), b=TierBudget(TIER, retention_s=50), c=None)
        for keyspace in (A, B, C):
            server.manager.store(Key(keyspace, 1))
        server.turn()
        looked.clear()
        for _ in range(3):
            server.now_s += governing.LOOK_S
            assert server.turn() == pytest.approx(governing.LOOK_S)
        assert looked == []
        server.now_s += 50 - 3 * governing.LOOK_S
        server.turn()
        assert looked == [B]
        assert server.resident() == [Key(A, 1), Key(C, 1)]

    def test_what_could_not_be_deleted_is_tried_again_although_nothing_tells_of_it(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.allow(a=TierBudget(TIER, limit_bytes=BLOCK_BYTES))
        delete = server.manager.delete
        monkeypatch.setattr(server.manager, "delete", lambda keys: dict.fromkeys(keys, LOCKED))
        server.manager.store(*keys_of(A, 2))
        server.turn()
        monkeypatch.setattr(server.manager, "delete", delete)
        server.now_s += governing.LOOK_S
        server.turn()
        assert server.resident() == [Key(A, 0)]

    def test_whatever_left_the_memory_is_told_once_it_is_gone_also_if_its_event_was_lost(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.allow(a=TierBudget(TIER, limit_bytes=BLOCK_BYTES))
        server.manager.store(*keys_of(A, 2))
        server.turn()
        server.turn()
        assert server.gone == [Key(A, 1)], "evicted: of a prompt the last goes first"
        monkeypatch.setattr(notes, "MAX_NOTES", 0)
        server.manager.delete([Key(A, 0)])
        server.turn()
        assert server.gone == [Key(A, 1), Key(A, 0)]

    def test_a_block_that_comes_back_from_a_tier_has_its_age_before_it_has_arrived(self, server: Server) -> None:
        server.allow(a=None)
        server.governor.inherit_age(Key(A, 1), age_s=40)
        assert server.governor.age_s(Key(A, 1)) == pytest.approx(40), "its copy may go to another tier at once"
        server.manager.store(Key(A, 1))
        server.now_s += 1
        server.turn()
        assert server.governor.age_s(Key(A, 1)) == pytest.approx(41)

    def test_a_block_that_comes_back_right_behind_its_forerunner_keeps_its_age(self, server: Server) -> None:
        server.allow(a=TierBudget(TIER, retention_s=100))
        server.manager.store(Key(A, 1))
        server.manager.delete([Key(A, 1)])
        server.governor.inherit_age(Key(A, 1), age_s=90)
        server.manager.store(Key(A, 1))
        server.turn()
        assert server.governor.age_s(Key(A, 1)) == pytest.approx(90)
        assert server.gone == [], "one of this name is there"
        server.now_s += 11
        server.turn()
        assert server.resident() == []
        server.turn()
        assert server.gone == [Key(A, 1)]
        server.manager.store(Key(A, 1))
        server.turn()
        assert server.governor.age_s(Key(A, 1)) == 0, "computed anew"

    def test_a_block_that_is_being_loaded_while_its_forerunner_goes_keeps_its_age(self, server: Server) -> None:
        server.allow(a=None)
        server.manager.store(Key(A, 1))
        server.turn()
        server.manager.delete([Key(A, 1)])
        server.manager.reserve(Key(A, 1))
        server.governor.inherit_age(Key(A, 1), age_s=90)
        server.turn()
        server.manager.commit(Key(A, 1))
        server.turn()
        assert server.governor.age_s(Key(A, 1)) == pytest.approx(90)

    def test_arc_keeps_what_was_read_again_and_a_purge_forgets_what_went(self, start: Callable[..., Server]) -> None:
        server = start(eviction="ARC")
        server.allow(a=TierBudget(TIER, limit_bytes=6 * BLOCK_BYTES))
        server.manager.store(*keys_of(A, 3))
        for _ in range(2):  # LMCache reports them when the storing request ends, and when another has read them
            server.governor.note(Note.USED, keys_of(A, 3))
        for number in range(10, 40):
            server.manager.store(Key(A, number))
            server.turn()
        assert set(keys_of(A, 3)) <= set(server.resident())
        scope = server.governor._book.scope(A)
        assert scope is not None
        assert scope.order.gone_once  # type: ignore[attr-defined]
        server.manager.read(Key(A, 0))
        server.governor.purge([A], BOOT)
        server.turn()
        assert server.governor._book.scope(A) is scope, "one is in use"
        assert not scope.order.gone_once  # type: ignore[attr-defined]

    def test_usage_names_no_keyspace_in_full_and_sums_up_what_no_policy_names(self, server: Server) -> None:
        server.allow(a=TierBudget(TIER, limit_bytes=10**9, guaranteed_bytes=7), b=None)
        server.manager.store(*keys_of(A, 3), Key(B, 1), Key(C, 1))
        server.manager.read(Key(C, 1))
        server.turn()
        assert server.governor.usage() == (
            (
                ScopeUsage(A[:12], TIER, 3 * BLOCK_BYTES, 3, 10**9, 7),
                ScopeUsage(B[:12], TIER, BLOCK_BYTES, 1),
                ScopeUsage("", TIER, BLOCK_BYTES, 1, 0),
            ),
            0,
        )

    @pytest.mark.parametrize(("tier", "told"), [(TIER, [(TIER, "CPU")]), (None, [])])
    def test_the_gate_is_told_whether_the_cpu_tiers_policy_is_enforced(
        self, tier: str | None, told: list[tuple[str, str]]
    ) -> None:
        governor = Server(tier=tier).governor
        assert [(state.name, state.medium) for state in governor.states()] == told
        assert all(state.breaker == "open" and state.detail for state in governor.states())
        governor.start()
        try:
            assert all(state.breaker == "closed" and not state.detail for state in governor.states())
        finally:
            governor.close()


class TestPurges:
    def test_what_is_read_and_what_is_written_is_counted_and_goes_when_it_can(self, server: Server) -> None:
        server.allow(a=None, b=None)
        free, read, written = keys_of(A, 3)
        server.manager.store(free, read, Key(B, 1))
        server.manager.read(read)
        server.manager.reserve(written)
        answer = server.governor.purge([A], BOOT)
        assert (answer.purged_blocks, answer.locked_blocks, answer.locked_bytes) == (1, 2, 2 * BLOCK_BYTES)
        assert [server.has_bytes_of(key) for key in (free, read, written, Key(B, 1))] == [False, True, True, True]
        server.manager.commit(written)
        server.turn()
        assert not server.has_bytes_of(written)
        server.manager.release(read)
        server.turn()
        assert not server.has_bytes_of(read)
        answer = server.governor.purge([A], BOOT)
        assert (answer.purged_blocks, answer.locked_blocks) == (3, 0)
        assert server.resident() == [Key(B, 1)]

    def test_what_was_stored_afterwards_stays(self, server: Server) -> None:
        server.allow(a=None)
        server.manager.store(Key(A, 1))
        server.manager.read(Key(A, 1))
        server.governor.purge([A], BOOT)
        server.manager.store(Key(A, 2))
        server.manager.release(Key(A, 1))
        server.turn()
        assert server.resident() == [Key(A, 2)]

    def test_the_sum_holds_what_went_since_the_keyspace_left_the_policy(self, server: Server) -> None:
        server.allow(a=None)
        server.manager.store(*keys_of(A, 3))
        server.turn()
        server.allow()
        server.turn()
        assert server.governor.purge([A], BOOT).purged_blocks == 3
        assert server.governor.purge([A], BOOT).purged_bytes == 3 * BLOCK_BYTES, "asked again, it tells the same"

    def test_a_policy_that_was_replaced_at_once_counts_too(self, server: Server) -> None:
        server.allow(a=None)
        server.manager.store(*keys_of(A, 3))
        server.allow()
        server.turn()
        assert server.governor.purge([A], BOOT).purged_blocks == 3

    def test_a_block_is_not_counted_twice_by_policy_and_purge(self, server: Server) -> None:
        server.allow(a=None)
        server.manager.store(Key(A, 1))
        server.manager.read(Key(A, 1))
        server.turn()
        server.allow()
        server.governor.purge([A], BOOT)
        server.manager.release(Key(A, 1))
        server.turn()
        assert server.governor.purge([A], BOOT).purged_blocks == 1

    def test_what_a_purge_waits_for_is_left_to_it(self, server: Server) -> None:
        server.manager.store(Key(A, 1))
        server.manager.read(Key(A, 1))
        server.governor.purge([A], BOOT)
        server.manager._objects[Key(A, 1)].read_lock.count = 0
        assert server.governor._purges.delete({Key(A, 1): (A, BLOCK_BYTES)}) == set()
        assert server.governor.purge([A], BOOT).purged_blocks == 1

    def test_sums_are_kept_for_a_bounded_number_of_keyspaces(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(purging, "MAX_TALLIES", 2)
        server.manager.store(Key(A, 1))
        server.manager.read(Key(A, 1))
        server.governor.purge([A], BOOT)
        for number in range(10):
            server.governor.purge([f"{number:032x}"], BOOT)
        assert server.governor._purges.sums([A])[3] == 1, "what has yet to go is not forgotten"
        assert len(server.governor._purges._tallies) == 2

    def test_a_purge_is_not_answered_before_the_bytes_are_gone(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.allow(a=None)
        server.manager.store(Key(A, 1))
        going_on = threading.Event()
        monkeypatch.setattr(server.pool, "overwrite", lambda *_: going_on.wait())
        monkeypatch.setattr(governing, "PURGE_TIMEOUT_S", 0.05)
        with pytest.raises(ContractError, match="not been overwritten yet"):
            server.governor.purge([A], BOOT)
        going_on.set()


class TestOverwriting:
    def test_freed_memory_is_nobodys_until_it_is_overwritten(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.manager.store(*keys_of(A, 16))
        overwrite, going_on = server.pool.overwrite, threading.Event()
        monkeypatch.setattr(server.pool, "overwrite", lambda *span: going_on.wait() and overwrite(*span))
        server.manager.delete(keys_of(A, 16))
        assert not server.manager.reserve(Key(B, 1))
        assert server.pool.usage()[0] == 0, "what waits to be overwritten is nobody's use"
        going_on.set()
        assert server.pool.settle(10)
        assert not any(server.has_bytes_of(key) for key in keys_of(A, 16))
        assert server.manager.reserve(Key(B, 1))

    def test_memory_that_cannot_be_overwritten_is_kept_back_and_health_says_so(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        overwrite = server.pool.overwrite

        def fails(*_: int) -> None:
            raise OSError

        monkeypatch.setattr(server.pool, "overwrite", fails)
        server.manager.store(Key(A, 1))
        server.manager.delete([Key(A, 1)])
        assert not server.pool.settle(0.05)
        assert not server.pool.scrubber.healthy
        assert server.free_blocks() == 15
        monkeypatch.setattr(server.pool, "overwrite", overwrite)
        assert server.pool.settle(10)
        assert server.pool.scrubber.healthy
        assert server.free_blocks() == 16

    def test_memory_that_was_freed_twice_and_is_somebody_elses_is_left_alone(self) -> None:
        content = ctypes.create_string_buffer(b"somebody else's", BLOCK_BYTES)
        freed = MemoryObject(ctypes.addressof(content), 1, valid=False)
        manager = Manager(1)
        pool = Pool(manager, SUCCESS, LOCKED)
        scrubber = Scrubber(pool)
        scrubber.start()
        scrubber.take([freed])
        assert scrubber.flush(10)
        scrubber.close()
        assert content.value == b"somebody else's"

    def test_an_object_that_is_freed_twice_at_once_costs_nobody_a_byte(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.manager.store(Key(A, 1))
        freed = server.manager._objects[Key(A, 1)].memory_obj
        overwrite, going_on = server.pool.overwrite, threading.Event()
        monkeypatch.setattr(server.pool, "overwrite", lambda *span: going_on.wait() and overwrite(*span))
        give_back = server.pool.give_back

        def give_back_and_store(objects: list[Any]) -> None:
            give_back(objects)
            if not server.resident():
                server.manager.store(Key(B, 1))

        monkeypatch.setattr(server.pool, "give_back", give_back_and_store)
        server.manager.delete([Key(A, 1)])
        _until(lambda: not server.pool.scrubber._aside)
        server.pool.scrubber.take([freed])
        going_on.set()
        assert server.pool.settle(10)
        assert server.manager._objects[Key(B, 1)].memory_obj.data_ptr == freed.data_ptr
        assert server.has_bytes_of(Key(B, 1))

    def test_closing_leaves_lmcaches_manager_as_it_was(self, server: Server) -> None:
        own = type(server.manager._memory_manager).free
        server.manager.store(Key(A, 1))
        server.manager.delete([Key(A, 1)])
        server.close()
        assert server.free_blocks() == 16
        assert server.manager._memory_manager.free.__func__ is own  # type: ignore[attr-defined]

    def test_neighbours_are_overwritten_in_one_go(self) -> None:
        assert joined([(30, 10), (0, 10), (10, 10), (50, 5), (0, 10)]) == [(0, 20), (30, 10), (50, 5)]


def test_the_thread_follows_by_itself(server: Server) -> None:
    server.governor.start()
    server.allow(a=TierBudget(TIER, limit_bytes=4 * BLOCK_BYTES))
    for number in range(50):
        server.manager.store(Key(A, number))
        give_up_at_s = time.monotonic() + 10
        while len(server.resident()) > 4:
            assert time.monotonic() < give_up_at_s
            time.sleep(0.001)
    assert Key(A, 49) in server.resident()
    assert server.governor.healthy


def test_a_turn_that_fails_shows_and_is_made_up_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    delete, failing = server.pool.delete, threading.Event()
    failing.set()

    def fails(keys: Any) -> Any:
        if failing.is_set():
            raise RuntimeError
        return delete(keys)

    monkeypatch.setattr(server.pool, "delete", fails)
    server.governor.start()
    server.manager.store(Key(A, 1))
    _until(lambda: server.governor.counters()["enforced"] == 0)
    failing.clear()
    _until(lambda: server.governor.healthy and not server.resident())


steps = st.tuples(st.sampled_from("sswwcrlpdt"), st.sampled_from([A, B]), st.integers(0, 5))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(steps, max_size=60))
def test_whatever_happens_a_purged_block_leaves_no_byte_and_free_memory_holds_zeros(
    steps: list[tuple[str, str, int]],
) -> None:
    server = Server(blocks=12)
    server.allow(a=TierBudget(TIER, limit_bytes=5 * BLOCK_BYTES), b=None)
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
                answer = server.governor.purge([keyspace], BOOT)
                still = [entry for entry in before.values() if entry.memory_obj.valid]
                assert answer.locked_blocks == len(still)
                assert all(entry.write_lock.count or entry.read_lock.count for entry in still)
            elif what == "t":
                server.turn()
        for key, entry in _entries(server.manager):
            entry.read_lock.count = 0
            if key in server.manager._staging:
                server.manager.commit(key)
        server.now_s += governing.LOOK_S
        server.turn()
        assert not any(entry.memory_obj.valid for entry in doomed.values())
        memory = server.manager._memory_manager
        for block in memory.free_blocks:
            assert not any(memory.buffer.raw[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])
        held = sum(row.used_bytes for row in server.governor.usage()[0] if row.scope == A[:SCOPE_DIGITS])
        assert held <= 5 * BLOCK_BYTES
    finally:
        server.close()


def _entries(manager: Manager) -> list[tuple[Key, Entry]]:
    staged = [(key, entry) for key, writers in manager._staging.items() for entry in writers.values()]
    return [*staged, *manager._objects.items()]


def _until(condition: Callable[[], bool]) -> None:
    give_up_at_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < give_up_at_s
        time.sleep(0.002)
