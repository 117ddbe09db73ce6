"""The gate with the policy adapter's own end of the link, instead of a stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvstrata.contract import ContractError
from kvstrata.contract.bundle import Rules
from kvstrata_sidecar.adapter.params import AdapterParams
from kvstrata_sidecar.adapter.runtime import Runtime

from .world import World, entry, keyspace, until


@pytest.fixture
async def real(world: World) -> AsyncIterator[World]:
    """A gate whose stand-in adapter has made way; nothing answers its link yet."""
    await world.adapter.stop()
    revision = await world.publish([entry("acme"), entry("globex")], Rules(stale_after_s=2, drain_timeout_s=1))
    async with world.started():
        await until(lambda: world.gate.enforcement.revision == revision)
        yield world


def runtime(world: World) -> Runtime:
    params = AdapterParams(
        domain="d" * 16,
        identity="1" * 16,
        policy_dir=world.directory / "policy",
        link_dir=world.directory / "link",
        tier=None,
    )
    return Runtime(params)


async def test_the_adapter_enforces_what_the_gate_writes(real: World) -> None:
    adapter = await asyncio.to_thread(runtime, real)
    try:
        await real.acked(1)
        view = adapter.enforcement.view
        assert view is not None
        assert set(view.keyspaces) == {keyspace("acme"), keyspace("globex")}
        assert adapter.enforcement.fresh()
        revision = await real.publish([entry("acme", "acme-2")])
        await real.acked(revision)
        view = adapter.enforcement.view
        assert view is not None
        assert set(view.keyspaces) == {keyspace("acme-2")}
    finally:
        await asyncio.to_thread(adapter.close)
    await until(lambda: real.gate.state().cache_boot == "")


async def test_a_gate_that_cannot_read_the_bundle_fences_the_adapter_too(real: World) -> None:
    adapter = await asyncio.to_thread(runtime, real)
    try:
        await real.acked(1)
        real.api.broken = True
        await until(lambda: not adapter.enforcement.fresh())
        assert not real.gate.enforcement.fresh()
        real.api.broken = False
        await until(adapter.enforcement.fresh)
    finally:
        await asyncio.to_thread(adapter.close)


async def test_a_purge_is_refused_by_a_cache_server_whose_memory_nobody_governs(real: World) -> None:
    adapter = await asyncio.to_thread(runtime, real)
    try:
        await real.acked(1)
        with pytest.raises(ContractError, match="server module was not started"):
            await real.gate.link.purge([keyspace("acme")])
    finally:
        await asyncio.to_thread(adapter.close)
