"""Stores that outlive pods are on record with each epoch that may have blocks there, and leave it by evidence only."""

from __future__ import annotations

import pytest

from kvstrata.api.status import MAX_STORES, ScopeStatus
from kvstrata.contract.policy.keyspace import ScopeKind
from kvstrata.model.erasure.facts import TierLost
from kvstrata.model.erasure.record import ErasureRecord
from kvstrata.model.refs import Key
from kvstrata.plan.erasure import ordering
from kvstrata.plan.kinds.policy import plan_policy
from kvstrata.plan.redis.backend import former_stores, with_stores
from tests.support.objects import (
    NAMESPACE,
    Raw,
    group,
    invalidation,
    model,
    own,
    pod,
    policy,
    pool,
    redis_tier,
    server_pod,
)
from tests.support.worlds import Simulation
from tests.unit.plan.invalidations import at_rest

HOLDERS = (
    ("TenantCachePolicy", "acme"), ("TenantGroup", "lab"), ("CacheDomain", "default"), ("PrefixPool", "system"),
)  # fmt: skip
DISK = own("CacheTier", "disk", {"medium": "NVMe", "capacityPerPod": "1Gi", "nvme": {"hostPath": {"path": "/kv"}}})


def at(*endpoints: str, cluster: bool = False) -> Raw:
    return {"external": {"endpoints": list(endpoints), **({"cluster": True} if cluster else {})}}


def crowd(redis: Raw | None = None, *others: Raw) -> Simulation:
    """A tier that outlives pods and one that does not, and each kind of scope."""
    tier = redis_tier(redis=redis or at("old.example:6379"))
    sim = at_rest(tier, policy("acme"), group("lab", "globex"), policy("globex", group="lab"), *others)
    sim.put(model(tiers=("cpu", "shared")), pool("system", "acme"))
    sim.come_to_rest()
    return sim


def on_record(sim: Simulation, kind: str = "TenantCachePolicy", name: str = "acme") -> list[tuple[str, list[str]]]:
    return [(one["tier"], one["places"]) for one in sim.status(kind, name)["scope"]["stores"]]


def change(sim: Simulation, redis: Raw) -> None:
    sim.edit("CacheTier", "shared", redis=redis)
    sim.come_to_rest()


def delete(sim: Simulation) -> None:
    sim.put(model(tiers=("cpu",)))
    sim.delete("CacheTier", "shared")
    sim.come_to_rest()


@pytest.mark.parametrize(("kind", "name"), HOLDERS)
def test_every_scope_has_the_stores_that_outlive_pods_and_nothing_is_written_at_rest(kind: str, name: str) -> None:
    sim = crowd()
    assert on_record(sim, kind, name) == [("shared", ["old.example:6379"])]
    assert sim.unsettled() == {}
    change(sim, at("new.example:6379"))
    assert on_record(sim, kind, name) == [("shared", ["old.example:6379"]), ("shared", ["new.example:6379"])]
    delete(sim)
    assert on_record(sim, kind, name) == [("shared", ["old.example:6379"]), ("shared", ["new.example:6379"])]
    assert sim.unsettled() == {}


def test_a_store_is_known_by_the_tiers_uid_or_by_its_folder() -> None:
    sim = crowd({"managed": {}}, DISK)
    uid = sim.world.tiers["shared"].uid
    assert on_record(sim) == [("disk", ["/kv disk"]), ("shared", [uid])]


def test_servers_that_pods_do_not_use_yet_are_not_on_record() -> None:
    sim = crowd()
    sim.backends_up = False
    change(sim, at("new.example:6379"))
    assert on_record(sim) == [("shared", ["old.example:6379"])]


def test_a_store_is_recorded_at_once_though_pods_are_silent() -> None:
    sim = crowd()
    sim.put(pod("silent"))
    sim.edit("TenantCachePolicy", "acme", cacheGeneration=1)
    sim.settle()
    sim.edit("CacheTier", "shared", redis=at("new.example:6379"))
    for _ in range(2):  # the servers are asked, and in force
        sim.step(Key("CacheTier", NAMESPACE, "shared"))
    (write,) = plan_policy(sim.world, "acme", sim.now).statuses
    assert [one["places"] for one in write.status["scope"]["stores"]] == [["old.example:6379"], ["new.example:6379"]]
    assert not write.can_wait


def test_endpoints_of_a_cluster_that_change_one_by_one_are_one_store() -> None:
    sim = crowd(at("a:6379", cluster=True))
    for endpoints in (("a:6379", "b:6379"), ("b:6379",)):
        change(sim, at(*endpoints, cluster=True))
        assert on_record(sim) == [("shared", list(endpoints))]


def test_a_tier_that_is_created_again_has_the_store_of_its_servers_under_any_name() -> None:
    sim = crowd()
    delete(sim)
    sim.put(redis_tier("other", redis=at("old.example:6379")))
    sim.put(model(tiers=("cpu", "other")))
    sim.come_to_rest()
    assert on_record(sim) == [("other", ["old.example:6379"])]


@pytest.mark.parametrize("rolls", ["generation", "invalidation"])
def test_a_new_epoch_begins_with_the_present_stores(rolls: str) -> None:
    sim = crowd()
    change(sim, at("new.example:6379"))
    if rolls == "generation":
        sim.edit("TenantCachePolicy", "acme", cacheGeneration=1)
    else:
        sim.put(invalidation("all", scope={"all": True}))
    sim.come_to_rest()
    held = HOLDERS[:1] if rolls == "generation" else HOLDERS
    assert [on_record(sim, *one) for one in held] == [[("shared", ["new.example:6379"])]] * len(held)
    assert sim.unsettled() == {}


def test_a_deleted_managed_tier_leaves_the_record_when_its_servers_are_gone_and_not_before() -> None:
    sim = crowd({"managed": {}})
    kept = on_record(sim)
    servers = sim.store.domain(NAMESPACE).servers
    delete(sim)
    assert servers["shared"]
    assert on_record(sim) == kept
    for name in list(servers["shared"]):
        sim.queue.add_all(sim.store._forget_pod(sim.store.domain(NAMESPACE), name, None, ended=True))
    sim.settle()
    assert on_record(sim) == []


def test_after_a_restart_nothing_proves_that_the_servers_of_a_deleted_managed_tier_ended() -> None:
    sim = crowd({"managed": {}})
    kept = on_record(sim)
    delete(sim)
    sim.store.domain(NAMESPACE).servers.clear()
    sim.restart()
    sim.come_to_rest()
    assert on_record(sim) == kept


def test_of_too_many_stores_former_ones_stay_so_that_no_erasure_is_proven() -> None:
    sim = crowd()
    stores = [{"tier": "shared", "places": [f"s{number}:6379"]} for number in range(MAX_STORES)]
    scope = ScopeStatus.model_validate({"kind": ScopeKind.TENANT, "name": "a", "epoch": "0" * 32, "stores": stores})
    shown = with_stores(sim.world, scope)
    assert shown is not None
    assert shown["stores"] == stores
    assert len(former_stores(sim.world, scope.stores)) == MAX_STORES


@pytest.mark.parametrize("seen", [True, False])
def test_a_deleted_managed_tier_of_which_a_server_vanished_stays_on_record_over_a_restart(seen: bool) -> None:
    sim = crowd({"managed": {}})
    name, kept = "kvs-shared-redis-0-0", on_record(sim)
    sim.put(server_pod(name, containerStatuses=[{"name": "redis", "state": {"running": {}}}]))
    sim.come_to_rest()
    sim.delete("Pod", name, seen=seen)
    if seen:
        sim.come_to_rest()
    sim.store.domain(NAMESPACE).servers.clear()
    sim.restart()
    sim.come_to_rest()
    delete(sim)
    for other in list(sim.store.domain(NAMESPACE).servers["shared"]):
        sim.queue.add_all(sim.store._forget_pod(sim.store.domain(NAMESPACE), other, None, ended=True))
    sim.settle()
    assert on_record(sim) == kept


def begun(sim: Simulation) -> ErasureRecord:
    found = sim.world.invalidations["leave"]
    record = ordering.begin(sim.world, Key("CacheInvalidation", NAMESPACE, "leave"), found, sim.now)
    assert record is not None
    return record


@pytest.mark.parametrize("rolls", ["generation", "invalidation"])
def test_an_epoch_that_is_drawn_after_the_intent_of_an_erasure_hides_no_former_store(rolls: str) -> None:
    sim = crowd()
    change(sim, at("new.example:6379"))
    sim.put(invalidation("leave", scope={"tenant": "acme"}, mode="Eager"))
    sim.settle()
    if rolls == "generation":
        sim.edit("TenantCachePolicy", "acme", cacheGeneration=1)
    else:
        sim.put(invalidation("all", scope={"all": True}))
    sim.settle()
    assert on_record(sim) == [("shared", ["new.example:6379"])]
    lost = begun(sim).erasure.of(TierLost)
    assert [(one.tier, one.server) for one in lost] == [("shared", "old.example:6379")]


def test_a_deleted_tier_that_was_not_chosen_is_excluded() -> None:
    sim = crowd(None, redis_tier("second", redis=at("second.example:6379")))
    delete(sim)
    sim.put(invalidation("leave", scope={"tenant": "acme"}, mode="Eager", tiers=[{"name": "second"}]))
    sim.settle()
    erasure = begun(sim).erasure
    assert erasure.order.excluded_tiers == ("cpu", "shared")
    assert erasure.of(TierLost) == ()
