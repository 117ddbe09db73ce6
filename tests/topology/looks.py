"""Looks at clusters that never were, for rules about moving slots: who has which slots, what is open, who is away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from kvstrata.model.redis.cluster import Cluster, Goal, Peer, Server, ServerPod, SlotJob, SlotRange
from kvstrata.plan.redis.topology import Step, Verdict, View, look

Slots = tuple[SlotRange, ...]


def node(shard: int, ordinal: int = 0) -> str:
    """The node id of the server in a pod."""
    return f"{shard:02x}{ordinal:02x}".ljust(40, "0")


def even(shards: int) -> list[Slots]:
    """All slots in as many contiguous parts."""
    edges = [16_384 * n // shards for n in range(shards + 1)]
    return [((first, last - 1),) for first, last in pairwise(edges)]


def cluster(
    slots: Sequence[Slots],
    *,
    replicas: int = 0,
    migrating: Mapping[int, Mapping[int, str]] | None = None,
    importing: Mapping[int, Mapping[int, str]] | None = None,
    away: Sequence[int] = (),
    gone: Sequence[int] = (),
    jobs: Mapping[int, Sequence[SlotJob]] | None = None,
    atomic: bool = False,
) -> Cluster:
    """A cluster whose shards have these slots.

    `migrating` and `importing` say what is open at the primary of a shard, `away` are shards whose servers do not
    answer, `gone` such whose pods are no more either.
    """
    peers: dict[tuple[int, int], Peer] = {}
    for shard, ranges in enumerate(slots):
        for ordinal in range(1 + replicas):
            peers[shard, ordinal] = Peer(
                node_id=node(shard, ordinal),
                ip=f"10.0.{shard}.{ordinal}",
                port=6379,
                hostname=f"kvs-t-redis-{shard}-{ordinal}",
                is_primary=ordinal == 0,
                primary=None if ordinal == 0 else node(shard),
                epoch=shard + 1,
                linked=True,
                slots=ranges if ordinal == 0 else (),
            )
    pods, servers, silent = {}, {}, {}
    for (shard, ordinal), peer in peers.items():
        if shard in gone:
            continue
        uid = f"uid-{shard}-{ordinal}"
        pods[uid] = ServerPod(peer.hostname, uid, shard, ordinal, peer.ip, ready=True, deleting=False, revision="r")
        if shard in away:
            silent[uid] = ("Timeout", "it did not answer in time")
            continue
        itself = peer
        if ordinal == 0:
            itself = replace(
                peer, migrating=(migrating or {}).get(shard, {}), importing=(importing or {}).get(shard, {})
            )
        others = tuple(one for place, one in peers.items() if place != (shard, ordinal))
        servers[uid] = Server(
            pod_uid=uid,
            node_id=peer.node_id,
            software="Redis",
            version="7.0.15",
            peers=(itself, *others),
            cluster_ok=True,
            current_epoch=len(slots),
            is_primary=peer.is_primary,
            link_up=True,
            ever_synced=True,
            syncing=False,
            offset=0,
            used_bytes=0,
            max_bytes=1 << 30,
            keys=0,
            node_timeout_ms=5000,
            moves_atomically=atomic,
            jobs=tuple((jobs or {}).get(shard, ())) if ordinal == 0 else (),
        )
    return Cluster(pods, servers, silent, at_s=0.0)


def goal(shards: int, **others: object) -> Goal:
    """A goal of so many shards."""
    return replace(Goal(shards, 0, 1 << 30, {}), **others)  # type: ignore[arg-type]


def view(found: Cluster, shards: int, **others: object) -> View:
    """A look in the terms of the rules."""
    return View(found, goal(shards, **others))


def step(found: Cluster, wanted: Goal) -> Step | None:
    """The step that a look leads to."""
    return look(found, wanted)[0]


def verdict(found: Cluster, wanted: Goal) -> Verdict:
    """What is said of a look."""
    return look(found, wanted)[1]
