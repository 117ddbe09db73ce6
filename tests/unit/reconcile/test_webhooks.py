"""Admission webhooks that change pod templates: what they add is theirs, and nothing is written at rest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from kvstrata.reconcile.children import writer_of
from tests.support.objects import NAMESPACE, cpu_tier, model, pod, policy, redis_tier
from tests.support.worlds import Simulation

PodSpec = dict[str, Any]


def inject(spec: PodSpec) -> None:
    spec["containers"].insert(0, {"name": "proxy", "image": "mesh:1"})
    spec.setdefault("volumes", []).append({"name": "certificates", "emptyDir": {}})


def rewrite(spec: PodSpec) -> None:
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        container["image"] = f"mirror.example/{container['image'].removeprefix('mirror.example/')}"


def admitted_with(change: Callable[[PodSpec], None]) -> Simulation:
    """A namespace whose webhook changes every pod template that is written."""
    simulation = Simulation(cpu_tier(), redis_tier(), model(tiers=("cpu", "shared")), policy("acme"))
    api = simulation.kube.api
    stored = api.apply

    def apply(slot: Any, body: Any, *manager: Any, **options: Any) -> Any:
        body = copy.deepcopy(body)
        if slot[0] in ("Deployment", "StatefulSet"):
            change(body["spec"]["template"]["spec"])
        return stored(slot, body, *manager, **options)

    api.apply = apply  # type: ignore[method-assign]
    simulation.come_to_rest()
    simulation.put(pod("pod-0"))
    simulation.come_to_rest()
    return simulation


@pytest.mark.parametrize("change", [inject, rewrite])
def test_a_model_becomes_ready_and_nothing_is_written_at_rest(change: Callable[[PodSpec], None]) -> None:
    simulation = admitted_with(change)
    assert "is being written" not in str(simulation.status("CachedModel", "tiny")["conditions"])
    version = simulation.kube.objects["Deployment", NAMESPACE, "kvs-tiny"]["metadata"]["resourceVersion"]
    simulation.advance(3600)
    assert simulation.kube.objects["Deployment", NAMESPACE, "kvs-tiny"]["metadata"]["resourceVersion"] == version


@pytest.mark.parametrize("change", [inject, rewrite])
def test_an_operator_that_starts_again_rolls_nothing(change: Callable[[PodSpec], None]) -> None:
    simulation = admitted_with(change)
    slot = "Deployment", NAMESPACE, "kvs-tiny"
    before = simulation.kube.objects[slot]
    simulation.restart()
    simulation.advance(60)
    simulation.come_to_rest()
    after = simulation.kube.objects[slot]
    assert (after["spec"], after["metadata"]["generation"]) == (before["spec"], before["metadata"]["generation"])
    writes = simulation.kube.writes
    simulation.advance(3600)
    assert simulation.kube.writes == writes, "something is written at rest"


def test_what_was_rewritten_is_an_event_of_the_owner() -> None:
    simulation = admitted_with(rewrite)
    events = [one for (kind, _, _), one in simulation.kube.objects.items() if kind == "Event"]
    told = {(one["involvedObject"]["kind"], one["message"]) for one in events if one["reason"] == "ChildRewritten"}
    changed = "spec.template.spec.initContainers[0].image"
    message = f"Deployment kvs-tiny: {changed} is stored otherwise than written, as by an admission webhook"
    assert ("CachedModel", message) in told
    assert len([one for one in events if one["reason"] == "ChildRewritten"]) == len(told), "once each"


def test_a_writer_that_changes_a_child_again_and_again_is_named_and_answered_ever_later() -> None:
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",)), policy("acme"))
    simulation.come_to_rest()
    slot = "Deployment", NAMESPACE, "kvs-tiny"
    wanted = simulation.kube.objects[slot]["spec"]["replicas"]
    repairs = 0
    for _ in range(300):
        found = simulation.kube.objects[slot]
        if found["spec"]["replicas"] == wanted:
            repairs += 1
            simulation.put({**found, "spec": {**found["spec"], "replicas": 7}})
        simulation.advance(1)
    assert 2 < repairs < 12
    conditions = str(simulation.status("CachedModel", "tiny")["conditions"])
    assert "changes spec.replicas of Deployment kvs-tiny; it is put back" in conditions
    events = [one for (kind, _, _), one in simulation.kube.objects.items() if kind == "Event"]
    assert [one["message"] for one in events if one["reason"] == "ChildChanged"] == [
        "Deployment kvs-tiny: another writer changed spec.replicas; it is put back"
    ]
    simulation.advance(600)
    assert simulation.kube.objects[slot]["spec"]["replicas"] == wanted


def test_the_writer_of_a_field_is_its_newest_manager_beside_the_operator() -> None:
    def entry(manager: str, time: str, field: str) -> dict[str, Any]:
        return {"manager": manager, "time": time, "fieldsV1": {"f:spec": {f"f:{field}": {}}}}

    entries = [
        entry("kvstrata-cachedmodel", "2026-01-01T00:00:09Z", "replicas"),
        entry("old", "2026-01-01T00:00:01Z", "replicas"),
        entry("keel", "2026-01-01T00:00:02Z", "replicas"),
        entry("kube-controller-manager", "2026-01-01T00:00:08Z", "paused"),
    ]
    assert writer_of({"metadata": {"managedFields": entries}}, "spec.replicas") == "keel"
    assert writer_of({"metadata": {}}, "spec.replicas") == "another writer"
