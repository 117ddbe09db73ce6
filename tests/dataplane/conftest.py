"""Fixtures: the real LMCache server with a real Redis behind the policy adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dataplane.fresh import fresh_keyspace, fresh_sequence
from tests.dataplane.lmcache_server import LMCacheServer, lmcache_python
from tests.tiers.gate_stand_in import GateStandIn

StartServer = Callable[..., LMCacheServer]

PATIENT_FILES = {"load_deadline_ms": 20_000, "store_deadline_ms": 30_000}
"""Deadlines with which nothing is given up, on a busy machine either, for tests that count on a tier of files."""

PATIENT = PATIENT_FILES | {"connect_timeout_ms": 5_000, "io_timeout_ms": 5_000, "lookup_deadline_ms": 5_000}
"""The same for Redis. A Redis that stands still is waited for so long, by three requests."""


def tier(port: int, name: str = "shared", **options: Any) -> dict[str, Any]:
    """Return the parameters of a tier on a loopback port, with deadlines that suit a test."""
    deadlines = {"io_timeout_ms": 500, "lookup_deadline_ms": 500, "load_deadline_ms": 1000, "store_deadline_ms": 2000}
    return {"name": name, "endpoints": [{"host": "127.0.0.1", "port": port}], "workers": 2} | deadlines | options


def file_tier(directory: Path, **options: Any) -> dict[str, Any]:
    """Return the parameters of a tier of files."""
    settings = {"medium": "NVMe", "name": "disk", "directory": str(directory), "free_floor_percent": 0, "workers": 2}
    patient = {"load_deadline_ms": 25_000}
    return settings | patient | {"capacity_bytes": 64 << 20, "max_blocks": 4096} | options


@pytest.fixture
def sequence() -> int:
    """The number of a prompt of this test's own."""
    return fresh_sequence()


@pytest.fixture
def keyspace() -> str:
    """A keyspace of this test's own."""
    return fresh_keyspace()


@pytest.fixture(scope="module")
def start_server() -> Iterator[StartServer]:
    """Start a server in a directory with a gate and tiers, and an engine stand-in; all are stopped after the module.

    A server with `chunk_tokens` is for a real engine and gets no stand-in.
    """
    python = lmcache_python()
    if python is None:
        pytest.skip("no LMCache: run tests/dataplane/install_lmcache.py or set KVSTRATA_LMCACHE_PYTHON")
    servers: list[LMCacheServer] = []

    def start(
        directory: Path,
        gate: GateStandIn,
        tiers: list[dict[str, Any] | None],
        chunk_tokens: int | None = None,
        memory: dict[str, Any] | None = None,
        **options: Any,
    ) -> LMCacheServer:
        server = LMCacheServer(python, directory, gate, tiers, chunk_tokens or 16, memory, **options)
        servers.append(server)
        server.wait_until_ready()
        if chunk_tokens is None:
            server.attach_engine_stand_in()
        return server

    yield start
    for server in servers:
        server.stop()
