"""The index of a tier's blocks, to the byte and to the second: order, ages, sums, and what it forgets."""

from __future__ import annotations

import random

import pytest

from kvstrata.contract.messages.adapter import ScopeUsage
from kvstrata_sidecar.adapter import index as scope_index
from kvstrata_sidecar.adapter.index import Deadlines, Kept, Scope, ScopeIndex, usage_rows
from kvstrata_sidecar.adapter.policy.limits import Bounds

A, B, C = "a" * 32, "b" * 32, "c" * 32


def scope_of(index: ScopeIndex, keyspace: str = A) -> Scope:
    scope = index.scope(keyspace)
    assert scope is not None
    return scope


def aged(*computed_s: float) -> ScopeIndex:
    """An index with a block of one byte in A for each moment, keyed by its place."""
    index = ScopeIndex()
    for place, moment_s in enumerate(computed_s):
        index.add(place, A, 1, moment_s)
    return index


class TestBlocks:
    def test_sums_are_those_of_the_blocks_that_are_there(self) -> None:
        index = ScopeIndex()
        index.add("x", A, 10, 1.0)
        index.add("y", A, 5, 2.0)
        index.add("z", B, 7, 3.0)
        assert (scope_of(index).used_bytes, scope_of(index, B).used_bytes, len(index)) == (15, 7, 3)
        removed = index.remove("x")
        assert removed is not None
        assert (removed.keyspace, removed.size_bytes, removed.computed_s) == (A, 10, 1.0)
        assert (scope_of(index).used_bytes, len(index), index.find("x")) == (5, 2, None)
        assert index.remove("x") is None
        assert index.remove("y") is not None
        assert (index.scope(A), index.keyspaces(), list(index)) == (None, [B], ["z"])

    def test_a_block_that_is_present_starts_anew(self) -> None:
        index = ScopeIndex()
        index.add("x", A, 10, 1.0)
        index.add("y", A, 1, 1.0)
        index.add("x", B, 4, 9.0)
        assert (scope_of(index).used_bytes, scope_of(index, B).used_bytes, len(index)) == (1, 4, 2)
        assert (scope_of(index).eldest_s(), scope_of(index, B).eldest_s()) == (1.0, 9.0)

    def test_every_use_has_a_number_of_its_own_across_scopes(self) -> None:
        index = ScopeIndex()
        index.add("x", A, 1, 0.0)
        index.add("y", B, 1, 0.0)
        index.add("z", A, 1, 0.0)
        assert [kept.used for key in "xyz" if (kept := index.find(key))] == [1, 2, 3]
        touched = index.touch("x")
        assert touched is index.find("x")
        assert touched is not None
        assert touched.used == 4
        assert list(scope_of(index).blocks) == ["z", "x"]
        assert (scope_of(index).least_used(), scope_of(index, B).least_used()) == (3, 2)
        assert index.touch("absent") is None
        index.add("w", A, 1, 0.0)
        assert list(scope_of(index).blocks) == ["z", "x", "w"]
        assert [kept.used for kept in scope_of(index).blocks.values()] == [3, 4, 5]

    def test_a_scope_without_blocks_has_no_eldest_and_no_least_used(self) -> None:
        assert (Scope().eldest_s(), Scope().least_used(), Scope().computed_before(9.0)) == (None, None, [])


class TestAges:
    def test_a_block_computed_at_that_very_moment_counts_and_a_later_one_does_not(self) -> None:
        scope = scope_of(aged(3.0, 1.0, 2.0))
        for most in (None, 9):
            assert scope.computed_before(0.999, most) == []
            assert scope.computed_before(1.0, most) == [1]
            assert scope.computed_before(1.999, most) == [1]
            assert scope.computed_before(2.0, most) == [1, 2]
            assert scope.computed_before(3.0, most) == [1, 2, 0]
        assert scope.eldest_s() == 1.0

    def test_of_the_same_age_the_one_that_came_first_is_first(self) -> None:
        scope = scope_of(aged(1.0, 1.0, 1.0))
        assert scope.computed_before(1.0) == scope.computed_before(1.0, 3) == [0, 1, 2]

    def test_the_eldest_few_are_returned_and_stay(self) -> None:
        scope = scope_of(aged(3.0, 1.0, 2.0, 4.0))
        for _ in range(2):
            assert scope.computed_before(3.0, 2) == [1, 2]
            assert scope.computed_before(3.0, 3) == [1, 2, 0]
            assert scope.computed_before(3.0, 0) == []
        assert scope.eldest_s() == 1.0

    def test_what_was_removed_or_replaced_is_not_returned_whatever_is_asked(self) -> None:
        index = aged(1.0, 2.0, 3.0, 4.0)
        scope = scope_of(index)
        index.remove(0)
        index.add(2, A, 1, 9.0)
        assert scope.eldest_s() == 2.0
        assert scope.computed_before(5.0) == scope.computed_before(5.0, 9) == [1, 3]
        assert scope.computed_before(9.0) == scope.computed_before(9.0, 9) == [1, 3, 2]

    def test_the_order_by_age_holds_no_more_than_twice_the_blocks_and_some(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(scope_index, "COMPACT_ABOVE", 3)
        index, held = ScopeIndex(), []
        for moment_s in range(40, 0, -1):
            for key, later_s in (("x", 0.0), ("y", 0.5)):
                index.add(key, B, 1, moment_s + later_s)
                held.append(len(scope_of(index, B)._by_age))
            assert scope_of(index, B).eldest_s() == moment_s
        assert max(held) == 2 * 2 + 3
        assert scope_of(index, B).computed_before(99.0) == ["x", "y"]

    def test_after_it_was_compacted_the_eldest_is_still_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scope_index, "COMPACT_ABOVE", 0)
        scope, draw = Scope(), random.Random(1)
        for number in range(500):
            scope.add(draw.randrange(12), Kept(A, 0, float(draw.randrange(1000)), number))
            assert scope.eldest_s() == min(kept.computed_s for kept in scope.blocks.values())


class TestUsage:
    def test_scopes_are_named_by_their_first_digits_and_the_rest_is_one_row(self) -> None:
        index = ScopeIndex()
        for key, keyspace, size_bytes in (("u", A, 10), ("v", A, 1), ("w", B, 7), ("x", C, 3), ("y", "d" * 32, 4)):
            index.add(key, keyspace, size_bytes, 0.0)
        assert usage_rows(index, {A: Bounds(20, 5), B: Bounds()}, "dram") == [
            ScopeUsage(A[:12], "dram", 11, 2, 20, 5),
            ScopeUsage(B[:12], "dram", 7, 1, None, None),
            ScopeUsage("", "dram", 7, 2, 0, None),
        ]
        assert usage_rows(ScopeIndex(), {A: Bounds()}, "dram") == []


class TestDeadlines:
    def test_what_is_due_at_that_very_moment_is_due_once(self) -> None:
        deadlines = Deadlines()
        deadlines.plan(A, 5.0)
        deadlines.plan(B, 6.0)
        assert deadlines.due(4.999) == set()
        assert deadlines.due(5.0) == {A}
        assert deadlines.due(5.0) == set()
        assert deadlines.next_s() == 6.0

    def test_changes_of_plan_take_no_more_than_twice_the_deadlines_and_some(self) -> None:
        deadlines, held = Deadlines(), []
        for moment in range(300, 0, -1):
            deadlines.plan(A, float(moment))
            held.append(len(deadlines._heap))
        assert max(held) == 2 * 1 + 64
        assert deadlines.next_s() == 1.0
        deadlines.plan(A, 1.0)
        assert held[-1] == len(deadlines._heap), "the same moment again takes nothing"

    def test_the_first_is_first_also_after_changed_plans_were_dropped(self) -> None:
        deadlines = Deadlines()
        names = [f"{number:032x}" for number in range(10)]
        for moment in range(100, 0, -1):
            for number, name in enumerate(names):
                deadlines.plan(name, float(moment * 10 - number))
                assert deadlines.next_s() == min(deadlines._moments.values())

    def test_cleared_it_knows_nothing(self) -> None:
        deadlines = Deadlines()
        deadlines.plan(A, 1.0)
        deadlines.clear()
        assert deadlines.next_s() is None
        assert deadlines.due(9.0) == set()
        deadlines.plan(A, 1.0)
        assert deadlines.due(1.0) == {A}
