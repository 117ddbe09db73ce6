"""A process that stores into one keyspace as fast as it can until it is killed; tells its stores on standard output."""

from __future__ import annotations

import queue
import random
import sys
import time

from kvstrata.contract.policy.bundle import EnforcedBudget, Rules
from kvstrata.contract.policy.cache_view import CacheView
from kvstrata_sidecar.adapter.params import AdapterParams, Endpoint, TierParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, boottime_ns
from kvstrata_sidecar.adapter.redis.tier import Tier
from kvstrata_sidecar.adapter.tier.interface import Block
from kvstrata_sidecar.adapter.tier.tasks import Task
from tests.tiers.gate_stand_in import DOMAIN, FINGERPRINT, IDENTITY

BLOCKS = 3000
BATCH = 4


def run(port: int, keyspace: str, limit: int, window_ms: int, seed: int, scale: int) -> None:
    """Store random blocks of a fixed population; a block's size, up to 256 times `scale`, follows from its name."""
    chance = random.Random(seed)
    enforcement = Enforcement(DOMAIN, lambda reopen=False: boottime_ns())
    budgets = (EnforcedBudget("shared", limit_bytes=limit or None),)
    enforcement.apply(CacheView(DOMAIN, 1, 1, Rules(), {keyspace: budgets}))
    # Patient, because no store may fail for want of time: a busy machine is no error.
    tier_params = TierParams("shared", (Endpoint("127.0.0.1", port),), workers=2, io_timeout_ms=10_000)
    params = AdapterParams(DOMAIN, IDENTITY, tier_params)
    answered: queue.Queue[Task] = queue.Queue()
    tier = Tier(params, tier_params, enforcement, answered.put, window_ms=window_ms, sweep_interval_s=3600)
    while tier.state().breaker != "closed":
        time.sleep(0.01)
    while True:
        numbers = [chance.randrange(BLOCKS) for _ in range(BATCH)]
        blocks = [population(keyspace, number) for number in numbers]
        tier.store(blocks, [memoryview(bytes(scale * (1 + block.chunk_hash[1]))) for block in blocks])
        answered.get(timeout=60)
        tier.pop_stores()
        counts = tier.counters()
        print(*(counts.get(name, 0) for name in ("stored", "refused", "errors", "evicted_bytes")), flush=True)


def population(keyspace: str, number: int) -> Block:
    """The block of a number."""
    return Block(number, keyspace, 0, 0, random.Random(number).randbytes(32), FINGERPRINT)


if __name__ == "__main__":
    port, keyspace, *numbers = sys.argv[1:]
    run(int(port), keyspace, *map(int, numbers))
