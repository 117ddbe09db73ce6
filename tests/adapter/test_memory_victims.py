"""Which blocks go, to the byte: at a bound nothing goes, a byte above it one block does."""

from __future__ import annotations

import random

import pytest

from kvstrata_sidecar.adapter.index import Cause, Choice, ScopeIndex, Situation, choose, next_expiry_s
from kvstrata_sidecar.adapter.policy.limits import Bounds
from tests.adapter.memory_stand_in import Key

A, B, C = "a" * 32, "b" * 32, "c" * 32


def index_of(*blocks: tuple[str, int]) -> ScopeIndex:
    """An index with blocks of (keyspace, bytes), the first the least recently used; keys are their places."""
    index = ScopeIndex()
    for place, (keyspace, size_bytes) in enumerate(blocks):
        index.add(place, keyspace, size_bytes, computed_s=float(place))
    return index


def chosen(
    index: ScopeIndex,
    bounds: dict[str, Bounds],
    *,
    guarantees: dict[str, float] | None = None,
    need_bytes: float = 0,
    locked: set[int] | None = None,
    passing: set[int] | None = None,
    staged: dict[str, int] | None = None,
    now_s: float = 1000.0,
    most: int | None = None,
    changed: tuple[str, ...] | None = None,
) -> Choice:
    in_use, on_their_way = locked or set(), passing or set()
    situation = Situation(
        bounds, guarantees or {}, staged or {}, in_use.__contains__, now_s, need_bytes,
        passing=on_their_way.__contains__, most=most,
    )  # fmt: skip
    return choose(index, situation, changed)


class TestALimit:
    @pytest.mark.parametrize(
        ("limit_bytes", "staged_bytes", "victims"),
        [
            (30, 0, []),
            (29, 0, [0]),
            (20, 0, [0]),
            (19, 0, [0, 1]),
            (30, 1, [0]),
            (30, 10, [0]),
            (30, 11, [0, 1]),
            (0, 0, [0, 1, 2]),
        ],
    )
    def test_the_excess_over_it_goes_and_not_a_block_more(
        self, limit_bytes: int, staged_bytes: int, victims: list[int]
    ) -> None:
        index = index_of((A, 10), (A, 10), (A, 10), (B, 10))
        bounds = {A: Bounds(limit_bytes=limit_bytes), B: Bounds()}
        choice = chosen(index, bounds, staged={A: staged_bytes, B: 99})
        assert choice.victims == dict.fromkeys(victims, Cause.LIMIT)
        assert choice.victim_bytes == 10 * len(victims)
        assert (choice.locked, choice.unfinished) == ({}, False)

    def test_what_expired_already_counts_towards_it(self) -> None:
        index = index_of((A, 10), (A, 10), (A, 10), (A, 10))
        choice = chosen(index, {A: Bounds(limit_bytes=20, retention_s=100)}, now_s=100.0)
        assert choice.victims == {0: Cause.RETENTION, 1: Cause.LIMIT}
        choice = chosen(index, {A: Bounds(limit_bytes=20, retention_s=100)}, now_s=102.0)
        assert choice.victims == dict.fromkeys([0, 1, 2], Cause.RETENTION)
        assert choice.victim_bytes == 30

    def test_what_cannot_go_is_summed_up_by_scope(self) -> None:
        index = index_of((A, 10), (A, 5), (A, 10), (B, 7))
        choice = chosen(index, {A: Bounds(limit_bytes=15), B: Bounds(limit_bytes=0)}, locked={0, 3}, passing={1})
        assert choice.victims == {2: Cause.LIMIT}
        assert choice.locked == {A: 15, B: 7}

    def test_a_block_on_its_way_to_other_tiers_is_spared_by_limits_alone(self) -> None:
        index = index_of((A, 10), (B, 10), (C, 10))
        bounds = {A: Bounds(limit_bytes=0), B: Bounds(retention_s=1)}
        choice = chosen(index, bounds, passing={0, 1, 2}, need_bytes=30)
        assert choice.victims == {1: Cause.RETENTION, 2: Cause.REMOVED}
        assert choice.locked == {A: 10}


class TestRetention:
    @pytest.mark.parametrize(("now_s", "gone"), [(99.999, []), (100.0, [0]), (100.999, [0]), (101.0, [0, 1])])
    def test_a_block_goes_at_the_very_end_of_its_time(self, now_s: float, gone: list[int]) -> None:
        for most in (None, 9):
            choice = chosen(index_of((A, 1), (A, 1), (A, 1)), {A: Bounds(retention_s=100)}, now_s=now_s, most=most)
            assert choice.victims == dict.fromkeys(gone, Cause.RETENTION)

    def test_more_than_one_choice_may_take_is_left_to_the_next(self) -> None:
        index = index_of(*[(A, 1)] * 5)
        for most, gone, unfinished in (
            (4, [0, 1, 2, 3], True),
            (5, [0, 1, 2, 3, 4], True),
            (6, [0, 1, 2, 3, 4], False),
        ):
            choice = chosen(index, {A: Bounds(retention_s=1)}, most=most)
            assert (list(choice.victims), choice.unfinished) == (gone, unfinished)
        assert not chosen(index, {A: Bounds(retention_s=1)}).unfinished

    def test_the_next_end_is_told_to_the_second(self) -> None:
        index = index_of((B, 1), (A, 1))
        scope = index.scope(A)
        assert scope is not None
        assert next_expiry_s(scope, Bounds(retention_s=10), 10.999, 99.0) == 11.0
        assert next_expiry_s(scope, Bounds(retention_s=10), 11.0, 99.0) == 99.0, "it is over, and in use"
        assert next_expiry_s(scope, Bounds(), 0.0, 99.0) is None


class TestMost:
    @pytest.mark.parametrize(("bounds", "need_bytes"), [({}, 0), ({A: Bounds(limit_bytes=0)}, 0), ({A: Bounds()}, 99)])
    def test_a_choice_takes_no_more_than_it_may(self, bounds: dict[str, Bounds], need_bytes: int) -> None:
        index = index_of(*[(A, 1)] * 5)
        for most in (1, 4, 5):
            assert len(chosen(index, bounds, most=most, need_bytes=need_bytes).victims) == most
        assert len(chosen(index, bounds, most=6, need_bytes=need_bytes).victims) == 5

    def test_what_may_not_be_taken_is_unfinished(self) -> None:
        index = index_of(*[(A, 1)] * 5)
        assert chosen(index, {}, most=4).unfinished
        assert not chosen(index, {}, most=5).unfinished


class TestForeignBlocks:
    def test_under_a_pools_keyspace_only_its_own_chunks_stay(self) -> None:
        index = ScopeIndex()
        for number in range(3):
            index.add(Key(A, number), A, 10, 0.0)
            index.add(Key(B, number), B, 10, 0.0)
        chunks = {A: frozenset({Key("", 1).chunk_hash})}
        situation = Situation({A: Bounds(), B: Bounds()}, {}, {}, {Key(A, 2)}.__contains__, 0.0, 0.0, chunks)
        choice = choose(index, situation)
        assert choice.victims == {Key(A, 0): Cause.FOREIGN}
        assert choice.locked == {A: 10}

    def test_they_count_towards_the_limit(self) -> None:
        index = ScopeIndex()
        for number in range(3):
            index.add(Key(A, number), A, 10, 0.0)
        chunks = {A: frozenset({Key("", 0).chunk_hash, Key("", 1).chunk_hash})}
        for limit_bytes, gone in ((20, {2: Cause.FOREIGN}), (19, {2: Cause.FOREIGN, 0: Cause.LIMIT})):
            situation = Situation({A: Bounds(limit_bytes)}, {}, {}, lambda _: False, 0.0, 0.0, chunks)
            assert choose(index, situation).victims == {Key(A, number): cause for number, cause in gone.items()}


class TestRoom:
    @pytest.mark.parametrize(("need_bytes", "count"), [(-1, 0), (0, 0), (0.5, 1), (10, 1), (10.5, 2), (20, 2)])
    def test_not_a_block_more_than_needed(self, need_bytes: float, count: int) -> None:
        choice = chosen(index_of(*[(A, 10)] * 5), {A: Bounds()}, need_bytes=need_bytes)
        assert choice.victims == dict.fromkeys(range(count), Cause.ROOM)
        assert choice.victim_bytes == 10 * count

    @pytest.mark.parametrize(
        ("guaranteed_bytes", "staged_bytes", "count"),
        [(30, 0, 0), (29.5, 0, 1), (20, 0, 1), (19.5, 0, 2), (30, 1, 1), (40, 10, 0), (0, 0, 3), (40, 0, 0)],
    )
    def test_a_scope_loses_what_it_has_above_its_guarantee(
        self, guaranteed_bytes: float, staged_bytes: int, count: int
    ) -> None:
        index = index_of((A, 10), (A, 10), (A, 10))
        guarantees, staged = {A: guaranteed_bytes}, {A: staged_bytes}
        choice = chosen(index, {A: Bounds()}, guarantees=guarantees, staged=staged, need_bytes=99)
        assert list(choice.victims) == list(range(count))

    def test_what_went_by_the_scopes_own_bounds_is_nothing_to_give_any_more(self) -> None:
        index = index_of((A, 10), (A, 10), (A, 10))
        choice = chosen(index, {A: Bounds(limit_bytes=20)}, guarantees={A: 20}, need_bytes=99)
        assert choice.victims == {0: Cause.LIMIT}
        choice = chosen(index, {A: Bounds(limit_bytes=20)}, guarantees={A: 19}, need_bytes=99)
        assert choice.victims == {0: Cause.LIMIT, 1: Cause.ROOM}

    def test_what_went_by_bounds_is_room_already(self) -> None:
        index = index_of((A, 10), (B, 10), (B, 10))
        for need_bytes, rest in ((10, {}), (10.5, {1: Cause.ROOM})):
            choice = chosen(index, {A: Bounds(limit_bytes=0), B: Bounds()}, need_bytes=need_bytes)
            assert choice.victims == {0: Cause.LIMIT, **rest}

    def test_of_many_scopes_the_one_that_has_the_oldest_gives_first(self) -> None:
        draw = random.Random(1)
        for _ in range(50):
            names = [f"{number:032x}" for number in range(9)]
            index = index_of(*[(name, 1) for name in names])
            for place in draw.sample(range(9), 8):
                index.touch(place)
            uses = {place: kept.used for place in range(9) if (kept := index.find(place))}
            choice = chosen(index, {name: Bounds() for name in names}, need_bytes=3)
            assert list(choice.victims) == sorted(uses, key=uses.__getitem__)[:3]

    def test_who_was_not_looked_at_gives_as_well_and_what_is_spared_stays(self) -> None:
        index = index_of((A, 10), (B, 10), (A, 10), (B, 10), (B, 10))
        bounds = {A: Bounds(), B: Bounds(limit_bytes=0)}
        choice = chosen(index, bounds, changed=(), need_bytes=25, locked={1}, passing={2})
        assert list(choice.victims) == [0, 3, 4]
        assert set(choice.victims.values()) == {Cause.ROOM}
        assert choice.locked == {}, "room takes others instead"
        assert list(chosen(index, bounds, changed=(A, C)).victims) == []
