"""A status has the conditions that apply now, and Ready says why an object without live pods is ready."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.objects import cpu_tier, domain, group, model, pod, policy, redis_tier
from tests.support.worlds import Simulation
from tools.generate.conditions import condition_types

POLICY, TIER, MODEL = "TenantCachePolicy", "CacheTier", "CachedModel"
BUDGET = [{"tier": "shared", "limit": "8Mi", "guaranteed": "4Mi"}]


def at_rest(*objects: dict[str, Any]) -> Simulation:
    simulation = Simulation(domain(), *objects)
    simulation.come_to_rest()
    assert simulation.unsettled() == {}
    return simulation


def present(simulation: Simulation, kind: str, name: str) -> set[str]:
    return {condition["type"] for condition in simulation.status(kind, name)["conditions"]}


REDIS = {"Ready", "BackendReachable", "HasRoom", "PasswordsCurrent", "CertificateCurrent"}


def test_a_plain_redis_tier_has_no_condition_about_what_it_lacks() -> None:
    simulation = at_rest(redis_tier(), model(tiers=("shared",)), policy("acme"))
    assert present(simulation, TIER, "shared") == {*REDIS, "Encrypted"}, "encryption is Disabled"
    simulation.put(pod("pod-0"))
    simulation.come_to_rest()
    assert present(simulation, TIER, "shared") == {*REDIS, "Encrypted", "EvictsWhenFull"}


def test_conditions_come_and_go_with_what_they_judge() -> None:
    simulation = at_rest(redis_tier(encryption=None), model(tiers=("shared",)), policy("acme", budgets=BUDGET))
    assert present(simulation, TIER, "shared") == {*REDIS, "CapacityCommitted"}
    assert present(simulation, POLICY, "acme") == {"Ready", "Admitted", "ErasesOnDeletion"}
    assert present(simulation, MODEL, "tiny") - {"Reconciling"} == {"Ready", "TiersBound", "RolledOut"}
    simulation.put(pod("pod-0"))
    simulation.come_to_rest()
    assert present(simulation, TIER, "shared") >= {*REDIS, "CapacityCommitted", "Encrypted", "EvictsWhenFull"}
    assert present(simulation, POLICY, "acme") >= {"Ready", "Admitted", "ErasesOnDeletion", "Enforced", "WithinBudget"}
    assert present(simulation, MODEL, "tiny") >= {"PolicyEnforced", "IsolationVerified"}
    simulation.edit(POLICY, "acme", budgets=[], deletionPolicy="Abandon")
    simulation.delete("Pod", "pod-0")
    simulation.come_to_rest()
    simulation.advance(20)
    assert present(simulation, TIER, "shared") == REDIS
    assert present(simulation, POLICY, "acme") == {"Ready", "Admitted"}


def test_a_tier_in_memory_of_pods_has_nothing_to_judge_without_guarantees() -> None:
    simulation = at_rest(cpu_tier(), redis_tier(), model(tiers=("cpu", "shared")), pod("pod-0"))
    assert present(simulation, TIER, "cpu") == {"Ready"}
    assert "TiersOrdered" in present(simulation, MODEL, "tiny")


@pytest.mark.parametrize(
    ("kind", "name"), [("CacheDomain", "default"), (MODEL, "tiny"), (POLICY, "acme"), ("TenantGroup", "lab")]
)
def test_without_a_live_pod_an_object_is_ready_and_its_column_says_no_pods(kind: str, name: str) -> None:
    scaled_to_zero = model(tiers=("shared",), engine={"image": "engine:1", "replicas": 0})
    simulation = at_rest(redis_tier(), scaled_to_zero, group("lab", "acme"), policy("acme", group="lab"))
    assert simulation.condition(kind, name, "Ready") == ("True", "NoLivePods")
    assert present(simulation, kind, name).isdisjoint({"Enforced", "PolicyEnforced", "Reconciling", "Stalled"})
    always = {str(condition) for condition, when in condition_types(kind).items() if not when}
    assert present(simulation, kind, name) >= always, "the reference says when a condition is present"
    assert simulation.status(kind, name)["enforcedBy"] == "no pods"
    (ready,) = (one for one in simulation.status(kind, name)["conditions"] if one["type"] == "Ready")
    assert "there is nothing to enforce" in ready["message"]


def test_a_live_pod_without_an_acknowledgement_makes_its_policy_reconcile() -> None:
    simulation = at_rest(redis_tier(), model(tiers=("shared",)), policy("acme"), pod("pod-0"), pod("pod-1"))
    assert simulation.status(POLICY, "acme")["enforcedBy"] == "2/2"
    simulation.edit(POLICY, "acme", cacheGeneration=1)
    simulation.settle()
    assert simulation.condition(POLICY, "acme", "Ready") == ("False", "AwaitingAcks")
    assert simulation.condition(POLICY, "acme", "Reconciling") == ("True", "AwaitingAcks")
    assert simulation.status(POLICY, "acme")["enforcedBy"] == "0/2"
    simulation.ack("pod-0")
    simulation.come_to_rest()
    assert simulation.condition(POLICY, "acme", "Ready") == ("True", "AllPodsAcknowledged")
    assert present(simulation, POLICY, "acme").isdisjoint({"Reconciling", "Stalled"})


def test_a_guarantee_that_waits_for_room_keeps_its_policy_from_being_ready() -> None:
    asked = [{"tier": "shared", "guaranteed": "30Mi"}]
    policies = (policy(name, budgets=asked) for name in ("acme", "late"))
    simulation = at_rest(redis_tier(), model(tiers=("shared",)), pod("pod-0"), *policies)
    assert simulation.condition(POLICY, "acme", "Ready") == ("True", "AllPodsAcknowledged")
    assert simulation.condition(POLICY, "late", "Enforced") == ("True", "AllPodsAcknowledged")
    assert simulation.condition(POLICY, "late", "Ready") == ("False", "InsufficientCapacity")
    assert simulation.condition(POLICY, "late", "Reconciling") == ("True", "InsufficientCapacity")
    simulation.delete(POLICY, "acme")
    simulation.come_to_rest()
    assert simulation.condition(POLICY, "late", "Ready") == ("True", "AllPodsAcknowledged")
