"""A new pod that a pool holds up is ready once its own memory holds the pool, and not for ever without it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstrata.contract.messages.pools import PoolTierState
from kvstrata.contract.policy.pools import PoolShard, PoolState, PoolVersion, pack_hashes

from .world import World, entry, keyspace, until

RENDERED = "f" * 16
PATIENCE_S = 60
SPACE = keyspace("docs-1")
CHUNKS = pack_hashes(bytes([number]) * 32 for number in range(3))
VERSION = PoolVersion(SPACE, RENDERED, PoolState.PUBLISHED, CHUNKS, ("cpu", "shared"), before_ready_s=PATIENCE_S)
EMPTY, PARTLY, WHOLE = (PoolTierState("cpu", stored, 3, 1000 * stored) for stored in (0, 2, 3))
WAITING = (503, b"warming: the pool docs is not in this pod's memory yet\n")
READY = (200, b"ok\n")


@pytest.fixture(autouse=True)
def memory(world: World) -> None:
    """A cache server with a CPU tier, whose Redis has every chunk that it is asked for."""
    world.adapter.memory = EMPTY


async def ready(world: World) -> tuple[int, bytes]:
    answer = await world.get("/readyz")
    return answer.status, answer.body


async def serving(world: World, *versions: PoolVersion) -> None:
    """Let the gate do all that it has to but wait for pools."""
    await world.acked(await world.publish([entry("acme")], pools={0: PoolShard("docs", "uid-docs", versions)}))
    await until(lambda: world.gate.keys.ring and world.gate.engine_ready and world.gate.link.state.tiers)


async def looked(world: World) -> None:
    """Wait until the gate has asked what there is, and got its answer."""
    before = len(world.adapter.pool_questions)
    await until(lambda: len(world.adapter.pool_questions) >= before + 2)


async def test_a_new_pod_is_ready_when_its_own_memory_holds_every_chunk(world: World) -> None:
    async with world.started(render_id=RENDERED):
        await serving(world, VERSION)
        await looked(world)
        assert await ready(world) == WAITING
        world.adapter.memory = PARTLY
        await looked(world)
        assert await ready(world) == WAITING
        world.adapter.memory = WHOLE
        await until(lambda: not world.gate.not_ready())
        assert await ready(world) == READY


async def test_a_pool_that_is_never_warm_keeps_no_pod_out_for_longer_than_it_may(world: World) -> None:
    async with world.started(render_id=RENDERED):
        await serving(world, VERSION)
        await looked(world)
        assert await ready(world) == WAITING
        world.gate._engine_ready_s -= PATIENCE_S  # as if so much time had passed
        assert await ready(world) == READY


async def test_a_pod_is_not_held_up_where_nobody_asked_for_it(world: World) -> None:
    async with world.started(render_id=RENDERED):
        await serving(world, replace(VERSION, before_ready_s=0))
        assert await ready(world) == READY
        assert world.adapter.pool_questions == []


async def test_a_pod_that_was_ready_is_not_held_up_by_a_pool_that_comes_later(world: World) -> None:
    async with world.started(render_id=RENDERED):
        await serving(world)
        assert await ready(world) == READY
        await serving(world, VERSION)
        assert await ready(world) == READY


async def test_a_pod_that_was_ready_is_not_held_up_by_what_its_memory_lost(world: World) -> None:
    world.adapter.memory = WHOLE
    async with world.started(render_id=RENDERED):
        await serving(world, VERSION)
        await until(lambda: not world.gate.not_ready())
        world.adapter.memory = EMPTY
        await world.adapter.restart("boot-2")
        await until(lambda: world.gate.enforcement.cache_boot == "boot-2")
        assert await ready(world) == READY


async def test_what_a_cache_server_had_counts_for_no_other(world: World) -> None:
    world.adapter.memory, world.engine.healthy = WHOLE, False
    async with world.started(render_id=RENDERED):
        await world.acked(await world.publish([entry("acme")], pools={0: PoolShard("docs", "uid-docs", (VERSION,))}))
        await until(lambda: world.gate.pools._whole)
        world.adapter.memory = EMPTY
        await world.adapter.restart("boot-2")
        world.engine.healthy = True
        await until(lambda: world.gate.enforcement.cache_boot == "boot-2" and world.gate.engine_ready)
        assert await ready(world) == WAITING


async def test_content_of_another_template_is_waited_for_only_while_there_is_none_of_ones_own(world: World) -> None:
    old = replace(VERSION, render_id="e" * 16)
    own = replace(VERSION, keyspace=keyspace("docs-2"), state=PoolState.WARMING)
    async with world.started(render_id=RENDERED):
        await serving(world, old)
        await looked(world)
        assert await ready(world) == WAITING
        await serving(world, old, own)
        await until(lambda: world.adapter.pool_questions[-1].keyspace == own.keyspace)
        assert await ready(world) == WAITING
        world.adapter.memory = WHOLE
        await until(lambda: not world.gate.not_ready())
        assert world.adapter.pool_questions[-1].keyspace == own.keyspace
