"""Readers of a pool on a real Redis: one copy for all of them, and nobody who may not read it or write to it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvstrata_sidecar.adapter.redis.client.transport import ClusterTransport
from kvstrata_sidecar.adapter.tier.tasks import StoreOutcome
from tests.tiers.books import Books
from tests.tiers.data_keys import FIRST, OTHER, SECOND
from tests.tiers.faulty_proxy import FaultyProxy
from tests.tiers.pool_blocks import CHUNKS, PATIENT, READERS, blocks, fill, load_right, places, scoped, store, values
from tests.tiers.pool_gate import OLD_POOL, POOL, PoolGate, content, reader, reader_space
from tests.tiers.redis_cluster import until
from tests.tiers.redis_process import RedisProcess
from tests.tiers.tier_driver import BLOCK_BYTES, Driver, block

pytestmark = pytest.mark.redis


@pytest.fixture
def tier(start: Callable[..., Driver], redis_server: RedisProcess) -> Driver:
    driver = start(redis_server.port, **PATIENT)
    driver.until("closed")
    return driver


def asked_buckets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many buckets each exchange of a lookup asks about, in a list that grows."""
    asked: list[int] = []
    ask = ClusterTransport.ask_each

    def counted(transport: ClusterTransport, commands: Any) -> Any:
        indexes = [one for one in commands if one.arguments[0] == b"ZMSCORE" and one.arguments[1].endswith(b":#x")]
        asked.extend([len(indexes)] if indexes else [])
        return ask(transport, commands)

    monkeypatch.setattr(ClusterTransport, "ask_each", counted)
    return asked


@pytest.mark.claim("readers of a pool share one copy, and nobody else finds it")
class TestSharing:
    def test_eight_readers_share_one_copy_and_keep_only_their_own_suffixes(
        self, tier: Driver, pools: PoolGate, redis_server: RedisProcess
    ) -> None:
        pools.publish([reader(n, "docs") for n in READERS], docs=(content(POOL, CHUNKS),))
        assert store(tier, blocks(POOL, *CHUNKS)).stored_bytes == len(CHUNKS) * BLOCK_BYTES
        for number in READERS:
            prompt = blocks(reader_space(number), *CHUNKS, 100 + number)
            assert tier.lookup(prompt) == [1, 1, 1, 0]
            assert load_right(tier, prompt[:3]) == [1, 1, 1]
            assert store(tier, prompt[3:]).stored_bytes == BLOCK_BYTES
            assert tier.lookup(prompt) == [1, 1, 1, 1]
            counts = scoped(tier, number)
            assert (counts["pool_hits"], counts["pool_bytes"]) == (3, 3 * BLOCK_BYTES)
            assert (counts["loaded"], counts["lookup_hits"], counts["lookup_misses"]) == (3, 7, 1)
        own = [(reader_space(number), 100 + number) for number in READERS]
        assert places(redis_server) == sorted([*((POOL, number) for number in CHUNKS), *own])
        one_value = Books(redis_server, POOL).totals().used // len(CHUNKS)
        assert all(Books(redis_server, reader_space(number)).totals().used == one_value for number in READERS)
        Books(redis_server, POOL).assert_consistent()

    def test_a_lookup_of_pool_and_own_chunks_is_one_exchange(
        self, tier: Driver, pools: PoolGate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pools.publish([reader(1, "docs")], docs=(content(POOL, CHUNKS), content(OLD_POOL, CHUNKS)))
        asked = asked_buckets(monkeypatch)
        tier.lookup(blocks(reader_space(1), *CHUNKS, 5))
        assert asked == [3 + 3 + 3], "three buckets of the reader's own, of the new content and of the old"

    def test_where_a_pool_had_a_chunk_a_moment_ago_is_the_only_place_that_is_asked(
        self, tier: Driver, pools: PoolGate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = blocks(reader_space(1), *CHUNKS)
        pools.publish([reader(1, "docs"), reader(2, "docs")], docs=(content(POOL, CHUNKS), content(OLD_POOL, CHUNKS)))
        store(tier, blocks(OLD_POOL, *CHUNKS[:2]))
        asked = asked_buckets(monkeypatch)
        for expected in (9, 5, 5):
            assert tier.lookup(own) == [1, 1, 0]
            assert asked.pop() == expected
        assert tier.lookup(blocks(reader_space(2), *CHUNKS)) == [1, 1, 0]
        assert asked.pop() == 9, "another reader may have copies of its own"
        assert (scoped(tier, 1)["lookup_hits"], scoped(tier, 1)["lookup_misses"]) == (6, 3)
        pools.publish([reader(1)], docs=(content(POOL, CHUNKS), content(OLD_POOL, CHUNKS)))
        assert tier.lookup(own) == [0, 0, 0]
        assert asked.pop() == 3

    def test_what_a_faster_tier_serves_counts_as_used_where_it_is_kept(self, tier: Driver, pools: PoolGate) -> None:
        pools.publish([reader(1, "docs")], docs=(content(POOL, CHUNKS),))
        store(tier, blocks(POOL, 1))
        first = tier.tier._places.first
        assert first(block(reader_space(1), 1)).keyspace == POOL
        assert first(block(reader_space(1), 5)).keyspace == reader_space(1)
        assert first(block(reader_space(2), 1)).keyspace == reader_space(2)

    def test_who_may_not_read_a_pool_finds_nothing_of_it(self, tier: Driver, pools: PoolGate) -> None:
        versions = (content(POOL, CHUNKS),)
        pools.publish([reader(1, "docs"), reader(2), reader(3, "docs", suspended=True)], docs=versions)
        store(tier, blocks(POOL, *CHUNKS))
        assert tier.lookup(blocks(reader_space(1), *CHUNKS)) == [1, 1, 1]
        for number in (2, 3, 9):
            assert tier.lookup(blocks(reader_space(number), *CHUNKS)) == [0, 0, 0]
            assert load_right(tier, blocks(reader_space(number), *CHUNKS)) == [0, 0, 0]
        pools.publish([reader(1), reader(2, "docs")], docs=versions)
        assert tier.lookup(blocks(reader_space(1), *CHUNKS)) == [0, 0, 0]
        assert load_right(tier, blocks(reader_space(2), *CHUNKS)) == [1, 1, 1]

    def test_a_pool_that_is_warming_is_read_by_nobody(self, tier: Driver, pools: PoolGate) -> None:
        pools.publish([reader(1, "docs")], docs=(content(POOL, CHUNKS, warming=True),))
        assert store(tier, blocks(POOL, *CHUNKS)).stored_bytes == len(CHUNKS) * BLOCK_BYTES
        assert tier.lookup(blocks(reader_space(1), *CHUNKS)) == [0, 0, 0]
        assert load_right(tier, blocks(reader_space(1), *CHUNKS)) == [0, 0, 0]
        pools.publish([reader(1, "docs")], docs=(content(POOL, CHUNKS),))
        assert load_right(tier, blocks(reader_space(1), *CHUNKS)) == [1, 1, 1]

    def test_what_the_new_content_lacks_comes_from_the_old_and_what_both_lack_from_the_readers_own(
        self, tier: Driver, pools: PoolGate
    ) -> None:
        pools.publish([reader(1)], docs=(content(POOL, (1, 2, 3)), content(OLD_POOL, (1, 2, 3))))
        store(tier, blocks(POOL, 1))
        store(tier, blocks(OLD_POOL, 1, 2))
        store(tier, blocks(reader_space(1), 3, 4))
        pools.publish([reader(1, "docs")], docs=(content(POOL, (1, 2, 3)), content(OLD_POOL, (1, 2, 3))))
        prompt = blocks(reader_space(1), 1, 2, 3, 4, 5)
        assert tier.lookup(prompt) == [1, 1, 1, 1, 0]
        assert load_right(tier, prompt) == [1, 1, 1, 1, 0]
        assert scoped(tier, 1)["pool_hits"] == 2
        assert tier.tier.counters()["load_misses"] == 1


@pytest.mark.claim("readers store no copy of what their pool has")
class TestReadersOwnCopies:
    def test_they_go_when_the_pool_has_the_same(
        self, tier: Driver, pools: PoolGate, redis_server: RedisProcess
    ) -> None:
        pools.publish([reader(1), reader(2)], docs=(content(POOL, (1, 2)),))
        store(tier, blocks(POOL, 1))
        store(tier, blocks(reader_space(1), 1, 2, 3))
        pools.publish([reader(1, "docs"), reader(2)], docs=(content(POOL, (1, 2)),))
        assert tier.lookup(blocks(reader_space(1), 1, 2, 3)) == [1, 1, 1]
        own = reader_space(1)
        until(lambda: places(redis_server) == sorted([(POOL, 1), (own, 2), (own, 3)]), lambda: places(redis_server))
        Books(redis_server, own).assert_consistent()
        assert load_right(tier, blocks(own, 1, 2, 3)) == [1, 1, 1]
        until(lambda: scoped(tier, 1).get("copies_discarded") == 1, lambda: scoped(tier, 1))

    def test_what_the_pool_has_is_not_stored_again_and_what_it_lacks_is(
        self, tier: Driver, pools: PoolGate, redis_server: RedisProcess
    ) -> None:
        pools.publish([reader(1, "docs")], docs=(content(POOL, (1, 2)),))
        store(tier, blocks(POOL, 1))
        assert store(tier, blocks(reader_space(1), 1, 2, 3)) == StoreOutcome(True, 2 * BLOCK_BYTES)
        assert store(tier, blocks(reader_space(1), 1)) == StoreOutcome(True, 0)
        assert scoped(tier, 1)["stores_in_pool"] == 2
        assert places(redis_server) == sorted([(POOL, 1), (reader_space(1), 2), (reader_space(1), 3)])


class TestRemoval:
    def test_no_redirected_read_outlives_the_acknowledgement_that_took_its_reader_away(
        self, start: Callable[..., Driver], pools: PoolGate, redis_server: RedisProcess
    ) -> None:
        proxy = FaultyProxy(redis_server.port)
        try:
            driver = start(proxy.port, **PATIENT | {"io_timeout_ms": 60_000, "load_deadline_ms": 60_000})
            driver.until("closed")
            versions = (content(POOL, (1,)),)
            pools.publish([reader(1, "docs"), reader(2, "docs")], docs=versions)
            store(driver, blocks(POOL, 1))
            assert load_right(driver, blocks(reader_space(1), 1)) == [1]
            stuck, go_on = threading.Event(), threading.Event()

            def slow(data: bytes) -> bytes:
                if len(data) > 1000:
                    stuck.set()
                    go_on.wait(90)
                return data

            proxy.fault = slow
            buffer = bytearray(BLOCK_BYTES)
            task_id = driver.tier.load(blocks(reader_space(1), 1), [memoryview(buffer)])
            assert stuck.wait(60)
            asked_s = time.monotonic()
            pools.publish([reader(1), reader(2, "docs")], docs=versions)
            driver.wait(task_id)
            assert time.monotonic() - asked_s < 20, "it was cut off, it did not run out"
            assert driver.tier.pop_found(task_id) == b"\0"
            buffer[:] = b"\xee" * BLOCK_BYTES
            proxy.fault = None
            go_on.set()
            until(lambda: load_right(driver, blocks(reader_space(2), 1)) == [1], driver.tier.state)
            assert load_right(driver, blocks(reader_space(1), 1)) == [0]
            assert buffer == b"\xee" * BLOCK_BYTES
        finally:
            go_on.set()
            proxy.close()

    def test_what_waits_for_a_worker_is_not_read_for_a_reader_that_left_meanwhile(
        self, tier: Driver, pools: PoolGate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        versions = (content(POOL, (1,)),)
        pools.publish([reader(1, "docs")], docs=versions)
        store(tier, blocks(POOL, 1))
        places = tier.tier._places  # as if the policy changed between the division and the worker
        divide = places.to_load

        def late(*arguments: Any) -> Any:
            divided = divide(*arguments)
            pools.publish([reader(1)], docs=versions)
            return divided

        monkeypatch.setattr(places, "to_load", late)
        assert load_right(tier, blocks(reader_space(1), 1)) == [0]
        assert tier.refused("not_a_reader") == 1


class TestEncryption:
    @pytest.fixture
    def sealed(self, start: Callable[..., Driver], redis_server: RedisProcess) -> Driver:
        driver = start(redis_server.port, encryption="Required", **PATIENT)
        driver.until("closed")
        return driver

    def test_a_pools_chunks_are_under_the_pools_key_and_readers_need_no_other(
        self, sealed: Driver, pools: PoolGate, redis_server: RedisProcess
    ) -> None:
        entries = [reader(n, "docs", keys=(OTHER,)) for n in READERS]
        pools.publish(entries, docs=(content(POOL, CHUNKS, keys=(FIRST,)),))
        store(sealed, blocks(POOL, *CHUNKS))
        for number in READERS:
            assert load_right(sealed, blocks(reader_space(number), *CHUNKS)) == [1, 1, 1]
        found = list(values(redis_server, POOL))
        assert len(found) == len(CHUNKS)
        assert not any(bytes([fill(number)]) * 16 in value for number in CHUNKS for _, value in found)

    def test_without_the_pools_key_readers_go_their_own_way(self, sealed: Driver, pools: PoolGate) -> None:
        docs = content(POOL, CHUNKS, keys=(FIRST,))
        pools.publish([reader(1, "docs", keys=(OTHER,))], docs=(docs,))
        store(sealed, blocks(POOL, *CHUNKS))
        pools.publish([reader(1, "docs", keys=(OTHER,))], docs=(content(POOL, CHUNKS),))
        own = blocks(reader_space(1), *CHUNKS)
        assert sealed.lookup(own) == [0, 0, 0]
        assert load_right(sealed, own) == [0, 0, 0]
        assert store(sealed, own).stored_bytes == len(CHUNKS) * BLOCK_BYTES
        assert load_right(sealed, own) == [1, 1, 1]
        assert sealed.tier.state().keyless == 1

    def test_a_pools_value_under_another_key_is_a_miss(self, sealed: Driver, pools: PoolGate) -> None:
        pools.publish([reader(1, "docs", keys=(OTHER,))], docs=(content(POOL, CHUNKS, keys=(FIRST,)),))
        store(sealed, blocks(POOL, *CHUNKS))
        pools.publish([reader(1, "docs", keys=(OTHER,))], docs=(content(POOL, CHUNKS, keys=(SECOND,)),))
        assert load_right(sealed, blocks(reader_space(1), *CHUNKS)) == [0, 0, 0]
