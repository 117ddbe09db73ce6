"""A pod's shared tier without its sweeper's thread: a test says what it stores and when it takes a turn."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Iterable, Mapping

from kvstrata.contract.policy.bundle import EnforcedBudget, Rules
from kvstrata.contract.policy.cache_view import CacheView
from kvstrata.contract.store.block_value import value_bytes
from kvstrata_sidecar.adapter.params import AdapterParams, Endpoint, TierParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, boottime_ns
from kvstrata_sidecar.adapter.redis.tier import Tier
from kvstrata_sidecar.adapter.tier.interface import Block
from kvstrata_sidecar.adapter.tier.tasks import Task
from tests.tiers.gate_stand_in import DOMAIN, FINGERPRINT, IDENTITY
from tests.tiers.redis_process import RedisProcess
from tests.tiers.sweeping import make_due, stop


class SharingPod:
    """Stores blocks of one size into a tier whose capacity is that of a number of blocks."""

    def __init__(self, server: RedisProcess, capacity_blocks: int, block_bytes: int) -> None:
        self.fresh = True
        self.block_bytes = block_bytes
        self.value_bytes = value_bytes(block_bytes)
        self.enforcement = Enforcement(DOMAIN, lambda reopen=False: boottime_ns() if self.fresh else 0)
        tier = TierParams(
            "shared", (Endpoint("127.0.0.1", server.port),), workers=1,
            capacity_bytes=capacity_blocks * self.value_bytes, io_timeout_ms=5_000, store_deadline_ms=9_000,
        )  # fmt: skip
        self._answered: queue.Queue[Task] = queue.Queue()
        self.tier = Tier(AdapterParams(DOMAIN, IDENTITY, tier), tier, self.enforcement, self._answered.put)
        self.sweeper = self.tier._sweeper
        stop(self.tier)
        while self.tier.state().breaker != "closed":
            time.sleep(0.01)

    def enforce(self, guaranteed: Mapping[str, int], revision: int, retention_s: int = 3600) -> None:
        """Put a policy in force that guarantees numbers of blocks."""
        budgets = {
            keyspace: (EnforcedBudget("shared", guaranteed_bytes=blocks * self.value_bytes, retention_s=retention_s),)
            for keyspace, blocks in guaranteed.items()
        }
        self.enforcement.apply(CacheView(DOMAIN, revision, 1, Rules(), budgets))

    def store(self, keyspace: str, numbers: Iterable[int]) -> int:
        """Store blocks one after the other; return how many were taken."""
        return sum(self._store(any_block(keyspace, number)) for number in numbers)

    def _store(self, block: Block) -> bool:
        task_id = self.tier.store([block], [memoryview(bytes(self.block_bytes))])
        assert self._answered.get(timeout=60).task_id == task_id
        return self.tier.pop_stores()[task_id].stored_bytes > 0

    def turn(self, *, sweep: bool = False) -> None:
        """Do what is due, with `sweep` also what is once an interval."""
        make_due(self.tier, 0.0 if sweep else time.monotonic() + 60)
        while self.sweeper.turn():
            make_due(self.tier, time.monotonic() + 60)

    def evicted(self) -> int:
        """How many blocks of scopes in the policy it evicted."""
        return self.tier.counters().get("evicted", 0)

    def departed(self) -> int:
        """How many blocks it evicted that nobody could read."""
        return self.tier.counters().get("departed_evicted", 0)

    def close(self) -> None:
        """End its threads."""
        self.tier.close()


def any_block(keyspace: str, number: int) -> Block:
    """The block of a number, of which there are as many as one wants; they spread over all buckets."""
    return Block((keyspace, number), keyspace, 0, 0, random.Random(number).randbytes(32), FINGERPRINT)
