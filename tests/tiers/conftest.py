"""Fixtures: a real Redis, a cluster of three, a gate stand-in, a tier between the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata_sidecar.adapter.params import AdapterParams, Endpoint, TierParams
from kvstrata_sidecar.adapter.redis import tier as redis_tier
from kvstrata_sidecar.adapter.redis.client.commands import WRITE_WINDOW_MS
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.dial import dial
from kvstrata_sidecar.adapter.redis.client.slots import Address
from kvstrata_sidecar.adapter.runtime import acquire, release
from tests.support.amounts import CLAIMS, SOAK
from tests.tiers.books import Books
from tests.tiers.gate_stand_in import DOMAIN, IDENTITY, KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.pool_gate import PoolGate
from tests.tiers.redis_cluster import PATIENT_MS, RedisCluster
from tests.tiers.redis_process import RedisProcess
from tests.tiers.server_kinds import DEFAULT, KINDS, VALKEY_8, ServerKind
from tests.tiers.sweeping import stop
from tests.tiers.tier_driver import Driver
from tests.tiers.writer_by_hand import ByHand

PATIENT = {
    "connect_timeout_ms": 5000,
    "io_timeout_ms": 5000,
    "lookup_deadline_ms": 10_000,
    "load_deadline_ms": 10_000,
    "store_deadline_ms": 10_000,
}
"""So that on a busy machine nothing is given up that a test counts on."""

SHORT = {"io_timeout_ms": 400, "lookup_deadline_ms": 200, "load_deadline_ms": 600, "store_deadline_ms": 1500}
"""For tests marked `short_deadlines`, which are about servers that do not answer."""

PATIENT_PROBE_S = 5.0
"""How long upkeep waits for a server's answer in all other tests: a probe that fails counts as an error."""

CORE = {
    "test_tier.py": None,
    "test_budget.py": ("TestTheLimit", "TestALedgerThatIsLost"),
    "test_crash.py": ("TestWritersThatAreLate",),
    "test_forgetful_server.py": None,
    "test_guarantees.py": None,
    "test_revocation.py": None,
    "test_interleavings.py": None,
    "test_pool_redirect.py": ("TestSharing", "TestReadersOwnCopies"),
    "test_resp.py": ("TestARealRedis",),
}
"""The tests that run on every kind of server: whole files, or some of their classes."""

CLAIMED = {"test_tier.py": (DEFAULT, VALKEY_8)}
"""The kinds of server on which files show their claims, of other files the default alone."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "server_kind" not in metafunc.fixturenames or "server_kind" in own:
        return
    classes = CORE.get(metafunc.definition.path.name, ())
    everywhere = classes is None or (metafunc.cls is not None and metafunc.cls.__name__ in classes)
    marked = metafunc.definition.get_closest_marker("on_every_server") is not None
    kinds = KINDS if everywhere or marked or SOAK else (DEFAULT,)
    if CLAIMS:
        kinds = CLAIMED.get(metafunc.definition.path.name, (DEFAULT,))
    metafunc.parametrize("server_kind", kinds, ids=str, scope="session")


@pytest.fixture
def redis_server(tmp_path: Path, server_kind: ServerKind) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path, command=server_kind.command())
    server.start()
    yield server
    server.kill()


@pytest.fixture
def cluster(tmp_path: Path, server_kind: ServerKind) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path, command=server_kind.command(), node_timeout_ms=PATIENT_MS)
    cluster.start()
    yield cluster
    cluster.kill()


@pytest.fixture
def gate(tmp_path: Path) -> GateStandIn:
    return GateStandIn(tmp_path)


@pytest.fixture
def pools(gate: GateStandIn) -> PoolGate:
    return PoolGate(gate)


@pytest.fixture
def connect_to() -> Iterator[Callable[..., Connection]]:
    """Open a connection to a loopback port; a server that a busy machine starves is waited for."""
    opened: list[Connection] = []

    def connect(port: int, **options: Any) -> Connection:
        settings: dict[str, Any] = {"connect_timeout_ms": 30_000, "io_timeout_ms": 30_000}
        connection = dial(Address("127.0.0.1", port), TierParams("shared", **settings | options))
        opened.append(connection)
        return connection

    yield connect
    for connection in opened:
        connection.close()


@pytest.fixture
def start(
    gate: GateStandIn, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []
    is_short = request.node.get_closest_marker("short_deadlines") is not None
    deadlines = SHORT if is_short else PATIENT
    if not is_short:
        monkeypatch.setattr(redis_tier, "PROBE_TIMEOUT_S", PATIENT_PROBE_S)

    def start(port: int, window_ms: int = WRITE_WINDOW_MS, **options: Any) -> Driver:
        endpoints = (Endpoint("127.0.0.1", port),)
        settings: dict[str, Any] = {
            "endpoints": endpoints,
            "workers": 1,  # so that a test knows which connection is warm
        } | deadlines
        tier = TierParams("shared", **settings | options)
        params = AdapterParams(DOMAIN, IDENTITY, tier, gate.policy_dir, gate.link_dir)
        drivers.append(Driver(acquire(params), params, tier, window_ms=window_ms))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.tier.close()
        release(driver.runtime)


@pytest.fixture
def driver(start: Callable[..., Driver], redis_server: RedisProcess, gate: GateStandIn) -> Driver:
    driver = start(redis_server.port)
    driver.until("closed")
    gate.allow(KEYSPACE_A, KEYSPACE_B)
    return driver


@pytest.fixture
def books(redis_server: RedisProcess) -> Books:
    return Books(redis_server, KEYSPACE_A)


@pytest.fixture
def idle(driver: Driver) -> Driver:
    """A driver with a sweeper that works only at the test's call."""
    stop(driver.tier)
    return driver


@pytest.fixture
def late(redis_server: RedisProcess, connect_to: Callable[..., Connection]) -> ByHand:
    return ByHand(connect_to(redis_server.port))
