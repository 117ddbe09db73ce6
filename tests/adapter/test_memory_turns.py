"""A turn of the evictor, to the byte and to the moment, with a stand-in for LMCache's manager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata_sidecar.adapter.memory import events, evictor
from kvstrata_sidecar.adapter.memory.events import COMPARE_S, MemoryEvent
from kvstrata_sidecar.adapter.memory.evictor import LOOK_S
from kvstrata_sidecar.adapter.memory.write_back import GRACE_S
from kvstrata_sidecar.upstream import pool as lmcache_pool
from tests.adapter.memory_server import PATIENCE_S, TIER, A, B, Server, keys_of, until
from tests.adapter.memory_stand_in import BLOCK_BYTES, LOCKED, SUCCESS, Key

SOON = 1e-6


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with closing(Server(**getattr(request, "param", {}))) as server:
        yield server


def counted(server: Server, name: str) -> int:
    return server.memory.counters().get(name, 0)


class TestTheMark:
    @pytest.mark.parametrize("server", [{"blocks": 200, "high_percent": 90}], indirect=True)
    @pytest.mark.parametrize(("stored", "gone"), [(180, 0), (181, 3), (190, 12)])
    def test_above_it_the_excess_goes_and_one_percent_of_the_memory(
        self, server: Server, stored: int, gone: int
    ) -> None:
        server.allow(a=None)
        server.manager.store(*keys_of(A, stored))
        server.turn()
        assert len(server.resident()) == stored - gone
        assert counted(server, "evicted_room") == gone
        assert server.held_bytes(A) == (stored - gone) * BLOCK_BYTES, "already, and not by the next turn"
        server.turn()
        assert len(server.resident()) == stored - gone

    @pytest.mark.parametrize("server", [{"blocks": 200, "high_percent": 90}], indirect=True)
    def test_what_is_being_written_counts(self, server: Server) -> None:
        server.allow(a=None)
        server.manager.store(*keys_of(A, 170))
        server.manager.reserve(*keys_of(B, 11))
        server.turn()
        assert len(server.resident()) == 167


@pytest.mark.parametrize("server", [{"blocks": 100, "high_percent": 90}], indirect=True)
class TestRoom:
    """Batches of blocks, for all of which together LMCache needs memory."""

    @pytest.fixture(autouse=True)
    def patient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lmcache_pool, "ROOM_WITHIN_S", 60.0)
        monkeypatch.setattr(evictor, "OVERWRITTEN_WITHIN_S", 60.0)

    @pytest.fixture
    def reserve(self, server: Server) -> Iterator[Callable[..., Future[bool]]]:
        """Reserve memory for blocks beside the test, and return once they have it, or wait."""
        with ThreadPoolExecutor() as others:

            def reserve(*keys: Key) -> Future[bool]:
                waiting = len(server.pool.room._waiting)
                answer = others.submit(server.manager.reserve_write, keys, [False] * len(keys), tag="w")
                until(lambda: answer.done() or len(server.pool.room._waiting) > waiting)
                whole: Future[bool] = others.submit(
                    lambda: all(error == SUCCESS for error, _ in answer.result().values())
                )
                return whole

            yield reserve

    def test_a_batch_that_fits_waits_for_nothing_and_evicts_nothing(
        self, server: Server, reserve: Callable[..., Future[bool]]
    ) -> None:
        server.allow(a=None, b=None)
        server.manager.store(*keys_of(A, 90))
        server.turn()
        assert reserve(*keys_of(B, 10)).result(60)
        assert len(server.resident()) == 90

    @pytest.mark.parametrize(("stored", "wanted", "gone"), [(90, 11, 2), (90, 40, 31), (40, 61, 2)])
    def test_a_larger_one_waits_until_the_memory_for_it_is_overwritten(
        self, server: Server, reserve: Callable[..., Future[bool]], stored: int, wanted: int, gone: int
    ) -> None:
        """A percent more goes, as at the mark."""
        server.allow(a=None, b=None)
        server.manager.store(*keys_of(A, stored))
        server.turn()
        answer = reserve(*keys_of(B, wanted))
        assert not answer.done()
        server.memory.evictor.turn()
        assert answer.result(60)
        assert len(server.resident()) == stored - gone
        assert counted(server, "allocation_failed") == 0

    def test_two_have_room_together(self, server: Server, reserve: Callable[..., Future[bool]]) -> None:
        server.allow(a=None, b=None)
        server.manager.store(*keys_of(A, 90))
        server.turn()
        answers = reserve(*keys_of(B, 15)), reserve(*keys_of(B, 15, first=15))
        server.memory.evictor.turn()
        assert [one.result(60) for one in answers] == [True, True]
        assert len(server.resident()) == 90 - 21

    def test_what_others_are_guaranteed_is_not_evicted_and_the_batch_is_lost(
        self, server: Server, reserve: Callable[..., Future[bool]]
    ) -> None:
        server.allow(a=EnforcedBudget(TIER, guaranteed_bytes=70 * BLOCK_BYTES), b=None)
        server.manager.store(*keys_of(A, 70))
        server.turn()
        answer = reserve(*keys_of(B, 50))
        server.memory.evictor.turn()
        assert not answer.result(60)
        assert len(server.resident()) == 70
        assert counted(server, "allocation_failed") == 1

    def test_after_a_turn_that_failed_it_is_tried_too(
        self, server: Server, reserve: Callable[..., Future[bool]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.allow(a=None)
        server.manager.store(*keys_of(A, 90))
        server.turn()
        answer = reserve(*keys_of(B, 40))
        monkeypatch.setattr(server.pool, "usage", lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            server.memory.evictor.turn()
        assert not answer.result(60)

    def test_what_waits_is_tried_when_the_server_stops(
        self, server: Server, reserve: Callable[..., Future[bool]]
    ) -> None:
        server.allow(a=None)
        server.manager.store(*keys_of(A, 90))
        answer = reserve(*keys_of(B, 40))
        server.pool.room.close()
        assert not answer.result(60)
        assert "reserve_write" not in vars(server.manager)


class TestGuarantees:
    @pytest.mark.parametrize("server", [{"blocks": 100, "high_percent": 100}], indirect=True)
    @pytest.mark.parametrize("needed", [1, 30])
    def test_guarantees_that_do_not_fit_below_it_are_cut_by_one_share(self, server: Server, needed: int) -> None:
        budget = EnforcedBudget(TIER, guaranteed_bytes=80 * BLOCK_BYTES)
        server.allow(a=budget, b=budget)
        server.manager.store(*keys_of(A, 50))
        server.manager.store(*keys_of(B, 50 - needed))
        server.manager.reserve(*keys_of(B, needed, first=100))
        server.turn()
        assert len(server.resident()) == 100 - needed, "each has its half, and keeps it"


class TestTheNextTurn:
    def test_it_is_due_a_second_after_the_last_look_at_the_latest(self, server: Server) -> None:
        server.allow(a=None)
        assert server.turn() == LOOK_S
        server.now_s += 0.4
        assert server.turn() == pytest.approx(LOOK_S - 0.4)
        server.now_s += 0.6 - SOON
        assert server.turn() == pytest.approx(SOON)
        server.now_s += 2 * SOON
        assert server.turn() == LOOK_S

    def test_a_locked_block_is_looked_at_again_in_a_second_or_when_another_is_due(self, server: Server) -> None:
        server.allow(a=EnforcedBudget(TIER, limit_bytes=0, retention_s=10))
        server.memory.inherit_age(Key(A, 2), 9.75)
        server.manager.store(*keys_of(A, 3))
        server.manager.read(*keys_of(A, 3))
        assert server.turn() == pytest.approx(0.25)
        server.now_s += 0.25
        assert server.turn() == pytest.approx(LOOK_S - 0.25)
        server.now_s += LOOK_S - 0.25
        assert server.turn() == pytest.approx(0.25), "a second after the last, not after the first"

    def test_what_could_not_be_deleted_is_tried_again_after_a_second_and_not_before(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.allow(a=EnforcedBudget(TIER, limit_bytes=0), b=EnforcedBudget(TIER, limit_bytes=0))
        tried: list[list[Key]] = []
        monkeypatch.setattr(
            server.manager, "delete", lambda keys: tried.append(list(keys)) or dict.fromkeys(keys, LOCKED)
        )
        server.now_s += 0.5
        server.manager.store(Key(A, 1))
        server.turn()
        for _ in range(3):
            server.now_s += LOOK_S / 2 - SOON
            server.turn()
            server.now_s += SOON
        assert tried == [[Key(A, 1)], [Key(A, 1)]]
        assert counted(server, "evicted_limit") == 0

    @pytest.mark.parametrize("server", [{"passes_on": True}], indirect=True)
    def test_while_a_block_is_on_its_way_to_other_tiers_it_is_due_by_then(self, server: Server) -> None:
        server.allow(a=EnforcedBudget(TIER, limit_bytes=0))
        server.manager.store(Key(A, 1))
        assert server.turn() == pytest.approx(GRACE_S)
        server.now_s += GRACE_S - SOON
        server.turn()
        assert server.resident() == [Key(A, 1)]
        server.now_s += SOON
        server.turn()
        assert server.resident() == []

    def test_after_a_turn_that_failed_everything_is_checked(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.allow(a=EnforcedBudget(TIER, limit_bytes=BLOCK_BYTES), b=None)
        server.manager.store(*keys_of(A, 2), Key(B, 1))
        delete = server.manager.delete

        def fails(_: object) -> None:
            raise RuntimeError

        monkeypatch.setattr(server.manager, "delete", fails)
        with pytest.raises(RuntimeError):
            server.turn()
        monkeypatch.setattr(server.manager, "delete", delete)
        server.turn()
        assert server.resident() == [Key(A, 0), Key(B, 1)]
        assert server.turn() == LOOK_S

    def test_nothing_is_remembered_of_scopes_that_went_in_a_turn_that_failed(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.allow(a=EnforcedBudget(TIER, limit_bytes=0, retention_s=60))
        server.memory.inherit_age(Key(A, 1), 59.5)
        server.manager.store(Key(A, 1))
        server.manager.read(Key(A, 1))
        assert server.turn() == pytest.approx(0.5)
        server.manager.release(Key(A, 1))
        server.manager.delete([Key(A, 1)])
        server.manager.store(Key(B, 1))
        with monkeypatch.context() as failing:
            failing.setattr(server.manager, "delete", None)
            with pytest.raises(TypeError):
                server.turn()
        assert server.turn() == LOOK_S
        assert counted(server, "locked_bytes") == 0

    @pytest.mark.parametrize("server", [{"passes_on": True}], indirect=True)
    def test_blocks_that_no_tier_took_up_in_time_hold_up_nothing(self, server: Server) -> None:
        server.allow(a=EnforcedBudget(TIER, limit_bytes=BLOCK_BYTES))
        server.manager.store(Key(A, 1))
        server.turn()
        assert server.memory.pending
        server.now_s += GRACE_S
        server.turn()
        assert not server.memory.pending


class TestCounts:
    def test_every_cause_is_counted_for_its_scope_and_what_no_policy_names_together(self, server: Server) -> None:
        budgets = {
            "a": EnforcedBudget(TIER, limit_bytes=BLOCK_BYTES),
            "b": EnforcedBudget(TIER, retention_s=10),
            "p": None,
        }
        server.allow(**budgets)
        server.share("p", "", [0])
        server.memory.inherit_age(Key(B, 1), 10.0)
        server.manager.store(*keys_of(A, 3), Key(B, 1), Key("c" * 32, 1), Key("d" * 32, 1), *keys_of("p" * 32, 2))
        server.turn()
        assert server.memory.counts.by_scope() == {
            A[:12]: {"evicted_limit": 2},
            B[:12]: {"evicted_retention": 1},
            "_none": {"evicted_removed": 2},
            "p" * 12: {"evicted_foreign": 1},
        }
        assert [counted(server, f"evicted_{cause}") for cause in ("limit", "retention", "removed", "foreign")] == [
            2, 1, 2, 1,
        ]  # fmt: skip
        server.allow(a=budgets["a"])
        server.turn()
        assert server.memory.counts.by_scope().keys() == {A[:12], "_none"}, "who left the policy makes room for others"

    def test_what_is_loaded_for_keyspaces_outside_of_the_policy_is_counted_together(self, server: Server) -> None:
        server.allow(a=None)
        server.manager.load(*keys_of(A, 2), *keys_of(B, 3))
        server.turn()
        assert server.memory.counts.by_scope() == {
            A[:12]: {"promoted_blocks": 2, "promoted_bytes": 2 * BLOCK_BYTES},
            "_none": {"promoted_blocks": 3, "promoted_bytes": 3 * BLOCK_BYTES},
        }

    def test_locked_bytes_are_the_sum_over_scopes_and_end_with_the_locks(self, server: Server) -> None:
        server.allow(a=EnforcedBudget(TIER, limit_bytes=BLOCK_BYTES), b=EnforcedBudget(TIER, limit_bytes=0))
        server.manager.store(*keys_of(A, 3), *keys_of(B, 2))
        server.manager.read(*keys_of(A, 3), *keys_of(B, 2))
        server.turn()
        assert counted(server, "locked_bytes") == 5 * BLOCK_BYTES, "any of a scope above its limit may have to go"
        server.manager.release(*keys_of(A, 3))
        server.turn()
        assert server.resident() == [Key(A, 0), *keys_of(B, 2)]
        assert counted(server, "locked_bytes") == 2 * BLOCK_BYTES
        server.manager.release(*keys_of(B, 2))
        server.turn()
        assert counted(server, "locked_bytes") == 0

    def test_reservations_are_given_up_once_their_writers_have_timed_out(self, server: Server) -> None:
        server.allow(a=None)
        server.manager.reserve(*keys_of(A, 3))
        for key in keys_of(A, 2):
            server.manager._staging[key]["w"].write_lock.count = 0
        server.turn()
        assert (counted(server, "abandoned"), server.free_blocks()) == (2, 15)
        server.manager._staging[Key(A, 2)]["w"].write_lock.count = 0
        server.now_s += LOOK_S - SOON
        server.turn()
        assert counted(server, "abandoned") == 2, "it is looked for once a second"
        server.now_s += 2 * SOON
        server.turn()
        assert (counted(server, "abandoned"), server.free_blocks()) == (3, 16)

    def test_gauges_tell_of_loans_and_of_what_was_overwritten(self, server: Server) -> None:
        server.allow(a=None, p=None)
        server.share("p", "a", range(3))
        server.manager.store(*keys_of("p" * 32, 3))
        server.turn()
        server.manager.reserve_read(keys_of(A, 2), 1)
        server.manager.delete([Key("p" * 32, 2)])
        assert server.pool.settle(PATIENCE_S)
        assert (counted(server, "loans"), counted(server, "overwritten_bytes")) == (2, BLOCK_BYTES)
        assert counted(server, "enforced") == 0, "its thread was not started"

    def test_drift_is_what_lmcache_uses_beyond_what_is_counted(self, server: Server) -> None:
        server.allow(a=None, b=None)
        server.manager.store(*keys_of(A, 3), Key(B, 1))
        server.manager.reserve(Key(B, 2))
        server.turn()
        assert server.memory.drift_bytes() == 0
        server.manager._memory_manager.allocate()
        assert server.memory.drift_bytes() == BLOCK_BYTES
        server.manager.delete([Key(A, 0), Key(A, 1)])
        assert server.pool.settle(PATIENCE_S)
        assert server.memory.drift_bytes() == -BLOCK_BYTES, "two are counted that are gone"


class TestEvents:
    def test_the_tables_are_compared_once_a_minute(self, server: Server) -> None:
        server.allow(a=None)
        server.manager.store(*keys_of(A, 3))
        server.turn()
        del server.manager._objects[Key(A, 1)]
        server.now_s += COMPARE_S - 1
        server.turn()
        assert server.held_bytes(A) == 3 * BLOCK_BYTES
        server.now_s += 1
        server.turn()
        assert server.held_bytes(A) == 2 * BLOCK_BYTES
        assert server.gone == [Key(A, 1)]
        del server.manager._objects[Key(A, 2)]
        server.now_s += COMPARE_S - SOON
        server.turn()
        assert server.held_bytes(A) == 2 * BLOCK_BYTES, "a minute from the last time"
        server.now_s += 2 * SOON
        server.turn()
        assert server.held_bytes(A) == BLOCK_BYTES

    def test_as_many_events_wait_as_may_and_a_lost_one_is_made_up_for_once(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(events, "MAX_EVENTS", 4)
        server.allow(a=None)
        compared = 0
        resident = server.pool.resident

        def counts() -> list[tuple[Key, object]]:
            nonlocal compared
            compared += 1
            return resident()

        monkeypatch.setattr(server.pool, "resident", counts)
        server.manager.store(Key(A, 1))
        server.manager.store(Key(A, 2))
        server.turn()
        assert (server.held_bytes(A), compared) == (2 * BLOCK_BYTES, 0), "four events: two reserved, two written"
        for number in range(3, 6):
            server.manager.store(Key(A, number))
        server.turn()
        server.turn()
        assert (server.held_bytes(A), compared) == (5 * BLOCK_BYTES, 1)

    def test_a_scope_that_differed_is_put_right_by_the_same_turn(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.allow(a=EnforcedBudget(TIER, limit_bytes=BLOCK_BYTES))
        server.turn()
        monkeypatch.setattr(events, "MAX_EVENTS", 0)
        server.manager.store(*keys_of(A, 3))
        server.turn()
        assert len(server.resident()) == 1

    def test_a_block_is_there_once_it_is_written_and_as_old_when_it_was_read(self, server: Server) -> None:
        server.allow(a=None)
        server.manager.reserve(Key(A, 1))
        server.turn()
        assert server.held_bytes(A) == 0
        server.manager.commit(Key(A, 1))
        server.turn()
        assert server.held_bytes(A) == BLOCK_BYTES
        server.now_s += 10
        server.manager.read(Key(A, 1))
        server.manager.release(Key(A, 1))
        server.turn()
        assert server.memory.age_s(Key(A, 1)) == pytest.approx(10)

    def test_uses_are_counted_as_hits_and_count_for_the_order(self, server: Server) -> None:
        server.allow(a=None)
        server.manager.store(*keys_of(A, 3))
        server.turn()
        server.now_s += 7
        server.memory.note(MemoryEvent.USED, [Key(A, 1), Key(A, 9)])
        server.turn()
        assert server.memory.counts.ages()["hit"].sum_s == pytest.approx(7)
        assert sum(server.memory.counts.ages()["hit"].buckets) == 1
        server.allow(a=EnforcedBudget(TIER, limit_bytes=BLOCK_BYTES))
        server.turn()
        assert server.resident() == [Key(A, 1)]


class TestAges:
    def test_of_two_ages_the_older_counts_until_the_block_has_arrived(self, server: Server) -> None:
        server.allow(a=None)
        server.memory.inherit_age(Key(A, 1), 30.0)
        server.manager.store(Key(A, 1))
        server.turn()
        assert server.memory.age_s(Key(A, 1)) == pytest.approx(30)
        server.memory.inherit_age(Key(A, 1), 20.0)
        assert server.memory.age_s(Key(A, 1)) == pytest.approx(30)
        server.memory.inherit_age(Key(A, 1), 40.0)
        assert server.memory.age_s(Key(A, 1)) == pytest.approx(40)
        server.manager.store(Key(A, 1))
        server.turn()
        server.now_s += 1
        assert server.memory.age_s(Key(A, 1)) == pytest.approx(41)
        server.manager.store(Key(A, 1))
        server.turn()
        assert server.memory.age_s(Key(A, 1)) == 0

    def test_no_block_is_younger_than_new(self, server: Server) -> None:
        server.allow(a=EnforcedBudget(TIER, retention_s=10))
        server.memory.inherit_age(Key(A, 1), -5.0)
        assert server.memory.age_s(Key(A, 1)) == 0
        server.manager.store(Key(A, 1))
        server.turn()
        server.now_s += 10
        server.turn()
        assert server.resident() == []
        assert server.memory.age_s(Key(A, 7)) == 0

    def test_the_eldest_announcements_are_forgotten_first(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(events, "MAX_KNOWN_AGES", 3)
        server.allow(a=None)
        for number in range(4):
            server.memory.inherit_age(Key(A, number), 10.0 + number)
        assert [server.memory.age_s(key) for key in keys_of(A, 4)] == pytest.approx([0, 11, 12, 13])
        server.manager.store(*keys_of(A, 4))
        server.turn()
        assert [server.memory.age_s(key) for key in keys_of(A, 4)] == pytest.approx([0, 11, 12, 13])

    def test_while_events_are_out_of_order_an_announced_age_counts(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.allow(a=EnforcedBudget(TIER, retention_s=40))
        monkeypatch.setattr(events, "MAX_EVENTS", 0)
        server.memory.inherit_age(Key(A, 1), 30.0)
        server.manager.store(Key(A, 1), Key(A, 2))
        server.turn()
        server.now_s += 1
        assert server.memory.age_s(Key(A, 1)) == pytest.approx(31)
        assert server.memory.age_s(Key(A, 2)) == pytest.approx(1)
        server.now_s += 9
        server.turn()
        assert server.resident() == [Key(A, 2)]

    def test_an_age_that_is_announced_for_the_next_block_of_a_name_is_not_that_of_the_one_there(
        self, server: Server
    ) -> None:
        server.allow(a=EnforcedBudget(TIER, retention_s=40))
        server.manager.store(Key(A, 1))
        server.memory.inherit_age(Key(A, 1), 90.0)
        server.turn()
        assert server.resident() == [Key(A, 1)]
        assert server.memory.age_s(Key(A, 1)) == pytest.approx(90), "a copy of either may be on its way"
        server.manager.store(Key(A, 1))
        server.turn()
        assert server.resident() == []
