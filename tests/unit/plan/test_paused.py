"""Paused models and tiers: their children stay, policies go on."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.reasons import ModelReason
from kvstrata.plan.actions import Decision
from kvstrata.plan.conditions import kstatus, write_status
from tests.support.objects import NAMESPACE, model, pod, policy, redis_tier
from tests.support.worlds import Simulation

PAUSED = "kvstrata.io/paused"
CHILD = {"CachedModel": ("Deployment", "kvs-tiny"), "CacheTier": ("StatefulSet", "kvs-shared-redis-0")}
EDIT: dict[str, dict[str, Any]] = {
    "CachedModel": {"engine": {"image": "engine:2", "replicas": 1}},
    "CacheTier": {"redis": {"managed": {"image": "redis:9"}}},
}
NAMES = {"CachedModel": "tiny", "CacheTier": "shared"}


def annotate(simulation: Simulation, kind: str, value: str) -> None:
    raw = dict(simulation.kube.objects[(kind, NAMESPACE, NAMES[kind])])
    simulation.put({**raw, "metadata": {**raw["metadata"], "annotations": {PAUSED: value}}})


def image(simulation: Simulation, kind: str) -> str:
    child = simulation.kube.objects[(CHILD[kind][0], NAMESPACE, CHILD[kind][1])]
    return str(child["spec"]["template"]["spec"]["containers"][0]["image"])


@pytest.fixture
def simulation() -> Simulation:
    built = Simulation(redis_tier(), model(tiers=("shared",)), policy("anna"), pod("pod-0"))
    built.come_to_rest()
    return built


@pytest.mark.parametrize("kind", ["CachedModel", "CacheTier"])
def test_children_of_a_paused_object_stay_and_status_says_so(simulation: Simulation, kind: str) -> None:
    annotate(simulation, kind, "true")
    simulation.come_to_rest()
    assert simulation.condition(kind, NAMES[kind], "Paused") == ("True", "Paused")
    assert simulation.condition(kind, NAMES[kind], "Ready")[0] == "True"
    before = image(simulation, kind)
    simulation.edit(kind, NAMES[kind], **EDIT[kind])
    simulation.come_to_rest()
    assert image(simulation, kind) == before
    assert simulation.condition(kind, NAMES[kind], "Ready") == ("False", "Paused")
    assert simulation.unsettled() == {}
    annotate(simulation, kind, "false")
    simulation.come_to_rest()
    assert image(simulation, kind) == ("engine:2" if kind == "CachedModel" else "redis:9") != before
    assert "Paused" not in {one["type"] for one in simulation.status(kind, NAMES[kind])["conditions"]}


def test_a_deleted_child_of_a_paused_object_is_not_made_again(simulation: Simulation) -> None:
    annotate(simulation, "CachedModel", "true")
    simulation.delete("Service", "kvs-tiny")
    simulation.come_to_rest()
    assert ("Service", NAMESPACE, "kvs-tiny") not in simulation.kube.objects


def test_a_paused_object_reports_trouble_of_its_own() -> None:
    raw = model()
    paused = CachedModel.parse({**raw, "metadata": {**raw["metadata"], "annotations": {PAUSED: "true"}}})
    trouble = Decision(ModelReason.PODS_NOT_READY, "pod tiny-0: the engine does not answer")
    (write,) = write_status(paused, datetime(2026, 1, 1, tzinfo=UTC), kstatus(pending=trouble), {})
    shown = {one["type"]: (one["status"], one["reason"]) for one in write.status["conditions"]}
    assert shown == {"Ready": ("False", "PodsNotReady"), "Paused": ("True", "Paused")}


def test_a_policy_is_enforced_while_its_model_is_paused(simulation: Simulation) -> None:
    annotate(simulation, "CachedModel", "true")
    simulation.come_to_rest()
    before = simulation.bundle().root.revision
    simulation.edit("TenantCachePolicy", "anna", suspend=True)
    simulation.come_to_rest()
    assert simulation.bundle().root.revision > before
    assert simulation.condition("TenantCachePolicy", "anna", "Enforced")[0] == "True"


def test_gates_of_a_paused_model_may_read_new_parts_of_the_bundle(simulation: Simulation) -> None:
    annotate(simulation, "CachedModel", "true")
    simulation.delete("Role", "kvs-tiny")
    simulation.come_to_rest()
    assert ("Role", NAMESPACE, "kvs-tiny") in simulation.kube.objects
