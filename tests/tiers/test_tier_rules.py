"""Servers, capacity and retention of a tier follow the policy, without another cache server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.contract.policy.tiers import Server, TierRules
from kvstrata_sidecar.adapter.redis.client.nodes import UNNAMED
from tests.support.redis_binary import needs_redis
from tests.tiers.books import Books
from tests.tiers.gate_stand_in import KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.server_kinds import ServerKind
from tests.tiers.tier_driver import VALUE_BYTES, Driver, block, spread, stored

pytestmark = needs_redis


@pytest.fixture
def other_server(tmp_path: Path, server_kind: ServerKind) -> Iterator[RedisProcess]:
    directory = tmp_path / "other"
    directory.mkdir()
    server = RedisProcess(directory, command=server_kind.command())
    server.start()
    yield server
    server.kill()


@pytest.fixture
def unnamed(start: Callable[..., Driver]) -> Driver:
    """A tier whose parameters have no servers."""
    return start(0, endpoints=())


def enforce(gate: GateStandIn, *tiers: TierRules) -> int:
    """Put a policy of two scopes with these tiers in force and return the acknowledged revision."""
    return gate.enforce({KEYSPACE_A: (), KEYSPACE_B: ()}, tiers=tiers).revision


def rules(server: RedisProcess, blocks: int = 40, retention_s: int | None = None) -> TierRules:
    return TierRules("shared", (Server("127.0.0.1", server.port),), blocks * VALUE_BYTES, retention_s)


def store(driver: Driver, count: int) -> None:
    for number in range(count):
        driver.store([block(KEYSPACE_A, spread(number))])


def test_a_tier_is_away_until_the_policy_names_its_servers(
    unnamed: Driver, gate: GateStandIn, redis_server: RedisProcess
) -> None:
    enforce(gate)
    assert (unnamed.tier.state().breaker, unnamed.tier.state().detail) == ("open", UNNAMED)
    assert unnamed.store([block(KEYSPACE_A)]).stored_bytes == 0
    assert enforce(gate, rules(redis_server)) == 2
    unnamed.until("closed")
    assert unnamed.store([block(KEYSPACE_A)]).stored_bytes > 0
    assert unnamed.load([block(KEYSPACE_A)])[0] == [1]


def test_capacity_holds_from_the_revision_on_that_has_it(
    unnamed: Driver, gate: GateStandIn, redis_server: RedisProcess, books: Books
) -> None:
    enforce(gate, rules(redis_server, blocks=20))
    unnamed.until("closed")
    store(unnamed, 50)
    assert books.totals().used <= 20 * VALUE_BYTES
    enforce(gate, rules(redis_server, blocks=40))
    assert unnamed.tier.state().capacity_bytes == 40 * VALUE_BYTES
    store(unnamed, 50)
    assert 20 * VALUE_BYTES < books.totals().used <= 40 * VALUE_BYTES
    enforce(gate, rules(redis_server, blocks=10))
    give_up_at_s = time.monotonic() + 60
    while books.totals().used > 10 * VALUE_BYTES:
        assert time.monotonic() < give_up_at_s
        time.sleep(0.02)


def test_blocks_go_to_the_servers_of_the_newest_revision_alone(
    unnamed: Driver, gate: GateStandIn, redis_server: RedisProcess, other_server: RedisProcess
) -> None:
    enforce(gate, rules(redis_server))
    unnamed.until("closed")
    unnamed.store([block(KEYSPACE_A, 1)])
    former = stored(redis_server)
    enforce(gate, rules(other_server))
    unnamed.until("closed")
    assert unnamed.lookup([block(KEYSPACE_A, 1)]) == [0]
    unnamed.store([block(KEYSPACE_A, 2)])
    assert unnamed.load([block(KEYSPACE_A, 2)])[0] == [1]
    assert (stored(redis_server), len(stored(other_server))) == (former, 1)


def test_a_shorter_retention_of_the_tier_ends_blocks_that_are_there(
    unnamed: Driver, gate: GateStandIn, redis_server: RedisProcess, books: Books
) -> None:
    enforce(gate, rules(redis_server))
    unnamed.until("closed")
    unnamed.store([block(KEYSPACE_A)])
    enforce(gate, rules(redis_server, retention_s=60))
    give_up_at_s = time.monotonic() + 60
    while redis_server.admin().pttl(next(iter(books.values()))) > 60_000:
        assert time.monotonic() < give_up_at_s
        time.sleep(0.02)


@pytest.mark.parametrize("cluster", [False, True])
def test_a_tier_that_a_policy_omits_is_used_no_more(
    start: Callable[..., Driver], gate: GateStandIn, redis_server: RedisProcess, cluster: bool
) -> None:
    driver = start(0, endpoints=(), cluster=cluster)
    enforce(gate, rules(redis_server))
    if not cluster:
        driver.until("closed")
    enforce(gate)
    assert (driver.tier.state().breaker, driver.tier.state().detail) == ("open", UNNAMED)
    assert driver.store([block(KEYSPACE_A)]).stored_bytes == 0
    assert stored(redis_server) == []


def test_parameters_of_the_former_version_count_instead_of_the_policy(
    start: Callable[..., Driver], gate: GateStandIn, redis_server: RedisProcess, other_server: RedisProcess
) -> None:
    former = start(redis_server.port, capacity_bytes=30 * VALUE_BYTES)
    former.until("closed")
    enforce(gate, rules(other_server))
    former.store([block(KEYSPACE_A)])
    assert former.tier.state().capacity_bytes == 30 * VALUE_BYTES
    assert (len(stored(redis_server)), stored(other_server)) == (1, [])
