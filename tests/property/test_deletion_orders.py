"""Objects that are deleted in any order, as tools prune and namespaces end, all go: nothing waits without an end."""

from __future__ import annotations

import random

import pytest

from kvstrata.contract.receipt.claims import claims
from kvstrata.contract.receipt.residue import ReceiptClaim, Residue
from tests.support.objects import NAMESPACE, group, invalidation, pool
from tests.unit.reconcile.deletions import end_pods, left, residue, run, world
from tests.unit.reconcile.erasing import World

KINDS = (
    "CacheDomain", "CacheTier", "CachedModel", "TenantCachePolicy", "TenantGroup", "PrefixPool", "CacheInvalidation",
)  # fmt: skip
LIMIT_S = 900
"""Far below the deletionDeadline."""


def declared(made: World) -> list[tuple[str, str]]:
    return [(kind, name) for kind, where, name in made.sim.kube.objects if where == NAMESPACE and kind in KINDS]


async def prune(w: World, order: list[tuple[str, str]], pauses: random.Random) -> None:
    """Delete objects one by one; pods end some time after their model, and others acknowledge."""
    for kind, name in order:
        if (kind, NAMESPACE, name) in w.sim.kube.objects:
            w.sim.delete(kind, name)
        for _ in range(pauses.choice((0, 0, 1, 5))):
            await turn(w)
    ordered, began = set(order), w.sim.now
    while waiting := ordered & set(declared(w)) - {("CacheDomain", "default")}:
        assert (w.sim.now - began).total_seconds() < LIMIT_S, waiting
        await turn(w)


async def turn(w: World) -> None:
    if ("CachedModel", NAMESPACE, "tiny") not in w.sim.kube.objects:
        end_pods(w.sim)
    for pod in w.sim.world.pods.get("tiny", {}):
        w.sim.ack(pod)
    await w.turn(5)


def crowd() -> World:
    return world(group("both", "none"), pool("system", "globex"), invalidation("once", scope={"tenant": "globex"}))


def ends_with_receipts(made: World) -> None:
    """No tenant's blocks can be reached; its receipt proves that tiers are empty, or names the one that is gone."""
    proofs = {facts.subject.scope_name: facts for facts in made.chain.issued if facts.subject.scope_name != "once"}
    assert proofs.keys() == {"acme", "globex"}
    for facts in proofs.values():
        assert ReceiptClaim.UNREACHABLE in claims(facts)
        assert not facts.tiers or ReceiptClaim.VERIFIED in claims(facts) or Residue.TIER_LOST in residue(facts)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prune_that_takes_one_kind_first_or_last_ends(kind: str, last: bool) -> None:
    made = crowd()
    order = sorted(declared(made), key=lambda slot: (slot[0] == kind) is last)
    run(lambda w: prune(w, order, random.Random(1)), made)
    ends_with_receipts(made)


@pytest.mark.parametrize("seed", range(50))
def test_a_prune_in_any_order_ends(seed: int) -> None:
    made, chance = crowd(), random.Random(seed)
    order = declared(made)
    chance.shuffle(order)
    run(lambda w: prune(w, order, chance), made)
    ends_with_receipts(made)


@pytest.mark.parametrize("seed", range(10))
def test_a_namespace_whose_objects_go_in_any_order_ends(seed: int) -> None:
    made, chance = crowd(), random.Random(seed)
    order = [(kind, name) for kind, where, name in made.sim.kube.objects if where == NAMESPACE and kind != "Pod"]
    chance.shuffle(order)
    made.sim.kube.api.ending.add(NAMESPACE)
    run(lambda w: prune(w, order, chance), made)
    assert left(made.sim) == []
    assert {facts.subject.scope_name for facts in made.chain.issued} <= {"acme", "globex"}
