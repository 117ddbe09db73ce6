"""Copies of blocks that leave the memory, to the byte and to the moment, with stand-ins of LMCache and slower tiers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata_sidecar.adapter.index import victims
from kvstrata_sidecar.adapter.memory import erase, evictor, warmup, write_back
from kvstrata_sidecar.adapter.memory.presence import PresenceCache
from kvstrata_sidecar.adapter.memory.write_back import (
    ENOUGH_S,
    GRACE_S,
    LOOK_S,
    MAX_POOLS,
    PATIENCE_S,
    RETRY_S,
    TRUST_S,
    WITHIN_S,
    WORTHWHILE_S,
    Offers,
    PendingWriteBack,
)
from tests.adapter.memory_server import TIER, A, B, Server, keys_of
from tests.adapter.memory_stand_in import BLOCK_BYTES, Key
from tests.adapter.slower_tier import SlowerTier

BLOCKS = 200
SOON = 1e-6
IN_FLIGHT = BLOCKS // 20
"""Blocks that may be under way at once: five percent of the memory."""


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server(blocks=BLOCKS)) as server:
        server.lower.append(SlowerTier())
        yield server


@pytest.fixture
def tier(server: Server) -> SlowerTier:
    tier: SlowerTier = server.lower[0]
    return tier


def counted(server: Server, name: str) -> int:
    return server.memory.counters().get(name, 0)


def turn(server: Server, after_s: float = LOOK_S) -> None:
    server.now_s += after_s
    server.turn()


def test_figures_are_those_that_the_guides_name() -> None:
    assert (victims.NEAR_SHARE, victims.SOON_S) == (0.05, 10.0)
    assert (write_back.IN_FLIGHT_BYTES, write_back.IN_FLIGHT_SHARE, TRUST_S, GRACE_S) == (64 << 20, 0.05, 60.0, 0.25)
    assert (warmup.BATCH_BYTES, warmup.BATCH_SHARE, warmup.SPARE_SHARE, warmup.PATIENCE_S) == (64 << 20, 8, 0.05, 5.0)
    assert (evictor.GATHER_S, erase.WITHIN_S) == (0.005, 2.0)


class TestHowMuchAtOnce:
    def test_next_victims_are_looked_for_five_times_a_second(self, server: Server, tier: SlowerTier) -> None:
        server.allow(a=None)
        server.manager.store(*keys_of(A, BLOCKS))
        turn(server)
        tier.answer()
        turn(server, LOOK_S - SOON)
        assert len(tier.handed_keys()) == IN_FLIGHT
        turn(server, 2 * SOON)
        assert len(tier.handed_keys()) == 2 * IN_FLIGHT

    def test_it_is_bounded_in_bytes_too(
        self, server: Server, tier: SlowerTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(write_back, "IN_FLIGHT_BYTES", 3 * BLOCK_BYTES + 1)
        server.allow(a=None)
        server.manager.store(*keys_of(A, BLOCKS))
        turn(server)
        assert len(tier.handed_keys()) == 3
        monkeypatch.setattr(write_back, "IN_FLIGHT_BYTES", 4 * BLOCK_BYTES - 1)
        turn(server)
        assert len(tier.handed_keys()) == 3
        monkeypatch.setattr(write_back, "IN_FLIGHT_BYTES", 4 * BLOCK_BYTES)
        turn(server)
        assert len(tier.handed_keys()) == 4

    def test_a_block_that_is_larger_is_copied_alone(
        self, server: Server, tier: SlowerTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(write_back, "IN_FLIGHT_BYTES", BLOCK_BYTES - 1)
        server.allow(a=None)
        server.manager.store(*keys_of(A, BLOCKS))
        turn(server)
        assert len(tier.handed_keys()) == 1
        turn(server)
        assert len(tier.handed_keys()) == 1

    @pytest.mark.parametrize(("limit_blocks", "count"), [(8, 4), (7, 3), (2, 1), (1, 0)])
    def test_of_a_scope_half_of_its_limit_is_under_way(
        self, server: Server, tier: SlowerTier, limit_blocks: int, count: int
    ) -> None:
        server.allow(a=EnforcedBudget(TIER, limit_bytes=limit_blocks * BLOCK_BYTES))
        server.manager.store(*keys_of(A, limit_blocks))
        turn(server)
        turn(server)
        assert len(tier.handed_keys()) == count

    def test_what_ended_makes_room_for_others_of_its_scope(self, server: Server, tier: SlowerTier) -> None:
        server.allow(a=EnforcedBudget(TIER, limit_bytes=4 * BLOCK_BYTES))
        server.manager.store(*keys_of(A, 4))
        turn(server)
        assert all(server.pool.in_use(key) for key in tier.handed_keys())
        tier.answer(succeed=False)
        assert not any(server.pool.in_use(key) for key in tier.handed_keys())
        turn(server, RETRY_S)
        tier.answer()
        assert tier.handed_keys() == [Key(A, 3), Key(A, 2)] * 2
        assert (counted(server, "handed_down_blocks"), counted(server, "handed_down_bytes")) == (2, 2 * BLOCK_BYTES)


class TestWhichAndWhen:
    def test_a_block_is_tried_again_five_seconds_later_and_not_before(self, server: Server, tier: SlowerTier) -> None:
        server.allow(a=EnforcedBudget(TIER, limit_bytes=2 * BLOCK_BYTES))
        server.manager.store(*keys_of(A, 2))
        turn(server)
        tier.answer(succeed=False)
        assert (tier.handed_keys(), counted(server, "handed_down_blocks")) == ([Key(A, 1)], 0)
        turn(server, RETRY_S - SOON)
        assert tier.handed_keys() == [Key(A, 1)]
        turn(server)
        assert tier.handed_keys() == [Key(A, 1)] * 2

    @pytest.mark.parametrize(("left_s", "count"), [(ENOUGH_S - SOON, 0), (ENOUGH_S, 1), (ENOUGH_S + SOON, 1)])
    def test_a_block_that_leaves_memory_too_soon_is_not_copied(
        self, server: Server, tier: SlowerTier, left_s: float, count: int
    ) -> None:
        server.allow(a=EnforcedBudget(TIER, retention_s=60))
        server.memory.inherit_age(Key(A, 1), 60 - left_s)
        server.manager.store(Key(A, 1))
        server.turn()
        assert len(tier.handed) == count
        assert all(one.within_s == pytest.approx(left_s) for one in tier.handed)

    @pytest.mark.parametrize(
        ("retention_s", "life_s", "count"),
        [
            (9, 9 + WORTHWHILE_S, 1),  # it expires: it has to outlive its time in memory
            (9, 9 + WORTHWHILE_S - SOON, 0),
            (60, 3 + WORTHWHILE_S, 1),  # its limit takes it: it has to live at all
            (60, 3 + WORTHWHILE_S - SOON, 0),
        ],
    )
    def test_a_block_is_copied_where_it_lives_half_a_second_longer(
        self, server: Server, tier: SlowerTier, retention_s: int, life_s: float, count: int
    ) -> None:
        tier.life = life_s
        server.allow(a=EnforcedBudget(TIER, limit_bytes=2 * BLOCK_BYTES, retention_s=retention_s))
        server.memory.inherit_age(Key(A, 1), 3.0)
        server.manager.store(*keys_of(A, 1, first=1))
        if retention_s == 60:
            server.manager.store(Key(A, 2))
        server.turn()
        assert tier.handed_keys().count(Key(A, 1)) == count

    @pytest.mark.parametrize(
        ("retention_s", "within_s"), [(None, WITHIN_S), (600, WITHIN_S), (20, 19.0), (1000, WITHIN_S)]
    )
    def test_a_copy_ends_before_its_block_and_within_half_a_minute(
        self, server: Server, tier: SlowerTier, retention_s: int | None, within_s: float
    ) -> None:
        server.allow(a=EnforcedBudget(TIER, limit_bytes=2 * BLOCK_BYTES, retention_s=retention_s))
        server.memory.inherit_age(Key(A, 1), 1.0)
        server.manager.store(*keys_of(A, 2))
        server.turn()
        assert [one.within_s for one in tier.handed] == [pytest.approx(within_s)]

    def test_a_copy_ends_before_half_of_the_lock_that_it_holds(self, server: Server, tier: SlowerTier) -> None:
        server.manager._read_ttl_seconds = 40
        server.allow(a=EnforcedBudget(TIER, limit_bytes=2 * BLOCK_BYTES))
        server.manager.store(*keys_of(A, 2))
        server.turn()
        assert [one.within_s for one in tier.handed] == [20.0]

    def test_expiring_blocks_are_copied_apart_from_others(self, server: Server, tier: SlowerTier) -> None:
        server.allow(a=EnforcedBudget(TIER, limit_bytes=100 * BLOCK_BYTES, retention_s=60))
        server.memory.inherit_age(Key(A, 0), 55.0)
        server.manager.store(*keys_of(A, 100))
        server.turn()
        assert [len(one.blocks) for one in tier.handed] == [1, 9]
        assert [one.within_s for one in tier.handed] == [pytest.approx(5.0), WITHIN_S]


class TestWhereTo:
    def test_an_answer_is_trusted_for_a_minute_and_for_ever_once_the_block_left(self, server: Server) -> None:
        tier: Any = SlowerTier(tells=False, per_pod=False)
        server.lower[0] = tier
        server.allow(a=EnforcedBudget(TIER, limit_bytes=2 * BLOCK_BYTES))
        server.manager.store(*keys_of(A, 2))
        server.memory.confirm(tier, keys_of(A, 2))
        turn(server, TRUST_S - 1)
        assert tier.handed == []
        turn(server, 1)
        assert tier.handed_keys() == [Key(A, 1)]
        tier.answer()
        server.manager.store(*keys_of(A, 2, first=7))
        server.turn()
        assert counted(server, "left_uncopied_blocks") == 0

    def test_what_was_copied_is_known_to_be_there(self, server: Server) -> None:
        tier: Any = SlowerTier(tells=False, per_pod=False)
        server.lower[0] = tier
        server.allow(a=EnforcedBudget(TIER, limit_bytes=2 * BLOCK_BYTES))
        server.manager.store(*keys_of(A, 2))
        turn(server)
        tier.answer()
        turn(server, RETRY_S)
        assert tier.handed_keys() == [Key(A, 1)]
        server.manager.store(*keys_of(A, 2, first=7))
        server.turn()
        assert counted(server, "left_uncopied_blocks") == 1, "the other was not copied"

    def test_what_files_said_is_not_remembered(self, server: Server, tier: SlowerTier) -> None:
        server.allow(a=EnforcedBudget(TIER, limit_bytes=2 * BLOCK_BYTES))
        server.manager.store(*keys_of(A, 2))
        server.memory.confirm(tier, keys_of(A, 2))  # type: ignore[arg-type]
        turn(server)
        assert tier.handed_keys() == [Key(A, 1)], "files know by themselves, at any time"

    def test_a_block_that_a_tier_behind_a_closed_one_has_is_not_copied(self, server: Server, tier: SlowerTier) -> None:
        tier.is_open = False
        server.lower.append(SlowerTier(kept=dict.fromkeys(keys_of(A, 3), b"")))
        server.allow(a=EnforcedBudget(TIER, limit_bytes=2 * BLOCK_BYTES))
        server.manager.store(*keys_of(A, 3))
        turn(server)
        assert counted(server, "left_uncopied_blocks") == 0

    def test_a_block_that_leaves_counts_as_lost_only_where_it_could_live(
        self, server: Server, tier: SlowerTier
    ) -> None:
        tier.is_open = False
        server.allow(a=EnforcedBudget(TIER, limit_bytes=2 * BLOCK_BYTES))
        for life_s, lost in ((4 + WORTHWHILE_S, 1), (4 + WORTHWHILE_S - SOON, 1), (4 + WORTHWHILE_S + SOON, 2)):
            tier.life = life_s
            server.manager.store(*keys_of(A, 2))
            server.turn()
            server.now_s += 4
            server.manager.store(Key(A, 9))
            server.turn()
            assert counted(server, "left_uncopied_blocks") == lost
            server.manager.delete([Key(A, 9)])
            server.turn()

    def test_without_slower_tiers_nothing_is_lost(self, server: Server) -> None:
        server.lower.clear()
        server.allow(a=EnforcedBudget(TIER, limit_bytes=0))
        server.manager.store(*keys_of(A, 3))
        server.turn()
        assert counted(server, "left_uncopied_blocks") == 0

    def test_a_tier_that_fails_at_once_leaves_nothing_locked(
        self, server: Server, tier: SlowerTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*_: object) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(tier, "hand_down", fails)
        server.allow(a=EnforcedBudget(TIER, limit_bytes=4 * BLOCK_BYTES))
        server.manager.store(*keys_of(A, 4))
        turn(server)
        assert not any(server.pool.in_use(key) for key in keys_of(A, 4))
        monkeypatch.undo()
        turn(server, RETRY_S)
        assert len(tier.handed_keys()) == 2, "nothing counts as under way"

    def test_an_answer_that_comes_twice_unlocks_once(self, server: Server, tier: SlowerTier) -> None:
        server.allow(a=EnforcedBudget(TIER, limit_bytes=2 * BLOCK_BYTES))
        server.manager.store(*keys_of(A, 2))
        turn(server)
        (copying,) = tier.waiting
        server.manager.read(Key(A, 1))
        tier.answer()
        tier.waiting.append(copying)
        tier.answer()
        assert server.pool.in_use(Key(A, 1)), "its reader's lock stands"


class TestBlocksOnTheirWay:
    def test_a_block_waits_a_quarter_of_a_second_for_lmcaches_own_copy(self) -> None:
        now_s = [10.0]
        pending = PendingWriteBack(lambda key: key != "none", lambda: now_s[0])
        pending.came(["x", "none"])
        now_s[0] += 0.1
        pending.came(["y"])
        pending.came(["x"])
        assert [pending.waits(key, 10.0) for key in ("x", "y", "none")] == [True, True, False]
        assert (pending.waits("x", 10.1 + GRACE_S - SOON), pending.waits("x", 10.1 + GRACE_S)) == (True, False)
        pending.taken(["y", "z"])
        assert not pending.waits("y", 10.0)
        assert pending

    def test_those_that_came_too_long_ago_are_forgotten_and_later_ones_are_not(self) -> None:
        now_s = [10.0]
        pending = PendingWriteBack(lambda _: True, lambda: now_s[0])
        for key in "xyz":
            pending.came([key])
            now_s[0] += 0.1
        pending.forget(10.0 + GRACE_S - SOON)
        assert list(pending._came_s) == ["x", "y", "z"]
        pending.forget(10.1 + GRACE_S)
        assert list(pending._came_s) == ["z"]
        pending.forget(99.0)
        assert not pending
        for moment_s, key in ((20.0, "x"), (20.1, "y"), (20.2, "x")):
            now_s[0] = moment_s
            pending.came([key])
        pending.forget(20.1 + GRACE_S)
        assert list(pending._came_s) == ["x"], "what came again is the last"


class TestPresence:
    def test_an_answer_is_as_old_as_it_is_and_counts_for_its_tier_alone(self) -> None:
        now_s = [5.0]
        presence, one, other = PresenceCache(lambda: now_s[0]), object(), object()
        presence.confirm(one, ["x", "y"])
        now_s[0] = 7.5
        presence.confirm(one, ["y"])
        presence.confirm(other, ["z"])
        now_s[0] = 8.0
        assert [presence.age_s(one, key) for key in "xyz"] == [3.0, 0.5, None]
        assert [presence.age_s(other, key) for key in "xyz"] == [None, None, 0.5]
        presence.discard("y")
        assert [presence.age_s(one, key) for key in "xyz"] == [3.0, None, None]
        assert presence.age_s(object(), "x") is None

    def test_what_was_confirmed_longest_ago_is_dropped_first(self) -> None:
        presence, tier = PresenceCache(lambda: 0.0, max_entries=2), object()
        presence.confirm(tier, ["x", "y"])
        presence.confirm(tier, ["x", "z"])
        assert [presence.age_s(tier, key) for key in "xyz"] == [0.0, None, 0.0]


class TestOffers:
    def test_a_block_is_offered_at_the_very_end_of_its_time(self) -> None:
        now_s, offered, counts = [0.0], list[list[Any]](), list[tuple[str, int, str]]()
        offers = Offers(offered.append, lambda *count: counts.append(count), lambda: now_s[0])
        offers.lacking(B, ["x"])
        now_s[0] = PATIENCE_S - 0.5
        offers.lacking(B, ["x", "y"])
        assert offered == []
        now_s[0] = PATIENCE_S
        offers.lacking(B, ["x", "y"])
        assert (offered, counts) == ([["x"]], [("offered_again", 1, B)])
        now_s[0] = 2 * PATIENCE_S - 0.5
        offers.lacking(B, ["x", "y"])
        assert offered == [["x"], ["y"]]
        now_s[0] = 2 * PATIENCE_S
        offers.lacking(B, ["x", "y"])
        assert offered == [["x"], ["y"], ["x"]]

    def test_the_pool_asked_about_longest_ago_is_forgotten_first(self) -> None:
        now_s, offered = [0.0], list[list[Any]]()
        offers = Offers(offered.append, lambda *_: None, lambda: now_s[0])
        for number in range(MAX_POOLS):
            offers.lacking(str(number), [f"{number}"])
        offers.lacking("0", ["0"])
        offers.lacking("new", ["n"])
        now_s[0] = PATIENCE_S
        for name in ("0", "2", "new", "1"):
            offers.lacking(name, [name])
        assert offered == [["0"], ["2"]], "1 was forgotten, and the new pool's block is another"
