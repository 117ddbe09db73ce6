"""A whole tier against a real Redis: isolation, retention, removal, fencing, and what a process shares."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvstrata.contract.messages.adapter import AdapterAck, ApplyRequest, encode_request
from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.store.redis_keys import BlockKey, parse_block_key
from kvstrata_sidecar.adapter.params import AdapterParams
from kvstrata_sidecar.adapter.runtime import acquire, release
from kvstrata_sidecar.adapter.tier.tasks import StoreOutcome
from tests.tiers.gate_stand_in import (
    DOMAIN,
    IDENTITY,
    KEYSPACE_A,
    KEYSPACE_B,
    KEYSPACE_UNKNOWN,
    RESOLVED,
    STALE_AFTER_S,
    GateStandIn,
)
from tests.tiers.redis_cluster import until
from tests.tiers.redis_process import RedisProcess
from tests.tiers.sweeping import stop
from tests.tiers.tier_driver import BLOCK_BYTES, Driver, block, stored

pytestmark = [
    pytest.mark.redis,
    pytest.mark.claim("each keyspace finds its own blocks in a Redis tier, and none of another"),
]


class TestIsolation:
    def test_a_block_comes_back_to_its_own_keyspace_and_to_no_other(self, driver: Driver) -> None:
        assert driver.store([block(KEYSPACE_A)], fill=7) == StoreOutcome(True, BLOCK_BYTES)
        assert driver.lookup([block(KEYSPACE_A), block(KEYSPACE_B)]) == [1, 0]
        hits, buffers = driver.load([block(KEYSPACE_A), block(KEYSPACE_B)])
        assert hits == [1, 0]
        assert buffers == [bytearray([7] * BLOCK_BYTES), bytearray(BLOCK_BYTES)]

    def test_keys_are_those_of_the_contract(self, driver: Driver, redis_server: RedisProcess) -> None:
        driver.store([block(KEYSPACE_A)])
        (name,) = stored(redis_server)
        assert parse_block_key(name) == BlockKey(DOMAIN, KEYSPACE_A, RESOLVED, 0x01000100, 0, bytes([1]) * 32)

    @pytest.mark.parametrize(
        ("keyspace", "reason"),
        [
            (KEYSPACE_UNKNOWN, "unknown_keyspace"),
            ("", "malformed_keyspace"),
            ("a" * 31 + "}", "malformed_keyspace"),
            (f"{KEYSPACE_A} GET", "malformed_keyspace"),
        ],
    )
    def test_an_unknown_keyspace_writes_nothing_and_finds_nothing(
        self, driver: Driver, redis_server: RedisProcess, keyspace: str, reason: str
    ) -> None:
        assert driver.store([block(keyspace)]) == StoreOutcome(True, 0)
        assert driver.lookup([block(keyspace)]) == [0]
        assert driver.load([block(keyspace)])[0] == [0]
        assert len(stored(redis_server)) == 0
        assert driver.refused(reason) == 3

    def test_a_batch_of_many_tenants_stores_what_is_allowed(self, driver: Driver, redis_server: RedisProcess) -> None:
        outcome = driver.store([block(KEYSPACE_A), block(KEYSPACE_UNKNOWN), block(KEYSPACE_B)])
        assert outcome == StoreOutcome(True, 2 * BLOCK_BYTES)
        assert len(stored(redis_server)) == 2

    def test_before_the_first_policy_nothing_is_served(
        self, start: Callable[..., Driver], redis_server: RedisProcess
    ) -> None:
        driver = start(redis_server.port)
        driver.until("closed")
        assert driver.store([block(KEYSPACE_A)]) == StoreOutcome(True, 0)
        assert driver.lookup([block(KEYSPACE_A)]) == [0]
        assert driver.runtime.state().revision == 0


class TestRetention:
    def test_a_block_lives_as_long_as_the_policy_says(
        self, driver: Driver, redis_server: RedisProcess, gate: GateStandIn
    ) -> None:
        driver.store([block(KEYSPACE_B, 1)])
        gate.allow(
            KEYSPACE_A, budgets=(EnforcedBudget("shared", retention_s=600), EnforcedBudget("other", retention_s=1))
        )
        driver.store([block(KEYSPACE_A, 2)])
        lives_s = sorted(redis_server.admin().ttl(name) for name in stored(redis_server))
        assert 550 <= lives_s[0] <= 600
        assert 86_000 < lives_s[1] <= 86_400

    def test_a_retention_of_nothing_stores_nothing(
        self, driver: Driver, redis_server: RedisProcess, gate: GateStandIn
    ) -> None:
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", retention_s=0),))
        assert driver.store([block(KEYSPACE_A)]) == StoreOutcome(True, 0)
        assert len(stored(redis_server)) == 0


class TestRemoval:
    def test_a_removed_keyspace_misses_from_the_acknowledgement_on(self, driver: Driver, gate: GateStandIn) -> None:
        driver.store([block(KEYSPACE_A), block(KEYSPACE_B)])
        ack = gate.allow(KEYSPACE_B)
        assert ack.revision == 2
        assert driver.lookup([block(KEYSPACE_A), block(KEYSPACE_B)]) == [0, 1]
        assert driver.load([block(KEYSPACE_A)])[0] == [0]

    def test_the_acknowledgement_waits_for_the_io_on_removed_keyspaces(
        self, idle: Driver, gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        idle.store([block(KEYSPACE_A)])
        redis_server.freeze()
        loading = self.load_under_way(idle)
        gate.allow(KEYSPACE_B)
        assert idle.runtime.enforcement.under_way([KEYSPACE_A]) == 0, "not before the load was given up"
        loading.join()
        redis_server.thaw()

    def test_io_on_a_removed_keyspace_is_cut_short_after_half_a_second(
        self, start: Callable[..., Driver], gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        driver = start(redis_server.port, io_timeout_ms=60_000, load_deadline_ms=60_000)
        driver.until("closed")
        gate.allow(KEYSPACE_A)
        stop(driver.tier)
        driver.store([block(KEYSPACE_A)])
        redis_server.freeze()
        loading = self.load_under_way(driver)
        started_s = time.monotonic()
        gate.allow(KEYSPACE_B)
        assert 0.4 < time.monotonic() - started_s < 20, "it would last for a minute"
        loading.join(30)
        assert not loading.is_alive()
        redis_server.thaw()

    def load_under_way(self, driver: Driver) -> threading.Thread:
        """Load a block from a server that does not answer; return once the load waits for it, and no other call."""
        loading = threading.Thread(target=driver.load, args=([block(KEYSPACE_A)],))
        loading.start()
        until(lambda: driver.runtime.enforcement.under_way([KEYSPACE_A]) == 1)
        return loading

    def test_a_store_that_waits_in_the_queue_is_refused_when_its_turn_comes_after_the_removal(
        self, start: Callable[..., Driver], gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        driver = start(redis_server.port, io_timeout_ms=20_000, store_deadline_ms=20_000)
        driver.until("closed")
        gate.allow(KEYSPACE_A, KEYSPACE_B)
        driver.store([block(KEYSPACE_A, 1)])
        redis_server.freeze()
        view = memoryview(bytes(BLOCK_BYTES))
        first, second = (driver.tier.store([block(keyspace, 2)], [view]) for keyspace in (KEYSPACE_A, KEYSPACE_B))
        gate.allow(KEYSPACE_A)
        redis_server.thaw()
        driver.wait(first)
        driver.wait(second)
        assert driver.tier.pop_stores()[first] == StoreOutcome(True, BLOCK_BYTES)
        assert driver.refused("unknown_keyspace") == 1
        assert len(stored(redis_server)) == 2

    def test_an_older_policy_file_is_refused_and_the_newer_stays(self, driver: Driver, gate: GateStandIn) -> None:
        gate.allow(KEYSPACE_B)
        gate.write_policy(gate.view([KEYSPACE_A], revision=1))
        assert b"older" in gate.ask(encode_request(ApplyRequest(1, 1)))
        assert driver.runtime.state().revision == 2

    def test_a_policy_file_older_than_asked_for_is_not_acknowledged(self, driver: Driver, gate: GateStandIn) -> None:
        assert b"error" in gate.ask(encode_request(ApplyRequest(9, 1)))

    def test_garbage_in_the_policy_file_or_on_the_line_changes_nothing(self, driver: Driver, gate: GateStandIn) -> None:
        (gate.policy_dir / "policy.json").write_bytes(b"{")
        assert b"error" in gate.ask(encode_request(ApplyRequest(2, 1)))
        assert b"error" in gate.ask(b"[]\n")
        assert b"error" in gate.ask(b'{"op":"erase"}\n')
        assert driver.runtime.state().revision == 1

    def test_a_policy_file_newer_than_asked_for_is_enforced_and_what_was_asked_for_is_acknowledged(
        self, driver: Driver, gate: GateStandIn
    ) -> None:
        gate.write_policy(gate.view([KEYSPACE_A], revision=5))
        ack = gate.put(ApplyRequest(4, 1), AdapterAck)
        assert ack == AdapterAck(4, 1, driver.runtime.state().boot)
        assert gate.state().revision == 5


class TestFencing:
    def test_a_stale_pod_neither_stores_nor_finds_until_it_is_fresh_again(
        self, driver: Driver, gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        driver.store([block(KEYSPACE_A, 1)])
        gate.write_freshness(age_s=STALE_AFTER_S + 1)
        assert driver.lookup([block(KEYSPACE_A, 1)]) == [0]
        assert driver.load([block(KEYSPACE_A, 1)])[0] == [0]
        assert driver.store([block(KEYSPACE_A, 2)]) == StoreOutcome(True, 0)
        assert len(stored(redis_server)) == 1
        assert not gate.state().fresh
        gate.write_freshness()
        assert driver.lookup([block(KEYSPACE_A, 1)]) == [1]

    def test_serve_stale_serves_on(self, driver: Driver, gate: GateStandIn) -> None:
        gate.allow(KEYSPACE_A, on_stale="ServeStale")
        gate.write_freshness(age_s=10 * STALE_AFTER_S)
        driver.store([block(KEYSPACE_A)])
        assert driver.lookup([block(KEYSPACE_A)]) == [1]
        assert not gate.state().fresh


class TestDeletion:
    def test_blocks_are_deleted_and_unknown_keyspaces_left_alone(
        self, driver: Driver, redis_server: RedisProcess, gate: GateStandIn
    ) -> None:
        driver.store([block(KEYSPACE_A, 1), block(KEYSPACE_A, 2), block(KEYSPACE_B, 1)])
        gate.allow(KEYSPACE_A)
        deleted = driver.tier.delete([block(KEYSPACE_A, 1), block(KEYSPACE_A, 9), block(KEYSPACE_B, 1)])
        assert deleted == [("key", KEYSPACE_A, 1)]
        assert len(stored(redis_server)) == 2


class TestRuntime:
    def test_tiers_of_one_process_share_one_link_until_the_last_is_gone(
        self, gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        params = AdapterParams(DOMAIN, IDENTITY, None, gate.policy_dir, gate.link_dir)
        first, second = acquire(params), acquire(params)
        assert first is second
        release(first)
        assert gate.state().boot == second.state().boot
        release(second)
        with pytest.raises(OSError, match=r"No such file"):
            gate.state()

    def test_a_second_adapter_with_other_parameters_is_refused(self, gate: GateStandIn) -> None:
        params = AdapterParams(DOMAIN, IDENTITY, None, gate.policy_dir, gate.link_dir)
        runtime = acquire(params)
        with pytest.raises(ValueError, match="same domain"):
            acquire(AdapterParams("e" * 16, IDENTITY, None, gate.policy_dir, gate.link_dir))
        release(runtime)

    def test_each_start_has_a_boot_of_its_own(self, gate: GateStandIn) -> None:
        params = AdapterParams(DOMAIN, IDENTITY, None, gate.policy_dir, gate.link_dir)
        boots = set()
        for _ in range(2):
            runtime = acquire(params)
            boots.add(gate.state().boot)
            release(runtime)
        assert len(boots) == 2

    def test_the_state_names_tiers_and_counts(self, driver: Driver, gate: GateStandIn) -> None:
        driver.store([block(KEYSPACE_A), block(KEYSPACE_UNKNOWN)])
        driver.load([block(KEYSPACE_A)])
        state = gate.state()
        assert (state.revision, state.term, state.keyspaces, state.fresh) == (1, 1, 2, True)
        (tier,) = state.tiers
        assert (tier.name, tier.medium, tier.breaker, tier.stored, tier.loaded, tier.refused, tier.errors) == (
            "shared",
            "Redis",
            "closed",
            1,
            1,
            1,
            0,
        )
        assert state.counters["shared.refused_unknown_keyspace"] == 1
        assert state.counters["shared.stored_bytes"] == BLOCK_BYTES
