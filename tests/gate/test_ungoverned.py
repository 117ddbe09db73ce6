"""A pod whose LMCache has a version that cannot be governed serves without reuse, and reports the version."""

from __future__ import annotations

from kvstrata.contract.messages.engine_identity import EngineIdentity
from tests.tiers.gate_stand_in import FINGERPRINT

from .world import World, chat, entry, keyspace, post, until

NEWER = "LMCache 0.5.7 is none of the governed versions (0.5.6)"


def reported(world: World) -> tuple[str, str]:
    state = world.gate.state()
    return state.withheld, state.unresolved


async def salt(world: World) -> str:
    assert (await world.ask(post("/v1/chat/completions", chat()))).status == 200
    return str(world.engine.requests[-1].json["cache_salt"])


async def serving(world: World) -> None:
    revision = await world.publish([entry("acme")])
    await world.publish_keys(acme="key-of-acme")
    await world.acked(revision)
    await until(lambda: world.gate.keys.ring and world.gate.engine_ready)


async def test_a_cache_server_that_cannot_be_governed_means_random_salts(world: World) -> None:
    world.adapter.ungoverned, world.adapter.fingerprints = NEWER, ()
    async with world.started():
        await serving(world)
        assert world.gate.not_ready() == ""
        salts = {await salt(world) for _ in range(3)}
        assert len(salts) == 3
        assert keyspace("acme") not in salts
        assert reported(world) == ("ungoverned", f"cache: {NEWER}")


async def test_a_cache_server_that_can_be_governed_again_means_reuse(world: World) -> None:
    world.adapter.ungoverned, world.adapter.fingerprints = NEWER, ()
    async with world.started():
        await serving(world)
        world.adapter.ungoverned = ""
        world.adapter.fingerprints = (FINGERPRINT,)
        await until(lambda: not world.gate.enforcement.identity.withheld)
        assert await salt(world) == keyspace("acme")
        assert reported(world) == ("", "")


async def test_an_engine_that_cannot_be_governed_means_random_salts_from_its_first_request(world: World) -> None:
    world.report_identity(EngineIdentity(problem=NEWER, ungoverned=True))
    async with world.started():
        await serving(world)
        assert await salt(world) != keyspace("acme")
        assert reported(world) == ("ungoverned", f"engine: {NEWER}")
