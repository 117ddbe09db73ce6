"""Fixtures: a gate in force with two tenants that have a policy and one that has none."""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from kvstrata.clients import gate as gate_client

from .world import ACME, GLOBEX, NOBODY, World, entry, until


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Any]:
    """Run these tests on the loop that the gate runs on."""
    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let a thread end what hangs: uvloop logs what a signal handler raises, and goes on."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(method="thread"))


@pytest.fixture(autouse=True)
def patient_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's client connects in time on a machine that does nothing for seconds."""
    monkeypatch.setattr(gate_client, "CONNECT_TIMEOUT", aiohttp.ClientTimeout(total=None, sock_connect=60.0))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """Everything around a gate, which itself is not running."""
    # Unix socket paths are short, pytest's directories are not.
    with tempfile.TemporaryDirectory(prefix="gate") as directory:
        world = World(Path(directory))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(world.gate_tls / "tls.crt", world.gate_tls / "tls.key")
        await world.api.start(context)
        await world.engine.start()
        await world.adapter.start()
        await world.publish_keys(acme=ACME, globex=GLOBEX, nobody=NOBODY)
        try:
            yield world
        finally:
            await world.adapter.stop()
            await world.engine.stop()
            await world.api.stop()


@pytest.fixture
async def gate(world: World) -> AsyncIterator[World]:
    """A gate that is ready."""
    revision = await world.publish([entry("acme"), entry("globex")])
    async with world.started():
        await world.acked(revision)
        await until(lambda: not world.gate.not_ready())
        await until(lambda: len(world.gate.keys.ring) == 3)
        yield world
