"""The gate with the policy adapter's own end of the link, instead of a stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvstrata.contract.messages.erase import Amount, EraseOutcome, LeftKeys
from kvstrata.contract.policy.bundle import Rules
from kvstrata.contract.policy.data_key import KEYS_DIRECTORY, DataKey
from kvstrata_sidecar.adapter.params import AdapterParams
from kvstrata_sidecar.adapter.runtime import Runtime
from tests.adapter.memory_server import Server
from tests.adapter.memory_stand_in import BLOCK_BYTES, Key
from tests.tiers.gate_stand_in import FINGERPRINT

from .test_erasing import erased
from .world import World, entry, keyspace, until


@pytest.fixture
async def real(world: World) -> AsyncIterator[World]:
    """A gate whose stand-in adapter has made way; nothing answers its link yet."""
    await world.adapter.stop()
    revision = await world.publish([entry("acme"), entry("globex")])
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
    made = Runtime(params)
    made.enforcement.fingerprints = lambda: [FINGERPRINT]
    return made


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


async def test_the_cache_servers_metrics_are_on_the_gates_page_for_as_long_as_it_answers(real: World) -> None:
    real.gate.link.metrics = ""
    watching = asyncio.create_task(real.gate.link.watch_metrics(every_s=0.02))
    adapter = await asyncio.to_thread(runtime, real)
    try:
        await real.acked(1)
        await until(lambda: b"kvstrata_cache_policy_revision 1\n" in real.gate.metrics_page())
        assert b"kvstrata_gate_acked_revision 1\n" in real.gate.metrics_page()
    finally:
        await asyncio.to_thread(adapter.close)
    await until(lambda: b"kvstrata_cache_" not in real.gate.metrics_page())
    watching.cancel()


async def test_data_keys_come_with_the_bundle_and_are_overwritten_before_the_gate_acknowledges_that_they_went(
    real: World, capfd: pytest.CaptureFixture[str]
) -> None:
    own, other = DataKey(7, b"acme's own key of thirty-two b.."), DataKey(1, b"globex's key of thirty-two byte.")
    adapter = await asyncio.to_thread(runtime, real)
    try:
        keys, directory = adapter.enforcement.keys, real.directory / "policy" / KEYS_DIRECTORY
        revision = await real.publish([entry("acme", keys=(own,)), entry("globex", keys=(other,)), entry("third")])
        await real.acked(revision)
        assert {path.name for path in directory.iterdir()} == {f"{keyspace('acme')}.7", f"{keyspace('globex')}.1"}
        assert adapter.enforcement.keyless() == 1
        sealing = keys.sealing(keyspace("acme"))
        assert sealing is not None
        assert (sealing.generation, bytes(sealing._secret)) == (7, own.secret)
        revision = await real.publish([entry("acme", "acme-2"), entry("globex", keys=(other,))])
        await real.acked(revision)
        assert bytes(sealing._secret) == bytes(32)
        assert {path.name for path in directory.iterdir()} == {f"{keyspace('globex')}.1"}
        assert keys.sealing(keyspace("globex")) is not None
    finally:
        await asyncio.to_thread(adapter.close)
    told = (
        "".join(capfd.readouterr()) + real.gate.state().encode().decode() + (directory / "../policy.json").read_text()
    )
    assert not any(form in told for key in (own, other) for form in (key.secret.decode(), key.secret.hex()))


async def test_a_gate_that_cannot_read_the_bundle_fences_the_adapter_too(real: World) -> None:
    adapter = await asyncio.to_thread(runtime, real)
    try:
        await real.acked(await real.publish([entry("acme")], Rules(stale_after_s=2, drain_timeout_s=1)))
        real.api.broken = True
        await until(lambda: not adapter.enforcement.fresh())
        assert not real.gate.enforcement.fresh()
        real.api.broken = False
        await until(adapter.enforcement.fresh)
    finally:
        await asyncio.to_thread(adapter.close)


async def test_an_erasure_is_not_complete_by_a_cache_server_whose_memory_nobody_governs(real: World) -> None:
    adapter = await asyncio.to_thread(runtime, real)
    try:
        await real.acked(1)
        said = await erased(real, keyspace("acme-of-before"))
        assert (said.outcome, said.held_by) == (
            EraseOutcome.REMAINING, ("the cache server's memory: this cache server's own memory is not governed",)
        )  # fmt: skip
    finally:
        await asyncio.to_thread(adapter.close)


async def test_what_left_the_policy_is_erased_with_its_data_keys(real: World) -> None:
    own = DataKey(7, b"acme's own key of thirty-two b..")
    memory = Server()
    adapter = await asyncio.to_thread(runtime, real)
    adapter.memory = memory.memory
    block = Key(keyspace("acme"), 1)
    try:
        await real.acked(await real.publish([entry("acme", keys=(own,))]))
        memory.manager.store(block)
        assert (await erased(real, keyspace("acme"))).outcome is EraseOutcome.IN_FORCE
        await real.acked(await real.publish([entry("globex")]))
        sent = asyncio.create_task(erased(real, keyspace("acme"), wait_s=30))
        said = await asyncio.wait_for(sent, 40)
        assert (said.outcome, said.keys, said.cache.revision) == (EraseOutcome.COMPLETE, LeftKeys(), 3)
        assert said.cache.tiers[0].deleted == Amount(1, BLOCK_BYTES)
        assert not memory.has_bytes_of(block)
        assert adapter.enforcement.keys.left([keyspace("acme")]) == 0
    finally:
        adapter.memory = None
        await asyncio.to_thread(adapter.close)
        memory.close()
