"""Servers that the operator runs and that do not come up: the tier says why, and what to change."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from kvstrata.clients import pki
from kvstrata.model.pods import ClusterReport
from kvstrata.model.redis.cluster import Cluster
from kvstrata.model.redis.credentials import CredentialLook, TlsFacts
from kvstrata.model.refs import Key
from kvstrata.objects import names
from kvstrata.plan.actions import TendServers
from tests.support.memory_secret_store import MemorySecretStore
from tests.support.objects import NAMESPACE, redis_tier, server_pod
from tests.support.server_answers import NO_PODS
from tests.support.worlds import START, Simulation
from tests.unit.plan.test_model_pods import event

TIER = Key("CacheTier", NAMESPACE, "shared")
NO_REDIS = {
    "podIP": "10.0.0.1",
    "containerStatuses": [
        {
            "name": "redis",
            "image": "nginx:1",
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"exitCode": 127, "reason": "Error", "message": "neither redis-server nor …"}},
        }
    ],
}


def cluster_tier(**managed: Any) -> dict[str, Any]:
    return redis_tier(capacity="3Gi", redis={"managed": {"shards": 3, **managed}})


def message(simulation: Simulation, condition: str) -> str:
    found = next(c for c in simulation.status("CacheTier", "shared")["conditions"] if c["type"] == condition)
    return str(found["message"])


def looked(simulation: Simulation) -> None:
    """Have the operator look at the cluster's pods, none of which answers."""
    pods = simulation.world.servers["shared"]
    silent = {pod.uid: ("ConnectionRefused", f"{pod.name} refuses connections") for pod in pods.values()}
    found = Cluster({pod.uid: pod for pod in pods.values()}, {}, silent, 0.0)
    simulation.looks["shared"] = ClusterReport(found, simulation.now)
    simulation.queue.add(TIER)
    simulation.settle()


def test_one_server_of_an_image_that_is_no_redis() -> None:
    simulation = Simulation(redis_tier())
    simulation.backends_up = False
    simulation.come_to_rest()
    assert simulation.condition("CacheTier", "shared", "Ready") == ("False", "Unreachable")
    simulation.put(server_pod("kvs-shared-redis-0-0", **NO_REDIS))
    simulation.settle()
    for condition in ("Ready", "BackendReachable"):
        assert simulation.condition("CacheTier", "shared", condition) == ("False", "ServersDoNotStart")
    told = "container redis ends again and again, with Error, exit code 127: neither redis-server nor …"
    assert message(simulation, "Ready") == f"kvs-shared-redis-0-0: {told}"
    simulation.backends_up = True
    simulation.put(
        server_pod("kvs-shared-redis-0-0", podIP="10.0.0.1", conditions=[{"type": "Ready", "status": "True"}])
    )
    simulation.advance(10)
    assert simulation.condition("CacheTier", "shared", "Ready")[0] == "True"


def test_a_cluster_of_an_image_that_is_no_redis() -> None:
    simulation = Simulation(cluster_tier())
    simulation.advance(2)
    simulation.put(*(server_pod(f"kvs-shared-redis-{shard}-0", **NO_REDIS) for shard in range(3)))
    looked(simulation)
    for condition in ("Ready", "BackendReachable"):
        assert simulation.condition("CacheTier", "shared", condition) == ("False", "ServersDoNotStart")
    assert message(simulation, "Ready").endswith("neither redis-server nor … (2 more do not come up)")
    assert "kvs-shared-redis-0-0: container redis ends" in message(simulation, "SlotsCovered")


def test_a_certificate_without_a_key_of_which_no_server_can_tell_because_none_starts() -> None:
    simulation = Simulation(cluster_tier(tls={"mode": "Secret", "secretRef": {"name": "mine"}}))
    simulation.looks["shared"] = NO_PODS
    simulation.advance(2)
    asked = [a for _, made in simulation.plans for a in made.actions if isinstance(a, TendServers)]
    assert [(one.servers, one.tls_secret, one.foreign_tls) for one in asked[:1]] == [((), "mine", True)]
    facts = TlsFacts("", problem="Secret mine has no tls.key: add it")
    look = CredentialLook({}, simulation.now, facts)
    simulation.store.domain(NAMESPACE).credentials["shared"] = look
    simulation.step(TIER)
    for condition in ("Ready", "CertificateCurrent"):
        assert simulation.condition("CacheTier", "shared", condition) == ("False", "InvalidTlsSecret")
        assert "tls.key" in message(simulation, condition)


@pytest.mark.parametrize("there", [False, True])
def test_a_certificate_is_read_although_there_are_no_servers_yet(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = pki.create_authority("test", START, pki.generate_key())
    monkeypatch.setattr(MemorySecretStore, "authority", property(lambda _: authority))
    simulation = Simulation(cluster_tier(tls={"mode": "Secret", "secretRef": {"name": "mine"}}))
    simulation.looks["shared"] = NO_PODS
    simulation.advance(2)
    if there:
        data = {names.AUTHORITY_KEY: base64.b64encode(b"x").decode()}
        metadata = {"name": "mine", "namespace": NAMESPACE}
        simulation.kube.put({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
    order = TendServers("shared", (), names.redis_auth("shared"), "mine", {}, foreign_tls=True)
    store = simulation.store.domain(NAMESPACE)
    store.credentials.pop("shared", None)
    asyncio.run(simulation.credentials.tend(NAMESPACE, order))
    simulation.step(TIER)
    expected = "InvalidTlsSecret" if there else "SecretNotFound"
    assert simulation.condition("CacheTier", "shared", "CertificateCurrent") == ("False", expected)
    assert simulation.condition("CacheTier", "shared", "Ready") == ("False", expected)
    assert "mine" in message(simulation, "Ready")


REFUSED = 'pods "x" is forbidden: no PriorityClass with name gold was found'


def test_a_tier_whose_servers_are_refused_is_stalled_and_is_asked_on_until_they_start() -> None:
    simulation = Simulation(redis_tier())
    simulation.backends_up = False
    simulation.advance(5)
    shard = simulation.kube.objects[("StatefulSet", NAMESPACE, "kvs-shared-redis-0")]
    simulation.put(event("e", shard["metadata"]["uid"], "FailedCreate", REFUSED))
    simulation.put({**shard, "status": {"observedGeneration": 1, "replicas": 0}})
    simulation.advance(30)
    for condition, status in (("Ready", "False"), ("Stalled", "True")):
        assert simulation.condition("CacheTier", "shared", condition) == (status, "ServersDoNotStart")
        assert message(simulation, condition) == f"kvs-shared-redis-0: no pod can be created: {REFUSED}"
    simulation.restart()
    simulation.advance(3)
    assert simulation.condition("CacheTier", "shared", "Stalled") == ("True", "ServersDoNotStart")
    simulation.backends_up = True
    simulation.put({**shard, "status": {"observedGeneration": 1, "replicas": 1}})
    simulation.advance(30)
    assert simulation.condition("CacheTier", "shared", "Ready")[0] == "True"
    assert simulation.condition("CacheTier", "shared", "Stalled") == ("", "")


def test_a_tier_without_room_is_stalled_after_ten_minutes() -> None:
    simulation = Simulation(redis_tier())
    simulation.backends_up = False
    simulation.advance(5)
    full = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available: 1 Insufficient memory."}
    simulation.put(server_pod("kvs-shared-redis-0-0", conditions=[full]))
    simulation.advance(60)
    assert simulation.condition("CacheTier", "shared", "Reconciling") == ("True", "ServersDoNotStart")
    simulation.advance(600)
    assert simulation.condition("CacheTier", "shared", "Stalled") == ("True", "ServersDoNotStart")
    assert "Insufficient memory" in message(simulation, "Stalled")


def test_the_ten_minutes_count_from_the_trouble_of_a_pod_and_not_from_another_reason() -> None:
    simulation = Simulation(redis_tier())
    simulation.backends_up = False
    simulation.advance(1200)
    assert simulation.condition("CacheTier", "shared", "Ready") == ("False", "Unreachable")
    at = simulation.now.isoformat().replace("+00:00", "Z")
    full = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available: 1 Insufficient memory."}
    simulation.put(server_pod("kvs-shared-redis-0-0", conditions=[{**full, "lastTransitionTime": at}]))
    simulation.advance(60)
    assert simulation.condition("CacheTier", "shared", "Reconciling") == ("True", "ServersDoNotStart")
    assert simulation.condition("CacheTier", "shared", "Stalled") == ("", "")
    simulation.advance(600)
    assert simulation.condition("CacheTier", "shared", "Stalled") == ("True", "ServersDoNotStart")
