"""A Redis Cluster that the operator runs, in pods: it forms, loses servers and heals, is scaled and rolled, while
somebody writes and reads. What a caller may notice is a miss or a short wait, and never another's value.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from e2e.product.cluster_caller import DEADLINE_S, Requests, cluster_caller
from e2e.product.direct import pods_run_here
from e2e.product.faults import Victim
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import CommandError, Kubectl, wait_until
from kvstrata.objects import paths

pytestmark = pytest.mark.cluster

TIER = "cluster"
FORMS_WITHIN_S = 180.0
HEALS_WITHIN_S = 180.0
MOVES_WITHIN_S = 300.0
LONGEST_REQUEST_S = DEADLINE_S + 3
"""A request that ends with its deadline, after a last try that waits for several servers in turn."""


@pytest.fixture(scope="module")
def cluster(kubectl: Kubectl) -> Iterator[Kubectl]:
    """A cluster of three shards with a replica each, which is Ready."""
    if not pods_run_here():
        pytest.skip("the networks of another cluster's pods than the local one's cannot be entered from here")
    kubectl.apply(tier())
    try:
        wait_until("the cluster forms", lambda: _settled(kubectl, shards=3), FORMS_WITHIN_S)
        yield kubectl
    finally:
        kubectl.run("-n", DEMO_NAMESPACE, "delete", "cachetier", TIER, "--ignore-not-found")
        wait_until("its pods go", lambda: not _pods(kubectl), HEALS_WITHIN_S)


def tier(**managed: Any) -> dict[str, Any]:
    """The tier, with other settings of its servers."""
    small = {"requests": {"cpu": "20m", "memory": "96Mi"}}
    settings = {"shards": 3, "replicasPerShard": 1, "resources": small, **managed}
    return {
        "apiVersion": "kvstrata.io/v1alpha1",
        "kind": "CacheTier",
        "metadata": {"name": TIER, "namespace": DEMO_NAMESPACE},
        "spec": {"medium": "Redis", "capacity": "96Mi", "redis": {"managed": settings}},
    }


@contextmanager
def requests_all_the_while(kubectl: Kubectl) -> Iterator[Requests]:
    """Somebody writes and reads; whatever happens, nothing foreign is found and nobody hangs."""
    with cluster_caller(kubectl, TIER) as requests:
        wait_until("requests are served", lambda: requests.hits > 20, 30)
        yield requests
        before = requests.hits
        wait_until("requests are served again", lambda: requests.hits > before + 50, 60)
    assert requests.wrong == 0
    assert requests.longest_s < LONGEST_REQUEST_S, requests


def test_it_forms_with_tls_and_every_condition_says_so(cluster: Kubectl) -> None:
    status = cluster.get("cachetier", TIER, DEMO_NAMESPACE)["status"]
    conditions = {one["type"]: one for one in status["conditions"]}
    for name in ("Ready", "BackendReachable", "SlotsCovered", "ReplicationHealthy"):
        assert conditions[name]["status"] == "True", conditions[name]
    assert (status["shards"], status["shardsReady"]) == (3, 3)
    assert len(_pods(cluster)) == 6
    listed = cluster.run("-n", DEMO_NAMESPACE, "get", "cache-status")
    assert f"cachetier.kvstrata.io/{TIER}" in listed


def test_a_primary_whose_pod_is_deleted_hands_over_first(cluster: Kubectl) -> None:
    primary = _primary(cluster, shard=0)
    with requests_all_the_while(cluster) as requests:
        cluster.run("-n", DEMO_NAMESPACE, "delete", "pod", primary["metadata"]["name"], "--wait=false")
        wait_until("another has its name", lambda: _replaced(cluster, primary), HEALS_WITHIN_S)
        wait_until("the cluster is whole", lambda: _settled(cluster, shards=3), HEALS_WITHIN_S)
    assert requests.failed == 0, requests.last_failure


def test_a_primary_that_is_killed_is_followed_by_its_replica(cluster: Kubectl) -> None:
    primary = _primary(cluster, shard=1)
    with requests_all_the_while(cluster):
        Victim(cluster, DEMO_NAMESPACE, primary["metadata"]["name"], "redis").send(9)
        wait_until(
            "its replica leads", lambda: _primary(cluster, 1)["metadata"]["uid"] != primary["metadata"]["uid"], 60
        )
        wait_until("the cluster is whole", lambda: _settled(cluster, shards=3), HEALS_WITHIN_S)


def test_all_pods_lost_at_once_form_a_cluster_again(cluster: Kubectl) -> None:
    before = {pod["metadata"]["uid"] for pod in _pods(cluster)}
    with requests_all_the_while(cluster):
        chosen = f"kvstrata.io/tier={TIER}"
        cluster.run("-n", DEMO_NAMESPACE, "delete", "pod", "-l", chosen, "--force", "--grace-period=0")
        wait_until("all are new", lambda: not before & {p["metadata"]["uid"] for p in _pods(cluster)}, HEALS_WITHIN_S)
        wait_until("the cluster is whole", lambda: _settled(cluster, shards=3), HEALS_WITHIN_S)


def test_shards_are_added_and_taken_away_without_a_lost_request(cluster: Kubectl) -> None:
    with requests_all_the_while(cluster) as requests:
        cluster.apply(tier(shards=4))
        wait_until("a fourth shard has its part", lambda: _settled(cluster, shards=4), MOVES_WITHIN_S)
        assert len(_pods(cluster)) == 8
        cluster.apply(tier(shards=3))
        wait_until(
            "the fourth is gone", lambda: _settled(cluster, shards=3) and len(_pods(cluster)) == 6, MOVES_WITHIN_S
        )
    assert requests.failed == 0, requests.last_failure
    assert requests.misses == 0


def test_a_new_template_is_rolled_replicas_first(cluster: Kubectl) -> None:
    before = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in _pods(cluster)}
    with requests_all_the_while(cluster) as requests:
        cluster.apply(tier(podTemplate={"annotations": {"example.com/rolled": "once"}}))
        wait_until("every pod is new", lambda: _all_new(cluster, before), MOVES_WITHIN_S)
        wait_until("the cluster is whole", lambda: _settled(cluster, shards=3), HEALS_WITHIN_S)
    assert requests.failed == 0, requests.last_failure
    assert requests.misses == 0


def _pods(kubectl: Kubectl) -> list[dict[str, Any]]:
    return kubectl.list("pod", DEMO_NAMESPACE, f"kvstrata.io/tier={TIER}")


def _all_new(kubectl: Kubectl, before: dict[str, str]) -> bool:
    pods = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in _pods(kubectl)}
    return pods.keys() == before.keys() and not set(pods.values()) & set(before.values())


def _replaced(kubectl: Kubectl, pod: dict[str, Any]) -> bool:
    try:
        found = kubectl.get("pod", pod["metadata"]["name"], DEMO_NAMESPACE)
    except CommandError:
        return False
    return bool(found["metadata"]["uid"] != pod["metadata"]["uid"])


def _settled(kubectl: Kubectl, *, shards: int) -> bool:
    """Whether the tier is Ready at its newest generation, with so many shards, and has nothing left to do."""
    found = kubectl.get("cachetier", TIER, DEMO_NAMESPACE)
    status = found.get("status") or {}
    conditions = {one["type"]: one for one in status.get("conditions") or ()}
    ready = conditions.get("Ready", {})
    return bool(
        ready.get("status") == "True"
        and ready.get("observedGeneration") == found["metadata"]["generation"]
        and status.get("shardsReady") == shards
        and not status.get("progress")
        and all(_is_ready(pod) for pod in _pods(kubectl))
    )


def _is_ready(pod: dict[str, Any]) -> bool:
    if "deletionTimestamp" in pod["metadata"]:
        return False
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions") or ())


def _primary(kubectl: Kubectl, shard: int) -> dict[str, Any]:
    """Return the pod of a shard whose server has slots, as the server says."""
    for _ in range(50):
        for pod in _pods(kubectl):
            name = pod["metadata"]["name"]
            if name.startswith(f"kvs-{TIER}-redis-{shard}-") and _role(kubectl, name) == "master":
                return pod
        time.sleep(0.5)
    raise AssertionError(f"shard {shard} has no primary: {json.dumps([p['metadata']['name'] for p in _pods(kubectl)])}")


def _role(kubectl: Kubectl, pod: str) -> str:
    """Return what a server says it is; its admin's password is in the file that it was started with."""
    tls = f"--tls --cacert {paths.REDIS_TLS}/ca.crt"
    ask = f"REDISCLI_AUTH=$(cat {paths.REDIS_AUTH}/admin-password) redis-cli -h 127.0.0.1 {tls} --user admin role"
    try:
        told = kubectl.exec(pod, DEMO_NAMESPACE, "redis", "sh", "-c", ask)
    except CommandError:
        return ""
    return told.splitlines()[0].strip() if told else ""
