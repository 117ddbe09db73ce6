"""Which blocks go from the cache server's memory: bounds, order, and what nobody may lose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.policy.bundle import EnforcedBudget, Rules
from kvstrata.contract.policy.cache_view import CacheView
from kvstrata_sidecar.adapter.index import Cause, Choice, ScopeIndex, Situation, choose, next_expiry_s
from kvstrata_sidecar.adapter.policy.limits import Bounds, bounds_of, scaled_guarantees

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
    need_bytes: float = 0,
    locked: set[int] | None = None,
    staged: dict[str, int] | None = None,
    now_s: float = 1000.0,
) -> Choice:
    guarantees = scaled_guarantees(bounds, 10**9)
    in_use = locked or set()
    return choose(index, Situation(bounds, guarantees, staged or {}, in_use.__contains__, now_s, need_bytes))


class TestBounds:
    def test_a_keyspace_outside_of_the_policy_keeps_nothing(self) -> None:
        index = index_of((A, 10), (B, 10))
        assert chosen(index, {A: Bounds()}).victims == {1: Cause.REMOVED}
        assert len(chosen(index, {}).victims) == 2

    def test_a_scope_above_its_limit_loses_its_own_oldest_and_nobody_else_anything(self) -> None:
        index = index_of((B, 10), (A, 10), (A, 10), (A, 10))
        assert chosen(index, {A: Bounds(limit_bytes=15), B: Bounds()}).victims == {1: Cause.LIMIT, 2: Cause.LIMIT}

    def test_what_is_being_written_counts_against_the_limit(self) -> None:
        index = index_of((A, 10), (A, 10))
        assert chosen(index, {A: Bounds(limit_bytes=20)}).victims == {}
        assert chosen(index, {A: Bounds(limit_bytes=20)}, staged={A: 10}).victims == {0: Cause.LIMIT}

    def test_a_block_that_is_too_old_goes_and_counts_towards_the_limit(self) -> None:
        index = index_of((A, 10), (A, 10), (A, 10))
        bounds = {A: Bounds(limit_bytes=20, retention_s=100)}
        assert chosen(index, bounds, now_s=100.0).victims == {0: Cause.RETENTION}
        assert chosen(index, bounds, now_s=99.5).victims == {0: Cause.LIMIT}

    def test_age_counts_from_when_tokens_were_computed_not_from_use(self) -> None:
        index = index_of((A, 10), (A, 10))
        index.touch(0)
        assert chosen(index, {A: Bounds(retention_s=100)}, now_s=100.0).victims == {0: Cause.RETENTION}

    def test_a_block_in_use_stays_is_counted_and_its_successor_goes(self) -> None:
        choice = chosen(index_of((A, 10), (A, 10), (A, 10)), {A: Bounds(limit_bytes=20)}, locked={0})
        assert choice.victims == {1: Cause.LIMIT}
        assert choice.locked == {A: 10}

    def test_only_the_keyspaces_that_changed_are_looked_at(self) -> None:
        index = index_of((A, 10), (B, 10))
        situation = Situation({}, {}, {}, lambda _: False, 0.0, 0)
        assert choose(index, situation, changed={B}).victims == {1: Cause.REMOVED}

    def test_the_next_expiry_is_that_of_the_eldest_block_with_a_retention(self) -> None:
        index = index_of((A, 1), (B, 1), (B, 1))
        scope = index.scope(B)
        assert scope is not None
        assert next_expiry_s(scope, Bounds(retention_s=10), 0.0, 1.0) == 11.0
        index.remove(1)
        assert next_expiry_s(scope, Bounds(retention_s=10), 0.0, 1.0) == 12.0
        assert next_expiry_s(scope, Bounds(retention_s=10), 12.0, 13.0) == 13.0, "it is in use"
        assert next_expiry_s(scope, Bounds(), 0.0, 1.0) is None


class TestRoom:
    def test_scopes_that_lose_nothing_are_not_looked_into(self) -> None:
        index = index_of(*((f"{number:032x}", 10) for number in range(100)))
        asked: list[Hashable] = []

        def locked(key: Hashable) -> bool:
            asked.append(key)
            return False

        bounds = {keyspace: Bounds() for keyspace in index.keyspaces()}
        choice = choose(index, Situation(bounds, {}, {}, locked, 0.0, 25), changed=())
        assert list(choice.victims) == [0, 1, 2]
        assert len(asked) <= 6

    def test_the_oldest_of_all_goes_first(self) -> None:
        index = index_of((A, 10), (B, 10), (A, 10))
        index.touch(0)
        assert chosen(index, {A: Bounds(), B: Bounds()}, need_bytes=15).victims == {1: Cause.ROOM, 2: Cause.ROOM}

    def test_a_scan_costs_nobody_else_a_guaranteed_block(self) -> None:
        index = index_of((A, 10), (A, 10), *[(B, 10)] * 20)
        victims = chosen(index, {A: Bounds(guaranteed_bytes=20), B: Bounds()}, need_bytes=100).victims
        assert set(victims) == set(range(2, 12))

    def test_above_its_guarantee_a_scope_takes_part(self) -> None:
        index = index_of((A, 10), (A, 10), (A, 10), (B, 10))
        assert set(chosen(index, {A: Bounds(guaranteed_bytes=15), B: Bounds()}, need_bytes=40).victims) == {0, 1, 3}

    def test_what_goes_by_its_own_bounds_makes_room_already(self) -> None:
        index = index_of((A, 10), (B, 10), (C, 10))
        assert chosen(index, {A: Bounds(), B: Bounds()}, need_bytes=10).victims == {2: Cause.REMOVED}

    def test_guarantees_that_do_not_fit_are_cut_alike(self) -> None:
        bounds = {A: Bounds(guaranteed_bytes=100), B: Bounds(guaranteed_bytes=300), C: Bounds()}
        assert scaled_guarantees(bounds, 200) == {A: 50.0, B: 150.0}
        assert scaled_guarantees(bounds, 400) == {A: 100.0, B: 300.0}


def test_budgets_are_those_of_the_cpu_tier() -> None:
    budgets = (EnforcedBudget("dram", 100, 50, 60), EnforcedBudget("redis", 999, None, 30))
    view = CacheView("d" * 16, 1, 1, Rules(), {A: budgets, B: ()})
    assert bounds_of(view, "dram") == {A: Bounds(100, 50, 60), B: Bounds()}
    assert bounds_of(view, None) == {A: Bounds(retention_s=30), B: Bounds()}, "no copy outlives the shortest retention"
    assert bounds_of(None, "dram") == {}


limits = st.none() | st.integers(0, 200)


@given(
    st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(1, 30)), max_size=40),
    st.dictionaries(
        st.sampled_from([A, B, C]), st.builds(Bounds, limits, st.integers(0, 200), st.none() | st.integers(1, 50))
    ),
    st.integers(-100, 400),
    st.sets(st.integers(0, 39), max_size=5),
)
def test_after_a_choice_every_bound_holds(
    blocks: list[tuple[str, int]], bounds: dict[str, Bounds], need_bytes: int, locked: set[int]
) -> None:
    index = index_of(*blocks)
    now_s = 60.0
    choice = chosen(index, bounds, need_bytes=need_bytes, locked=locked, now_s=now_s)
    assert not locked & choice.victims.keys()
    sized: dict[Hashable, tuple[str, int]] = dict(enumerate(blocks))
    left = {place: block for place, block in enumerate(blocks) if place not in choice.victims}
    held: Counter[str] = Counter()
    for keyspace, size_bytes in left.values():
        held[keyspace] += size_bytes
    locked_of: Counter[str] = Counter()
    for place in locked & left.keys():
        locked_of[blocks[place][0]] += blocks[place][1]
    before: Counter[str] = Counter()
    for keyspace, size_bytes in blocks:
        before[keyspace] += size_bytes
    largest: dict[Hashable, int] = {}
    for keyspace, size_bytes in blocks:
        largest[keyspace] = max(size_bytes, largest.get(keyspace, 0))
    for keyspace, bytes_before in before.items():
        bound = bounds.get(keyspace)
        if bound is None:
            assert held[keyspace] == locked_of[keyspace]
            continue
        if bound.limit_bytes is not None:
            assert held[keyspace] <= max(bound.limit_bytes, locked_of[keyspace])
        by_room = [p for p, cause in choice.victims.items() if cause is Cause.ROOM and sized[p][0] == keyspace]
        if by_room:
            assert held[keyspace] > min(bound.guaranteed_bytes, bytes_before) - largest[keyspace]
        if bound.retention_s is not None:
            assert all(
                place + bound.retention_s > now_s or place in locked
                for place, (owner, _) in left.items()
                if owner == keyspace
            )
    freed_bytes = sum(sized[place][1] for place in choice.victims)
    if need_bytes > freed_bytes:
        for keyspace, bytes_held in held.items():
            if keyspace in bounds and bytes_held > locked_of[keyspace]:
                assert bytes_held <= max(bounds[keyspace].guaranteed_bytes, 0), "there was more to give"


@given(st.lists(st.tuples(st.sampled_from("artd"), st.integers(0, 9)), max_size=200))
def test_the_book_agrees_with_a_plain_account(steps: list[tuple[str, int]]) -> None:
    index = ScopeIndex()
    account: dict[int, tuple[str, int, int]] = {}
    for time, (step, number) in enumerate(steps):
        keyspace = (A, B)[number % 2]
        if step in "ar":
            index.add(number, keyspace, number + 1, float(-time))
            account.pop(number, None)
            account[number] = (keyspace, number + 1, time)
        elif step == "t":
            index.touch(number)
            if number in account:
                account[number] = account.pop(number)
        else:
            index.remove(number)
            account.pop(number, None)
    assert len(index) == len(account)
    for keyspace in (A, B):
        scope = index.scope(keyspace)
        mine = [number for number, (owner, _, _) in account.items() if owner == keyspace]
        assert list(scope.blocks) == mine if scope else not mine
        if scope is not None:
            assert scope.used_bytes == sum(account[number][1] for number in mine)
            assert scope.computed_before(0.0) == sorted(mine, key=lambda number: -account[number][2])
