"""Clusters in pods on Redis 7.0, the oldest, and on Valkey 9, which moves slots as a whole: formed, a primary lost,
scaled, and brought to a newer version. The installed Valkey 9 knows no TLS, so its tier's is switched off.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.product.cluster_caller import cluster_caller
from e2e.product.direct import pods_run_here
from e2e.product.kubectl import Kubectl, wait_until
from e2e.product.managed_cluster import WHOLE_WITHIN_S, ManagedCluster
from e2e.product.server_images import load_server_image
from tests.tiers.server_kinds import DEFAULT, REDIS_7, VALKEY_9, ServerKind

pytestmark = pytest.mark.cluster

CONDITIONS = ("Ready", "SlotsCovered", "ReplicationHealthy")


@pytest.fixture(scope="module", params=[REDIS_7, VALKEY_9], ids=str)
def kind(request: pytest.FixtureRequest) -> ServerKind:
    """The server program."""
    found: ServerKind = request.param
    return found


@pytest.fixture(scope="module")
def cluster(kubectl: Kubectl, kind: ServerKind) -> Iterator[ManagedCluster]:
    """A cluster of three shards with a replica each on that server, which is Ready."""
    if not pods_run_here():
        pytest.skip("the networks of another cluster's pods than the local one's cannot be entered from here")
    image = load_server_image(kind)
    settings = {"image": image} if kind.tls else {"image": image, "tls": {"mode": "Disabled"}}
    found = ManagedCluster(kubectl, kind.name.partition(".")[0], settings=settings)
    try:
        found.apply()
        found.wait_whole()
        yield found
    finally:
        found.delete()


def test_it_forms_and_says_which_server_answers(cluster: ManagedCluster, kind: ServerKind) -> None:
    software, _, version = kind.name.partition("-")

    def are_well() -> bool:
        conditions = {one["type"]: one["status"] for one in cluster.status()["conditions"]}
        message = _backend(cluster)
        well = all(conditions.get(name) == "True" for name in CONDITIONS)
        return well and software in message.lower() and version in message

    # Servers that answer one look late are silent in it.
    wait_until("every condition reports it, and one the server", are_well)


def test_a_primary_whose_pod_is_deleted_hands_over_first(cluster: ManagedCluster, kind: ServerKind) -> None:
    primary = cluster.primary(shard=0)
    with cluster_caller(cluster.kubectl, cluster.name, tls=kind.tls) as requests:
        wait_until("requests are served", lambda: requests.hits > 20)
        cluster.delete_pod(primary)
        wait_until("another has its name", lambda: cluster.replaced(primary))
        cluster.wait_whole()
    assert (requests.failed, requests.wrong, requests.misses, requests.lost) == (0, 0, 0, 0), requests


def test_a_shard_is_added_and_taken_away_without_a_lost_request(cluster: ManagedCluster, kind: ServerKind) -> None:
    with cluster_caller(cluster.kubectl, cluster.name, tls=kind.tls) as requests:
        wait_until("requests are served", lambda: requests.hits > 20)
        cluster.apply(shards=4)
        cluster.wait_whole(shards=4)
        cluster.apply(shards=3)
        cluster.wait_whole(shards=3)
        wait_until("the fourth is gone", lambda: len(cluster.pods()) == 6)
    assert (requests.failed, requests.wrong, requests.misses, requests.lost) == (0, 0, 0, 0), requests


@pytest.mark.parametrize("kind", [REDIS_7], ids=str, indirect=True, scope="module")
def test_a_newer_version_is_rolled_without_a_lost_request(cluster: ManagedCluster) -> None:
    """From Redis 7.0 to the operator's own 8.0, whose data sets 7.0 cannot read."""
    before = cluster.pods()
    image = load_server_image(DEFAULT)
    with cluster_caller(cluster.kubectl, cluster.name) as requests:
        wait_until("requests are served", lambda: requests.hits > 20)
        cluster.apply(image=image)
        wait_until("every pod is new", lambda: cluster.all_new(before), WHOLE_WITHIN_S)
        cluster.wait_whole()
    version = DEFAULT.name.partition("-")[2]
    wait_until("status reports the version", lambda: version in _backend(cluster))
    assert (requests.failed, requests.wrong, requests.misses, requests.lost) == (0, 0, 0, 0), requests


def _backend(cluster: ManagedCluster) -> str:
    """The message of its condition BackendReachable."""
    conditions = {one["type"]: one for one in cluster.status()["conditions"]}
    return str(conditions["BackendReachable"]["message"])
