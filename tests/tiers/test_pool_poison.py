"""Nothing that anybody but the warmer stores is ever served to a reader of a pool: on a real Redis."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from kvstrata.contract.store.block_value import HEADER_BYTES, TAG_BYTES
from kvstrata.contract.store.redis_keys import BlockKey, parse_block_key, revoked_key
from kvstrata_sidecar.adapter.tier.tasks import StoreOutcome
from tests.tiers.books import Books
from tests.tiers.gate_stand_in import DOMAIN, IDENTITY
from tests.tiers.pool_blocks import CHUNKS, PATIENT, blocks, fill, load_right, places, store, values
from tests.tiers.pool_gate import OLD_POOL, POOL, PoolGate, content, reader, reader_space
from tests.tiers.redis_cluster import until
from tests.tiers.redis_process import RedisProcess
from tests.tiers.tier_driver import BLOCK_BYTES, Driver, stored

pytestmark = [pytest.mark.redis, pytest.mark.claim("no action of a tenant changes a pool's bytes")]


@pytest.fixture
def tier(start: Callable[..., Driver], redis_server: RedisProcess) -> Driver:
    driver = start(redis_server.port, **PATIENT)
    driver.until("closed")
    return driver


class TestPoison:
    """Nothing that anybody but the warmer stores is ever served to a reader of the pool."""

    def test_the_same_tokens_of_a_reader_stay_the_readers(self, tier: Driver, pools: PoolGate) -> None:
        entries = [reader(1, "docs"), reader(2, "docs")]
        pools.publish(entries, docs=(content(POOL, CHUNKS),))
        store(tier, blocks(reader_space(1), *CHUNKS), lambda _: 251)
        assert tier.lookup(blocks(reader_space(2), *CHUNKS)) == [0, 0, 0]
        store(tier, blocks(POOL, *CHUNKS))
        for number in (1, 2):
            assert load_right(tier, blocks(reader_space(number), *CHUNKS)) == [1, 1, 1]

    def test_under_a_forged_salt_only_the_pools_own_chunks_are_written_and_in_its_own_tiers(
        self, tier: Driver, pools: PoolGate, redis_server: RedisProcess
    ) -> None:
        elsewhere = content(OLD_POOL, (5,))
        object.__setattr__(elsewhere, "tiers", ("slow",))
        pools.publish([reader(1, "docs")], docs=(content(POOL, CHUNKS),), more=(elsewhere,))
        assert store(tier, [*blocks(POOL, 2, 3), *blocks(OLD_POOL, 5), *blocks("d" * 32, 1)]) == StoreOutcome(True, 0)
        assert tier.refused("not_in_pool") == 3
        assert tier.refused("unknown_keyspace") == 1
        assert places(redis_server) == []

    def test_another_models_block_of_the_same_tokens_is_another_block(
        self, tier: Driver, pools: PoolGate, redis_server: RedisProcess
    ) -> None:
        pools.publish([reader(1, "docs")], docs=(content(POOL, CHUNKS),))
        store(tier, blocks(POOL, *CHUNKS))
        for name in stored(redis_server):
            redis_server.admin().rename(name, name.replace(IDENTITY, "2" * 16))
        assert load_right(tier, blocks(reader_space(1), *CHUNKS)) == [0, 0, 0]
        other = [one._replace(rank=0x02000200) for one in blocks(reader_space(1), *CHUNKS)]
        assert tier.lookup(other) == [0, 0, 0]

    def test_a_value_that_somebody_copied_into_a_pool_is_a_miss(
        self, tier: Driver, pools: PoolGate, redis_server: RedisProcess
    ) -> None:
        pools.publish([reader(1), reader(2)], docs=(content(POOL, CHUNKS),))
        store(tier, blocks(POOL, *CHUNKS))
        store(tier, blocks(reader_space(2), *CHUNKS), lambda _: 251)
        pools.publish([reader(1, "docs"), reader(2)], docs=(content(POOL, CHUNKS),))
        admin = redis_server.admin()
        for name in stored(redis_server):
            key = parse_block_key(name)
            if key is not None and key.keyspace == reader_space(2):
                pool = str(BlockKey(DOMAIN, POOL, key.identity, key.rank, key.group, key.chunk_hash))
                admin.copy(name, pool, replace=True)
        assert load_right(tier, blocks(reader_space(1), *CHUNKS)) == [0, 0, 0]
        assert tier.tier.counters()["unreadable"] == len(CHUNKS)

    def test_a_pools_keyspace_that_was_revoked_is_not_read(
        self, tier: Driver, pools: PoolGate, redis_server: RedisProcess
    ) -> None:
        redis_server.admin().zadd(revoked_key(DOMAIN), {POOL: 1})
        pools.publish([reader(1, "docs")], docs=(content(POOL, CHUNKS),))
        assert store(tier, blocks(POOL, *CHUNKS)) == StoreOutcome(True, 0)
        assert tier.lookup(blocks(reader_space(1), *CHUNKS)) == [0, 0, 0]
        store(tier, blocks(reader_space(1), *CHUNKS))
        assert load_right(tier, blocks(reader_space(1), *CHUNKS)) == [1, 1, 1]

    @pytest.mark.parametrize("seed", range(3))
    def test_whatever_readers_and_the_warmer_do_at_once_the_pools_bytes_never_change(
        self, start: Callable[..., Driver], pools: PoolGate, redis_server: RedisProcess, seed: int
    ) -> None:
        """The warmer stores what is right. Readers store, look up (which discards), load and lose their right."""
        drivers = [start(redis_server.port, **PATIENT, workers=2) for _ in range(3)]
        for driver in drivers:
            driver.until("closed")
        versions = {"docs": (content(POOL, CHUNKS),)}
        pools.publish([reader(1, "docs"), reader(2, "docs")], **versions)
        over, wrong = threading.Event(), list[Any]()

        def warm(driver: Driver) -> None:
            while not over.is_set():
                store(driver, blocks(POOL, *CHUNKS))
                driver.tier.delete(blocks(POOL, CHUNKS[0]))

        def read(driver: Driver, number: int, random: Random) -> None:
            own = blocks(reader_space(number), *CHUNKS)
            poison = 250 + number
            while not over.is_set():
                step = random.randrange(3)
                if step == 0:
                    store(driver, own, lambda _: poison)
                elif step == 1:
                    driver.lookup(own)
                else:
                    hits, buffers = driver.load(own)
                    for one, hit, buffer in zip(own, hits, buffers, strict=True):
                        if hit and set(buffer) not in ({fill(one.chunk_hash[0])}, {poison}):
                            wrong.append((number, one.chunk_hash[0], set(buffer)))

        jobs = [
            threading.Thread(target=warm, args=(drivers[0],)),
            threading.Thread(target=read, args=(drivers[1], 1, Random(seed))),
            threading.Thread(target=read, args=(drivers[2], 2, Random(-seed - 1))),
        ]
        for job in jobs:
            job.start()
        try:
            for turn in range(12):
                time.sleep(0.05)
                pools.publish([reader(1, *(["docs"] * (turn % 2))), reader(2, "docs")], **versions)
                for _, value in values(redis_server, POOL):
                    body = value[HEADER_BYTES:-TAG_BYTES]
                    assert len(body) == BLOCK_BYTES
                    assert len(set(body)) == 1
                    assert body[0] < 250
        finally:
            over.set()
            for job in jobs:
                job.join()
        assert wrong == []
        pools.publish([reader(1), reader(2), reader(3, "docs")], **versions)
        store(drivers[0], blocks(POOL, *CHUNKS))
        assert load_right(drivers[0], blocks(reader_space(3), *CHUNKS)) == [1, 1, 1]
        for keyspace in (POOL, reader_space(1), reader_space(2)):
            books = Books(redis_server, keyspace)
            # A store that took long while its right ended was cut off: its reservation is given back soon.
            until(lambda: not books.reservations())  # noqa: B023
            books.assert_consistent()
