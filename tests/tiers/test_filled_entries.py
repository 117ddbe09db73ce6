"""What the benchmark of erasures fills a tier with is, to the product, what stores leave."""

from __future__ import annotations

from collections.abc import Callable

from bench.erase.fill import Filling
from kvstrata.contract.keys import BUCKETS, bucket_prefix
from kvstrata.contract.receiptfacts import Amount
from kvstrata_sidecar.adapter.protocol import call, read_list, state_key
from kvstrata_sidecar.adapter.resp import Connection
from kvstrata_sidecar.adapter.slots import SLOTS
from tests.support.redis_binary import needs_redis
from tests.tiers.eraser import erase, look, order
from tests.tiers.gate_stand_in import DOMAIN
from tests.tiers.redis_process import RedisProcess

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
        [call("audit", state, 0, 100, read=lambda reply: read_list(reply, 3)) for state in states]
    ):
        assert [int(one) for one in answer] == [0, 0, 0], "no entry lacks its value"
    for answer in connection.ask(
        [call("recount", state, 1000, 1, read=lambda reply: read_list(reply, 4)) for state in states]
    ):
        assert (answer[0], [int(drift) for drift in answer[1:]]) == (b"ok", [0, 0, 0])
    assert erase(order(redis_server.port, *filling.keyspaces)).sums[:2] == (whole, whole)
    assert look(redis_server.port, *filling.keyspaces).empty
