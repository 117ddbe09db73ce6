"""Conditions of Redis tiers, whoever runs the servers and however many there are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstrata.model.pods import ClusterReport
from kvstrata.model.redis.cluster import Cluster
from kvstrata.model.redis.credentials import CredentialLook, ServerCredentials
from kvstrata.model.refs import Key
from kvstrata.objects import names
from kvstrata.plan.redis.cluster import known_as
from tests.support.objects import NAMESPACE, model, pod, policy, redis_tier
from tests.support.worlds import Simulation
from tests.topology import looks

TIER = Key("CacheTier", NAMESPACE, "t")
FIVE = ("BackendReachable", "SlotsCovered", "ReplicationHealthy", "CapacityCommitted", "Encrypted")
ABSENT = ("", "")
MANAGED_CLUSTER = {"managed": {"shards": 3, "replicasPerShard": 1}}


def looked(simulation: Simulation, found: Cluster) -> None:
    """Have the operator look at its cluster."""
    simulation.store.domain(NAMESPACE).servers["t"] = {pod.name: pod for pod in found.pods.values()}
    simulation.looks["t"] = ClusterReport(found, simulation.now)
    simulation.queue.add(TIER)
    simulation.settle()


def told(simulation: Simulation) -> dict[str, tuple[str, str]]:
    return {kind: simulation.condition("CacheTier", "t", kind) for kind in FIVE}


@pytest.mark.parametrize(
    ("redis", "slots", "replication"),
    [
        ({"managed": {}}, ABSENT, ABSENT),
        ({"external": {"endpoints": ["a:1"]}}, ABSENT, ABSENT),
        ({"external": {"endpoints": ["a:1"], "cluster": True}}, ("True", "SlotsCovered"), ABSENT),
        (MANAGED_CLUSTER, ("True", "SlotsCovered"), ("True", "ReplicasInStep")),
    ],
    ids=["one shard", "an external server", "an external cluster", "a managed cluster"],
)
def test_slots_and_replicas_are_judged_where_the_servers_have_some(
    redis: dict[str, Any], slots: tuple[str, str], replication: tuple[str, str]
) -> None:
    simulation = Simulation(redis_tier("t", capacity="3Gi", redis=redis))
    simulation.come_to_rest()
    if redis is MANAGED_CLUSTER:
        looked(simulation, looks.cluster(looks.even(3), replicas=1))
    assert told(simulation) == {
        "BackendReachable": ("True", "Reachable"),
        "SlotsCovered": slots,
        "ReplicationHealthy": replication,
        "CapacityCommitted": ABSENT,
        "Encrypted": ("False", "EncryptionDisabled"),
    }
    assert simulation.condition("CacheTier", "t", "Ready") == ("True", "TierReady")
    assert simulation.unsettled() == {}


def test_guarantees_of_a_cluster_that_gets_smaller_are_told_in_numbers() -> None:
    simulation = Simulation(
        redis_tier("t", capacity="3Gi", redis=MANAGED_CLUSTER),
        model(tiers=("t",)),
        pod("pod-0"),
        *(policy(one, budgets=[{"tier": "t", "guaranteed": "512Mi", "limit": "1Gi"}]) for one in ("a", "b")),
    )
    simulation.come_to_rest()
    looked(simulation, looks.cluster(looks.even(3), replicas=1))
    assert simulation.condition("CacheTier", "t", "CapacityCommitted") == ("True", "GuaranteesFit")
    simulation.edit("CacheTier", "t", capacity="1Gi")
    simulation.step(TIER)
    assert simulation.condition("CacheTier", "t", "CapacityCommitted") == ("False", "GuaranteesExceedCapacity")
    (found,) = (c for c in simulation.status("CacheTier", "t")["conditions"] if c["type"] == "CapacityCommitted")
    assert "pods enforce 1Gi of guarantees, and 665Mi of it can be guaranteed" in found["message"]
    simulation.come_to_rest()
    assert simulation.condition("CacheTier", "t", "CapacityCommitted") == ("False", "GuaranteesWaiting")
    (found,) = (c for c in simulation.status("CacheTier", "t")["conditions"] if c["type"] == "CapacityCommitted")
    assert "1 object waits for 512Mi more of guarantees than fit into the 665Mi" in found["message"]


def test_a_password_secret_that_vanishes_is_made_anew_and_servers_of_every_shard_get_another_template() -> None:
    simulation = Simulation(redis_tier("t", capacity="3Gi", redis=MANAGED_CLUSTER))
    simulation.come_to_rest()
    whole = looks.cluster(looks.even(3), replicas=1)
    looked(simulation, whole)
    shards = [("StatefulSet", NAMESPACE, names.redis_shard("t", shard)) for shard in range(3)]
    before = [simulation.kube.objects[shard]["spec"]["template"] for shard in shards]
    simulation.delete("Secret", names.redis_auth("t"))
    simulation.settle()
    assert ("Secret", NAMESPACE, names.redis_auth("t")) in simulation.kube.objects
    after = [simulation.kube.objects[shard]["spec"]["template"] for shard in shards]
    assert all(one != other for one, other in zip(before, after, strict=True))
    known = [known_as(pod) for pod in whole.pods.values()]
    refused = {name: ServerCredentials(name, "WrongPassword", "refuses the password") for name in known}
    simulation.store.domain(NAMESPACE).credentials["t"] = CredentialLook(refused, simulation.now)
    looked(simulation, replace(whole, servers={}, silent=dict.fromkeys(whole.pods, ("WrongPassword", "refused"))))
    assert simulation.condition("CacheTier", "t", "Ready") == ("False", "PasswordsLost")
    assert simulation.condition("CacheTier", "t", "PasswordsCurrent") == ("False", "PasswordsLost")
    assert simulation.condition("CacheTier", "t", "BackendReachable") == ("False", "WrongPassword")
    assert simulation.condition("CacheTier", "t", "SlotsCovered") == ("Unknown", "PasswordsLost")
