"""What the benchmark of erasures fills a tier with is, to the product, what stores leave."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from bench.erase.fill import Filling
from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.receipt.facts import Amount
from kvstrata.contract.store.redis_keys import BUCKETS, bucket_prefix
from kvstrata_sidecar.adapter.redis.client.commands import call, reads_numbers, reads_status, state_key
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.slots import SLOTS
from tests.support.redis_binary import needs_redis
from tests.tiers.eraser import erase, look, order
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.sweeping import stop
from tests.tiers.tier_driver import Driver, block

pytestmark = needs_redis


def test_filled_entries_add_up_have_their_values_and_are_deleted(
    redis_server: RedisProcess, connect_to: Callable[..., Connection]
) -> None:
    filling = Filling.of("a", 2, 4 * BUCKETS * 2, 300)
    filling.put([redis_server.admin()], [0] * SLOTS)
    whole = Amount(filling.entries, filling.entries * 300)
    assert filling.entries == 128
    seen = look(redis_server.port, *filling.keyspaces).nodes[0]
    assert (seen.values, seen.value_bytes) == (whole.keys, whole.bytes)
    states = [
        state_key(bucket_prefix(DOMAIN, keyspace, bucket).encode())
        for keyspace in filling.keyspaces
        for bucket in range(BUCKETS)
    ]
    connection = connect_to(redis_server.port)
    for answer in connection.ask(
        [call("audit", state, reads_numbers(4), cursor=0, count=100, encrypts=False) for state in states]
    ):
        assert answer == [0, 0, 0, 0], "no entry lacks its value"
    for answer in connection.ask([call("recount", state, reads_status(3), step=1000) for state in states]):
        assert answer == ("ok", [0, 0, 0])
    assert erase(order(redis_server.port, *filling.keyspaces)).sums[:2] == (whole, whole)
    assert look(redis_server.port, *filling.keyspaces).empty


def test_filled_entries_look_as_those_of_stored_blocks_do(
    start: Callable[..., Driver], gate: GateStandIn, redis_server: RedisProcess
) -> None:
    driver = start(redis_server.port, capacity_bytes=1 << 30)
    driver.until("closed")
    stop(driver.tier)
    gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", limit_bytes=64 << 20),))
    driver.store([block(KEYSPACE_A, number) for number in range(4)])
    filling = Filling.of("a", 1, 4 * BUCKETS, 300)
    filling.put([redis_server.admin()], [0] * SLOTS)
    stored = layout(redis_server, bucket_prefix(DOMAIN, KEYSPACE_A, 0))
    assert len(stored) == 4 + 4, "four blocks, their state and three indexes"
    assert layout(redis_server, bucket_prefix(DOMAIN, filling.keyspaces[0], 0)) == stored


def layout(server: RedisProcess, bucket: str) -> list[tuple[Any, ...]]:
    """What keys of a bucket are like, whatever the numbers and blocks in them: names, kinds, forms, what is in them."""
    admin = server.admin()
    found = []
    for key in admin.scan_iter(bucket + ":*", count=1000):
        kind, inside = admin.type(key), set()
        if kind == b"hash":
            inside = {(alike(name), alike(value)) for name, value in admin.hgetall(key).items()}
        elif kind == b"zset":
            inside = {alike(member) for member in admin.zrange(key, 0, -1)}
        name = alike(key.removeprefix(bucket.encode() + b":"))
        found.append((name, kind, admin.object("encoding", key), admin.pttl(key) > 0, sorted(inside)))
    return sorted(found)


def alike(text: bytes) -> bytes:
    return re.sub(rb"\d+", b"0", re.sub(rb"[0-9a-f]{64}", b"chunk", text))
