"""Entries as stores leave them, made by the servers themselves, only to be deleted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstrata.contract.store.redis_keys import BUCKETS, bucket_prefix
from kvstrata_sidecar.adapter.redis.client.slots import slot_of
from tests.tiers.gate_stand_in import DOMAIN, RESOLVED

ENTRIES_AT_ONCE = 500
LIFE_MS = 3_600_000

_FILL = """
local base, first, count, size = string.sub(KEYS[1], 1, -3), tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local value, clock = string.rep('x', tonumber(size)), redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
for number = first, first + count - 1 do
  local member = ARGV[4] .. redis.sha1hex(base .. number) .. string.format('%024d', number)
  redis.call('SET', base .. member, value, 'PX', ARGV[5])
  redis.call('ZADD', base .. '#x', string.format('%.0f', now + ARGV[5]), member)
  redis.call('ZADD', base .. '#a', string.format('%.0f', now), member)
  redis.call('HSET', base .. '#m', member, size .. ':' .. string.format('%.0f', now))
end
local used = redis.call('HINCRBY', KEYS[1], 'used', string.format('%.0f', count * tonumber(size)))
redis.call('HSET', KEYS[1], 'held', '0', 'lease', used, 'retention', ARGV[5], 'version', clock[1] .. clock[2])
for _, key in ipairs({KEYS[1], base .. '#x', base .. '#a', base .. '#m'}) do
  redis.call('PEXPIREAT', key, string.format('%.0f', now + 2 * ARGV[5]))
end
"""
"""Creates the entries that `reserve`, SET and `commit` leave of a budgeted scope's blocks; KEYS[1]: bucket state."""


@dataclass(frozen=True, slots=True)
class Filling:
    """So many entries of so many bytes, spread evenly over the buckets of these keyspaces."""

    keyspaces: tuple[str, ...]
    entries: int
    value_bytes: int

    @classmethod
    def of(cls, label: str, keyspaces: int, entries: int, value_bytes: int) -> Filling:
        """Return one whose keyspaces' names begin with a hexadecimal digit of one's choice."""
        names = tuple(f"{label}{number:031x}" for number in range(keyspaces))
        return cls(names, entries // (BUCKETS * keyspaces) * BUCKETS * keyspaces, value_bytes)

    def put(self, clients: Sequence[Any], owners: Sequence[int]) -> None:
        """Store all of it: `clients[owners[slot]]` is a client of the server that has a slot."""
        scripts = [client.script_load(_FILL) for client in clients]
        pipelines = [client.pipeline(transaction=False) for client in clients]
        names = f"{RESOLVED}:01000100:0:"
        each = self.entries // (BUCKETS * len(self.keyspaces))
        for first in range(0, each, ENTRIES_AT_ONCE):
            for keyspace in self.keyspaces:
                for bucket in range(BUCKETS):
                    base = bucket_prefix(DOMAIN, keyspace, bucket)
                    owner = owners[slot_of(base.encode())]
                    count = min(ENTRIES_AT_ONCE, each - first)
                    pipelines[owner].evalsha(
                        scripts[owner], 1, f"{base}:#s", first, count, self.value_bytes, names, LIFE_MS
                    )
            for pipeline in pipelines:
                pipeline.execute()
