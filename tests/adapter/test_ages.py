"""How old blocks are known to be."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from kvstrata_sidecar.adapter.policy import ages as module
from kvstrata_sidecar.adapter.policy.ages import Ages
from kvstrata_sidecar.adapter.redis.budget.ledger import HORIZON_S
from kvstrata_sidecar.adapter.redis.recent import Recent


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Memory:
    """What the server's own memory knows."""

    def __init__(self) -> None:
        self.ages: dict[Hashable, float] = {}

    def inherit_age(self, key: Hashable, age_s: float) -> None:
        self.ages[key] = age_s

    def age_s(self, key: Hashable) -> float:
        return self.ages.get(key, 0.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_block_of_which_nothing_is_known_is_new() -> None:
    assert Ages().age_s("a") == 0


def test_what_was_seen_of_scopes_that_are_gone_is_not_kept(clock: Clock) -> None:
    horizons: Recent[str, int] = Recent(clock, HORIZON_S)
    for number in range(100):
        clock.now_s += 0.1
        horizons.put(f"{number:032x}", 5)
    assert len(horizons._until) <= 11
    assert horizons.get(f"{99:032x}") == 5


def test_a_block_that_was_loaded_grows_older(clock: Clock) -> None:
    ages = Ages(clock)
    ages.inherit("a", 10)
    clock.now_s += 5
    assert ages.age_s("a") == 15


def test_a_block_grows_older_on_its_way(clock: Clock) -> None:
    memory = Memory()
    ages = Ages(clock)
    ages.memory = memory
    asked_s = ages.now_s()
    clock.now_s += 3
    ages.inherit("a", 10, asked_s)
    assert ages.age_s("a") == 13
    assert memory.ages == {"a": 13}


def test_a_block_that_is_computed_anew_after_it_was_forgotten_is_new(clock: Clock) -> None:
    ages = Ages(clock)
    ages.inherit("a", 10)
    ages.forget("a")
    ages.forget("a")
    assert ages.age_s("a") == 0


def test_the_memory_hears_of_every_age_and_its_word_counts_where_it_is_older(clock: Clock) -> None:
    memory = Memory()
    ages = Ages(clock)
    ages.memory = memory
    ages.inherit("a", 10)
    assert memory.ages == {"a": 10}
    memory.ages["a"] = 30
    assert ages.age_s("a") == 30
    memory.ages["a"] = 3
    assert ages.age_s("a") == 10


def test_the_least_recently_loaded_is_forgotten_first(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KNOWN_BLOCKS", 2)
    ages = Ages(clock)
    for key in ("a", "b", "a", "c"):
        ages.inherit(key, 7)
    assert [ages.age_s(key) for key in ("a", "b", "c")] == [7, 0, 7]


def test_a_clock_that_does_not_move_makes_nothing_negative(clock: Clock) -> None:
    ages = Ages(clock)
    ages.inherit("a", -5)
    assert ages.age_s("a") == 0
