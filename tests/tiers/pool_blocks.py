"""Blocks of a prefix pool and of its readers in a shared tier, and what is there of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvstrata.contract.store.redis_keys import parse_block_key
from kvstrata_sidecar.adapter.tier.interface import Block
from kvstrata_sidecar.adapter.tier.tasks import StoreOutcome
from tests.tiers.pool_gate import reader_space
from tests.tiers.redis_process import RedisProcess
from tests.tiers.tier_driver import BLOCK_BYTES, Driver, block, stored

READERS = range(1, 9)
CHUNKS = (1, 77, 200)
PATIENT = {"io_timeout_ms": 5000, "lookup_deadline_ms": 10_000, "load_deadline_ms": 10_000, "store_deadline_ms": 10_000}
"""For tests that say nothing about time: a busy machine makes no misses."""


def blocks(keyspace: str, *numbers: int) -> list[Block]:
    return [block(keyspace, number) for number in numbers]


def fill(number: int) -> int:
    return 1 + number % 250


def store(driver: Driver, some: list[Block], fill_of: Callable[[int], int] = fill) -> StoreOutcome:
    """Store blocks, each filled with what its number says."""
    views = [memoryview(bytes([fill_of(one.chunk_hash[0])]) * BLOCK_BYTES) for one in some]
    task_id = driver.tier.store(some, views)
    driver.wait(task_id)
    return driver.tier.pop_stores()[task_id]


def load_right(driver: Driver, some: list[Block]) -> list[int]:
    """Load blocks; what hits has to hold what its number says, and what misses nothing."""
    hits, buffers = driver.load(some)
    for one, hit, buffer in zip(some, hits, buffers, strict=True):
        assert buffer == bytes([fill(one.chunk_hash[0]) if hit else 0]) * BLOCK_BYTES
    return hits


def scoped(driver: Driver, number: int) -> dict[str, int]:
    return dict(driver.tier.counts.by_scope().get(reader_space(number)[:12], {}))


def places(server: RedisProcess) -> list[tuple[str, int]]:
    """Keyspace and chunk of every value in a server."""
    keys = [parse_block_key(name) for name in stored(server)]
    return sorted((key.keyspace, key.chunk_hash[0]) for key in keys if key is not None)


def values(server: RedisProcess, keyspace: str) -> Iterator[tuple[str, bytes]]:
    """The values of a keyspace that are there and committed or not."""
    for name in stored(server):
        key = parse_block_key(name)
        if key is not None and key.keyspace == keyspace:
            value = server.admin().get(name)
            if isinstance(value, bytes):
                yield name, value
