"""ARC in the cache server's memory: the paper's order, scans, and what is remembered of evicted blocks."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata_sidecar.adapter.index.bounds import Bounds
from kvstrata_sidecar.adapter.index.eviction_order import Arc as Lists
from kvstrata_sidecar.adapter.index.scope_index import Book
from kvstrata_sidecar.adapter.index.victims import Cause, Situation, choose
from tests.tiers.arc_model import Arc

A, B = "a" * 32, "b" * 32
CAPACITY = 6


class Memory:
    """A book, whose scope A may hold `capacity` blocks of a byte, asked for one block after another as LMCache is."""

    def __init__(self, capacity: int = CAPACITY, *, arc: bool = True) -> None:
        self.book = Book(arc=arc)
        self.now_s = 0.0
        self._bounds = {A: Bounds(limit_bytes=capacity)}

    def request(self, number: int) -> bool:
        """Use a block if it is there, store it otherwise; whether it was there."""
        self.now_s += 1
        there = self.book.find(number) is not None
        if there:
            self.book.touch(number)
        else:
            self.book.add(number, A, 1, self.now_s)
        self.book.touch(number)  # the request has ended
        choice = choose(self.book, Situation(self._bounds, {}, {}, lambda _: False, self.now_s, 0))
        for key, cause in choice.victims.items():
            assert cause is Cause.LIMIT
            self.book.remove(key, self.now_s)
        self.book.settle()
        return there

    @property
    def lists(self) -> Lists:
        scope = self.book.scope(A)
        assert scope is not None
        assert isinstance(scope.order, Lists)
        return scope.order


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(0, 7), st.integers(0, 20)), min_size=1, max_size=200))
def test_the_order_is_that_of_the_paper(requests: list[int]) -> None:
    memory, model = Memory(), Arc(CAPACITY)
    for number in requests:
        assert memory.request(number) == model.request(number)
        lists = memory.lists
        assert [list(one) for one in (lists.once, lists.often, lists.gone_once, lists.gone_often)] == [
            model.t1, model.t2, model.b1, model.b2,
        ]  # fmt: skip
        assert lists.target == model.p
        assert memory.book.scope(A).used_bytes <= CAPACITY  # type: ignore[union-attr]


def test_a_scan_leaves_what_is_used_again_where_lru_loses_it() -> None:
    kept = {}
    for arc in (False, True):
        memory, chance = Memory(64, arc=arc), random.Random(1)
        hot = range(32)
        for number in (*hot, *hot):
            memory.request(number)
        for step in range(2000):
            memory.request(1000 + step)
            if step % 8 == 0:
                memory.request(chance.choices(hot, [1 / (rank + 1) for rank in hot])[0])
        kept[arc] = sum(memory.book.find(number) is not None for number in hot)
    assert kept[True] >= 30, kept
    assert kept[False] <= 16, kept


def test_the_end_of_the_request_that_stored_a_block_is_no_second_use() -> None:
    memory = Memory()
    memory.request(1)
    assert list(memory.lists.once) == [1]
    memory.request(1)
    assert list(memory.lists.often) == [1]


def test_what_went_for_another_reason_than_room_is_not_remembered() -> None:
    memory = Memory()
    for number in (1, 1, 2, 3):
        memory.request(number)
    memory.book.remove(2)
    assert not memory.lists.gone_once
    assert list(memory.lists.once) == [3]


def test_names_are_forgotten_on_demand_and_with_their_scope() -> None:
    memory = Memory()
    for number in (1, 1, 2, 2, *range(10, 20)):
        memory.request(number)
    assert len(memory.lists.gone_once) >= 2
    middle_s = list(memory.lists.gone_once.values())[1]
    memory.book.forget([B])
    memory.book.forget([A], before_s=middle_s)
    assert min(memory.lists.gone_once.values()) == middle_s
    memory.book.forget([A])
    assert not memory.lists.gone_once
    for key in memory.book:
        memory.book.remove(key)
    assert memory.book.scope(A) is None


def test_a_block_in_use_is_passed_over_and_the_next_goes() -> None:
    memory = Memory()
    for number in range(CAPACITY):
        memory.request(number)
    memory.book.add(50, A, 1, 0.0)
    choice = choose(memory.book, Situation({A: Bounds(limit_bytes=CAPACITY)}, {}, {}, lambda key: key == 0, 0.0, 0))
    assert choice.victims == {1: Cause.LIMIT}
    assert choice.locked_bytes == 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("aurv"), st.integers(0, 12)), max_size=200))
def test_whatever_happens_each_block_is_in_one_list_and_names_are_bounded(steps: list[tuple[str, int]]) -> None:
    book = Book(arc=True)
    for time, (step, number) in enumerate(steps):
        if step == "a":
            book.add(number, A, 1, float(time))
        elif step == "u":
            book.touch(number)
        else:
            book.remove(number, float(time) if step == "v" else None)
        scope = book.scope(A)
        if scope is None:
            continue
        assert isinstance(scope.order, Lists)
        lists = scope.order
        assert sorted([*lists.once, *lists.often], key=str) == sorted(scope.blocks, key=str)
        assert sorted(key for key, _ in scope.victims()) == sorted(scope.blocks)  # type: ignore[type-var]
        assert not (lists.gone_once.keys() | lists.gone_often.keys()) & scope.blocks.keys()
        assert len(lists.gone_once) + len(lists.gone_often) <= len(scope.blocks)
