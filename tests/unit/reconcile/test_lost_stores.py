"""A receipt names each store that may have had the erased blocks and that no tier names any more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstrata.api.cachetier import Redis
from kvstrata.contract.receipt.claims import claims
from kvstrata.contract.receipt.residue import ReceiptClaim, Residue
from kvstrata.model.redis.external import ExternalReport, ServerFacts
from tests.support.objects import Raw, group, invalidation, model, policy, pool, redis_tier
from tests.support.worlds import Simulation
from tests.unit.plan.invalidations import at_rest
from tests.unit.reconcile.deletions import POLICY, acked_until, delete_namespace, end_pods, gone, phase, run
from tests.unit.reconcile.erasing import World

Change = Callable[[Simulation], None]
OLD, NEW = ({"external": {"endpoints": [f"{name}.example:6379"]}} for name in ("old", "new"))


def world(*objects: Raw) -> World:
    """A tenant with blocks on an external server."""
    sim = at_rest(redis_tier(redis=OLD), policy("acme"), *objects, pods=2)
    sim.put(model(tiers=("cpu", "shared")))
    sim.come_to_rest()
    return World(sim)


def edit(sim: Simulation) -> None:
    sim.edit("CacheTier", "shared", redis=NEW)


def delete(sim: Simulation) -> None:
    sim.put(model(tiers=("cpu",)))
    sim.delete("CacheTier", "shared")


def create_again(sim: Simulation) -> None:
    delete(sim)
    sim.put(redis_tier(redis=NEW))
    sim.put(model(tiers=("cpu", "shared")))


def lost(made: World) -> list[tuple[str, int]]:
    (facts,) = made.chain.issued
    assert (Residue.TIER_LOST in {item.kind for item in facts.residue}) is (ReceiptClaim.VERIFIED not in claims(facts))
    return [(item.about, item.count) for item in facts.residue if item.kind is Residue.TIER_LOST]


CHANGES = [(edit, 1), (create_again, 1), (delete, 0)]
"""Each with the number of servers that the receipt counts; 0 for a whole tier."""


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(("change", "servers"), CHANGES)
def test_former_servers_are_named_by_the_receipt_of_a_deleted_policy(
    change: Change, servers: int, restarts: bool
) -> None:
    made = world()
    change(made.sim)
    made.sim.come_to_rest()
    if restarts:
        made.sim.restart()

    async def story(w: World) -> None:
        w.sim.delete(POLICY, "acme")
        await gone(w)

    run(story, made)
    assert lost(made) == [("shared", servers)]
    reasons = [raw["reason"] for (kind, *_), raw in made.sim.kube.objects.items() if kind == "Event"]
    assert "NotProven" in reasons


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("change", [edit, create_again, delete])
def test_lost_stores_are_named_by_the_receipt_of_a_deleted_namespace(change: Change, restarts: bool) -> None:
    made = world()
    change(made.sim)
    made.sim.come_to_rest()
    if restarts:
        made.sim.restart()

    async def story(w: World) -> None:
        delete_namespace(w.sim)
        end_pods(w.sim)
        await gone(w, tick_s=5)

    run(story, made)
    assert lost(made) == [("shared", 0)]


@pytest.mark.parametrize("scope", [{"tenant": "acme"}, {"group": "lab"}, {"pool": "system"}, {"all": True}])
def test_former_servers_are_named_by_the_receipt_of_any_scope(scope: Raw) -> None:
    made = world(group("lab", "globex"), policy("globex", group="lab"), pool("system", "acme"))
    edit(made.sim)
    made.sim.come_to_rest()

    async def story(w: World) -> None:
        w.sim.put(invalidation("leave", scope=scope, mode="Eager", allowResidue=True))
        await acked_until(w, lambda: w.phase in ("Complete", "Failed"))

    run(story, made)
    assert lost(made) == [("shared", 1)]
    assert made.phase == "Complete"
    assert "TierLost shared" in made.status["message"]


def test_an_erasure_of_chosen_tiers_names_no_other_ones_former_servers() -> None:
    made = world(redis_tier("second", redis={"external": {"endpoints": ["second.example:6379"]}}))
    edit(made.sim)
    made.sim.come_to_rest()

    async def story(w: World) -> None:
        w.sim.put(invalidation("leave", scope={"tenant": "acme"}, mode="Eager", tiers=[{"name": "second"}]))
        await acked_until(w, lambda: w.phase in ("Complete", "Failed"))

    run(story, made)
    assert lost(made) == []


@pytest.mark.parametrize("change", [edit, create_again])
def test_a_tier_that_gets_other_servers_during_its_erasure_is_lost(change: Change) -> None:
    made = world()
    made.server.problem = "nothing listens"

    async def story(w: World) -> None:
        w.sim.delete(POLICY, "acme")
        await acked_until(w, lambda: phase(w.sim) == "Erasing")
        change(w.sim)
        w.sim.come_to_rest()
        w.server.problem = ""
        await gone(w)

    run(story, made)
    assert lost(made) == [("shared", 0)]


@pytest.mark.parametrize("all_scopes", [False, True])
def test_after_a_new_epoch_former_servers_have_nothing_of_the_tenant(all_scopes: bool) -> None:
    made = world()
    edit(made.sim)
    made.sim.come_to_rest()
    if all_scopes:
        made.sim.put(invalidation("all", scope={"all": True}))
    else:
        made.sim.edit(POLICY, "acme", cacheGeneration=1)
    made.sim.come_to_rest()

    async def story(w: World) -> None:
        w.sim.delete(POLICY, "acme")
        await gone(w)

    run(story, made)
    assert lost(made) == []


def test_blocks_are_deleted_from_the_servers_that_pods_use_while_new_ones_fail() -> None:
    made = world()
    made.sim.external["shared"] = ExternalReport(
        (ServerFacts("new.example:6379", True, "", "", version="8.0.0", max_bytes=1 << 50, is_replica=True),)
    )
    edit(made.sim)
    made.sim.come_to_rest()

    async def story(w: World) -> None:
        w.sim.delete(POLICY, "acme")
        await gone(w)

    run(story, made)
    assert lost(made) == []
    (order,) = made.jobs.ran
    assert order.tier.spec.redis == Redis.model_validate(OLD)
