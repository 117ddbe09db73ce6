"""Restore or recompute, on loads whose durations the test sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.contract.messages.adapter import PrefillCost
from kvstrata_sidecar.adapter.tier.interface import Block
from kvstrata_sidecar.adapter.tier.restoring import (
    ACCEPT,
    LONGEST_PAUSE_S,
    SHORT_S,
    Prefill,
    Restoring,
    declines,
    patience_s,
    usable,
)
from kvstrata_sidecar.adapter.tier.tasks import Task, TaskKind
from tests.tiers.gate_stand_in import FINGERPRINT
from tests.tiers.tier_driver import BLOCK_BYTES

CHUNK_TOKENS = 100
PREFILL_S = 0.125
"""Of one chunk."""

Load = Callable[[int], float]
"""How long a load of so many chunks takes."""


@dataclass
class World:
    """An engine that computes a chunk in an eighth of a second, and a tier that holds every prompt."""

    now_s: float = 0.0
    prefill: Prefill = field(default_factory=Prefill)
    in_parts: bool = True
    """Whether the blocks of a load that is given up arrive one after the other, or all at its end."""

    def __post_init__(self) -> None:
        self.prefill.costs = (PrefillCost(1024, int(1e9 * PREFILL_S / CHUNK_TOKENS)),)
        self.restoring = Restoring(self.prefill, lambda: CHUNK_TOKENS, lambda _: False, clock=lambda: self.now_s)

    def request(self, chunks: int, load: Load) -> float:
        """Serve a prompt; return the seconds that it waited for loads, and computed what they did not bring."""
        blocks, began_s = prompt(chunks), self.now_s
        worth = self.restoring.worth(blocks, b"\1" * chunks)
        loading = [block for block, hit in zip(blocks, worth, strict=True) if hit]
        arrived = 0
        if loading:
            restore = self.restoring.begin(loading)
            assert restore is not None
            needs_s = load(len(loading))
            in_time = needs_s <= restore.within_s
            arrived = len(loading) if in_time else int(len(loading) * restore.within_s / needs_s) * self.in_parts
            self.now_s += min(needs_s, restore.within_s)
            task = Task(1, TaskKind.LOAD, 0.0, bytearray(b"\1" * arrived + bytes(len(loading) - arrived)), 0)
            task.restore, task.cancelled, task.sizes = restore, not in_time, [BLOCK_BYTES] * arrived
            self.restoring.over(restore, task)
        self.now_s += PREFILL_S * (chunks - arrived)
        return self.now_s - began_s


def prompt(chunks: int, group: int = 0) -> list[Block]:
    return [Block(number, "a" * 64, 0, group, number.to_bytes(2, "big"), FINGERPRINT) for number in range(chunks)]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 20), st.floats(0.55, 1.0)), min_size=1, max_size=20))
def test_a_load_that_is_measured_and_cheaper_than_prefill_by_the_margin_is_never_declined(
    requests: list[tuple[int, float]],
) -> None:
    world = World(in_parts=False)
    costs, world.prefill.costs = world.prefill.costs, ()
    world.request(20, lambda n: ACCEPT * PREFILL_S * n)
    world.prefill.costs = costs
    for chunks, share in requests:
        world.request(chunks, lambda n, share=share: share * ACCEPT * PREFILL_S * n)  # type: ignore[misc]
        state = world.restoring.state()
        assert state is not None
        assert (state.declined, state.given_up) == (0, 0)


@pytest.mark.parametrize("in_parts", [True, False])
def test_no_request_pays_much_for_a_slow_tier_and_few_pay_anything(in_parts: bool) -> None:
    world = World(in_parts=in_parts)
    paid = [world.request(16, lambda n: 10 * PREFILL_S * n) / (16 * PREFILL_S) for _ in range(200)]
    assert max(paid) <= 1.26
    assert sum(cost > 1 for cost in paid) <= 15
    assert sum(paid) / len(paid) < 1.01


def test_a_tier_that_becomes_slow_costs_one_request_a_quarter_of_its_prefill() -> None:
    world = World(in_parts=False)
    for _ in range(20):
        world.request(16, lambda n: 0.1 * PREFILL_S * n)
    paid = [world.request(16, lambda n: 50 * PREFILL_S * n) / (16 * PREFILL_S) for _ in range(20)]
    assert paid[0] == pytest.approx(1.25)
    assert max(paid) <= 1.26
    assert sum(paid) / len(paid) < 1.04


@pytest.mark.parametrize("chunks", [1, 16, 300])
def test_a_tier_that_is_fast_again_is_used_again(chunks: int) -> None:
    world = World(in_parts=False)
    for _ in range(50):
        world.request(chunks, lambda n: 20 * PREFILL_S * n)
    ended_s = world.now_s + LONGEST_PAUSE_S + 20 * chunks * PREFILL_S
    while world.now_s < ended_s:
        world.request(chunks, lambda n: 0.1 * PREFILL_S * n)
    assert world.request(chunks, lambda n: 0.1 * PREFILL_S * n) == pytest.approx(0.1 * chunks * PREFILL_S)


def test_the_state_says_how_often_and_what_it_saved() -> None:
    world = World()
    for _ in range(10):
        world.request(10, lambda n: 0.2 * PREFILL_S * n)
    state = world.restoring.state()
    assert state is not None
    assert (state.restored, state.declined, state.saved_ms) == (10, 0, 10_000)
    assert (state.tokens_per_s, state.prefill_tokens_per_s, world.restoring.declining) == (4000, 800, False)
    assert state.bytes_per_s == 40 * BLOCK_BYTES
    for _ in range(40):
        world.request(10, lambda n: 4 * PREFILL_S * n)
    state = world.restoring.state()
    assert state is not None
    assert world.restoring.declining
    assert state.declined >= 35
    assert state.avoided_ms > 35 * 1_250
    assert 0 < state.lost_ms < 2_500
    assert state.given_up >= 1


def test_nothing_is_declined_before_prefill_and_loads_are_measured() -> None:
    world = World()
    world.prefill.costs = ()
    for _ in range(5):
        assert world.request(4, lambda n: 9 * PREFILL_S * n) == pytest.approx(4.5)
    unmeasured = World()
    assert unmeasured.restoring.state() is None
    assert unmeasured.restoring.worth(prompt(4), b"\1\1\1\0") == b"\1\1\1\0"


def test_a_decision_changes_only_beyond_the_margins() -> None:
    assert not declines(0.9, 1.0, declining=False)
    assert declines(0.9, 1.0, declining=True)
    assert declines(1.1, 1.0, declining=False)
    assert not declines(0.6, 1.0, declining=True)
    assert not declines(SHORT_S, 0.001, declining=True)


@given(st.one_of(st.none(), st.floats(0, 1000)), st.floats(0.001, 1000))
def test_no_load_may_take_longer_than_its_prefill(load_s: float | None, prefill_s: float) -> None:
    assert patience_s(load_s, prefill_s) <= max(2 * SHORT_S, prefill_s)


def test_only_hits_within_the_beginning_that_is_there_count() -> None:
    here = prompt(6)
    hits = usable(here, b"\0\0\1\1\0\1", lambda block: block.key in {0, 1})
    assert hits == ([[2], [3]], 4, 2)
    assert usable(here, b"\1\0\0\0\0\0", lambda block: block.key == 1) == ([[0]], 2, 2)
    assert usable(here, b"\0\1\1\1\1\1", lambda _: False).numbers == []
    assert usable(here, b"\1\1\1\1\1\1", lambda _: True).numbers == []
    two_parts = [*prompt(2), *prompt(2, group=1)]
    assert usable(two_parts, b"\1\1\1\0", lambda _: False) == ([[0, 2]], 1, 1)
