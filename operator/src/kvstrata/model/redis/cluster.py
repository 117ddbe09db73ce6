"""A managed cluster as it was found: its pods, and what the server in each said of itself and of the others.

Roles, slots and replication come from the servers, never from a pod's number; a pod's number says only which shard it
is meant for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

SLOTS = 16_384

SlotRange = tuple[int, int]
"""First and last slot, both included."""


@dataclass(frozen=True, slots=True)
class ServerPod:
    """A pod of a managed tier as the API server shows it; that of a single server is the first of shard 0.

    `shard` and `ordinal` are its place by name, `revision` the template that it was made from, `started` how often its
    server's container was started before (a server that was started anew has a new identity and no memory). `starting`
    is whether the server of its container's newest start has not answered the kubelet yet. `trouble` is why it does not
    come up, as Kubernetes and the container say; empty while nothing is known to hinder it. `made_for_bytes` is the
    memory that its server is started with, for which its container has room; 0 if unknown. `ends_by` is when a pod that
    is being deleted has had all the time that it was given, None for any other. `controller` is the UID of the
    StatefulSet that made it, empty if unknown.
    """

    name: str
    uid: str
    shard: int
    ordinal: int
    ip: str | None
    ready: bool
    deleting: bool
    revision: str
    node: str | None = None
    started: int = 0
    starting: bool = False
    trouble: str = ""
    made_for_bytes: int = 0
    ends_by: datetime | None = None
    controller: str = ""


@dataclass(frozen=True, slots=True)
class Peer:
    """One line of CLUSTER NODES: what one server believes of another, or of itself.

    `failed` is what the majority agreed on, `suspected` what this server alone thinks. `primary` is the node id of a
    replica's primary, None for a primary. `epoch` is its configuration epoch. `migrating` and `importing` tell, by the
    slot, to or from which node id it is open; servers tell this of themselves only.
    """

    node_id: str
    ip: str
    port: int
    hostname: str
    is_primary: bool
    primary: str | None
    epoch: int
    linked: bool
    failed: bool = False
    suspected: bool = False
    handshake: bool = False
    no_address: bool = False
    slots: tuple[SlotRange, ...] = ()
    migrating: Mapping[int, str] = field(default_factory=dict)
    importing: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SlotJob:
    """One atomic migration of slots that a server knows of (Valkey 9), as CLUSTER GETSLOTMIGRATIONS tells it.

    `operation` is `EXPORT` or `IMPORT`, `state` the server's word for where it is; `finished` whether it is over.
    """

    name: str
    operation: str
    state: str
    slots: tuple[SlotRange, ...]
    source: str
    target: str
    finished: bool
    message: str = ""


@dataclass(frozen=True, slots=True)
class Server:
    """What the server in a pod said of itself. Sizes and offsets are bytes.

    `pod_uid` names the pod that was asked, `peers` has itself, too, under `node_id`. `link_up` is whether a replica is
    in step with its primary, `offset` how far it has read, `ever_synced` whether it was in step since it became this
    primary's. `node_timeout_ms` is after how much silence it suspects
    another. `moves_atomically` is whether it has CLUSTER MIGRATESLOTS.
    """

    pod_uid: str
    node_id: str
    software: str
    version: str
    peers: tuple[Peer, ...]
    cluster_ok: bool
    current_epoch: int
    is_primary: bool
    link_up: bool
    ever_synced: bool
    syncing: bool
    offset: int
    used_bytes: int
    max_bytes: int
    keys: int
    node_timeout_ms: int
    moves_atomically: bool = False
    jobs: tuple[SlotJob, ...] = ()

    @property
    def itself(self) -> Peer:
        """Its own line."""
        return next(peer for peer in self.peers if peer.node_id == self.node_id)

    def peer(self, node_id: str) -> Peer | None:
        """What it knows of another."""
        return next((peer for peer in self.peers if peer.node_id == node_id), None)


@dataclass(frozen=True, slots=True)
class Cluster:
    """One look at a managed cluster: its pods by uid, and the servers that answered, by the uid of their pod.

    `pods` must be all that there are: a server whose pod is not among them is taken for lost.

    `silent` gives why a pod's server did not answer, by its uid: a reason and a message. `at_s` is the moment of the
    look on a monotonic clock, in seconds.
    """

    pods: Mapping[str, ServerPod]
    servers: Mapping[str, Server]
    silent: Mapping[str, tuple[str, str]]
    at_s: float

    def by_node_id(self) -> Mapping[str, Server]:
        """The servers that answered, by their name in the cluster."""
        return {server.node_id: server for server in self.servers.values()}


@dataclass(frozen=True, slots=True)
class Goal:
    """What a managed cluster is meant to be. `revision` is the pod template in force, by shard.

    `max_bytes_each` is a server's memory. `node_timeout_ms` is the silence after which servers suspect each other.
    `doomed` are uids of pods whose StatefulSet is no more, so that they are about to be deleted, `locked_out` those of
    pods whose servers admit no password that any Secret holds.
    `drops` is whether slots move without what they hold; `movable_bytes` the largest value that is moved key by key,
    larger ones are dropped as misses. `erased_by` names the CacheInvalidations that erase here, and for which slots are
    to stay where they are.
    """

    shards: int
    replicas: int
    max_bytes_each: int
    revisions: Mapping[int, str]
    node_timeout_ms: int = 5000
    drops: bool = False
    movable_bytes: int = 8 << 20
    locked_out: frozenset[str] = frozenset()
    erased_by: tuple[str, ...] = ()
    doomed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Command:
    """One command to one server, sent only if that server is still `node_id`.

    `words` hold no secret: where a command needs a password (MIGRATE), whoever sends it puts it in.
    """

    pod_uid: str
    node_id: str
    words: tuple[str, ...]
