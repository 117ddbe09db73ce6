"""Fixtures: a real Redis, a gate stand-in, a tier between the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata_sidecar.adapter.dial import dial
from kvstrata_sidecar.adapter.params import AdapterParams, Endpoint, TierParams
from kvstrata_sidecar.adapter.protocol import WRITE_WINDOW_MS
from kvstrata_sidecar.adapter.resp import Connection
from kvstrata_sidecar.adapter.runtime import acquire, release
from tests.tiers.gate_stand_in import DOMAIN, IDENTITY, KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.redis_process import RedisProcess
from tests.tiers.tier_driver import Driver


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def gate(tmp_path: Path) -> GateStandIn:
    return GateStandIn(tmp_path)


@pytest.fixture
def connect_to() -> Iterator[Callable[..., Connection]]:
    """Open a connection to a loopback port with short timeouts."""
    opened: list[Connection] = []

    def connect(port: int, **options: object) -> Connection:
        settings = {"tls": None, "username": None, "password_file": None} | options
        settings = {"connect_timeout_s": 5.0, "io_timeout_s": 1.0} | settings
        connection = dial(Endpoint("127.0.0.1", port), **settings)  # type: ignore[arg-type]
        opened.append(connection)
        return connection

    yield connect
    for connection in opened:
        connection.close()


@pytest.fixture
def start(gate: GateStandIn) -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def start(port: int, window_ms: int = WRITE_WINDOW_MS, **options: Any) -> Driver:
        endpoints = (Endpoint("127.0.0.1", port),)
        deadlines = {
            "io_timeout_ms": 400,
            "lookup_deadline_ms": 200,
            "load_deadline_ms": 600,
            "store_deadline_ms": 1500,
        }
        # One worker, so that a test knows which connection is warm.
        tier = TierParams("shared", endpoints, **{"workers": 1} | deadlines | options)
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
