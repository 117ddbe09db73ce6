"""A tenant is erased from a managed cluster of real servers, while a primary is lost, and while a shard is added."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstrata.contract.receipt.residue import ReceiptClaim
from tests.support.objects import invalidation, model, policy, redis_tier
from tests.support.redis_binary import needs_redis
from tests.support.server_answers import NO_PODS
from tests.tiers.server_kinds import DEFAULT
from tests.topology.erasing import TIER, ClusterWorld
from tests.topology.rig import Rig
from tests.unit.plan.invalidations import at_rest

pytestmark = needs_redis

MANAGED: dict[str, Any] = {"shards": 3, "replicasPerShard": 1, "tls": {"mode": "Disabled"}}
BLOCKS = 48


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[ClusterWorld]:
    """Two tenants with blocks in a cluster of three shards of two servers."""
    sim = at_rest(policy("acme"), policy("globex"))
    sim.looks[TIER] = NO_PODS
    sim.put(redis_tier(TIER, capacity="30Gi", redis={"managed": MANAGED}), model(tiers=("cpu", TIER)))
    sim.come_to_rest()
    rig = Rig(tmp_path / "servers", DEFAULT.command(), users=True)
    try:
        async with ClusterWorld(sim, rig, tmp_path) as made, made.leading_operator():
            await made.until(
                lambda: sim.condition("CacheTier", TIER, "ReplicationHealthy") == ("True", "ReplicasInStep")
            )
            for tenant in ("acme", "globex"):
                made.store(sim.entry(tenant).keyspace, BLOCKS)
            yield made
    finally:
        await rig.nodes.close()
        rig.close()


async def ordered(world: ClusterWorld) -> None:
    """Order the erasure of acme, and have every pod acknowledge."""
    world.sim.put(invalidation("leave", scope={"tenant": "acme"}, mode="Eager"))
    await world.until(lambda: world.status.get("rolledTime"))
    for pod in world.addresses:
        world.sim.ack(pod)


async def test_a_tenant_is_erased_although_a_primary_is_lost_meanwhile_and_everything_is_counted(
    world: ClusterWorld,
) -> None:
    leaving, staying = world.sim.entry("acme").keyspace, world.sim.entry("globex").keyspace
    assert world.values(leaving) == world.values(staying) == 2 * BLOCKS
    lost = await world.rig.primary(0)
    heir = await world.rig.server(await world.rig.replica(0))
    await ordered(world)
    await world.until(lambda: world.jobs_begun and world.tombstones(leaving))
    world.rig.replace(lost)
    await world.until(lambda: world.phase in ("Complete", "Failed"))

    assert world.proven() >= {ReceiptClaim.UNREACHABLE, ReceiptClaim.ERASED, ReceiptClaim.VERIFIED}, world.status
    assert (world.values(leaving), world.values(staying)) == (0, 2 * BLOCKS)
    assert world.status["keys"] == BLOCKS
    (tier,) = world.chain.issued[0].tiers
    assert heir.node_id in {node.node for node in tier.nodes}, "who took over was emptied and looked at"
    assert len(tier.nodes) == 3


async def test_slots_stand_still_meanwhile_and_move_to_a_new_shard_afterwards(world: ClusterWorld) -> None:
    sim, rig = world.sim, world.rig
    world.jobs_may_start = False  # The new servers take their time, and the erasure would be over.
    await ordered(world)
    await world.until(lambda: world.phase == "WaitingOutWrites")
    sim.edit("CacheTier", TIER, redis={"managed": {**MANAGED, "shards": 4}})
    rig.goal = replace(rig.goal, shards=4, revisions=dict.fromkeys(range(4), "a"))
    for ordinal in range(2):
        rig.add(3, ordinal)
    await world.until(lambda: "begins when CacheInvalidation leave has erased" in world.progress, tick_s=0.05)
    assert world.phase != "Complete"
    world.jobs_may_start = True
    await world.until(lambda: world.phase in ("Complete", "Failed"))

    assert world.proven() >= {ReceiptClaim.ERASED, ReceiptClaim.VERIFIED}, world.status
    (tier,) = world.chain.issued[0].tiers
    assert len(tier.nodes) == 3, "a server without slots has nothing to be deleted"
    await world.until(lambda: world.slots(3))
