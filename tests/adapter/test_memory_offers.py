"""What a tier lost of a pool that memory has is offered to it again, and not what is on its way."""

from __future__ import annotations

from collections.abc import Hashable

from kvstrata_sidecar.adapter.memory.write_back import MAX_POOLS, PATIENCE_S, Offers

POOL = "f" * 32


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.offered: list[list[Hashable]] = []
        self.counted = 0
        self.offers = Offers(self.offered.append, self._count, lambda: self.now_s)

    def _count(self, name: str, amount: int, keyspace: str) -> None:
        assert (name, keyspace) == ("offered_again", POOL)
        self.counted += amount


def test_what_was_just_written_is_on_its_way_and_what_stays_away_is_offered() -> None:
    clock = Clock()
    clock.offers.lacking(POOL, ["a", "b"])
    clock.now_s += PATIENCE_S - 1
    clock.offers.lacking(POOL, ["a", "c"])
    assert clock.offered == []
    clock.now_s += 1
    clock.offers.lacking(POOL, ["a", "b", "c"])
    assert clock.offered == [["a"]], "b was there in between, c is lacking for a second"
    assert clock.counted == 1


def test_it_is_offered_once_in_a_while() -> None:
    clock = Clock()
    for _ in range(31):
        clock.offers.lacking(POOL, ["a"])
        clock.now_s += PATIENCE_S / 10
    assert clock.offered == [["a"]] * 3


def test_of_pools_that_nobody_asks_about_any_more_nothing_is_remembered_for_ever() -> None:
    clock = Clock()
    for number in range(3 * MAX_POOLS):
        clock.offers.lacking(f"{number:032x}", ["a"])
    assert len(clock.offers._since_s) == MAX_POOLS
    clock.offers.lacking(f"{3 * MAX_POOLS - 1:032x}", [])
    assert len(clock.offers._since_s) == MAX_POOLS - 1
