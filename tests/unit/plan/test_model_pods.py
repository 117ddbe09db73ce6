"""A model's conditions name the pod that does not come up, and why: from its status, or from events about it."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.api.base import InvalidObjectError
from kvstrata.api.cachedmodel import CachedModel
from kvstrata.model.refs import Key
from kvstrata.plan.actions import ReadEvents
from tests.support.objects import NAMESPACE, Raw, cpu_tier, model, pod, redis_tier
from tests.support.worlds import START, Simulation

MODEL = Key("CachedModel", NAMESPACE, "tiny")
BACK_OFF = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
FULL = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available: 1 Insufficient memory."}


def message(simulation: Simulation, condition: str = "Ready", kind: str = "CachedModel", name: str = "tiny") -> str:
    return str(next(c["message"] for c in simulation.status(kind, name)["conditions"] if c["type"] == condition))


def stuck(name: str, **status: Any) -> Raw:
    made = pod(name, ready=False, state="waiting")
    made["spec"] = {"nodeName": "node"} if "conditions" not in status else {}
    return {**made, "status": {**made["status"], **status}}


def observed(simulation: Simulation, **status: Any) -> None:
    raw = simulation.kube.objects[("Deployment", NAMESPACE, "kvs-tiny")]
    simulation.put({**raw, "status": {"observedGeneration": raw["metadata"]["generation"], **status}})
    simulation.settle()


def event(name: str, uid: str, reason: str, text: str, namespace: str = NAMESPACE) -> Raw:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": namespace},
        "involvedObject": {"uid": uid},
        "type": "Warning",
        "reason": reason,
        "message": text,
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }


def test_a_wrong_image_reaches_the_models_conditions_and_goes_with_its_correction() -> None:
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",)))
    simulation.advance(5)
    simulation.put(stuck("pod-0", containerStatuses=[{"name": "engine", "image": "engine:typo", "state": BACK_OFF}]))
    observed(simulation, updatedReplicas=1, replicas=1)
    for condition in ("Ready", "RolledOut"):
        assert simulation.condition("CachedModel", "tiny", condition) == ("False", "ImageNotPulled")
    assert message(simulation).startswith("pod pod-0: the image engine:typo of container engine cannot be pulled: ")
    simulation.put(pod("pod-0"))
    simulation.roll_out()
    simulation.ack_all()
    assert simulation.condition("CachedModel", "tiny", "RolledOut") == ("True", "RolledOut")


def test_a_failing_pod_of_a_new_template_is_reported_while_the_old_one_serves() -> None:
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",)), pod("old"))
    simulation.come_to_rest()
    simulation.put(stuck("new", containerStatuses=[{"name": "engine", "image": "engine:typo", "state": BACK_OFF}]))
    observed(simulation, updatedReplicas=1, replicas=2, readyReplicas=1)
    assert simulation.condition("CachedModel", "tiny", "RolledOut") == ("False", "ImageNotPulled")


def test_a_tier_larger_than_every_node_is_named_with_its_size() -> None:
    simulation = Simulation(cpu_tier("dram", capacityPerPod="64Gi"), model(tiers=("dram",)))
    simulation.advance(5)
    simulation.put(stuck("pod-0", conditions=[FULL], containerStatuses=[]))
    observed(simulation, updatedReplicas=1, replicas=1)
    assert simulation.condition("CachedModel", "tiny", "Ready") == ("False", "Unschedulable")
    reported = message(simulation)
    assert "A pod asks for 66144Mi of memory, 64Gi of that for CacheTier dram: lower its capacityPerPod or" in reported


def test_a_missing_secret_of_a_volume_is_found_in_the_events_about_the_pod() -> None:
    hub = {"hub": {"repository": "x/y", "tokenSecretRef": {"name": "hf", "key": "token"}}}
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",), model={"name": "tiny", "source": hub}))
    simulation.advance(5)
    simulation.put(stuck("pod-0", containerStatuses=[{"name": "engine", "state": {"waiting": {}}}]))
    uid = simulation.pod("pod-0").uid
    words = 'MountVolume.SetUp failed for volume "hub-token" : references non-existent secret key: token'
    simulation.put(event("e", uid, "FailedMount", words), event("other", "of another", "FailedMount", "x"))
    observed(simulation, updatedReplicas=1, replicas=1)
    simulation.advance(60)
    assert simulation.condition("CachedModel", "tiny", "Ready") == ("False", "SecretNotFound")
    assert message(simulation) == "pod pod-0: Secret hf has no key token: add it, or correct the key's name"
    asked = [a for _, made in simulation.plans for a in made.actions if isinstance(a, ReadEvents)]
    assert 3 <= len(asked) <= 6, "a look each 15 seconds"


def test_pods_that_start_in_time_cause_no_look_at_events() -> None:
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",)))
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": START.isoformat()}
    made = stuck("pod-0", conditions=[scheduled])
    simulation.put({**made, "spec": {"nodeName": "node"}})
    simulation.advance(5)
    simulation.put(pod("pod-0"))
    simulation.advance(60)
    assert not [a for _, made in simulation.plans for a in made.actions if isinstance(a, ReadEvents)]


def test_pods_that_a_quota_refuses_are_reported_for_a_model_and_for_servers_of_a_tier() -> None:
    simulation = Simulation(redis_tier(), model())
    simulation.backends_up = False
    simulation.advance(5)
    refused = 'pods "x" is forbidden: exceeded quota: small'
    condition = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": refused}
    observed(simulation, conditions=[condition])
    assert simulation.condition("CachedModel", "tiny", "Ready") == ("False", "PodsRefused")
    shard = simulation.kube.objects[("StatefulSet", NAMESPACE, "kvs-shared-redis-0")]
    simulation.put(event("e", shard["metadata"]["uid"], "FailedCreate", refused))
    simulation.put({**shard, "status": {"observedGeneration": 1, "replicas": 0}})
    simulation.advance(30)
    assert simulation.condition("CacheTier", "shared", "Ready") == ("False", "ServersDoNotStart")
    reported = message(simulation, kind="CacheTier", name="shared")
    assert reported == f"kvs-shared-redis-0: no pod can be created: {refused}"


def test_a_model_whose_pods_cannot_start_is_stalled_and_goes_on_when_that_is_mended() -> None:
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",)))
    simulation.advance(5)
    refused = "pods x is forbidden: no PriorityClass with name gold was found"
    condition = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": refused}
    observed(simulation, conditions=[condition])
    for kind, reported in (("Ready", "False"), ("Stalled", "True"), ("RolledOut", "False")):
        assert simulation.condition("CachedModel", "tiny", kind) == (reported, "PodsRefused")
        assert message(simulation, kind) == f"no pod can be created: {refused}"
    assert simulation.condition("CachedModel", "tiny", "Reconciling") == ("", "")
    simulation.put(pod("pod-0"))
    simulation.roll_out()
    simulation.ack_all()
    simulation.come_to_rest()
    assert simulation.condition("CachedModel", "tiny", "Stalled") == ("", "")
    assert simulation.condition("CachedModel", "tiny", "Ready")[0] == "True"


def test_a_model_without_room_is_stalled_when_its_time_to_start_has_passed() -> None:
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",)))
    simulation.advance(5)
    simulation.put(stuck("pod-0", conditions=[FULL], containerStatuses=[]))
    observed(simulation, updatedReplicas=1, replicas=1)
    assert simulation.condition("CachedModel", "tiny", "Reconciling") == ("True", "Unschedulable")
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    observed(simulation, updatedReplicas=1, replicas=1, conditions=[late])
    simulation.advance(30)
    assert simulation.condition("CachedModel", "tiny", "Stalled") == ("True", "Unschedulable")
    assert "Insufficient memory" in message(simulation, "Stalled")


def test_a_gate_that_is_not_ready_gives_the_reason_itself() -> None:
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",)))
    simulation.advance(5)
    simulation.put(pod("pod-0", ready=False))
    simulation.ack("pod-0", 0, problem="the cache server does not answer (no socket)")
    observed(simulation, updatedReplicas=1, replicas=1)
    simulation.advance(3)
    assert simulation.condition("CachedModel", "tiny", "Ready") == ("False", "PodsNotReady")
    assert message(simulation) == "0 of 1 pods are ready; pod pod-0: the cache server does not answer (no socket)"


def test_a_rollout_without_room_names_the_room_and_counts_no_pod_that_waits_for_it() -> None:
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",)), pod("old"))
    simulation.come_to_rest()
    simulation.put(stuck("new", conditions=[], containerStatuses=[]))
    observed(simulation, updatedReplicas=1, replicas=2, readyReplicas=1)
    assert message(simulation, "RolledOut") == "0 of 1 pods run the newest template, 1 an older one"
    simulation.put(stuck("new", conditions=[FULL], containerStatuses=[]))
    simulation.advance(1)
    assert simulation.condition("CachedModel", "tiny", "Ready") == ("False", "Unschedulable")
    assert "0/1 nodes are available: 1 Insufficient memory" in message(simulation)
    assert "set engine.rollout.maxSurge to 0" in message(simulation)
    simulation.edit("CachedModel", "tiny", engine={"image": "engine:1", "replicas": 1, "rollout": {"maxSurge": 0}})
    simulation.settle()
    observed(simulation, updatedReplicas=1, replicas=2, readyReplicas=1)
    simulation.advance(30)
    assert "maxSurge" not in message(simulation)


@pytest.mark.parametrize(
    ("rollout", "surge", "unavailable"),
    [
        ({}, 1, 0),
        ({"maxSurge": 0}, 0, 1),
        ({"maxSurge": "0%"}, "0%", 1),
        ({"maxSurge": "25%"}, "25%", 0),
        ({"maxSurge": "2", "maxUnavailable": 1}, 2, 1),
    ],
)
def test_a_model_replaces_pods_as_its_rollout_asks(rollout: Raw, surge: int | str, unavailable: int | str) -> None:
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",), engine={"image": "engine:1", "rollout": rollout}))
    simulation.advance(5)
    deployment = simulation.kube.objects[("Deployment", NAMESPACE, "kvs-tiny")]
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": surge, "maxUnavailable": unavailable}


@pytest.mark.parametrize("wrong", [{"maxSurge": 0, "maxUnavailable": "0%"}, {"maxSurge": "1.5"}, {"maxSurge": "101%"}])
def test_a_rollout_that_could_replace_no_pod_is_refused(wrong: Raw) -> None:
    raw = model(engine={"image": "engine:1", "rollout": wrong})
    with pytest.raises(InvalidObjectError, match=r"cannot both be 0|must be a number of pods"):
        CachedModel.parse(raw)
