"""The warm-up of a memory that just started, with LMCache and the tiers played: when it begins, stops and ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvstrata.contract.messages.adapter import TierState
from kvstrata.contract.messages.engine_identity import marked
from kvstrata.contract.policy.bundle import EnforcedBudget, Rules
from kvstrata.contract.policy.cache_view import CacheView
from kvstrata_sidecar.adapter.memory import warmup as module
from kvstrata_sidecar.adapter.memory.events import MemoryEvent
from kvstrata_sidecar.adapter.memory.params import MemoryParams, Warmup
from kvstrata_sidecar.adapter.memory.warmup import Chunk, Warmer
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement
from kvstrata_sidecar.adapter.tier.counts import Counters
from kvstrata_sidecar.adapter.tier.interface import Hot
from tests.tiers.gate_stand_in import FINGERPRINT

A, B = "a" * 32, "b" * 32
DOMAIN = "d0d0d0d0d0d0d0d0"
BYTES = 100
MEMORY_BYTES = 100 * BYTES


@dataclass(frozen=True)
class Part:
    rank: int = 0
    group: int = 0
    counted: bool = True
    size_bytes: int = BYTES
    model: str = marked("tiny", FINGERPRINT)


@dataclass
class Played:
    """LMCache's memory and its loads: `gate` cleared lets a load stand still, `present` is what tiers have."""

    name, high_share = "dram", 0.9
    counts: Counters = field(default_factory=Counters)
    parts_told: tuple[Part, ...] = (Part(),)
    memory: dict[Any, int] = field(default_factory=dict)
    other_bytes: int = 0
    present: set[Any] | None = None
    batches: list[list[Chunk]] = field(default_factory=list)
    quiet: list[frozenset[Any]] = field(default_factory=list)
    ordered: list[Any] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    loading: threading.Event = field(default_factory=threading.Event)
    loaded: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.gate.set()

    def parts(self) -> tuple[Part, ...]:
        return self.parts_told

    def keys(self, parts: Sequence[Part], chunks: Sequence[Chunk]) -> list[Any]:
        return [(chunk.keyspace, chunk.chunk_hash, part.rank, part.group) for chunk in chunks for part in parts]

    def begin(self, parts: Sequence[Part], chunks: Sequence[Chunk]) -> Any:
        self.batches.append(list(chunks))
        self.loading.set()
        return self.keys(parts, chunks)

    def over(self, handle: Any, timeout_s: float) -> bool:
        if not self.gate.wait(min(timeout_s, 0.05)):
            return False
        for key in handle:
            if self.present is None or key in self.present:
                self.memory[key] = BYTES
        self.loaded()
        return True

    def size(self, key: Any) -> int:
        return self.memory.get(key, 0)

    def held_bytes(self, keyspace: str) -> int:
        return sum(size for key, size in self.memory.items() if key[0] == keyspace)

    def fill(self) -> tuple[int, int]:
        return self.other_bytes + sum(self.memory.values()), MEMORY_BYTES

    def note(self, event: MemoryEvent, keys: Sequence[Any]) -> None:
        assert event is MemoryEvent.ORDERED
        self.ordered.extend(keys)


@dataclass
class Tier:
    """A tier that tells of these blocks, or of nothing yet."""

    hot: list[Hot] | None
    recovering: bool = False
    breaker: str = "closed"
    asked: list[list[str]] = field(default_factory=list)

    def hottest(self, keyspaces: Sequence[str]) -> list[Hot] | None:
        self.asked.append(list(keyspaces))
        return None if self.hot is None else [one for one in self.hot if one.keyspace in keyspaces]

    def state(self) -> TierState:
        return TierState("shared", "Redis", self.breaker, recovering=self.recovering)


def hot(keyspace: str, count: int, first: int = 0, age_s: float = 1.0) -> list[Hot]:
    """Return blocks, each hotter than the one before."""
    return [Hot(keyspace, FINGERPRINT, 0, 0, bytes([n]), float(n), age_s) for n in range(first, first + count)]


def view(keyspaces: dict[str, tuple[EnforcedBudget, ...]], revision: int = 1) -> CacheView:
    return CacheView(DOMAIN, revision, 1, Rules(on_stale="ServeStale"), keyspaces)


class World:
    """A warmer and all that it meets."""

    def __init__(self) -> None:
        self.played = Played()
        self.ahead_s = 0.0
        self.enforcement = Enforcement(DOMAIN, lambda **_: 0)
        self.counts = self.played.counts
        self.warmer: Warmer | None = None

    def allow(self, keyspaces: dict[str, tuple[EnforcedBudget, ...]], revision: int = 1) -> None:
        self.enforcement.apply(view(keyspaces, revision))

    def start(self, *tiers: Any, chunks: int = 10, timeout_s: int = 60) -> Warmer:
        played: Any = self.played
        warmup = Warmup(chunks * BYTES, timeout_s)
        clock = lambda: time.monotonic() + self.ahead_s  # noqa: E731
        self.warmer = Warmer(warmup, played, self.enforcement, lambda: tiers, played, clock)
        self.warmer.start()
        return self.warmer

    def warm(self, *tiers: Any, **options: Any) -> list[int]:
        """Warm up and return the chunks that were loaded, in order."""
        warmer = self.start(*tiers, **options)
        until(lambda: not warmer.warming)
        return [chunk.chunk_hash[0] for batch in self.played.batches for chunk in batch]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(module, "PATIENCE_S", 0.3)
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    made = World()
    made.allow({A: (), B: ()})
    yield made
    made.played.gate.set()
    if made.warmer is not None:
        made.warmer.close()


def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    give_up_at_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at_s
        time.sleep(0.01)


def test_the_hottest_are_loaded_first_and_as_many_as_the_budget_has(world: World) -> None:
    assert world.warm(Tier(hot(A, 8)), chunks=3) == [7, 6, 5]
    assert world.counts.snapshot() == {"warmed_blocks": 3, "warmed_bytes": 3 * BYTES}
    assert [key[1][0] for key in world.played.ordered] == [7, 6, 5], "the hottest is to go last"


def test_nothing_is_asked_before_the_engine_said_how_its_blocks_look(world: World) -> None:
    world.played.parts_told = ()
    tier = Tier(hot(A, 2))
    warmer = world.start(tier)
    time.sleep(0.1)
    assert warmer.warming
    assert (tier.asked, warmer.lasted_s) == ([], 0.0)
    world.played.parts_told = (Part(),)
    until(lambda: not warmer.warming)
    assert len(world.played.memory) == 2


def test_a_batch_is_a_part_of_the_budget_and_one_is_under_way_at_a_time(world: World) -> None:
    assert len(world.warm(Tier(hot(A, 16)), chunks=16)) == 16
    assert [len(batch) for batch in world.played.batches] == [2] * 8


def test_while_blocks_are_loaded_their_tiers_know_that_nobody_uses_them(world: World) -> None:
    quiet: list[frozenset[Any]] = []
    world.played.loaded = lambda: quiet.append(world.enforcement.warmed)
    world.warm(Tier(hot(A, 1)))
    assert quiet == [frozenset({(A, b"\x00", 0, 0)})]
    assert world.enforcement.warmed == frozenset()


def test_own_files_come_before_the_shared_tier_and_what_came_is_not_loaded_again(world: World) -> None:
    assert world.warm(Tier(hot(A, 2)), Tier(hot(A, 4))) == [1, 0, 3, 2]


def test_what_is_in_memory_already_is_not_loaded(world: World) -> None:
    world.played.memory[A, b"\x01", 0, 0] = BYTES
    assert world.warm(Tier(hot(A, 3))) == [2, 0]


def test_a_scope_that_may_keep_nothing_gets_nothing_and_one_no_more_than_its_limit(world: World) -> None:
    limits = {A: (EnforcedBudget("dram", limit_bytes=0),), B: (EnforcedBudget("dram", limit_bytes=2 * BYTES),)}
    world.allow(limits, 2)
    assert world.warm(Tier([*hot(A, 5, first=10), *hot(B, 5)])) == [4, 3]


def test_what_a_scope_holds_counts_in_its_limit(world: World) -> None:
    world.allow({A: (EnforcedBudget("dram", limit_bytes=3 * BYTES),)}, 2)
    world.played.memory[A, b"other", 0, 0] = 2 * BYTES
    assert world.warm(Tier(hot(A, 5))) == [4]


def test_what_is_too_old_for_memory_is_left_where_it_is(world: World) -> None:
    world.allow({A: (EnforcedBudget("dram", retention_s=60),)}, 2)
    assert world.warm(Tier([*hot(A, 2, age_s=61.0), *hot(A, 2, first=5, age_s=59.0)])) == [6, 5]


def test_no_keyspace_outside_of_the_policy_is_asked_for(world: World) -> None:
    world.allow({B: ()}, 2)
    tier = Tier([*hot(A, 2), *hot(B, 1, first=9)])
    assert world.warm(tier) == [9]
    assert tier.asked == [[B]]


def test_it_waits_for_a_policy(world: World) -> None:
    world.enforcement = Enforcement(DOMAIN, lambda **_: 0)
    warmer = world.start(Tier(hot(A, 1)))
    time.sleep(0.6)
    assert warmer.warming
    world.allow({A: ()})
    until(lambda: not warmer.warming)
    assert len(world.played.memory) == 1


def test_a_scope_that_leaves_the_policy_meanwhile_gets_no_further_batch(world: World) -> None:
    world.played.gate.clear()
    warmer = world.start(Tier([*hot(A, 8, first=50), *hot(B, 8)]), chunks=16)
    assert world.played.loading.wait(60)
    world.allow({B: ()}, 2)
    world.played.gate.set()
    until(lambda: not warmer.warming)
    assert {chunk.keyspace for batch in world.played.batches[1:] for chunk in batch} == {B}
    assert sum(len(batch) for batch in world.played.batches[1:]) == 8


def test_it_ends_where_the_memory_would_have_to_make_room(world: World) -> None:
    world.played.other_bytes = 80 * BYTES
    assert len(world.warm(Tier(hot(A, 40)), chunks=40)) == 5, "the mark is at 90, and 5 are left to requests"


def test_it_is_over_in_time_though_a_load_stands_still(world: World) -> None:
    world.played.gate.clear()
    warmer = world.start(Tier(hot(A, 8)), timeout_s=600)
    assert world.played.loading.wait(60)
    assert warmer.warming
    world.ahead_s += 600
    assert not warmer.warming
    assert len(world.played.batches) == 1
    world.played.gate.set()
    until(lambda: not world.enforcement.warmed)
    assert len(world.played.batches) == 1, "no further batch"


def test_a_tier_whose_server_went_away_is_asked_no_more(world: World) -> None:
    tier = Tier(hot(A, 8))
    world.played.loaded = lambda: setattr(tier, "breaker", "open")
    world.warm(tier)
    assert len(world.played.batches) == 1


def test_a_tier_that_is_away_is_waited_for_a_little_and_files_until_they_are_counted(world: World) -> None:
    files = Tier(None, recovering=True)
    warmer = world.start(files, Tier(None))
    time.sleep(0.6)
    assert warmer.warming
    files.hot, files.recovering = hot(A, 1), False
    until(lambda: not warmer.warming)
    assert len(world.played.memory) == 1


def test_a_tier_that_is_ready_right_after_it_was_asked_is_asked_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ready(Tier):
        def hottest(self, keyspaces: Sequence[str]) -> list[Hot] | None:
            was_recovering, self.recovering = self.recovering, False
            return None if was_recovering else super().hottest(keyspaces)

    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    assert world.warm(Ready(hot(A, 1), recovering=True)) == [0]


def test_a_tier_that_is_away_holds_nobody_up_for_long(world: World) -> None:
    warmer = world.start(Tier(None))
    until(lambda: not warmer.warming, 20)
    assert world.played.batches == []


def test_what_a_tier_turns_out_not_to_have_costs_no_budget(world: World) -> None:
    world.played.present = {(A, bytes([n]), 0, 0) for n in (1, 3, 5)}
    world.warm(Tier(hot(A, 6)), chunks=3)
    assert {key[1][0] for key in world.played.memory} == {1, 3, 5}


def test_a_warm_up_that_fails_is_over(world: World) -> None:
    class Broken(Tier):
        def hottest(self, keyspaces: Sequence[str]) -> list[Hot] | None:
            raise RuntimeError("broken")

    warmer = world.start(Broken(None))
    until(lambda: not warmer.warming)


POD = {"domain": DOMAIN, "identity": "1d" * 8, "policy_dir": "/p", "link_dir": "/l"}


def test_the_parameters_are_read() -> None:
    params = MemoryParams.from_json({**POD, "tier": "dram", "warmup": {"bytes": 5, "timeout_s": 7}})
    assert params.warmup == Warmup(5, 7)
    assert MemoryParams.from_json({**POD, "tier": "dram"}).warmup is None


@pytest.mark.parametrize(
    "warmup",
    [
        5,
        {},
        {"bytes": 1},
        {"bytes": 0, "timeout_s": 1},
        {"bytes": 1, "timeout_s": True},
        {"bytes": 1, "timeout_s": 1, "x": 1},
    ],
)
def test_malformed_parameters_stop_the_server(warmup: object) -> None:
    with pytest.raises(ValueError, match="warmup"):
        MemoryParams.from_json({**POD, "tier": "dram", "warmup": warmup})


def test_a_server_without_a_memory_tier_has_nothing_to_warm() -> None:
    with pytest.raises(ValueError, match="needs a CPU tier"):
        MemoryParams.from_json({**POD, "tier": None, "warmup": {"bytes": 5, "timeout_s": 7}})
