"""Readers of a pool on a real Redis Cluster, where its chunks are on several servers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstrata_sidecar.adapter.tier.tasks import StoreOutcome
from tests.tiers.pool_blocks import PATIENT, READERS, blocks, load_right, scoped, store
from tests.tiers.pool_gate import POOL, PoolGate, content, reader, reader_space
from tests.tiers.redis_cluster import RedisCluster, until
from tests.tiers.tier_driver import Driver
from tests.tiers.tier_on_cluster import all_closed

pytestmark = pytest.mark.redis


class TestACluster:
    @pytest.fixture
    def spread(self, start: Callable[..., Driver], cluster: RedisCluster) -> Driver:
        driver = start(cluster.nodes[0].port, cluster=True, workers=2, **PATIENT)
        all_closed(driver, len(cluster.primaries))
        return driver

    NUMBERS = tuple(range(0, 250, 11))

    def test_readers_share_one_copy_and_copies_of_before_go_wherever_both_are(
        self, spread: Driver, pools: PoolGate
    ) -> None:
        docs = (content(POOL, self.NUMBERS),)
        pools.publish([reader(n) for n in READERS], docs=docs)
        store(spread, blocks(POOL, *self.NUMBERS))
        store(spread, blocks(reader_space(1), *self.NUMBERS))
        pools.publish([reader(n, "docs") for n in READERS], docs=docs)
        for number in READERS:
            prompt = blocks(reader_space(number), *self.NUMBERS)
            assert sum(spread.lookup(prompt)) == len(self.NUMBERS)
            assert sum(load_right(spread, prompt)) == len(self.NUMBERS)
            assert store(spread, prompt) == StoreOutcome(True, 0)
            counts = scoped(spread, number)
            assert (counts["lookup_hits"], counts.get("lookup_misses", 0)) == (len(self.NUMBERS), 0)
            assert (counts["pool_hits"], counts["stores_in_pool"]) == (len(self.NUMBERS), len(self.NUMBERS))
        until(lambda: scoped(spread, 1).get("copies_discarded") == len(self.NUMBERS), lambda: scoped(spread, 1))
        pools.publish([reader(1)], docs=docs)
        assert sum(spread.lookup(blocks(reader_space(1), *self.NUMBERS))) == 0

    def test_while_a_server_is_away_its_chunks_are_read_from_readers_own_copies_and_the_others_from_the_pool(
        self, spread: Driver, pools: PoolGate, cluster: RedisCluster
    ) -> None:
        docs = (content(POOL, self.NUMBERS),)
        pools.publish([reader(1)], docs=docs)
        store(spread, blocks(POOL, *self.NUMBERS))
        store(spread, blocks(reader_space(1), *self.NUMBERS))
        cluster.primaries[-1].kill()
        prompt = blocks(reader_space(1), *self.NUMBERS)

        def noticed() -> bool:
            spread.lookup(prompt)
            return spread.tier.state().nodes_away == 1

        until(noticed, spread.tier.state)
        pools.publish([reader(1, "docs")], docs=docs)
        hits = load_right(spread, prompt)
        counts = scoped(spread, 1)
        assert 0 < counts["pool_hits"] < counts["loaded"] == sum(hits)
