"""What a faster tier holds is not looked for in a slower one, whose order learns of the use all the same."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.store.redis_keys import BUCKETS, bucket_prefix
from kvstrata_sidecar.adapter.redis.recent import Recent
from tests.support.redis_binary import needs_redis
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, KEYSPACE_UNKNOWN
from tests.tiers.redis_process import RedisProcess
from tests.tiers.tier_driver import Driver, block, spread

pytestmark = needs_redis

INTERVAL_S = 60.0
LIMIT = 5


class TestHints:
    @given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 40)), max_size=60))
    def test_a_block_is_due_once_in_an_interval_and_never_are_more_than_the_limit(
        self, uses: list[tuple[int, float]]
    ) -> None:
        now_s = 0.0
        hints: Recent[int, None] = Recent(lambda: now_s, INTERVAL_S, LIMIT)
        told: list[tuple[int, float]] = []
        for key, later_s in uses:
            now_s += later_s
            recent = [one for one, told_s in told if now_s < told_s + INTERVAL_S]
            due = hints.put_new(key, None)
            assert due is (key not in recent and len(recent) < LIMIT)
            if due:
                told.append((key, now_s))


class TestATier:
    def test_it_answers_no_for_what_a_faster_tier_holds_and_asks_for_the_rest(self, driver: Driver) -> None:
        blocks = [block(KEYSPACE_A, spread(number)) for number in range(6)]
        driver.store(blocks)
        driver.held |= {one.key for one in blocks[:4]}
        assert driver.lookup(blocks) == [0, 0, 0, 0, 1, 1]
        assert driver.tier.counts.by_scope()[KEYSPACE_A[:12]]["shadowed"] == 4
        assert driver.tier.counters()["lookup_hits"] == 2

    def test_who_needs_nothing_of_it_does_not_wait_for_it(self, driver: Driver, redis_server: RedisProcess) -> None:
        blocks = [block(KEYSPACE_A, spread(number)) for number in range(6)]
        driver.held |= {one.key for one in blocks}
        redis_server.freeze()
        try:
            assert driver.lookup(blocks) == [0] * 6
        finally:
            redis_server.thaw()
        assert "late_lookup" not in driver.tier.counters()
        assert "lookup" not in driver.tier.counts.latencies(), "there was no question"

    def test_its_order_learns_of_the_use_once_in_a_while(self, driver: Driver, redis_server: RedisProcess) -> None:
        blocks = [block(KEYSPACE_A, spread(number)) for number in range(6)]
        driver.store(blocks)
        before = last_uses(redis_server)
        driver.held |= {one.key for one in blocks[:4]}
        for _ in range(5):
            driver.lookup(blocks)
        assert driver.tier.counters()["hints"] == 4
        give_up_at_s = time.monotonic() + 60
        while sum(before[name] < moment for name, moment in last_uses(redis_server).items()) < 4:
            assert time.monotonic() < give_up_at_s
            time.sleep(0.02)
        assert sum(before[name] == moment for name, moment in last_uses(redis_server).items()) == 2, (
            "a hit is no use yet"
        )

    def test_what_the_policy_refuses_is_no_use(self, driver: Driver) -> None:
        one = block(KEYSPACE_UNKNOWN, 1)
        driver.held.add(one.key)
        driver.lookup([one])
        assert "shadowed" not in driver.tier.counters()
        assert driver.refused("unknown_keyspace") == 1

    def test_it_stands_behind_memory_and_the_tiers_before_it_alone(self, driver: Driver) -> None:
        in_memory, before, behind = (block(KEYSPACE_A, number) for number in range(3))
        runtime: Any = driver.runtime
        runtime.add(earlier := Mock(holds=lambda _, one: one == before))
        held_faster = runtime.held_faster()
        runtime.add(later := Mock(holds=lambda _, one: one == behind))
        assert [held_faster(one) for one in (in_memory, before, behind)] == [False, True, False]
        runtime.memory = Mock(holds=lambda _, one: one == in_memory)
        assert [held_faster(one) for one in (in_memory, before, behind)] == [True, True, False]
        runtime.memory = None
        runtime.remove(earlier)
        runtime.remove(later)


def last_uses(server: RedisProcess) -> dict[bytes, float]:
    admin = server.admin()
    keys = (bucket_prefix(DOMAIN, KEYSPACE_A, bucket) + ":#a" for bucket in range(BUCKETS))
    return {member: score for key in keys for member, score in admin.zrange(key, 0, -1, withscores=True)}
