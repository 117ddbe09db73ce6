"""A managed cluster as observed: its pods, and each server's report of itself and the others.

Roles, slots and replication come from the servers; a pod's number gives only its intended shard.
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
    """A pod of a managed tier as the API server shows it.

    `shard` and `ordinal` come from its name, `revision` is its template, `started` counts earlier starts of its
    container (a restarted server has a new identity and no data). `starting`: the newest start has not answered the
    kubelet yet. `trouble` is why it does not start, by Kubernetes and the container; empty if nothing is known.
    `lasting`: that does not end by itself. `down_since`: since when it does not run. `ever_ran`: the kubelet reported
    its container as running or ended. `ended`: it reported every container as ended. `made_for_bytes` is the memory
    that its server is started with; 0 if unknown. `ends_by` is the end of the grace period of a pod under deletion.
    `controller` is the UID of its StatefulSet, empty if unknown.
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
    lasting: bool = False
    down_since: datetime | None = None
    ever_ran: bool = False
    ended: bool = False
    made_for_bytes: int = 0
    ends_by: datetime | None = None
    controller: str = ""


@dataclass(frozen=True, slots=True)
class Peer:
    """One line of CLUSTER NODES: a server's view of another, or of itself.

    `failed` is agreed by the majority, `suspected` by this server alone. `primary` is the node id of a replica's
    primary. `epoch` is its configuration epoch. `migrating` and `importing` map an open slot to the other node id;
    servers report them only of themselves.
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
    """An atomic migration of slots (Valkey 9) that is under way from a server to the node `target`."""

    slots: tuple[SlotRange, ...]
    target: str


@dataclass(frozen=True, slots=True)
class Server:
    """Report of the server in a pod about itself. Sizes and offsets are bytes.

    `peers` includes itself under `node_id`. `link_up`: a replica is in step with its primary. `offset` is how far it
    has read, `ever_synced` whether it was in step since it follows this primary. `node_timeout_ms` is the silence after
    which it suspects another. `moves_atomically`: it has CLUSTER MIGRATESLOTS.
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
        return next(peer for peer in self.peers if peer.node_id == self.node_id)


@dataclass(frozen=True, slots=True)
class Cluster:
    """One look at a managed cluster: pods by UID, and the servers that answered, by their pod's UID.

    `pods` must be complete: a server without a pod in it is taken for lost. `silent` gives reason and message for each
    server that did not answer, by pod UID. `at_s` is the time on a monotonic clock, in seconds. A look is not atomic:
    slots that move may seem unclaimed in it, so `unclaimed_before` are those without an owner in the look before. All
    slots, the default, let a single look decide.
    """

    pods: Mapping[str, ServerPod]
    servers: Mapping[str, Server]
    silent: Mapping[str, tuple[str, str]]
    at_s: float
    unclaimed_before: tuple[SlotRange, ...] = ((0, SLOTS - 1),)


@dataclass(frozen=True, slots=True)
class Goal:
    """The desired state of a managed cluster. `revisions` is the pod template in force, by shard.

    `node_timeout_ms` is the silence after which servers suspect each other. `doomed` are UIDs of pods without a
    StatefulSet, `locked_out` those of pods with servers that admit no password in any Secret. `drops`: slots move
    without data. `movable_bytes` is the largest value moved key by key; larger ones are dropped as misses. `erased_by`
    names the running CacheInvalidations, during which slots must not move.
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
    """One command to one server, sent only if that server is still `node_id`. `words` hold no secret: the sender
    inserts the password that MIGRATE needs."""

    pod_uid: str
    node_id: str
    words: tuple[str, ...]
