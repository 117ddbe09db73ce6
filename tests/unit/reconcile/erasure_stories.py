"""How stories of erasures begin: a tenant with blocks, an operator that leads, and the order to erase."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvstrata.contract.receipt.residue import ReceiptClaim
from tests.support.objects import invalidation, model, policy, redis_tier
from tests.support.worlds import Simulation
from tests.unit.plan.invalidations import at_rest
from tests.unit.reconcile.erasing import World

ALL = {ReceiptClaim.UNREACHABLE, ReceiptClaim.KEYS_REVOKED, ReceiptClaim.ERASED, ReceiptClaim.VERIFIED}


def world(*, encrypted: bool = True, pods: int = 2) -> World:
    """A tenant with blocks in a Redis tier and in two pods."""
    plain = {"managed": {"tls": {"mode": "Disabled"}}}
    tier = redis_tier(encryption="Required" if encrypted else "Disabled", redis=plain)
    sim = at_rest(tier, policy("acme"), policy("globex"), pods=pods)
    listing = model(tiers=("cpu", "shared"))
    sim.put(listing)
    sim.come_to_rest()
    made = World(sim)
    sim.come_to_rest()
    domain = sim.world.domain_id or ""
    made.server.fill(domain, sim.entry("acme").keyspace, sim.entry("globex").keyspace)
    return made


def order(sim: Simulation, name: str = "leave", **spec: Any) -> None:
    """Order the erasure of acme."""
    sim.put(invalidation(name, **{"scope": {"tenant": "acme"}, "mode": "Eager", **spec}))


def run(story: Callable[[World], Coroutine[Any, Any, None]], made: World) -> None:
    """Let a story happen while an operator leads."""

    async def told() -> None:
        async with made.leading_operator():
            await story(made)

    asyncio.run(told())


async def acked(made: World) -> None:
    """Wait for the new bundles, and let every pod acknowledge."""
    await made.until(lambda: made.status.get("rolledTime"))
    for pod in made.addresses:
        made.sim.ack(pod)
