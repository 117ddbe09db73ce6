"""Admission webhooks that change pod templates: what they add is theirs, and nothing is written at rest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from kvstrata.clients.kube import KubeError
from kvstrata.objects.applied import writer_of
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


SLOT = "Deployment", NAMESPACE, "kvs-tiny"


def scale(simulation: Simulation, replicas: int) -> None:
    found = simulation.kube.objects[SLOT]
    simulation.put({**found, "spec": {**found["spec"], "replicas": replicas}})


def later(simulation: Simulation, seconds: float) -> None:
    simulation.now += timedelta(seconds=seconds)
    simulation.settle()


def events_of(simulation: Simulation, reason: str) -> list[str]:
    found = [one for (kind, _, _), one in simulation.kube.objects.items() if kind == "Event"]
    return [one["message"] for one in found if one["reason"] == reason]


def test_a_writer_that_never_rests_is_answered_for_days() -> None:
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",)), policy("acme"))
    simulation.come_to_rest()
    wanted = simulation.kube.objects[SLOT]["spec"]["replicas"]
    for _ in range(80):
        scale(simulation, 7)
        later(simulation, 301)
        assert simulation.kube.objects[SLOT]["spec"]["replicas"] == wanted


def test_a_network_policy_that_another_opens_is_closed_again_within_seconds() -> None:
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",)), policy("acme"))
    simulation.come_to_rest()
    slot = next(slot for slot in simulation.kube.objects if slot[0] == "NetworkPolicy")
    wanted, open_s = simulation.kube.objects[slot]["spec"], 0
    for _ in range(40):
        found = simulation.kube.objects[slot]
        if found["spec"] == wanted:
            simulation.put({**found, "spec": {**found["spec"], "ingress": [{}]}})
            open_s = 0
        later(simulation, 1)
        open_s += 1
        assert open_s <= 6


def test_a_child_that_loses_its_owner_is_taken_back_at_once_however_often() -> None:
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",)), policy("acme"))
    simulation.come_to_rest()
    for _ in range(8):
        found = simulation.kube.objects[SLOT]
        kept = {name: value for name, value in found["metadata"].items() if name != "ownerReferences"}
        simulation.put({**found, "metadata": kept})
        later(simulation, 1)
        assert simulation.kube.objects[SLOT]["metadata"]["ownerReferences"]


def test_a_child_that_another_changed_and_that_may_not_be_written_is_reported_as_refused() -> None:
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",)), policy("acme"))
    simulation.come_to_rest()

    def refuse(verb: str, kind: str, name: str) -> None:
        if kind == "Deployment":
            raise KubeError(403, "Forbidden", "a quota forbids it")

    simulation.kube.before_write = refuse
    scale(simulation, 7)
    for _ in range(60):
        later(simulation, 1)
        assert "a quota forbids it" in str(simulation.status("CachedModel", "tiny")["conditions"])
    simulation.kube.before_write = lambda verb, kind, name: None
    later(simulation, 60)
    assert simulation.kube.objects[SLOT]["spec"]["replicas"] == 1


def test_what_a_webhook_rewrites_is_no_change_of_another_when_an_operator_starts() -> None:
    simulation = admitted_with(rewrite)
    simulation.restart()
    simulation.advance(60)
    simulation.come_to_rest()
    assert events_of(simulation, "ChildChanged") == []


def test_where_a_webhook_rewrites_fields_the_one_that_another_changes_is_named() -> None:
    simulation = admitted_with(rewrite)
    for _ in range(3):
        scale(simulation, 7)
        later(simulation, 60)
    assert events_of(simulation, "ChildChanged") == [
        "Deployment kvs-tiny: another writer changed spec.replicas; it is put back"
    ]


def test_a_dispute_ends_with_the_content_that_it_was_about() -> None:
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",)), policy("acme"))
    simulation.come_to_rest()
    scale(simulation, 7)
    later(simulation, 1)
    assert simulation.world.disputes.keys() == {SLOT[::2]}
    engine = simulation.kube.objects["CachedModel", NAMESPACE, "tiny"]["spec"]["engine"]
    simulation.edit("CachedModel", "tiny", engine={**engine, "replicas": 3})
    later(simulation, 1)
    assert simulation.kube.objects[SLOT]["spec"]["replicas"] == 3
    assert not simulation.world.disputes


@pytest.mark.parametrize(
    ("path", "fields", "writer"),
    [
        ("spec.replicas", {"f:status": {"f:replicas": {}}}, "another writer"),
        ("spec.replicas", {"f:status": {}, "f:spec": {"f:replicas": {}}}, "other"),
        ("data.policy.json", {"f:data": {"f:policy.json": {}}}, "other"),
        ("data", {"f:metadata": {}}, "another writer"),
        ("spec.ports[0]", {"f:spec": {"f:ports": {}}}, "other"),
    ],
)
def test_the_writer_of_a_field_has_that_field(path: str, fields: dict[str, Any], writer: str) -> None:
    entry = {"manager": "other", "time": "2026-01-01T00:00:09Z", "fieldsV1": fields}
    assert writer_of({"metadata": {"managedFields": [entry]}}, path) == writer
