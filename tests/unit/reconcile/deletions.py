"""Tenants with blocks, whose policies or whose namespace are deleted while an operator leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvstrata.contract.receipt.facts import Erasure
from kvstrata.contract.receipt.residue import ReceiptClaim, Residue
from kvstrata.objects.labels import ERASES
from tests.support.objects import NAMESPACE, Raw, model, policy, redis_tier
from tests.support.worlds import Simulation
from tests.unit.plan.invalidations import at_rest
from tests.unit.reconcile.erasing import KIND, World

POLICY = "TenantCachePolicy"
ALL = {ReceiptClaim.UNREACHABLE, ReceiptClaim.KEYS_REVOKED, ReceiptClaim.ERASED, ReceiptClaim.VERIFIED}


def world(*objects: Raw, pods: int = 2) -> World:
    """Two tenants with blocks in a Redis tier that encrypts and in pods."""
    tier = redis_tier(encryption="Required", redis={"managed": {"tls": {"mode": "Disabled"}}})
    sim = at_rest(tier, policy("acme"), policy("globex"), *objects, pods=pods)
    sim.put(model(tiers=("cpu", "shared")))
    sim.come_to_rest()
    made = World(sim)
    sim.come_to_rest()
    made.server.fill(sim.world.domain_id or "", sim.entry("acme").keyspace, sim.entry("globex").keyspace)
    return made


def run(story: Callable[[World], Coroutine[Any, Any, None]], made: World) -> None:
    """Let a story happen while an operator leads."""

    async def told() -> None:
        async with made.leading_operator():
            await story(made)

    asyncio.run(told())


def stored(sim: Simulation, kind: str, name: str) -> Raw | None:
    """An object, as the API server has it."""
    found: Raw | None = sim.kube.objects.get((kind, NAMESPACE, name))
    return found


def erasing(sim: Simulation) -> Raw | None:
    """The CacheInvalidation that a deletion ordered."""
    found = (raw for (kind, _, _), raw in sim.kube.objects.items() if kind == KIND)
    return next((raw for raw in found if ERASES in raw["metadata"].get("annotations", {})), None)


def phase(sim: Simulation) -> str:
    """Where it stands."""
    found = erasing(sim)
    return str((found or {}).get("status", {}).get("phase", ""))


def is_gone(made: World, name: str = "acme") -> bool:
    """Whether a policy is gone, and nothing is kept of its erasure."""
    return stored(made.sim, POLICY, name) is None and not made.kept()


def annotate(sim: Simulation, kind: str, name: str, **annotations: str) -> None:
    """Annotate an object, as a person would."""
    raw = dict(sim.kube.objects[(kind, NAMESPACE, name)])
    merged = {**raw["metadata"].get("annotations", {}), **annotations}
    sim.put({**raw, "metadata": {**raw["metadata"], "annotations": merged}})


async def gone(made: World, *, name: str = "acme", tick_s: float = 1.0, turns: int = 400) -> None:
    """Let time pass, and pods acknowledge, until a policy is gone."""
    for _ in range(turns):
        if is_gone(made, name):
            return
        for pod in made.sim.world.pods.get("tiny", {}):
            made.sim.ack(pod)
        await made.turn(tick_s)
    raise AssertionError(f"it never went: {stored(made.sim, POLICY, name)}, {erasing(made.sim)}")


def residue(facts: Erasure) -> set[Residue]:
    return {item.kind for item in facts.residue}


async def acked_until(made: World, holds: Callable[[], object], *, tick_s: float = 1.0) -> None:
    """Let time pass, and pods acknowledge, until something is so."""
    for _ in range(400):
        if holds():
            return
        for pod in made.sim.world.pods.get("tiny", {}):
            made.sim.ack(pod)
        await made.turn(tick_s)
    raise AssertionError(f"it never came: {stored(made.sim, POLICY, 'acme')}, {erasing(made.sim)}")


def end_pods(sim: Simulation, *only: str) -> None:
    """Let these pods end, or every one, as a kubelet reports it, and go."""
    for name in only or list(sim.world.pods.get("tiny", {})):
        raw = dict(sim.kube.objects[("Pod", NAMESPACE, name)])
        ended = [{"name": "engine", "state": {"terminated": {}}}]
        sim.put({**raw, "status": {**raw["status"], "phase": "Succeeded", "containerStatuses": ended}})
        sim.delete("Pod", name)


def delete_namespace(sim: Simulation, *, last: str = POLICY) -> None:
    """Delete all that a namespace has, as its controller does; objects of the kind `last` after all others."""
    sim.kube.api.ending.add(NAMESPACE)
    slots = [(kind, name) for kind, where, name in sim.kube.objects if where == NAMESPACE and kind != "Pod"]
    for kind, name in sorted(slots, key=lambda slot: slot[0] == last):
        if (kind, NAMESPACE, name) in sim.kube.objects:
            sim.delete(kind, name)


def left(sim: Simulation) -> list[tuple[str, str]]:
    """What a namespace still has."""
    return [(kind, name) for kind, where, name in sim.kube.objects if where == NAMESPACE and kind != "Event"]
