"""A pod whose cache server warms its memory up is not ready yet, for as long as it was asked to wait."""

from __future__ import annotations

from .world import World, entry, until

PATIENCE_S = 60.0


async def ready(world: World) -> tuple[int, bytes]:
    answer = await world.get("/readyz")
    return answer.status, answer.body


async def serving(world: World) -> None:
    revision = await world.publish([entry("acme")])
    await world.publish_keys(acme="key-of-acme")
    await world.acked(revision)
    await until(lambda: world.gate.keys.ring and world.gate.engine_ready)


async def test_a_pod_that_warms_up_is_ready_when_that_is_done(world: World) -> None:
    world.adapter.warming = True
    async with world.started(warm_patience_s=PATIENCE_S):
        await serving(world)
        assert await ready(world) == (503, b"warming: the cache server loads the most recently used blocks\n")
        world.adapter.warming = False
        await until(lambda: not world.gate.link.state.warming)
        assert await ready(world) == (200, b"ok\n")


async def test_a_pod_that_warms_up_for_too_long_is_ready_all_the_same(world: World) -> None:
    world.adapter.warming = True
    async with world.started(warm_patience_s=0.5):
        await serving(world)
        await until(lambda: not world.gate.not_ready())
        assert world.gate.link.state.warming


async def test_a_pod_is_not_held_back_where_nobody_asked_for_it(world: World) -> None:
    world.adapter.warming = True
    async with world.started():
        await serving(world)
        assert await ready(world) == (200, b"ok\n")


async def test_a_cache_server_that_starts_again_takes_no_ready_pod_out(world: World) -> None:
    async with world.started(warm_patience_s=0.5):
        await serving(world)
        await until(lambda: world.gate.loop.time() > world.gate._engine_ready_s + 0.5)
        world.adapter.warming = True
        await until(lambda: world.gate.link.state.warming)
        assert await ready(world) == (200, b"ok\n")


async def test_a_cache_server_that_is_away_warms_nothing_up(world: World) -> None:
    world.adapter.warming = True
    async with world.started(warm_patience_s=PATIENCE_S):
        await serving(world)
        assert world.gate.link.state.warming
        await world.adapter.stop()
        await until(lambda: not world.gate.link.state.warming)
