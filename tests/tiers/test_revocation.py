"""Retention that changes, keyspaces that are revoked, indexes that nobody uses any more: on a real Redis."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.store.redis_keys import BUCKETS, bucket_prefix, claim_key, revoked_key
from kvstrata_sidecar.adapter.redis.client.commands import (
    Demand,
    Place,
    Terms,
    call,
    read_number,
    read_text,
    reads_numbers,
    reads_status,
    reservation,
    state_key,
)
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.resp import Command
from kvstrata_sidecar.adapter.tier.tasks import StoreOutcome
from tests.support.redis_binary import needs_redis
from tests.tiers.books import Books
from tests.tiers.eraser import set_value
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.sweeping import stop, sweep, sweep_all
from tests.tiers.tier_driver import BLOCK_BYTES, VALUE_BYTES, Driver, block, stored

pytestmark = [
    *needs_redis,
    pytest.mark.claim("a shortened retention applies to stored blocks, and nothing of a revoked keyspace is served"),
]
KEEP_MS = 7_200_000
BLOCKS = [block(KEYSPACE_A, number) for number in range(0, 256, 8)]


def retained(gate: GateStandIn, seconds: int) -> None:
    gate.allow(KEYSPACE_A, KEYSPACE_B, budgets=(EnforcedBudget("shared", retention_s=seconds),))


def reserve(state: bytes, member: bytes, size: int) -> Command:
    """A reservation under an hour's retention."""
    return reservation(Demand(Place(KEYSPACE_A, 0, state[:-3], member), size, b"t", Terms(3_600_000)), 30_000)


def commit(state: bytes, member: bytes, ttl_ms: int) -> Command:
    return call("commit", state, read_text, member=member, token=b"t", ttl_ms=ttl_ms, age_ms=0, keep_ms=KEEP_MS)


class TestWhatNobodyRemembers:
    def test_no_key_of_a_scope_lives_for_ever(
        self, start: Callable[..., Driver], gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        driver = start(redis_server.port)
        driver.until("closed")
        gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", limit_bytes=20 * VALUE_BYTES, retention_s=3600),))
        driver.store(BLOCKS[:3])
        for _ in range(2):
            driver.store(BLOCKS)
            driver.load(BLOCKS)
        driver.tier._sweeper.turn()
        sweep(driver.tier, KEYSPACE_A, audit=True)
        admin = redis_server.admin()
        assert not [name for name in admin.scan_iter(count=1000) if admin.pttl(name) == -1]


class TestRetention:
    def test_after_it_was_shortened_a_bucket_is_not_read_until_it_was_clamped(
        self, idle: Driver, gate: GateStandIn, redis_server: RedisProcess, books: Books
    ) -> None:
        retained(gate, 3600)
        idle.store(BLOCKS)
        retained(gate, 60)
        assert sum(idle.lookup(BLOCKS)) == 0
        assert idle.load(BLOCKS[:1])[0] == [0]
        assert idle.refused("retention") == len(BLOCKS) + 1
        sweep(idle.tier, KEYSPACE_A)
        assert sum(idle.lookup(BLOCKS)) == len(BLOCKS)
        assert all(redis_server.admin().ttl(name) <= 60 for name in stored(redis_server))
        books.assert_consistent()

    def test_a_lookup_that_was_refused_has_the_scope_clamped_soon(self, driver: Driver, gate: GateStandIn) -> None:
        retained(gate, 3600)
        driver.store(BLOCKS)
        retained(gate, 60)
        give_up_at_s = time.monotonic() + 30
        while sum(driver.lookup(BLOCKS)) < len(BLOCKS):
            assert time.monotonic() < give_up_at_s
            time.sleep(0.05)

    def test_what_is_older_than_a_shortened_retention_goes(
        self, idle: Driver, gate: GateStandIn, redis_server: RedisProcess, books: Books
    ) -> None:
        retained(gate, 3600)
        idle.store(BLOCKS)
        time.sleep(1.1)
        retained(gate, 1)
        sweep(idle.tier, KEYSPACE_A)
        assert stored(redis_server) == []
        books.assert_consistent()

    def test_a_pod_that_does_not_know_of_it_yet_cannot_bring_longer_lives_back_unnoticed(
        self,
        idle: Driver,
        gate: GateStandIn,
        redis_server: RedisProcess,
        connect_to: Callable[..., Connection],
    ) -> None:
        retained(gate, 60)
        idle.store(BLOCKS)
        (state,) = {state_key(bucket_prefix(DOMAIN, KEYSPACE_A, 0).encode())}
        old_pod = connect_to(redis_server.port)
        assert old_pod.ask([reserve(state, b"m", 10)])[0].outcome is True
        first = [one for one in BLOCKS if one.chunk_hash[0] < 16]
        assert sum(idle.lookup(BLOCKS)) == len(BLOCKS) - len(first), "its bucket may hold what lives too long"
        sweep(idle.tier, KEYSPACE_A)
        assert sum(idle.lookup(BLOCKS)) == len(BLOCKS)

    def test_what_is_committed_while_a_bucket_is_being_clamped_is_clamped_too(
        self, redis_server: RedisProcess, connect_to: Callable[..., Connection]
    ) -> None:
        connection = connect_to(redis_server.port)
        base = bucket_prefix(DOMAIN, KEYSPACE_A, 0)
        state = state_key(base.encode())
        for number in range(600):
            self.put(connection, state, b"m%d" % number)
        clamp = call("clamp", state, reads_status(2), life_ms=60_000, since=0, cursor=0, count=10)
        ((status, (cursor, since)),) = connection.ask([clamp])
        assert (status, cursor != 0) == ("more", True)
        self.put(connection, state, b"late")
        assert redis_server.admin().ttl(f"{base}:late") <= 60
        while status == "more":
            clamp = call("clamp", state, reads_status(2), life_ms=60_000, since=since, cursor=cursor, count=100)
            ((status, (cursor, since)),) = connection.ask([clamp])
        assert status == "done"
        latest_ms = redis_server.admin().zrange(f"{base}:#x", -1, -1, withscores=True)[0][1]
        assert latest_ms <= time.time() * 1000 + 60_000

    def put(self, connection: Connection, state: bytes, member: bytes) -> None:
        """Store a small value under an hour's retention."""
        connection.ask([reserve(state, member, 3)])
        assert set_value(connection, state[:-2] + member, [b"abc"], 30_000, commit(state, member, 3_600_000)) == "ok"

    def test_a_copy_inherits_what_remains_of_the_first(
        self, driver: Driver, gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        retained(gate, 1000)
        driver.runtime.enforcement.ages.inherit(BLOCKS[0].key, 700)
        driver.store(BLOCKS[:1])
        (name,) = stored(redis_server)
        assert 250 <= redis_server.admin().ttl(name) <= 300

    def test_the_age_of_what_is_loaded_is_known_afterwards(self, driver: Driver, gate: GateStandIn) -> None:
        retained(gate, 1000)
        ages = driver.runtime.enforcement.ages
        ages.inherit(BLOCKS[0].key, 700)
        driver.store(BLOCKS[:1])
        ages.forget(BLOCKS[0].key)
        assert ages.age_s(BLOCKS[0].key) == 0
        driver.load(BLOCKS[:1])
        assert 699 < ages.age_s(BLOCKS[0].key) < 750

    def test_a_block_that_is_too_old_already_is_not_stored(
        self, driver: Driver, gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        retained(gate, 60)
        driver.runtime.enforcement.ages.inherit(BLOCKS[0].key, 61)
        assert driver.store(BLOCKS[:1]) == StoreOutcome(True, 0)
        assert driver.refused("retention") == 1
        assert stored(redis_server) == []

    def test_the_index_of_a_scope_that_nobody_uses_any_more_goes_after_its_blocks(
        self, driver: Driver, gate: GateStandIn, redis_server: RedisProcess
    ) -> None:
        retained(gate, 60)
        driver.store(BLOCKS)
        admin = redis_server.admin()
        for name in admin.scan_iter():
            if b"#w" not in name:
                assert admin.ttl(name) > 0, name
            if name.endswith((b"#x", b"#a", b"#m", b"#s")):
                assert admin.ttl(name) > 3600, "and not before them"


class TestAKeyspaceThatIsRevoked:
    def drop(self, connection: Connection, count: int = 5) -> int:
        """Erase as an eraser does; return how many blocks were removed."""
        total = 0
        for bucket in range(BUCKETS):
            state, left = state_key(bucket_prefix(DOMAIN, KEYSPACE_A, bucket).encode()), 1
            while left:
                asked = call("drop", state, reads_numbers(6), count=count, keep_ms=0)
                ((removed, left, *_),) = connection.ask([asked])
                total += removed
        return total

    def test_a_dropped_bucket_is_empty_and_takes_nothing_any_more(
        self, driver: Driver, redis_server: RedisProcess, connect_to: Callable[..., Connection], books: Books
    ) -> None:
        driver.store(BLOCKS)
        assert self.drop(connect_to(redis_server.port)) == len(BLOCKS)
        assert stored(redis_server) == []
        books.assert_consistent()
        assert driver.store(BLOCKS[:3]) == StoreOutcome(True, 0)
        assert driver.refused("tombstone") == 3
        assert sum(driver.lookup(BLOCKS)) == 0
        assert driver.load(BLOCKS[:1])[0] == [0]
        assert stored(redis_server) == []
        names = {name.rsplit(b":", 1)[1] for name in redis_server.admin().scan_iter(f"*{KEYSPACE_A}:*")}
        assert names == {b"#s"}, "nothing but tombstones is left"

    def test_a_store_in_the_middle_of_a_drop_ends_in_nothing(
        self, driver: Driver, redis_server: RedisProcess, connect_to: Callable[..., Connection], books: Books
    ) -> None:
        connection = connect_to(redis_server.port)
        state = state_key(bucket_prefix(DOMAIN, KEYSPACE_A, 0).encode())
        connection.ask([reserve(state, b"m", 3)])
        self.drop(connection)
        assert set_value(connection, state[:-2] + b"m", [b"abc"], 30_000, commit(state, b"m", 60_000)) == "gone"
        books.assert_consistent()

    def test_keyspaces_in_the_set_of_revoked_ones_are_neither_stored_nor_found(
        self, idle: Driver, redis_server: RedisProcess, connect_to: Callable[..., Connection]
    ) -> None:
        idle.store(BLOCKS[:1])
        key = revoked_key(DOMAIN).encode()
        revoke = call("revoke", key, read_number, revision=7, keyspaces=[KEYSPACE_A.encode()])
        assert connect_to(redis_server.port).ask([revoke]) == [7]
        sweep_all(idle.tier)
        assert idle.store(BLOCKS[1:2]) == StoreOutcome(True, 0)
        assert idle.lookup(BLOCKS[:1]) == [0]
        assert idle.refused("revoked") == 2
        assert idle.store([block(KEYSPACE_B)]).stored_bytes == BLOCK_BYTES

    def test_what_was_seen_as_revoked_stays_so_although_the_set_is_lost(
        self, idle: Driver, redis_server: RedisProcess
    ) -> None:
        idle.store([block(KEYSPACE_A)])
        redis_server.admin().zadd(revoked_key(DOMAIN), {KEYSPACE_A: 1})
        sweep_all(idle.tier)
        redis_server.admin().delete(revoked_key(DOMAIN))
        sweep_all(idle.tier)
        assert idle.lookup([block(KEYSPACE_A)]) == [0]
        assert idle.refused("revoked") == 1
        assert idle.store([block(KEYSPACE_B)]).stored_bytes > 0

    def test_the_highest_revision_that_revoked_is_kept(
        self, redis_server: RedisProcess, connect_to: Callable[..., Connection]
    ) -> None:
        connection, key = connect_to(redis_server.port), revoked_key(DOMAIN).encode()
        answers = [
            connection.ask([call("revoke", key, read_number, revision=revision, keyspaces=[KEYSPACE_A.encode()])])[0]
            for revision in (7, 5, 9)
        ]
        assert answers == [7, 7, 9]


class TestSharedWork:
    def test_a_scope_is_swept_by_one_pod_an_interval(
        self, idle: Driver, start: Callable[..., Driver], redis_server: RedisProcess, gate: GateStandIn
    ) -> None:
        other = start(redis_server.port)
        other.until("closed")
        stop(other.tier)
        redis_server.admin().delete(claim_key(DOMAIN, KEYSPACE_A))
        assert [self.swept(driver) for driver in (idle, other)] == [True, False]

    def swept(self, driver: Driver) -> bool:
        driver.tier._deps.usage._until.clear()
        sweep_all(driver.tier)
        return driver.tier._deps.usage.get(KEYSPACE_A) is not None

    def test_nothing_is_swept_outside_of_the_policy_or_by_a_stale_pod(
        self, idle: Driver, redis_server: RedisProcess, gate: GateStandIn
    ) -> None:
        redis_server.admin().delete(claim_key(DOMAIN, KEYSPACE_A))
        gate.allow(KEYSPACE_B)
        assert not self.swept(idle)
        gate.allow(KEYSPACE_A)
        gate.write_freshness(age_s=1000)
        assert not self.swept(idle)
        assert not redis_server.admin().exists(claim_key(DOMAIN, KEYSPACE_A))
