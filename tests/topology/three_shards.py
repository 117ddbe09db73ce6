"""A cluster of three shards of two, what may have become of it, and the step that follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvstrata.model.redis.cluster import Cluster, Goal, Peer
from kvstrata.plan.redis.topology import Step
from kvstrata.plan.redis.topology.view import View
from tests.topology import looks
from tests.topology.looks import step


def goal(replicas: int = 1, **others: Any) -> Goal:
    return looks.goal(3, replicas=replicas, **{"revisions": dict.fromkeys(range(3), "r")} | others)


def told(cluster: Cluster, servers: Mapping[str, Mapping[str, Any]] | None = None, **everywhere: Any) -> Cluster:
    """The same with other words of some servers, by their pods' uids, or of all of them."""
    words = {uid: {**everywhere, **(servers or {}).get(uid, {})} for uid in cluster.servers}
    return replace(cluster, servers={uid: replace(one, **words[uid]) for uid, one in cluster.servers.items()})


def pods(cluster: Cluster, **changed: Mapping[str, Any]) -> Cluster:
    """The same with other pods: `uid_0_1={"ready": False}`."""
    found = {uid: replace(pod, **changed.get(uid.replace("-", "_"), {})) for uid, pod in cluster.pods.items()}
    return replace(cluster, pods=found)


def silent(cluster: Cluster, *uids: str, why: str = "Timeout", **of_pod: Any) -> Cluster:
    """The same where some do not answer."""
    changed = {uid.replace("-", "_"): of_pod for uid in uids}
    servers = {uid: server for uid, server in cluster.servers.items() if uid not in uids}
    return replace(pods(cluster, **changed), servers=servers, silent=dict.fromkeys(uids, (why, "")))


def without(cluster: Cluster, *uids: str) -> Cluster:
    """The same where some pods are gone."""
    return replace(
        cluster,
        pods={uid: pod for uid, pod in cluster.pods.items() if uid not in uids},
        servers={uid: server for uid, server in cluster.servers.items() if uid not in uids},
    )


def said(cluster: Cluster, about: str, *by: str, **words: Any) -> Cluster:
    """The same where the servers in some pods, or all, say something else of a node."""
    changed = {
        uid: {"peers": tuple(replace(peer, **words) if peer.node_id == about else peer for peer in server.peers)}
        for uid, server in cluster.servers.items()
        if not by or uid in by
    }
    return told(cluster, changed)


def newcomer(cluster: Cluster, uid: str, node_id: str, *, knows_all: bool = False, **words: Any) -> Cluster:
    """The same with an empty server under a new identity in a pod."""
    former = next(iter(cluster.servers.values()))
    pod = cluster.pods[uid]
    itself = Peer(node_id, str(pod.ip), 6379, "", True, None, 0, linked=True)
    others = tuple(peer for peer in former.peers if peer.node_id in View(cluster, goal()).servers) if knows_all else ()
    empty = replace(former, pod_uid=uid, node_id=node_id, peers=(itself, *others), is_primary=True, current_epoch=0)
    servers = {name: server for name, server in cluster.servers.items() if name != uid}
    if knows_all:
        servers = {name: replace(server, peers=(*server.peers, itself)) for name, server in servers.items()}
    return replace(cluster, servers=servers | {uid: replace(empty, **words)})


def taken(cluster: Cluster, **others: Any) -> Step:
    found = step(cluster, goal(**others))
    assert found is not None
    return found


def words(found: Step) -> list[tuple[str, ...]]:
    return [(command.pod_uid, *command.words) for command in found.commands]
