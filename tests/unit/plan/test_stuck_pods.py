"""Pods of servers that are being deleted and never go, as on a node that is lost: named, with what a person can do."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from kvstrata.api.scalars import format_timestamp
from kvstrata.plan.redis.cluster import STUCK_AFTER_S
from tests.support.objects import redis_tier, server_pod
from tests.support.worlds import START, Simulation
from tests.topology import looks
from tests.unit.plan.test_cluster_progress import looked

STUCK = START + timedelta(seconds=STUCK_AFTER_S + 1)


def leaving(name: str, ends_by: datetime = START) -> dict[str, Any]:
    raw = server_pod(name, podIP="10.0.0.1")
    return {**raw, "metadata": {**raw["metadata"], "deletionTimestamp": format_timestamp(ends_by)}}


def observe(simulation: Simulation, pod: dict[str, Any]) -> None:
    """Have the watch tell of a pod."""
    for key in simulation.store.observe({**pod, "metadata": {**pod["metadata"], "resourceVersion": "1"}}):
        simulation.queue.add(key)


def cluster(at: datetime, *pods: dict[str, Any], away: tuple[str, ...] = ("uid-1-1",)) -> Simulation:
    """A cluster of which these servers do not answer at that moment."""
    simulation = Simulation(redis_tier(capacity="3Gi", redis={"managed": {"shards": 3, "replicasPerShard": 1}}))
    simulation.advance(2)
    simulation.now = at
    for pod in pods:
        observe(simulation, pod)
    found = looks.cluster(looks.even(3), replicas=1)
    silent = dict.fromkeys(away, ("Timeout", "it did not answer in time"))
    answering = {uid: one for uid, one in found.servers.items() if uid not in away}
    looked(simulation, replace(found, servers=answering, silent=silent))
    return simulation


def said(simulation: Simulation, kind: str) -> tuple[str, str, str]:
    found = next(c for c in simulation.status("CacheTier", "shared")["conditions"] if c["type"] == kind)
    return found["status"], found["reason"], found["message"]


def test_a_replica_that_never_goes_is_named_with_what_to_do() -> None:
    simulation = cluster(STUCK, leaving("kvs-shared-redis-1-1"))
    assert said(simulation, "SlotsCovered")[0] == "True"
    for kind in ("ReplicationHealthy", "Ready"):
        status, reason, message = said(simulation, kind)
        assert (status, reason) == ("False", "PodStuckTerminating")
        assert (
            "kvs-shared-redis-1-1 should have ended by 2026-01-01T00:00:00Z, and node node does not report" in message
        )
        assert "kubectl -n team delete pod kvs-shared-redis-1-1 --force" in message
        assert "node.kubernetes.io/out-of-service" in message


def test_slots_of_a_primary_without_replicas_wait_for_the_pod_to_go() -> None:
    simulation = cluster(
        STUCK, leaving("kvs-shared-redis-1-0"), leaving("kvs-shared-redis-1-1"), away=("uid-1-0", "uid-1-1")
    )
    status, reason, message = said(simulation, "SlotsCovered")
    assert (status, reason) == ("False", "PodStuckTerminating")
    assert "5461 slots are those of servers that do not answer" in message
    assert "(1 more pods are stuck)" in message


@pytest.mark.parametrize(
    ("pods", "at"),
    [
        ([leaving("kvs-shared-redis-1-1")], STUCK - timedelta(seconds=2)),
        ([leaving("kvs-shared-redis-1-1", STUCK)], STUCK + timedelta(seconds=2)),
        ([server_pod("kvs-shared-redis-1-1", podIP="10.0.0.1")], STUCK),
    ],
    ids=["hardly late", "has time still", "is not being deleted"],
)
def test_a_pod_that_has_time_to_end_is_not_called_stuck(pods: list[dict[str, Any]], at: datetime) -> None:
    assert said(cluster(at, *pods), "ReplicationHealthy")[:2] == ("False", "ReplicasMissing")


def test_a_pod_that_nobody_misses_is_told_with_the_progress_only() -> None:
    simulation = cluster(STUCK, leaving("kvs-shared-redis-1-1"), away=())
    assert said(simulation, "Ready")[0] == "True"
    assert "progress" not in simulation.status("CacheTier", "shared")


def test_the_only_server_of_a_tier_that_never_goes() -> None:
    simulation = Simulation(redis_tier())
    simulation.backends_up = False
    simulation.come_to_rest()
    observe(simulation, leaving("kvs-shared-redis-0-0"))
    simulation.advance(STUCK_AFTER_S + 20)
    for kind in ("BackendReachable", "Ready"):
        assert said(simulation, kind)[:2] == ("False", "PodStuckTerminating")
