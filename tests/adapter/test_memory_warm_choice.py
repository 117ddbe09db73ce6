"""What a memory that just started is warmed with: which chunks, and how the budget is divided."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvstrata_sidecar.adapter.memory.warmup import Chunk, Room, batches, share_out, whole_chunks
from kvstrata_sidecar.adapter.tier.interface import Hot

BYTES = 10
SCOPES = ("a", "b", "c", "d")


def chunks(*named: tuple[str, int]) -> list[Chunk]:
    """Return chunks by scope and last use, the hottest first."""
    made = [Chunk(scope, bytes([used % 256, number]), used) for number, (scope, used) in enumerate(named)]
    return sorted(made, key=lambda chunk: chunk.last_use, reverse=True)


rooms_of_scopes = st.dictionaries(
    st.sampled_from(SCOPES),
    st.builds(Room, st.none() | st.integers(0, 120), st.integers(0, 120)),
)
lists = st.lists(st.tuples(st.sampled_from(SCOPES), st.integers(0, 50)), max_size=40).map(lambda named: chunks(*named))


@given(lists, st.integers(0, 300), rooms_of_scopes)
def test_nobody_gets_more_than_the_budget_or_a_limit_allows(
    hot: list[Chunk], budget_bytes: int, rooms: dict[str, Room]
) -> None:
    chosen = share_out(hot, BYTES, budget_bytes, rooms)
    assert len(chosen) * BYTES <= budget_bytes
    assert len(set(chosen)) == len(chosen)
    for scope, count in Counter(chunk.keyspace for chunk in chosen).items():
        left_bytes = rooms[scope].left_bytes
        assert left_bytes is None or count * BYTES <= left_bytes


@given(lists, st.integers(0, 300), rooms_of_scopes)
def test_of_each_scope_the_hottest_are_chosen_and_come_first(
    hot: list[Chunk], budget_bytes: int, rooms: dict[str, Room]
) -> None:
    chosen = share_out(hot, BYTES, budget_bytes, rooms)
    assert [chunk.last_use for chunk in chosen] == sorted((chunk.last_use for chunk in chosen), reverse=True)
    for scope in SCOPES:
        own = [chunk for chunk in hot if chunk.keyspace == scope]
        taken = [chunk for chunk in chosen if chunk.keyspace == scope]
        assert taken == own[: len(taken)]


@given(lists, st.integers(0, 300), rooms_of_scopes)
def test_every_scope_gets_its_share_of_the_guarantees_but_for_less_than_a_chunk(
    hot: list[Chunk], budget_bytes: int, rooms: dict[str, Room]
) -> None:
    asking = {chunk.keyspace for chunk in hot} & rooms.keys()
    promised = sum(rooms[scope].guaranteed_bytes for scope in asking)
    share = min(1.0, budget_bytes / promised) if promised else 0.0
    chosen = Counter(chunk.keyspace for chunk in share_out(hot, BYTES, budget_bytes, rooms))
    for scope in asking:
        left_bytes, there = rooms[scope].left_bytes, sum(chunk.keyspace == scope for chunk in hot)
        due = min(
            rooms[scope].guaranteed_bytes * share, there * BYTES, float("inf") if left_bytes is None else left_bytes
        )
        assert chosen[scope] * BYTES > due - BYTES


@given(lists, st.integers(0, 300), rooms_of_scopes)
def test_nothing_is_left_out_that_there_is_room_for(
    hot: list[Chunk], budget_bytes: int, rooms: dict[str, Room]
) -> None:
    chosen = share_out(hot, BYTES, budget_bytes, rooms)
    taken = Counter(chunk.keyspace for chunk in chosen)
    if budget_bytes - len(chosen) * BYTES < BYTES:
        return
    for chunk in set(hot) - set(chosen):
        room = rooms.get(chunk.keyspace)
        assert room is None or (room.left_bytes is not None and (taken[chunk.keyspace] + 1) * BYTES > room.left_bytes)


def test_without_guarantees_what_was_used_last_comes_first_whosever_it_is() -> None:
    hot = chunks(("a", 1), ("b", 2), ("a", 3), ("b", 4))
    chosen = share_out(hot, BYTES, 3 * BYTES, {"a": Room(), "b": Room()})
    assert [chunk.last_use for chunk in chosen] == [4, 3, 2]


def test_a_guarantee_comes_before_what_others_used_later() -> None:
    hot = chunks(("a", 1), ("b", 2), ("b", 3))
    chosen = share_out(hot, BYTES, 2 * BYTES, {"a": Room(guaranteed_bytes=BYTES), "b": Room()})
    assert [chunk.keyspace for chunk in chosen] == ["b", "a"]


def test_guarantees_beyond_the_budget_are_cut_by_one_share() -> None:
    hot = chunks(*(("a", number) for number in range(20)), *(("b", 100 + number) for number in range(20)))
    rooms = {"a": Room(guaranteed_bytes=120), "b": Room(guaranteed_bytes=60)}
    chosen = Counter(chunk.keyspace for chunk in share_out(hot, BYTES, 90, rooms))
    assert chosen == {"a": 6, "b": 3}


def test_a_scope_without_room_gets_nothing() -> None:
    hot = chunks(("a", 9), ("b", 1))
    assert [one.keyspace for one in share_out(hot, BYTES, 100, {"a": Room(left_bytes=0), "b": Room()})] == ["b"]


def test_a_chunk_of_which_a_part_is_missing_is_none_and_one_is_as_hot_as_its_coldest_part() -> None:
    needed = {(0, 0), (1, 0)}
    parts = [
        Hot("a", "", 0, 0, b"half", 9.0, 1.0),
        Hot("a", "", 0, 0, b"whole", 8.0, 1.0),
        Hot("a", "", 1, 0, b"whole", 2.0, 1.0),
        Hot("a", "", 0, 0, b"warm", 3.0, 1.0),
        Hot("a", "", 1, 0, b"warm", 3.0, 1.0),
        Hot("a", "", 7, 0, b"half", 9.0, 1.0),
    ]
    assert whole_chunks(parts, needed) == [Chunk("a", b"warm", 3.0), Chunk("a", b"whole", 2.0)]


@given(st.integers(0, 30), st.integers(1, 20), st.integers(1, 100))
def test_batches_are_all_chunks_in_order_and_no_larger_than_said(count: int, size: int, batch_bytes: int) -> None:
    hot = chunks(*(("a", number) for number in range(count)))
    divided = batches(hot, size, batch_bytes)
    assert [chunk for batch in divided for chunk in batch] == hot
    assert all(len(batch) == 1 or len(batch) * size <= batch_bytes for batch in divided)
