"""The cache server's own memory as the gate tells of it, and the erasure that it can ask for."""

from __future__ import annotations

import asyncio

import pytest

from kvstrata.contract import ContractError
from kvstrata.contract.messages.adapter import ScopeUsage
from kvstrata.contract.messages.erase import AdapterErased, EraseOutcome, EraseRequest
from kvstrata.contract.messages.pod_state import PodState
from kvstrata_sidecar.gate import adapter_link
from kvstrata_sidecar.gate.metrics import Metrics

from .test_control import poll
from .world import World, entry, keyspace, until

USAGE = (ScopeUsage("a1b2c3", "dram", 500, 5, 800, 100), ScopeUsage("", "dram", 7, 1, 0, None))

SHARED = (ScopeUsage("a1b2c3", "shared", 900, 9, None, None),)


async def test_the_operator_is_told_what_scopes_hold_and_not_woken_for_it(gate: World) -> None:
    first = await poll(gate, 0, 0)
    gate.adapter.usage, gate.adapter.tier_usage = USAGE, SHARED
    await until(lambda: gate.gate.link.state.usage == USAGE)
    second = await poll(gate, 1, 0)
    told = PodState.decode(second.body)
    assert (told.usage, told.tier_usage) == (USAGE, SHARED)
    assert second.headers["etag"] == first.headers["etag"]
    await gate.adapter.stop()
    await until(lambda: gate.gate.link.state.usage == gate.gate.link.state.tier_usage == ())


async def test_the_metrics_tell_what_scopes_hold(gate: World) -> None:
    gate.adapter.usage = USAGE
    await until(lambda: gate.gate.link.state.usage == USAGE)
    page = (await gate.get("/metrics")).body
    assert b'kvstrata_gate_memory_used_bytes{scope="a1b2c3",tier="dram"} 500' in page
    assert b'kvstrata_gate_memory_used_bytes{scope="_none",tier="dram"} 7' in page
    assert b'kvstrata_gate_memory_blocks{scope="a1b2c3",tier="dram"} 5' in page
    assert b'kvstrata_gate_memory_limit_bytes{scope="a1b2c3",tier="dram"} 800' in page
    assert b'kvstrata_gate_memory_limit_bytes{scope="_none",tier="dram"} 0' in page
    assert b'kvstrata_gate_memory_guaranteed_bytes{scope="a1b2c3",tier="dram"} 100' in page
    assert b'kvstrata_gate_memory_guaranteed_bytes{scope="_none"' not in page


def test_scopes_beyond_the_bound_are_counted_together() -> None:
    metrics = Metrics(max_tenants=2)
    metrics.usage = [ScopeUsage(f"a{n}", "dram", 100 - n, 1, 1000, 10) for n in range(5)]
    metrics.usage_left_out = 3
    lines = metrics.page().decode().splitlines()
    used = [line.split("{")[1] for line in lines if line.startswith("kvstrata_gate_memory_used_bytes{")]
    assert used == [
        'scope="a0",tier="dram"} 100',
        'scope="a1",tier="dram"} 99',
        f'scope="_other",tier="dram"}} {98 + 97 + 96}',
    ]
    assert not any(line.startswith('kvstrata_gate_memory_limit_bytes{scope="_other"') for line in lines)
    assert "kvstrata_gate_memory_scopes_unreported 3" in lines


async def test_nothing_is_acknowledged_before_the_memory_is_governed(world: World) -> None:
    revision = await world.publish([entry("acme")])
    async with world.started(memory_patience_s=60.0):
        await until(lambda: world.gate.link.state.tiers)
        await asyncio.sleep(0.3)
        assert world.adapter.applied == []
        world.adapter.counters = {"memory.enforced": 1}
        await world.acked(revision)


async def test_a_cache_server_without_the_module_is_not_waited_for_for_ever(world: World) -> None:
    revision = await world.publish([entry("acme")])
    async with world.started(memory_patience_s=0.2):
        await world.acked(revision)


async def test_an_erasure_has_a_line_of_its_own_and_holds_up_nothing(gate: World) -> None:
    gate.adapter.erasing.clear()
    request = EraseRequest((keyspace("b"), keyspace("a"), keyspace("a")))
    erasing = asyncio.create_task(gate.gate.link.ask(request, AdapterErased))
    await until(lambda: gate.adapter.erasures == [EraseRequest(tuple(sorted((keyspace("a"), keyspace("b")))))])
    await gate.acked(await gate.publish([entry("acme")]))
    assert not erasing.done()
    gate.adapter.erasing.set()
    assert (await asyncio.wait_for(erasing, 20)).outcome is EraseOutcome.COMPLETE


async def test_an_erasure_that_is_not_answered_is_never_done(gate: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.adapter.erasing.clear()
    request = EraseRequest((keyspace("a"),))
    monkeypatch.setattr(adapter_link, "ERASE_TIMEOUT_S", 0.2)
    with pytest.raises(ContractError, match="did not answer in time"):
        await gate.gate.link.ask(request, AdapterErased)
    monkeypatch.setattr(adapter_link, "ERASE_TIMEOUT_S", 30.0)
    again = EraseRequest((keyspace("b"),))
    waiting = asyncio.create_task(gate.gate.link.ask(again, AdapterErased))
    await until(lambda: again in gate.adapter.erasures)
    await gate.adapter.stop()
    with pytest.raises(ContractError, match="does not answer"):
        await asyncio.wait_for(waiting, 20)
    with pytest.raises(ContractError, match="does not answer"):
        await gate.gate.link.ask(request, AdapterErased)
