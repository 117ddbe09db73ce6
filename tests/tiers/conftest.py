"""Fixtures: a real Redis, a gate stand-in, certificates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata_sidecar.adapter.dial import dial
from kvstrata_sidecar.adapter.params import Endpoint
from kvstrata_sidecar.adapter.resp import Connection
from tests.tiers.gate_stand_in import GateStandIn
from tests.tiers.redis_process import RedisProcess


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
        settings = {"connect_timeout_s": 1.0, "io_timeout_s": 0.3} | settings
        connection = dial(Endpoint("127.0.0.1", port), **settings)  # type: ignore[arg-type]
        opened.append(connection)
        return connection

    yield connect
    for connection in opened:
        connection.close()
