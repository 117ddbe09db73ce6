"""Which slots go where: equal parts, as few moves as there can be, whole ranges where they can stay whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.model.redis.cluster import SLOTS, SlotRange
from kvstrata.plan.redis.topology.moves import Transfer, parts, side_by_side, transfers
from kvstrata.plan.redis.topology.view import count, ranges
from tests.support.amounts import examples

pytestmark = pytest.mark.claim("slots are spread evenly, with as few moves as there can be")

Owned = Mapping[str, tuple[SlotRange, ...]]


@st.composite
def scattered(draw: st.DrawFn) -> Owned:
    """All slots over some nodes, in ranges of any length."""
    nodes = [f"n{number}" for number in range(draw(st.integers(1, 8)))]
    edges = sorted(draw(st.sets(st.integers(1, SLOTS - 1), max_size=20)))
    owned: dict[str, list[SlotRange]] = {}
    for first, end in zip([0, *edges], [*edges, SLOTS], strict=True):
        owned.setdefault(draw(st.sampled_from(nodes)), []).append((first, end - 1))
    return {node: ranges(slot for one in found for slot in range(one[0], one[1] + 1)) for node, found in owned.items()}


@st.composite
def wanted(draw: st.DrawFn) -> list[str]:
    """Nodes that are to have slots, some of which may have had none, and not all that had some."""
    return draw(st.permutations([f"n{number}" for number in range(12)]))[: draw(st.integers(1, 12))]


def after(owned: Owned, moved: Sequence[tuple[str, str, Sequence[int]]]) -> Owned:
    owners = {slot: node for node, found in owned.items() for first, last in found for slot in range(first, last + 1)}
    for source, target, slots in moved:
        for slot in slots:
            assert owners[slot] == source, "it moves from where it is, once"
            owners[slot] = target
    result: dict[str, list[int]] = {}
    for slot, node in sorted(owners.items()):
        result.setdefault(node, []).append(slot)
    return {node: ranges(slots) for node, slots in result.items()}


def everything(found: Sequence[Transfer]) -> list[tuple[str, str, Sequence[int]]]:
    return [(one.source, one.target, one.slots) for one in found]


def total(found: Sequence[Transfer]) -> int:
    return sum(len(one.slots) for one in found)


@settings(max_examples=examples(60))
@given(scattered(), wanted())
def test_all_who_are_to_have_slots_have_equally_many_within_one_and_others_none(owned: Owned, nodes: list[str]) -> None:
    sizes = {node: count(found) for node, found in after(owned, everything(transfers(owned, nodes))).items()}
    assert sizes.keys() == set(nodes)
    assert max(sizes.values()) - min(sizes.values()) <= 1
    assert sum(sizes.values()) == SLOTS


@settings(max_examples=examples(60))
@given(scattered(), wanted())
def test_no_slot_moves_that_need_not(owned: Owned, nodes: list[str]) -> None:
    """Whoever gives has more than its part, and the parts are larger for those that have more already."""
    found = transfers(owned, nodes)
    sizes = {node: count(one) for node, one in owned.items()}
    each, more = divmod(SLOTS, len(nodes))
    kept = sorted((min(sizes.get(node, 0), each + 1) for node in nodes), reverse=True)
    fewest = SLOTS - sum(min(size, each + (place < more)) for place, size in enumerate(kept))
    assert total(found) == fewest
    assert not {one.source for one in found} & {one.target for one in found}


@settings(max_examples=examples(40))
@given(scattered(), wanted(), st.data())
def test_after_any_part_of_it_the_rest_is_as_much_as_was_left(
    owned: Owned, nodes: list[str], data: st.DataObject
) -> None:
    found = transfers(owned, nodes)
    part = [(one.source, one.target, one.slots[: data.draw(st.integers(0, len(one.slots)))]) for one in found]
    went = sum(len(slots) for *_, slots in part)
    assert total(transfers(after(owned, part), nodes)) == total(found) - went


@settings(max_examples=examples(40))
@given(scattered(), wanted())
def test_what_goes_at_the_same_time_has_no_server_in_common(owned: Owned, nodes: list[str]) -> None:
    found = transfers(owned, nodes)
    chosen = list(side_by_side(found))
    ends = [end for one in chosen for end in (one.source, one.target)]
    assert len(ends) == len(set(ends))
    assert bool(chosen) == bool(found)


def contiguous(shards: int) -> dict[str, tuple[SlotRange, ...]]:
    edges = [SLOTS * number // shards for number in range(shards + 1)]
    return {f"n{n}": ((first, last - 1),) for n, (first, last) in enumerate(pairwise(edges))}


@pytest.mark.parametrize(("before", "afterwards"), [(1, 3), (3, 4), (3, 5), (3, 64), (5, 12)])
def test_new_shards_get_their_part_from_all_others_evenly_and_in_one_range_each(before: int, afterwards: int) -> None:
    found = transfers(contiguous(before), [f"n{number}" for number in range(afterwards)])
    given_by = {f"n{number}": 0 for number in range(before)}
    for one in found:
        given_by[one.source] += len(one.slots)
        assert len(ranges(sorted(one.slots))) == 1
    assert max(given_by.values()) - min(given_by.values()) <= 1


@pytest.mark.parametrize(("before", "afterwards"), [(3, 1), (4, 3), (12, 5), (64, 3)])
def test_drained_shards_give_what_they_have_to_all_others_evenly(before: int, afterwards: int) -> None:
    found = transfers(contiguous(before), [f"n{number}" for number in range(afterwards)])
    got = {f"n{number}": 0 for number in range(afterwards)}
    for one in found:
        got[one.target] += len(one.slots)
    assert max(got.values()) - min(got.values()) <= 1
    assert sum(got.values()) == sum(count(contiguous(before)[f"n{number}"]) for number in range(afterwards, before))


def test_a_shard_that_comes_and_goes_again_leaves_the_ranges_as_they_were() -> None:
    nodes = ["n0", "n1", "n2"]
    four = after(contiguous(3), everything(transfers(contiguous(3), [*nodes, "n3"])))
    assert after(four, everything(transfers(four, nodes))) == contiguous(3)


def test_a_range_grows_at_one_end_whatever_part_of_it_moves_at_a_time() -> None:
    owned, nodes = contiguous(3), ["n0", "n1", "n2", "n3"]
    while found := transfers(owned, nodes):
        one = found[0]
        owned = after(owned, [(one.source, one.target, one.slots[:100])])
        assert len(owned["n3"]) <= 3
    assert [len(owned[node]) for node in nodes] == [1, 1, 1, 2], "it took over where two others meet"


def test_who_has_most_keeps_the_slot_that_does_not_divide() -> None:
    assert parts({"a": 5461, "b": 5461, "c": 5462}, ["a", "b", "c"]) == {"a": 5461, "b": 5461, "c": 5462}
