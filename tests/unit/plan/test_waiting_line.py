"""The line for a tier: who keeps, who gets and who waits, whatever happens in whatever order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstrata.model.refs import Key
from kvstrata.plan.budgets.waiting_line import CapacityRequest, WaitingLine, decide_admission
from tests.support.amounts import examples

POD = ("", "m0", "m1")


def key(number: int) -> Key:
    return Key("TenantCachePolicy", "ns", f"p{number}")


def ask(number: int, wanted: int, recorded: int = 0, **more: object) -> CapacityRequest:
    return replace(CapacityRequest(key(number), (float(number), ""), wanted, recorded), **more)  # type: ignore[arg-type]


def admitted(line: WaitingLine) -> dict[str, int]:
    return {holder.name: size for holder, size in line.granted.items()}


def test_room_goes_to_the_eldest_first() -> None:
    line = decide_admission([ask(2, 40), ask(1, 40), ask(3, 40)], {"": 100})
    assert admitted(line) == {"p1": 40, "p2": 40, "p3": 0}
    assert [(one.request.holder.name, one.free_bytes, one.behind) for one in line.waiting] == [("p3", 20, None)]


def test_a_younger_smaller_one_does_not_go_past_an_older_larger_one() -> None:
    line = decide_admission([ask(1, 60, 60), ask(2, 50), ask(3, 10)], {"": 100})
    assert admitted(line) == {"p1": 60, "p2": 0, "p3": 0}
    assert line.waiting[1].behind == key(2)


def test_one_that_would_not_fit_even_alone_holds_up_nobody() -> None:
    assert admitted(decide_admission([ask(1, 101), ask(2, 50)], {"": 100})) == {"p1": 0, "p2": 50}


def test_an_older_one_that_asks_for_more_takes_nothing_from_a_younger_and_keeps_what_it_has() -> None:
    line = decide_admission([ask(1, 90, 40), ask(2, 50, 50)], {"": 100})
    assert admitted(line) == {"p1": 40, "p2": 50}
    assert line.lost == frozenset()


def test_when_room_shrinks_the_eldest_keep_theirs_as_far_as_they_fit() -> None:
    line = decide_admission([ask(1, 40, 40), ask(2, 30, 30), ask(3, 10, 10)], {"": 50})
    assert dict(line.kept) == {key(1): 40, key(2): 0, key(3): 10}
    assert line.lost == {key(2)}
    written = decide_admission([ask(1, 40, 40), ask(2, 30, 0), ask(3, 10, 10)], {"": 50})
    assert (written.kept, written.granted) == (line.kept, line.granted), "whatever is written down first"


def test_one_that_became_too_large_even_alone_costs_the_others_nothing() -> None:
    line = decide_admission([ask(1, 80, 80), ask(2, 30, 30)], {"": 50})
    assert line.lost == {key(1)}


def test_what_was_let_go_is_given_to_nobody_before_its_status_says_so() -> None:
    assert admitted(decide_admission([ask(1, 10, 60), ask(2, 50, 0)], {"": 100})) == {"p1": 10, "p2": 0}
    assert admitted(decide_admission([ask(1, 10, 10), ask(2, 50, 0)], {"": 100})) == {"p1": 10, "p2": 50}


def test_what_is_being_written_for_one_is_not_given_to_another() -> None:
    line = decide_admission([ask(1, 60), ask(2, 60, 0, pending_bytes=60)], {"": 100})
    assert admitted(line)["p1"] == 0


def test_pods_of_one_model_have_room_that_those_of_another_have_not() -> None:
    asks = [
        ask(1, 80, 80, places=("m0",), charged_places=("m0",)),
        ask(2, 80, 0, places=("m1",), charged_places=("m1",)),
        ask(3, 30, 0, places=POD, charged_places=POD),
    ]
    line = decide_admission(asks, dict.fromkeys(POD, 100))
    assert admitted(line) == {"p1": 80, "p2": 80, "p3": 0}


def test_another_choice_of_models_is_asked_for_anew_and_keeps_no_right_of_the_old() -> None:
    moved = ask(1, 60, 60, places=("m1",), charged_places=POD, is_current=False)
    there = ask(2, 60, 60, places=("m1",), charged_places=("m1",))
    line = decide_admission([moved, there], dict.fromkeys(POD, 100))
    assert admitted(line) == {"p1": 0, "p2": 60}
    assert line.lost == {key(1)}


@dataclass
class Tier:
    """A tier and those who claim it, as statuses would say; every write is one holder's own."""

    room: int
    asks: dict[Key, CapacityRequest] = field(default_factory=dict)

    @property
    def line(self) -> WaitingLine:
        return decide_admission(self.asks.values(), dict.fromkeys(POD, self.room))

    def due(self) -> list[Key]:
        line = self.line
        return [holder for holder, one in self.asks.items() if line.granted[holder] != one.admitted_bytes]

    def write(self, holder: Key) -> None:
        self.asks[holder] = replace(self.asks[holder], admitted_bytes=self.line.granted[holder])

    def settle(self, chance: random.Random) -> None:
        for _ in range(200):
            if not (due := self.due()):
                return
            self.write(chance.choice(sorted(due)))
        raise AssertionError("it never comes to rest")

    def sums(self, *, of_records: bool) -> list[int]:
        kept = self.line.kept
        return [
            sum(
                one.admitted_bytes if of_records else kept[holder]
                for holder, one in self.asks.items()
                if place in one.places
            )
            for place in POD
        ]


edits = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "delete", "write", "write", "room"]),
        st.integers(0, 7),
        st.integers(0, 12),
        st.sampled_from([POD, POD, ("m0",), ("m1",)]),
    ),
    max_size=40,
)


@settings(max_examples=examples(300))
@given(edits)
@example([("put", 0, 9, POD), ("put", 1, 6, POD), ("write", 1, 0, POD), ("room", 0, 0, POD), ("put", 0, 3, POD)])
def test_no_history_gives_away_more_than_there_is_or_takes_from_who_was_admitted(
    steps: list[tuple[str, int, int, tuple[str, ...]]],
) -> None:
    tier, lowered = Tier(20), False
    for what, number, size, places in steps:
        holder, before = key(number), tier.line
        fitted = max(tier.sums(of_records=True)) <= tier.room
        match what:
            case "put":
                # Nobody moves: that other places are asked for anew is a test of its own.
                old = tier.asks.get(holder)
                fresh = ask(number, size, places=places, charged_places=places)
                tier.asks[holder] = replace(old, requested_bytes=size) if old is not None else fresh
            case "delete":
                tier.asks.pop(holder, None)
            case "room":
                lowered = lowered or size + 8 < tier.room
                tier.room = size + 8
            case "write":
                for due in tier.due()[: number + 1]:
                    tier.write(due)
        assert max(tier.sums(of_records=False)) <= tier.room, "bundles would guarantee more than fits"
        assert lowered or max(tier.sums(of_records=True)) <= tier.room
        if what != "room" and fitted:
            # A holder that declares what it has keeps it, whatever others do. Of records that a lower capacity does not
            # hold, the oldest keep theirs, until those that lost say so.
            for other, one in tier.asks.items():
                if other in before.kept and (other != holder or what == "write"):
                    assert tier.line.kept[other] >= min(before.kept[other], one.requested_bytes), (what, other)
        if what == "write" and not tier.due():
            lowered = False


@settings(max_examples=examples(200))
@example(
    [
        *(("put", number, size, POD) for number, size in ((0, 2), (1, 7), (2, 1))),
        *(("write", 0, 0, POD) for _ in range(3)),
        ("room", 0, 0, POD),
    ],
    0,
    1,
)
@given(edits, st.integers(0, 2**16), st.integers(0, 2**16))
def test_the_order_of_writes_changes_nothing_and_at_rest_nobody_waits_for_room_that_there_is(
    steps: list[tuple[str, int, int, tuple[str, ...]]], seed: int, other_seed: int
) -> None:
    tier = Tier(20)
    for what, number, size, places in steps:
        if what == "put":
            tier.asks[key(number)] = ask(number, size, tier.asks.get(key(number), ask(0, 0)).admitted_bytes)
            tier.asks[key(number)] = replace(tier.asks[key(number)], places=places, charged_places=places)
        elif what == "room":
            tier.room = size + 8
        elif what == "delete":
            tier.asks.pop(key(number), None)
        elif due := tier.due():
            tier.write(due[number % len(due)])
    twin = Tier(tier.room, dict(tier.asks))
    tier.settle(random.Random(seed))
    twin.settle(random.Random(other_seed))
    assert tier.asks == twin.asks
    line = tier.line
    assert line.lost == frozenset()
    closed: set[str] = set()
    for one in line.waiting:
        free = {place: tier.room - tier.sums(of_records=True)[POD.index(place)] for place in one.request.places}
        more = one.request.requested_bytes - one.request.admitted_bytes
        assert any(free[place] < more or place in closed for place in one.request.places), "there is room for it"
        if one.request.requested_bytes <= tier.room:
            closed.update(one.request.places)
