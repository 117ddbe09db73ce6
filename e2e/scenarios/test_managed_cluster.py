"""Clusters of Redis and of Valkey that the operator runs in pods, with TLS: each forms, loses servers and heals, is
scaled and rolled, while a caller writes and reads. It may notice a miss or a wait, and never another's value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from e2e.product.cluster_caller import Requests, cluster_caller
from e2e.product.direct import pods_run_here
from e2e.product.direct_operator import Operators
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import Kubectl, wait_until
from e2e.product.managed_cluster import WHOLE_WITHIN_S, ManagedCluster
from e2e.product.server_images import load_server_image
from e2e.product.watches import watch
from tests.tiers.server_kinds import DEFAULT, REDIS_8, VALKEY_8, ServerKind

pytestmark = pytest.mark.cluster

CONDITIONS = ("Ready", "BackendReachable", "SlotsCovered", "ReplicationHealthy")


@pytest.fixture(scope="module", autouse=True)
def _networks_can_be_entered() -> None:
    if not pods_run_here():
        pytest.skip("the networks of another cluster's pods than the local one's cannot be entered from here")


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, kubectl: Kubectl) -> Iterator[ManagedCluster]:
    """A cluster of three shards with a replica each, which is Ready: of the operator's own image, and of Valkey's."""
    kind: ServerKind = request.param
    settings = {} if kind is DEFAULT else {"image": load_server_image(kind)}
    found = ManagedCluster(kubectl, f"cluster-{kind.image}", settings=settings)
    try:
        found.apply()
        found.wait_whole()
        yield found
    finally:
        found.delete()


def on_both_servers(claim: str = "") -> pytest.MarkDecorator:
    """Give a test the clusters of Redis and of Valkey; with the first it shows the claim."""
    redis = pytest.param(REDIS_8, marks=pytest.mark.claim(claim)) if claim else REDIS_8
    return pytest.mark.parametrize("cluster", [redis, VALKEY_8], indirect=True, ids=str, scope="module")


@contextmanager
def requests_all_the_while(cluster: ManagedCluster) -> Iterator[Requests]:
    """Write and read while the block runs; in any case no foreign value is found, and requests are served again."""
    with cluster_caller(cluster.kubectl, cluster.name) as requests:
        wait_until("requests are served", lambda: requests.hits > 20)
        yield requests
        before = requests.hits
        wait_until("requests are served again", lambda: requests.hits > before + 50)
    assert requests.wrong == 0
    print(requests)


def served_without_loss(requests: Requests) -> None:
    """Every request was answered, and every read found the value written just before it, or seconds before it."""
    assert requests.failed == 0, requests.last_failure
    assert (requests.misses, requests.lost) == (0, 0), requests
    assert requests.hits == requests.writes > 0, requests


@on_both_servers("a cluster in pods forms with TLS, and every condition reports it")
def test_it_forms_with_tls_and_every_condition_says_so(cluster: ManagedCluster) -> None:
    def report_it() -> bool:
        conditions = {one["type"]: one["status"] for one in cluster.status()["conditions"]}
        return all(conditions.get(name) == "True" for name in CONDITIONS)

    # Servers that answer one look late are silent in it.
    wait_until("every condition reports it", report_it)
    status = cluster.status()
    assert (status["shards"], status["shardsReady"]) == (3, 3)
    assert len(cluster.pods()) == 6
    listed = cluster.kubectl.run("-n", DEMO_NAMESPACE, "get", "cache-status")
    assert f"cachetier.kvstrata.io/{cluster.name}" in listed


@on_both_servers("a primary whose pod is deleted hands over first: no request fails, no value is lost")
def test_a_primary_whose_pod_is_deleted_hands_over_first(cluster: ManagedCluster) -> None:
    primary = cluster.primary(shard=0)
    with requests_all_the_while(cluster) as requests:
        cluster.delete_pod(primary)
        wait_until("another has its name", lambda: cluster.replaced(primary))
        cluster.wait_whole()
    served_without_loss(requests)


@on_both_servers("a primary that is killed is followed by its replica, and no foreign value is read")
def test_a_primary_that_is_killed_is_followed_by_its_replica(cluster: ManagedCluster) -> None:
    primary = cluster.primary(shard=1)
    with requests_all_the_while(cluster):
        cluster.kill(primary)
        wait_until("its replica leads", lambda: _other_than(primary, cluster.primary(1)))
        cluster.wait_whole()


@on_both_servers()
def test_all_pods_lost_at_once_form_a_cluster_again(cluster: ManagedCluster) -> None:
    before = cluster.pods()
    with requests_all_the_while(cluster):
        chosen = f"kvstrata.io/tier={cluster.name}"
        cluster.kubectl.run("-n", DEMO_NAMESPACE, "delete", "pod", "-l", chosen, "--force", "--grace-period=0")
        wait_until("all are new", lambda: cluster.all_new(before))
        cluster.wait_whole()


@on_both_servers()
def test_shards_are_added_and_taken_away_without_a_lost_request(cluster: ManagedCluster) -> None:
    """Also though the operator that moves them is killed halfway."""
    operators = Operators(cluster.kubectl)
    leader = operators.acting()
    with (
        requests_all_the_while(cluster) as requests,
        watch(cluster.kubectl, "cachetier", DEMO_NAMESPACE, cluster.name) as tier,
    ):
        cluster.apply(shards=4)
        tier.wait_for("slots move", lambda o: "slot" in (o.get("status") or {}).get("progress", ""))
        leader.kill()
        cluster.wait_whole(shards=4)
        wait_until("it has eight pods", lambda: len(cluster.pods()) == 8)
        cluster.apply(shards=3)
        cluster.wait_whole(shards=3)
        wait_until("the fourth is gone", lambda: len(cluster.pods()) == 6)
    served_without_loss(requests)


def test_one_shard_becomes_three_and_three_become_one_again(kubectl: Kubectl) -> None:
    """The first shard's pod is replaced in the end, for its other memory, and its values are misses then."""
    alone = ManagedCluster(kubectl, "alone", settings={"replicasPerShard": 0})
    try:
        alone.apply(shards=1)
        alone.wait_whole(
            shards=1,
        )
        before = alone.pods()
        with requests_all_the_while(alone):
            alone.apply(shards=3)
            alone.wait_whole(shards=3)
            assert len(alone.pods()) <= 3, "a shard has a replica"
            wait_until("it has three pods", lambda: len(alone.pods()) == 3)
            wait_until("its pod is new", lambda: alone.replaced(before[0]))
            alone.apply(shards=1)
            alone.wait_whole(shards=1)
            wait_until("the others are gone", lambda: len(alone.pods()) == 1)
    finally:
        alone.delete()


@on_both_servers()
def test_a_new_template_is_rolled_replicas_first(cluster: ManagedCluster) -> None:
    before = cluster.pods()
    with requests_all_the_while(cluster) as requests:
        cluster.apply(podTemplate={"annotations": {"example.com/rolled": "once"}})
        wait_until("every pod is new", lambda: cluster.all_new(before), WHOLE_WITHIN_S)
        cluster.wait_whole()
    served_without_loss(requests)


def _other_than(pod: dict[str, Any], found: dict[str, Any]) -> bool:
    return bool(found["metadata"]["uid"] != pod["metadata"]["uid"])
