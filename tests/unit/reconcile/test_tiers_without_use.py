"""Deletions wait for no tier that no pod ever used, and receipts name servers whose end no kubelet reported."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from kvstrata.api.scalars import format_timestamp
from kvstrata.contract.messages.adapter import TierState
from kvstrata.contract.receipt.residue import Residue
from kvstrata.model.refs import Key
from kvstrata.plan.erasure import ordering
from kvstrata.plan.erasure.gather import tiers_lost
from kvstrata.plan.redis.cluster import never_used, was_formed
from tests.support.objects import (
    NAMESPACE,
    Raw,
    cpu_tier,
    domain,
    invalidation,
    model,
    pod,
    policy,
    redis_tier,
    server_pod,
)
from tests.support.server_answers import NO_PODS
from tests.support.worlds import Simulation
from tests.unit.reconcile.deletions import ALL, POLICY, acked_until, delete_namespace, gone, left, residue, run, world
from tests.unit.reconcile.erasing import World

TYPO = {"external": {"endpoints": ["192.0.2.1:6379"]}}
NO_IMAGE = {"name": "redis", "image": "redis:typo", "state": {"waiting": {"reason": "ErrImagePull"}}}
RUNNING = {"name": "redis", "image": "redis:8", "state": {"running": {}}}
ENDED = {"name": "redis", "image": "redis:8", "state": {"terminated": {"exitCode": 0}}}


def never_served(*tiers: Raw, pods: int = 0) -> World:
    """A tenant in a namespace with tiers of which no server ever answered."""
    sim = Simulation(domain(), cpu_tier(), *tiers, policy("acme"))
    sim.backends_up = False
    sim.looks = {raw["metadata"]["name"]: NO_PODS for raw in tiers}
    sim.put(model(tiers=("cpu", *(raw["metadata"]["name"] for raw in tiers))))
    sim.advance(5)
    sim.put(*(pod(f"pod-{n}") for n in range(pods)))
    sim.advance(5)
    return World(sim)


@pytest.mark.parametrize("pods", [0, 2])
@pytest.mark.parametrize("redis", [TYPO, {"managed": {}}])
def test_a_policy_goes_although_a_tier_never_had_a_server(redis: Any, pods: int) -> None:
    made = never_served(redis_tier("never", redis=redis), pods=pods)
    if "managed" in redis:
        made.sim.put(server_pod("kvs-never-redis-0-0", "never", containerStatuses=[NO_IMAGE]))

    async def story(w: World) -> None:
        w.sim.delete(POLICY, "acme")
        await gone(w)

    run(story, made)
    (facts,) = made.chain.issued
    assert facts.tiers == ()
    assert Residue.TIER_LOST not in residue(facts)


@pytest.mark.parametrize("evidence", ["answered", "vanished", "stored"])
def test_a_tier_that_was_never_reported_as_formed_and_of_which_a_server_ran_is_not_one_that_held_nothing(
    evidence: str,
) -> None:
    sim = never_served(redis_tier("never", redis={"managed": {}}), pods=1).sim
    tier, name = sim.world.tiers["never"], "kvs-never-redis-0-0"
    assert never_used(sim.world, tier)
    if evidence == "answered":
        raw = sim.kube.objects["CacheTier", NAMESPACE, "never"]
        sim.put({**raw, "status": {**raw["status"], "shardsReady": 1}})
    elif evidence == "vanished":
        sim.put(server_pod(name, "never", containerStatuses=[RUNNING]))
        sim.settle()
        sim.delete("Pod", name)
    else:
        sim.ack("pod-0", tiers=(TierState("never", "Redis", "open", stored=1),))
    tier = sim.world.tiers["never"]
    assert not was_formed(tier)
    assert not never_used(sim.world, tier)


def test_a_namespace_whose_tenants_never_cached_anything_goes_with_receipts_without_residue() -> None:
    sim = Simulation(domain(), redis_tier("served"), policy("a1"), policy("a2"), model(tiers=("served",)))
    sim.come_to_rest()
    made = World(sim)

    async def story(w: World) -> None:
        delete_namespace(w.sim)
        for _ in range(200):
            await w.turn(1)

    run(story, made)
    assert not [slot for slot in left(made.sim) if slot[0] == POLICY]
    assert len(made.chain.issued) == 2
    assert all(Residue.TIER_LOST not in residue(facts) for facts in made.chain.issued)


@pytest.mark.parametrize(("last", "lost"), [(RUNNING, True), (ENDED, False)])
def test_a_server_whose_end_no_kubelet_reported_is_residue_of_the_erasure(last: Raw, lost: bool) -> None:
    made = world()
    sim = made.sim
    name = "kvs-shared-redis-0-0"
    sim.put(server_pod(name, containerStatuses=[RUNNING]))
    sim.come_to_rest()

    async def story(w: World) -> None:
        w.sim.delete(POLICY, "acme")
        await w.turn(1)
        await w.turn(1)
        w.sim.put(server_pod(name, containerStatuses=[last]))
        w.sim.delete("Pod", name)
        await acked_until(w, lambda: w.chain.issued)

    run(story, made)
    (facts,) = made.chain.issued
    found = [(item.about, item.count) for item in facts.residue if item.kind is Residue.TIER_LOST]
    assert found == ([("shared", 1)] if lost else [])
    assert (made.proven() == ALL) is not lost


@pytest.mark.parametrize("kind", ["vanished", "replaced"])
def test_a_server_that_vanished_while_no_operator_ran_is_residue_of_the_erasure(kind: str) -> None:
    sim = world().sim
    name, server = "kvs-shared-redis-0-0", server_pod("kvs-shared-redis-0-0", containerStatuses=[RUNNING])
    sim.put(server)
    sim.come_to_rest()
    assert sim.status("CacheTier", "shared")["servers"] == [{"name": name, "uid": f"uid-{name}"}]
    assert sim.unsettled() == {}
    sim.put(invalidation("leave", scope={"tenant": "acme"}, mode="Eager"))
    sim.settle()
    key = Key("CacheInvalidation", NAMESPACE, "leave")
    record = ordering.begin(sim.world, key, sim.world.invalidations["leave"], sim.now)
    assert record is not None
    assert list(tiers_lost(sim.world, record.erasure, sim.now)) == []
    sim.delete("Pod", name, seen=False)
    if kind == "replaced":
        sim.kube.put({**server, "metadata": {**server["metadata"], "uid": "another"}})
    sim.store.domain(NAMESPACE).servers.clear()
    noticed = sim.now = sim.now.replace(microsecond=0) + timedelta(seconds=60)
    for _ in range(3):
        sim.restart()
        sim.advance(5)
        (lost,) = tiers_lost(sim.world, record.erasure, sim.now)
        assert (lost.tier, lost.server, lost.at) == ("shared", name, noticed)
    assert sim.status("CacheTier", "shared")["servers"][0]["lostAt"] == format_timestamp(noticed)


def test_an_erasure_that_begins_after_a_server_vanished_does_not_name_it() -> None:
    made = world()
    sim, name = made.sim, "kvs-shared-redis-0-0"
    sim.put(server_pod(name, containerStatuses=[RUNNING]))
    sim.come_to_rest()
    sim.delete("Pod", name, seen=False)
    sim.store.domain(NAMESPACE).servers.clear()
    sim.restart()
    sim.advance(5)

    async def story(w: World) -> None:
        w.sim.delete(POLICY, "acme")
        await gone(w)

    run(story, made)
    (facts,) = made.chain.issued
    assert made.proven() == ALL
    assert Residue.TIER_LOST not in residue(facts)
