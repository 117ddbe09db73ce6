"""The cache server's metrics: what is counted for whom, how many series there can be, and a well-formed page."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvstrata.contract.messages.adapter import (
    MAX_LINE_BYTES,
    AdapterState,
    MetricsPage,
    MetricsRequest,
    RestoreState,
    ScopeUsage,
    TierState,
    decode_answer,
    encode_answer,
    encode_request,
)
from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.store.redis_keys import bucket_prefix
from kvstrata_sidecar.adapter.metrics import page
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.tier.counts import MAX_SCOPES, NO_SCOPE, OTHER, Counters
from tests.support.metrics_page import families, series
from tests.support.redis_binary import needs_redis
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.sweeping import sweep
from tests.tiers.tier_driver import BLOCK_BYTES, VALUE_BYTES, Driver, block

pytestmark = needs_redis
REFERENCE = Path(__file__).resolve().parents[2] / "docs/reference/metrics.md"


class CountedTier:
    """A tier that has counted as much as one can."""

    def __init__(self, name: str, scopes: int) -> None:
        self._name = name
        self.counts = Counters()
        for number in range(scopes):
            for reason in Refusal:
                self.counts.refuse(reason, 10**9, f"{number:032x}"[::-1])
            names = ("lookup_hits", "lookup_misses", "stored", "stored_bytes", "loaded", "evicted", "expired")
            pooled = ("pool_hits", "pool_bytes", "stores_in_pool", "copies_discarded")
            for name in (*names, *pooled, "loads_own", "loads_other", "shadowed", "hints"):
                self.counts.add(name, 10**12, f"{number:032x}"[::-1])
        for operation in ("store", "lookup", "load"):
            self.counts.observe(operation, 0.003)
        for moment in ("hit", "eviction"):
            self.counts.age(moment, 100.0)
        self.counters = self.counts.snapshot

    def state(self) -> TierState:
        return TierState(self._name, "Redis", "closed")

    def nodes(self) -> dict[str, str]:
        return {"10.0.0.1:6379": "closed", "10.0.0.2:6379": "open: away"}


class CountedMemory:
    """The server's own memory, with what it counted by scope."""

    def __init__(self, name: str = "dram") -> None:
        self._name = name
        self.counts = Counters()

    def state(self) -> TierState:
        return TierState(self._name, "CPU", "closed")

    def drift_bytes(self) -> int:
        return 4096

    def fill(self) -> tuple[int, int]:
        return 3 << 20, 10 << 20


def shown(state: AdapterState, tiers: Sequence[CountedTier], memory: CountedMemory | None = None) -> str:
    return page(state, tiers, memory)  # type: ignore[arg-type]


class TestCounts:
    def test_scopes_are_bounded_and_the_rest_is_counted_together(self) -> None:
        counts = Counters(max_scopes=2)
        for keyspace in ("a" * 32, "b" * 32, "c" * 32, "d" * 32):
            counts.add("stored", 1, keyspace)
        assert counts.by_scope() == {"a" * 12: {"stored": 1}, "b" * 12: {"stored": 1}, OTHER: {"stored": 2}}
        assert counts.snapshot() == {"stored": 4}

    def test_keyspaces_of_no_policy_get_no_series(self) -> None:
        counts = Counters()
        for number in range(1000):
            counts.refuse(Refusal.UNKNOWN_KEYSPACE, 1, f"{number:032x}")
        assert counts.by_scope() == {NO_SCOPE: {"refused_unknown_keyspace": 1000}}

    def test_a_scope_that_left_the_policy_makes_room_for_another(self) -> None:
        counts = Counters(max_scopes=1)
        counts.add("stored", 1, "a" * 32)
        counts.retain(["b" * 32])
        counts.add("stored", 1, "b" * 32)
        assert counts.by_scope() == {"b" * 12: {"stored": 1}}


class TestThePage:
    def test_the_largest_there_can_be_fits_into_a_line(self) -> None:
        tiers = [CountedTier(f"a-tier-with-a-name-of-forty-characters-{n}", 2 * MAX_SCOPES) for n in range(1)]
        rows = tuple(ScopeUsage(f"{number:012x}", "shared", 10**12, 1, 10**12) for number in range(2048))
        text = shown(AdapterState("b", 1, 1, True, 5000, tier_usage=rows), tiers)
        assert len(series(text)) > 20 * MAX_SCOPES
        assert len(encode_answer(MetricsPage(text))) <= MAX_LINE_BYTES
        assert decode_answer(MetricsPage, encode_answer(MetricsPage(text))).page == text
        text = shown(AdapterState("b", 1, 1, True, 5000, tier_usage=rows), [*tiers] * 9)
        assert len(encode_answer(MetricsPage(text))) <= MAX_LINE_BYTES
        assert decode_answer(MetricsPage, encode_answer(MetricsPage(text))).page == text, "then without scopes"
        assert "scope=" not in text

    def test_histograms_are_cumulative_and_servers_are_counted_by_state(self) -> None:
        memory = CountedMemory()
        for name, amount in (("evicted_limit", 3), ("promoted_blocks", 2), ("lent_bytes", 8192)):
            memory.counts.add(name, amount, "a" * 32)
        found = series(shown(AdapterState("b", 7, 1, True, 2), [CountedTier("shared", 1)], memory))
        lookups = {name: value for name, value in found.items() if 'operation="lookup"' in name and "_bucket" in name}
        assert list(lookups.values()) == sorted(lookups.values())
        assert found['kvstrata_cache_operation_seconds_bucket{tier="shared",operation="lookup",le="0.0025"}'] == 0
        assert found['kvstrata_cache_operation_seconds_bucket{tier="shared",operation="lookup",le="0.005"}'] == 1
        assert found['kvstrata_cache_operation_seconds_count{tier="shared",operation="lookup"}'] == 1
        assert found['kvstrata_cache_tier_servers{tier="shared",breaker="closed"}'] == 1
        assert found['kvstrata_cache_tier_servers{tier="shared",breaker="open"}'] == 1
        assert found[f'kvstrata_cache_memory_evicted_total{{scope="{"a" * 12}",cause="limit"}}'] == 3
        assert found[f'kvstrata_cache_memory_promoted_blocks_total{{scope="{"a" * 12}"}}'] == 2
        assert found[f'kvstrata_cache_memory_lent_bytes_total{{scope="{"a" * 12}"}}'] == 8192
        assert found[f'kvstrata_cache_shadowed_total{{tier="shared",scope="{"0" * 12}",use="all"}}'] == 10**12
        assert found[f'kvstrata_cache_shadowed_total{{tier="shared",scope="{"0" * 12}",use="passed_on"}}'] == 10**12
        assert found["kvstrata_cache_policy_revision"] == 7
        assert found['kvstrata_cache_memory_bytes{state="used"}'] == 3 << 20
        assert found['kvstrata_cache_memory_bytes{state="free"}'] == 7 << 20

    def test_ages_orphans_and_what_is_not_counted_are_shown_by_tier(self) -> None:
        tier, memory = CountedTier("shared", 1), CountedMemory()
        memory.counts.age("hit", 30.0)
        tier.counts.add("orphan_scans", 4)
        tier.counts.add("departed_evicted", 3)
        found = series(shown(AdapterState("b", 7, 1, True, 2), [tier], memory))
        name = "kvstrata_cache_block_age_seconds"
        assert found[f'{name}_bucket{{tier="dram",at="hit",le="10.0"}}'] == 0
        assert found[f'{name}_bucket{{tier="dram",at="hit",le="60.0"}}'] == 1
        assert found[f'{name}_sum{{tier="shared",at="eviction"}}'] == 100
        assert found['kvstrata_cache_orphan_scans_total{tier="shared"}'] == 4
        for outcome in ("found", "removed"):
            assert found[f'kvstrata_cache_orphans_total{{tier="shared",kind="departed",outcome="{outcome}"}}'] == 3
        assert found["kvstrata_cache_memory_drift_bytes"] == 4096

    def test_hits_that_are_loaded_and_declined_are_shown_with_what_that_saved(self) -> None:
        restore = RestoreState(11, 5, 2, 9500, 1500, 250, 4_000_000, 86, 400)
        tiers = (TierState("shared", "Redis", "closed", restore=restore), TierState("dram", "CPU", "closed"))
        found = series(shown(AdapterState("b", 7, 1, True, 2, tiers=tiers), []))
        outcomes = {
            f'kvstrata_cache_restores_total{{tier="shared",outcome="{name}"}}': count
            for name, count in (("restored", 11), ("declined", 5), ("given_up", 2))
        }
        seconds = {
            f'kvstrata_cache_restore_seconds_total{{tier="shared",outcome="{name}"}}': count
            for name, count in (("saved", 9.5), ("avoided", 1.5), ("lost", 0.25))
        }
        speeds = {
            'kvstrata_cache_restore_bytes_per_second{tier="shared"}': 4_000_000,
            'kvstrata_cache_restore_tokens_per_second{tier="shared"}': 86,
            'kvstrata_cache_prefill_tokens_per_second{tier="shared"}': 400,
        }
        shown_of = {name: value for name, value in found.items() if "restore" in name or "prefill" in name}
        assert shown_of == outcomes | seconds | speeds

    def test_what_memory_refused_is_shown_beside_what_other_tiers_did(self) -> None:
        memory = CountedMemory()
        memory.counts.refuse(Refusal.NOT_ALLOWED, 7, "a" * 32)
        found = series(shown(AdapterState("b", 7, 1, True, 2), [CountedTier("shared", 1)], memory))
        name = f'kvstrata_cache_refused_total{{tier="dram",scope="{"a" * 12}",reason="not_allowed"}}'
        assert found[name] == 7
        assert sum('tier="dram"' in one for one in found) == 1

    def test_every_family_is_in_the_reference(self) -> None:
        text = shown(AdapterState("b", 7, 1, True, 2), [CountedTier("shared", 1)])
        assert families(text).keys() == set(re.findall(r"`(kvstrata_cache_\w+)`", REFERENCE.read_text()))


class TestARealTier:
    LONG_AGO_S = 30_000

    @pytest.fixture
    def used(self, idle: Driver, gate: GateStandIn) -> Driver:
        driver = idle
        budgets = (EnforcedBudget("shared", limit_bytes=8 * VALUE_BYTES),)
        gate.allow(KEYSPACE_A, KEYSPACE_B, budgets=budgets)
        for first in range(0, 24, 8):
            driver.store([block(KEYSPACE_A, number * 10) for number in range(first, first + 8)])
        driver.store([block("f" * 32, 1)])
        hits = driver.lookup([block(KEYSPACE_A, number * 10) for number in range(24)])
        self.hits = sum(hits)
        driver.load([block(KEYSPACE_A, number * 10) for number, hit in enumerate(hits) if hit])
        driver.lookup([block(KEYSPACE_B, 1)])
        sweep(driver.tier, KEYSPACE_A)
        return driver

    def test_scopes_appear_by_what_they_did(self, used: Driver, gate: GateStandIn) -> None:
        text = decode_answer(MetricsPage, used.runtime.link.answer(encode_request(MetricsRequest()))).page
        found = series(text)
        a, b = KEYSPACE_A[:12], KEYSPACE_B[:12]
        assert found[f'kvstrata_cache_lookups_total{{tier="shared",scope="{a}",result="hit"}}'] == self.hits
        assert found[f'kvstrata_cache_lookups_total{{tier="shared",scope="{a}",result="miss"}}'] == 24 - self.hits
        assert found[f'kvstrata_cache_lookups_total{{tier="shared",scope="{b}",result="miss"}}'] == 1
        assert found[f'kvstrata_cache_blocks_total{{tier="shared",scope="{a}",operation="stored"}}'] == 24
        assert found[f'kvstrata_cache_bytes_total{{tier="shared",scope="{a}",operation="loaded"}}'] == (
            self.hits * BLOCK_BYTES
        )
        assert found[f'kvstrata_cache_loads_total{{tier="shared",scope="{a}",writer="own"}}'] == self.hits
        evicted = found[f'kvstrata_cache_blocks_total{{tier="shared",scope="{a}",operation="evicted"}}']
        assert evicted == 24 - self.hits
        assert found['kvstrata_cache_refused_total{tier="shared",scope="_none",reason="unknown_keyspace"}'] == 1
        assert found[f'kvstrata_cache_tier_used_bytes{{tier="shared",scope="{a}"}}'] == self.hits * VALUE_BYTES
        assert found[f'kvstrata_cache_tier_limit_bytes{{tier="shared",scope="{a}"}}'] == 8 * VALUE_BYTES
        assert found['kvstrata_cache_operation_seconds_count{tier="shared",operation="store"}'] == 3
        assert found['kvstrata_cache_block_age_seconds_count{tier="shared",at="hit"}'] == self.hits
        assert found['kvstrata_cache_block_age_seconds_count{tier="shared",at="eviction"}'] == evicted
        assert KEYSPACE_A not in text

    def test_hits_on_blocks_of_another_pod_are_told_from_hits_on_own_ones(
        self, driver: Driver, start: Callable[..., Driver], redis_server: RedisProcess, gate: GateStandIn
    ) -> None:
        gate.allow(KEYSPACE_A)
        blocks = [block(KEYSPACE_A, number) for number in range(4)]
        driver.store(blocks[:3])
        other = start(redis_server.port)
        other.until("closed")
        other.store(blocks)
        for pod in (driver, other):
            assert sum(pod.load(blocks)[0]) == 4
        told = [pod.tier.counts.by_scope()[KEYSPACE_A[:12]] for pod in (driver, other)]
        assert [(counts["loads_own"], counts["loads_other"]) for counts in told] == [(3, 1), (1, 3)]

    def test_how_old_blocks_were_that_made_room_is_told_wherever_it_was_needed(
        self, idle: Driver, gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        driver = idle
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", limit_bytes=8 * VALUE_BYTES),))
        driver.store([block(KEYSPACE_A, number) for number in range(8)])
        admin, bucket = redis_server.admin(), bucket_prefix(DOMAIN, KEYSPACE_A, 0)
        for name, record in admin.hgetall(f"{bucket}:#m").items():
            size, computed_ms = map(int, record.split(b":"))
            admin.hset(f"{bucket}:#m", name, f"{size}:{computed_ms - 1000 * self.LONG_AGO_S}")
        # First other buckets want the room of these, and then a bucket that of its own.
        for first in (16, 24):
            driver.store([block(KEYSPACE_A, number) for number in range(first, first + 8)])
        told = driver.tier.counts.ages()["eviction"]
        evicted = driver.tier.counters()["evicted"]
        assert evicted >= 16
        assert sum(told.buckets) == evicted
        assert 8 * self.LONG_AGO_S <= told.sum_s < 9 * self.LONG_AGO_S

    def test_the_state_tells_use_and_limit_of_scopes_in_the_tier(self, used: Driver) -> None:
        state = decode_answer(AdapterState, used.runtime.link.answer(b'{"op":"state"}\n'))
        row = ScopeUsage(KEYSPACE_A[:12], "shared", self.hits * VALUE_BYTES, self.hits, 8 * VALUE_BYTES)
        assert state.tier_usage == (row,)
        assert state.usage == ()
        assert state.boot
