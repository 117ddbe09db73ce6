"""The memories that are compared: kvstrata's adapter before a Redis, a Redis that evicts by itself, and exact LRU.

All of them are asked for a prompt as an engine's connector asks: which of its first blocks are there, then for those;
missing blocks are stored.
"""

from __future__ import annotations

import queue
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import redis

from bench.adapter.stand import Redis
from bench.neighbours.workload import Prompt, chunk_hash
from e2e.cluster.progress import ClusterError
from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.store.block_value import value_bytes
from kvstrata_sidecar.adapter.params import AdapterParams, TierParams
from kvstrata_sidecar.adapter.redis.tier import Tier
from kvstrata_sidecar.adapter.runtime import Runtime, acquire, release
from kvstrata_sidecar.adapter.tier.interface import Block
from kvstrata_sidecar.adapter.tier.tasks import Task
from tests.tiers.gate_stand_in import DOMAIN, FINGERPRINT, IDENTITY, GateStandIn
from tests.tiers.sweeping import sweep

TIER = "shared"
BLOCK_BYTES = 4096
VALUE_BYTES = value_bytes(BLOCK_BYTES)
RANK = 0x01000100
ANSWER_TIMEOUT_S = 120.0
SWEEP_INTERVAL_S = 60.0
PATIENT_MS = 60_000
"""Hits must be the same on a busy machine: nothing is given up for being late."""


class Cache(Protocol):
    """A memory that keeps tenants' blocks."""

    def serve(self, prompt: Prompt) -> int:
        """Serve a prompt and keep its blocks; return how many of its first ones were there."""


class ExactLru:
    """One least-recently-used list of so many blocks, without a server: the ideal of a shared LRU."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[tuple[int, int], None] = OrderedDict()

    def serve(self, prompt: Prompt) -> int:
        """Serve a prompt."""
        keys = [(prompt.tenant, block) for block in prompt.blocks]
        hits = _leading(key in self._blocks for key in keys)
        for key in keys:
            self._blocks[key] = None
            self._blocks.move_to_end(key)
            if len(self._blocks) > self._capacity:
                self._blocks.popitem(last=False)
        return hits


class RedisLru:
    """A Redis with `allkeys-lru` and memory for so many blocks, used by SET and GET as LMCache's own client does."""

    AT_ONCE = 16

    def __init__(self, server: Redis, capacity_blocks: int) -> None:
        self._client = redis.Redis(port=server.port)
        self._value = bytes(VALUE_BYTES)
        # The server counts its own structures, too: it gets as much as so many blocks take it.
        for start in range(0, capacity_blocks, self.AT_ONCE):
            self._set([chunk_hash(-1, block) for block in range(start, min(start + self.AT_ONCE, capacity_blocks))])
        memory = self._client.info("memory")["used_memory"]
        self._client.config_set("maxmemory", memory)
        self._client.config_set("maxmemory-policy", "allkeys-lru")
        self._client.config_set("maxmemory-samples", 10)
        for start in range(0, capacity_blocks, self.AT_ONCE):
            self._client.unlink(*(chunk_hash(-1, block) for block in range(start, start + self.AT_ONCE)))

    def serve(self, prompt: Prompt) -> int:
        """Serve a prompt."""
        names = [chunk_hash(prompt.tenant, block) for block in prompt.blocks]
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.exists(name)
        hits = _leading(map(bool, pipeline.execute()))
        for start in range(0, hits, self.AT_ONCE):
            self._client.mget(names[start : min(start + self.AT_ONCE, hits)])
        for start in range(hits, len(names), self.AT_ONCE):
            self._set(names[start : start + self.AT_ONCE])
        return hits

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _set(self, names: Sequence[bytes]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.set(name, self._value)
        pipeline.execute()


class PolicyCache:
    """The policy adapter as a cache server uses it, below LMCache's interface, under budgets by tenants' numbers.

    Its clock goes as the trace's: between two prompts the adapter's second-by-second work is done once, and all scopes
    are swept each minute. The server's own clock, by which blocks are ordered, is the real one.
    """

    def __init__(
        self, directory: Path, server: Redis, capacity_blocks: int, budgets: Mapping[int, EnforcedBudget]
    ) -> None:
        directory.mkdir()
        self._gate = GateStandIn(directory)
        self._ahead_s = self._at_s = 0.0
        self._sweep_at_s = SWEEP_INTERVAL_S
        self._answered: queue.Queue[Task] = queue.Queue()
        endpoint = {"host": "127.0.0.1", "port": server.port}
        patience = dict.fromkeys(
            ("io_timeout_ms", "lookup_deadline_ms", "load_deadline_ms", "store_deadline_ms"), PATIENT_MS
        )
        tier = TierParams.from_json(
            # One connection for blocks: they are stored in their order, and so the next replay finds the same.
            {"name": TIER, "endpoints": [endpoint], "capacity_bytes": capacity_blocks * VALUE_BYTES, "workers": 1}
            | patience
        )
        params = AdapterParams(DOMAIN, IDENTITY, tier, self._gate.policy_dir, self._gate.link_dir)
        self._runtime: Runtime = acquire(params)
        self._tier = Tier(params, tier, self._runtime.enforcement, self._answered.put, self._clock)
        self._runtime.add(self._tier)
        self._keyspaces = {tenant: f"{tenant + 1:032x}" for tenant in budgets}
        self._settle(budgets)

    def serve(self, prompt: Prompt) -> int:
        """Serve a prompt, at its time."""
        self._pass_time(prompt.at_s)
        keyspace = self._keyspaces[prompt.tenant]
        blocks = [
            Block((prompt.tenant, block), keyspace, RANK, 0, chunk_hash(prompt.tenant, block), FINGERPRINT)
            for block in prompt.blocks
        ]
        hits = _leading(map(bool, self._found(self._tier.lookup(blocks))))
        if hits:
            found = self._found(self._tier.load(blocks[:hits], [memoryview(bytearray(BLOCK_BYTES))] * hits))
            if sum(found) < hits:
                raise ClusterError(f"{hits - sum(found)} blocks were found and could not be loaded")
        if blocks[hits:]:
            self._wait(self._tier.store(blocks[hits:], [memoryview(bytes(BLOCK_BYTES))] * len(blocks[hits:])))
            self._tier.pop_stores()
        return hits

    def counters(self) -> dict[str, int]:
        """Return the adapter's counters."""
        return self._tier.counters()

    def close(self) -> None:
        """End its threads."""
        self._tier.close()
        release(self._runtime)

    def _clock(self) -> float:
        return time.monotonic() + self._ahead_s

    def _pass_time(self, at_s: float) -> None:
        passed_s, self._at_s = at_s - self._at_s, at_s
        if passed_s <= 0:
            return
        self._ahead_s += passed_s
        self._tier._sweeper.turn()
        if at_s >= self._sweep_at_s:
            self._sweep_at_s = at_s + SWEEP_INTERVAL_S
            for keyspace in self._keyspaces.values():
                sweep(self._tier, keyspace, audit=False)

    def _settle(self, budgets: Mapping[int, EnforcedBudget]) -> None:
        give_up_at_s = time.monotonic() + ANSWER_TIMEOUT_S
        while self._tier.state().breaker != "closed":
            self._require_time(give_up_at_s)
        self._gate.enforce(
            {self._keyspaces[tenant]: (budget,) for tenant, budget in budgets.items()}, on_stale="ServeStale"
        )
        while self._tier.state().settling:
            self._require_time(give_up_at_s)

    def _require_time(self, give_up_at_s: float) -> None:
        if time.monotonic() > give_up_at_s:
            raise ClusterError(f"the tier did not come into use: {self._tier.state()}")
        time.sleep(0.01)

    def _found(self, task_id: int) -> bytes:
        self._wait(task_id)
        return self._tier.pop_found(task_id) or b""

    def _wait(self, task_id: int) -> None:
        while self._answered.get(timeout=ANSWER_TIMEOUT_S).task_id != task_id:
            pass


def _leading(there: Iterable[bool]) -> int:
    hits = 0
    for one in there:
        if not one:
            break
        hits += 1
    return hits
