"""A shared tier during a roll: blocks of this version and of the one before fingerprints, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.contract.messages.engine_identity import UNRESOLVED
from kvstrata.contract.messages.erase_report import Outcome
from kvstrata.contract.policy.budget import EnforcedBudget
from kvstrata.contract.receipt.facts import Amount
from kvstrata.contract.store.block_value import unpack_header
from kvstrata.contract.store.redis_keys import parse_block_key
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from tests.support import earlier
from tests.support.earlier import EarlierPod
from tests.support.redis_binary import needs_redis
from tests.tiers.books import Books
from tests.tiers.data_keys import FIRST
from tests.tiers.eraser import VALUE, Report, erase, look, order, put, report_of, start_program
from tests.tiers.gate_stand_in import DOMAIN, IDENTITY, KEYSPACE_A, RESOLVED, GateStandIn
from tests.tiers.keyed_gate import KeyedGate
from tests.tiers.redis_process import RedisProcess
from tests.tiers.sweeping import sweep
from tests.tiers.tier_driver import BLOCK_BYTES, VALUE_BYTES, Driver, block, spread, stored

pytestmark = needs_redis
COUNT = 12
OLD = "1d" * 7 + "00"
"""Another declared identity of which blocks are there."""

NUMBERS = [spread(number) for number in range(COUNT)]
BLOCKS = [block(KEYSPACE_A, number) for number in NUMBERS]
StartEarlier = Callable[..., EarlierPod]


@pytest.fixture
def connection(redis_server: RedisProcess, connect_to: Callable[..., Connection]) -> Connection:
    return connect_to(redis_server.port)


@pytest.fixture
def start_earlier(redis_server: RedisProcess, tmp_path: Path) -> Iterator[StartEarlier]:
    """Start a pod of the earlier version on the server; it ends with the test, and fails it if it logged an error."""
    pods: list[EarlierPod] = []

    def start(**options: bool) -> EarlierPod:
        pods.append(EarlierPod(redis_server.port, tmp_path / "earlier", **options))
        return pods[-1]

    yield start
    for pod in pods:
        pod.close()


def amounts(server: RedisProcess) -> dict[str, int]:
    """Return how many values each identity in names has."""
    found: dict[str, int] = {}
    for name in stored(server):
        key = parse_block_key(name)
        assert key is not None
        found[key.identity] = found.get(key.identity, 0) + 1
    return found


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_pods_of_both_versions_share_a_tier_and_its_accounts_and_no_block(
    start: Callable[..., Driver],
    start_earlier: StartEarlier,
    gate: GateStandIn,
    redis_server: RedisProcess,
    encrypted: bool,
) -> None:
    driver, earlier = start_both(start, start_earlier, gate, redis_server, encrypted=encrypted)
    assert earlier.ask("store", numbers=NUMBERS, fill=1) == COUNT * BLOCK_BYTES
    assert driver.lookup(BLOCKS) == driver.load(BLOCKS)[0] == [0] * COUNT
    assert driver.tier.sizes(BLOCKS) == [0] * COUNT, "of a pool they count as missing"
    driver.store(BLOCKS, fill=2)
    assert amounts(redis_server) == {IDENTITY: COUNT, RESOLVED: COUNT}
    assert earlier.ask("load", numbers=NUMBERS) == [1] * COUNT
    hits, buffers = driver.load(BLOCKS)
    assert (hits, {buffer[0] for buffer in buffers}) == ([1] * COUNT, {2})
    only_new = [block(KEYSPACE_A, spread(COUNT))]
    driver.store(only_new, fill=3)
    assert earlier.ask("lookup", numbers=[spread(COUNT)]) == [0]
    assert earlier.ask("load", numbers=[spread(COUNT)]) == [-1]

    books = Books(redis_server, KEYSPACE_A)
    stored_bytes = sum(books.values().values())
    for _ in range(2):
        earlier.ask("sweep")
        assert earlier.ask("usage") == [stored_bytes]
        sweep(driver.tier, KEYSPACE_A, audit=True)
        assert [row.used_bytes for row in driver.tier.usage()] == [stored_bytes]
    books.assert_consistent()
    assert amounts(redis_server) == {IDENTITY: COUNT, RESOLVED: COUNT + 1}
    assert driver.tier.state().errors == 0


def start_both(
    start: Callable[..., Driver],
    start_earlier: StartEarlier,
    gate: GateStandIn,
    server: RedisProcess,
    *,
    encrypted: bool = False,
) -> tuple[Driver, EarlierPod]:
    """Return a tier of this version and a pod of the earlier one on a server, with the same keys."""
    earlier = start_earlier(encrypted=encrypted)
    driver = start(server.port, encryption="Required" if encrypted else "Disabled")
    driver.until("closed")
    if encrypted:
        KeyedGate(gate).allow({KEYSPACE_A: (FIRST,)})
    else:
        gate.allow(KEYSPACE_A)
    return driver, earlier


def test_each_version_makes_room_of_both_formats_within_one_limit(
    start: Callable[..., Driver], start_earlier: StartEarlier, gate: GateStandIn, redis_server: RedisProcess
) -> None:
    driver, earlier = start_both(start, start_earlier, gate, redis_server)
    limit_bytes, books = COUNT * VALUE_BYTES, Books(redis_server, KEYSPACE_A)
    gate.allow(KEYSPACE_A, budgets=(EnforcedBudget("shared", limit_bytes=limit_bytes),))
    earlier.ask("allow", limit_bytes=limit_bytes)
    for turn in range(2):
        driver.store([block(KEYSPACE_A, spread(4 * COUNT * turn + number)) for number in range(2 * COUNT)])
        assert books.totals().holds(limit_bytes)
        earlier.ask("store", numbers=[spread(4 * COUNT * turn + number) for number in range(2 * COUNT)])
        assert books.totals().holds(limit_bytes)
        books.assert_consistent()
    assert amounts(redis_server)[IDENTITY] > COUNT // 2, "the earlier version found room among blocks of this one"


def test_a_value_of_a_later_version_is_a_miss_and_stays_for_pods_that_read_it(
    driver: Driver, redis_server: RedisProcess
) -> None:
    driver.store(BLOCKS)
    for name in stored(redis_server):
        redis_server.admin().setrange(name, 0, "kvs4")
    before = Books(redis_server, KEYSPACE_A).values()
    assert driver.lookup(BLOCKS) == [1] * COUNT, "only its content shows the version"
    assert driver.load(BLOCKS)[0] == [0] * COUNT
    assert driver.lookup(BLOCKS) == [0] * COUNT
    sweep(driver.tier, KEYSPACE_A, audit=True)
    driver.store(BLOCKS)
    assert driver.load(BLOCKS)[0] == [0] * COUNT
    assert driver.tier.state().errors == 0
    assert Books(redis_server, KEYSPACE_A).values() == before
    Books(redis_server, KEYSPACE_A).assert_consistent()


@pytest.mark.parametrize("by_earlier", [False, True], ids=["this version", "the earlier version"])
def test_an_erasure_of_a_scope_by_either_version_deletes_both_formats(
    start: Callable[..., Driver],
    start_earlier: StartEarlier,
    gate: GateStandIn,
    redis_server: RedisProcess,
    tmp_path: Path,
    by_earlier: bool,
) -> None:
    store_both(start, start_earlier, gate, redis_server)
    report = delete(redis_server, tmp_path, by_earlier=by_earlier)
    assert report.end.outcome is Outcome.ERASED
    assert report.sums[1].keys == 2 * COUNT
    assert stored(redis_server) == []


def test_an_erasure_deletes_all_identities_with_any_fingerprint_and_without_one(
    redis_server: RedisProcess, connection: Connection
) -> None:
    identities = (IDENTITY, RESOLVED, f"{IDENTITY}.{'9' * 16}", OLD, f"{OLD}.{'9' * 16}")
    for identity in identities:
        put(connection, KEYSPACE_A, range(COUNT), identity)
    report = erase(order(redis_server.port))
    assert report.end.outcome is Outcome.ERASED
    found = len(identities) * COUNT
    assert report.sums[1] == Amount(found, found * len(VALUE))
    assert stored(redis_server) == []


@pytest.mark.parametrize("by_earlier", [False, True], ids=["this version", "the earlier version"])
def test_an_erasure_of_chunks_deletes_both_formats_and_that_of_the_earlier_version_is_seen_not_to(
    start: Callable[..., Driver],
    start_earlier: StartEarlier,
    gate: GateStandIn,
    redis_server: RedisProcess,
    tmp_path: Path,
    by_earlier: bool,
) -> None:
    store_both(start, start_earlier, gate, redis_server)
    chunks = [BLOCKS[0].chunk_hash.hex()]
    assert delete(redis_server, tmp_path, by_earlier=by_earlier, chunks=chunks).end.outcome is Outcome.ERASED
    assert amounts(redis_server) == {IDENTITY: COUNT - 1, RESOLVED: COUNT - (0 if by_earlier else 1)}
    (node,) = look(redis_server.port, chunks=chunks).nodes
    assert len(node.names) == (1 if by_earlier else 0), "so its receipt does not claim it"
    Books(redis_server, KEYSPACE_A).assert_consistent()


def store_both(
    start: Callable[..., Driver], start_earlier: StartEarlier, gate: GateStandIn, server: RedisProcess
) -> None:
    driver, pod = start_both(start, start_earlier, gate, server)
    assert pod.ask("store", numbers=NUMBERS)
    assert driver.store(BLOCKS).stored_bytes


def delete(server: RedisProcess, folder: Path, *, by_earlier: bool, **options: Any) -> Report:
    """Run a deletion Job's program of this or of the earlier version, on keyspace A."""
    asked = {"domain": DOMAIN, "revision": 7, "keyspaces": [KEYSPACE_A], "window_ms": 0, **options}
    patience = {"io_timeout_ms": 30_000, "connect_timeout_ms": 30_000}
    asked["tier"] = {"name": "shared", "endpoints": [{"host": "127.0.0.1", "port": server.port}], **patience}
    environment = earlier.environment() if by_earlier else None
    output, _ = start_program(folder / "order.json", asked, environment).communicate(timeout=120)
    return report_of(output)


def test_reclaiming_a_declared_identity_deletes_all_its_fingerprints_and_the_earlier_format(
    redis_server: RedisProcess, connection: Connection
) -> None:
    for identity in (OLD, f"{OLD}.{'0' * 16}", f"{OLD}.{'9' * 16}", RESOLVED):
        put(connection, KEYSPACE_A, range(COUNT), identity)
    report = erase(order(redis_server.port, identities=[OLD]))
    assert report.end.outcome is Outcome.ERASED
    assert amounts(redis_server) == {RESOLVED: COUNT}
    Books(redis_server, KEYSPACE_A).assert_consistent()


def test_reclaiming_a_fingerprint_deletes_no_other_and_not_the_earlier_format(
    redis_server: RedisProcess, connection: Connection
) -> None:
    other = f"{IDENTITY}.{'9' * 16}"
    for identity in (IDENTITY, RESOLVED, other, f"{OLD}.{'9' * 16}"):
        put(connection, KEYSPACE_A, range(COUNT), identity)
    report = erase(order(redis_server.port, identities=[other]))
    assert report.end.outcome is Outcome.ERASED
    assert amounts(redis_server) == {IDENTITY: COUNT, RESOLVED: COUNT, f"{OLD}.{'9' * 16}": COUNT}
    Books(redis_server, KEYSPACE_A).assert_consistent()


def test_pods_with_different_fingerprints_share_nothing(driver: Driver, redis_server: RedisProcess) -> None:
    blocks = [block(KEYSPACE_A, spread(number)) for number in range(COUNT)]
    others = [one._replace(fingerprint="9" * 16) for one in blocks]
    driver.store(blocks, fill=1)
    assert driver.lookup(others) == [0] * COUNT
    assert driver.load(others)[0] == [0] * COUNT
    driver.store(others, fill=2)
    hits, buffers = driver.load(blocks)
    assert hits == [1] * COUNT, "an unchanged fingerprint keeps every hit"
    assert {buffer[0] for buffer in buffers} == {1}


def test_a_block_without_a_fingerprint_is_neither_stored_nor_looked_up(
    driver: Driver, redis_server: RedisProcess
) -> None:
    one = block(KEYSPACE_A)._replace(fingerprint=UNRESOLVED)
    assert driver.store([one]).stored_bytes == 0
    assert driver.lookup([one]) == [0]
    assert driver.load([one])[0] == [0]
    assert driver.refused("no_fingerprint") == 3
    assert stored(redis_server) == []


def test_a_value_has_when_its_tokens_were_computed(driver: Driver, redis_server: RedisProcess) -> None:
    now_ms = 1000 * int(redis_server.admin().time()[0])
    one = block(KEYSPACE_A)
    driver.runtime.enforcement.ages.inherit(one.key, 1000.0)
    driver.store([one])
    (name,) = stored(redis_server)
    header = unpack_header(name.encode(), redis_server.admin().getrange(name, 0, 47))
    assert header is not None
    assert abs(header.computed_ms - (now_ms - 1_000_000)) < 60_000
