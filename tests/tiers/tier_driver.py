"""Waits for a tier's answers as LMCache does, without LMCache."""

from __future__ import annotations

import queue
import time
from typing import Any

from kvstrata.contract.store.block_value import value_bytes
from kvstrata.contract.store.redis_keys import parse_block_key
from kvstrata_sidecar.adapter.params import AdapterParams, TierParams
from kvstrata_sidecar.adapter.redis.tier import Tier
from kvstrata_sidecar.adapter.runtime import Runtime
from kvstrata_sidecar.adapter.tier.interface import Block
from kvstrata_sidecar.adapter.tier.tasks import StoreOutcome, Task
from tests.tiers.gate_stand_in import FINGERPRINT
from tests.tiers.redis_process import RedisProcess

BLOCK_BYTES = 64 * 1024
VALUE_BYTES = value_bytes(BLOCK_BYTES)
"""What a server keeps of a block, in plain."""


class Driver:
    """A tier under a runtime; calls return what LMCache would be told. `held` are the keys that a faster tier has."""

    def __init__(self, runtime: Runtime, params: AdapterParams, tier: TierParams, **options: Any) -> None:
        self._answered: queue.Queue[Task] = queue.Queue()
        self.runtime = runtime
        self.params = tier
        self.held: set[Any] = set()
        self.tier = Tier(
            params,
            tier,
            runtime.enforcement,
            self._answered.put,
            held_faster=lambda one: one.key in self.held,
            **options,
        )
        runtime.add(self.tier)

    def store(self, blocks: list[Block], fill: int = 1, content: bytes = b"") -> StoreOutcome:
        """Store blocks of `fill`, or of `content` over and over."""
        body = content * (BLOCK_BYTES // len(content)) if content else bytes([fill]) * BLOCK_BYTES
        views = [memoryview(body) for _ in blocks]
        task_id = self.tier.store(blocks, views)
        self.wait(task_id)
        return self.tier.pop_stores()[task_id]

    def lookup(self, blocks: list[Block]) -> list[int]:
        return self._found(self.tier.lookup(blocks))

    def load(self, blocks: list[Block]) -> tuple[list[int], list[bytearray]]:
        buffers = [bytearray(BLOCK_BYTES) for _ in blocks]
        hits = self._found(self.tier.load(blocks, [memoryview(buffer) for buffer in buffers]))
        return hits, buffers

    def until(self, breaker: str, timeout_s: float = 60.0) -> str:
        """Wait until the breaker is in a state and return the tier's detail."""
        give_up_at_s = time.monotonic() + timeout_s
        while (state := self.tier.state()).breaker != breaker:
            assert time.monotonic() < give_up_at_s, state
            time.sleep(0.01)
        return state.detail

    def refused(self, reason: str) -> int:
        return self.tier.counters().get(f"refused_{reason}", 0)

    def _found(self, task_id: int) -> list[int]:
        self.wait(task_id)
        found = self.tier.pop_found(task_id)
        assert found is not None
        return list(found)

    def wait(self, task_id: int) -> None:
        assert self._answered.get(timeout=60).task_id == task_id


def block(keyspace: str, number: int = 1) -> Block:
    return Block(("key", keyspace, number), keyspace, 0x01000100, 0, bytes([number]) * 32, FINGERPRINT)


def spread(number: int) -> int:
    """A block number whose bucket differs from its neighbours'."""
    return (number * 16 + number // 16) % 256


def stored(server: RedisProcess) -> list[str]:
    """The names of all blocks in a server, committed or not; the index is left out."""
    names = (name.decode() for name in server.admin().scan_iter(count=1000))
    return sorted(name for name in names if parse_block_key(name) is not None)
