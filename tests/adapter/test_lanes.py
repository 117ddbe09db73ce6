"""Queues: bounded in number and in bytes, loads before stores, and no server in front of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.tier.queues import Lane
from kvstrata_sidecar.adapter.tier.tasks import Gain, Part, Task, TaskKind


@dataclass(eq=False)
class Waiting(Part[Any]):
    name: str
    size: int = 1
    urgent: bool = False
    task: Any = None
    keyspace: str | None = None

    def run(self, transport: Any, gain: Gain) -> None:
        """Do nothing."""


def names(lane: Lane, count: int) -> list[str]:
    taken = [lane.take() for _ in range(count)]
    return [one[1].name for one in taken if one is not None and isinstance(one[1], Waiting)]


def test_it_is_bounded_in_number_and_in_bytes_and_says_by_which() -> None:
    lane = Lane(3, 100)
    assert lane.put(Waiting("a", 60)) is None
    assert lane.put(Waiting("b", 50)) is Refusal.QUEUE_BYTES
    assert lane.put(Waiting("c", 40)) is None
    assert lane.put(Waiting("d", 0)) is None
    assert lane.put(Waiting("e", 0)) is Refusal.QUEUE_FULL
    assert names(lane, 1) == ["a"]
    assert lane.put(Waiting("f", 60)) is None, "what was taken waits no more"


def test_what_exceeds_the_limit_alone_may_wait_alone() -> None:
    lane = Lane(3, 100)
    assert lane.put(Waiting("a", 1000)) is None
    assert lane.put(Waiting("b", 1)) is Refusal.QUEUE_BYTES


def test_stores_that_wait_keep_no_load_out() -> None:
    lane = Lane(2, 100)
    for name in "ab":
        lane.put(Waiting(name, 50))
    assert lane.put(Waiting("load", 50, urgent=True)) is None
    assert names(lane, 2) == ["load", "a"]


def test_parts_of_a_task_that_is_over_give_their_bytes_back() -> None:
    lane = Lane(9, 100)
    late = Task(1, TaskKind.STORE, 0.0, bytearray(1), 1)
    lane.put(Waiting("a", 60, task=late))
    assert [part.size for part in lane.forget(lambda part: part.task is late)] == [60]
    assert lane.put(Waiting("b", 100)) is None
    assert names(lane, 1) == ["b"]


def test_servers_take_turns_and_one_gets_at_most_its_share_at_a_time() -> None:
    lane = Lane(99, 99, lambda: 2)
    for number in range(4):
        lane.put(Waiting(f"frozen-{number}"), "frozen")
    for number in range(2):
        lane.put(Waiting(f"well-{number}"), "well")
    assert names(lane, 4) == ["frozen-0", "well-0", "frozen-1", "well-1"]
    lane.put(Waiting("well-2"), "well")
    lane.done("well")
    assert names(lane, 1) == ["well-2"], "the frozen one has its share"
    lane.done("frozen")
    assert names(lane, 1) == ["frozen-2"]


def test_a_lane_that_is_closed_gives_back_what_waits() -> None:
    lane = Lane(9, 99)
    lane.put(Waiting("a"))
    lane.put(Waiting("b", urgent=True))
    assert {part.size for part in lane.close()} == {1}
    assert lane.take() is None
    assert lane.put(Waiting("c")) is Refusal.QUEUE_FULL
