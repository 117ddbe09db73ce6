"""What a plan consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvstrata.contract.policy.bundle import Entry, Root
from kvstrata.contract.policy.pools import PoolShard
from kvstrata.model.reclaim import FormerCache
from kvstrata.model.redis.cluster import Goal
from kvstrata.model.refs import Key
from kvstrata.plan.questions import IsolationQuestion, PoolQuestion


@dataclass(frozen=True, slots=True)
class Decision:
    """Why something is as it is: a reason of the API and a sentence that names the object and the fix."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class StatusWrite:
    """A status to write, if the object is still at `resource_version`. A None value removes its field.

    `can_wait` is whether it tells of progress only, so that the writer may let a later one take its place.
    """

    key: Key
    resource_version: str
    status: Mapping[str, Any]
    can_wait: bool = False


class Material(StrEnum):
    """What a generated Secret holds."""

    DOMAIN_KEY = "DomainKey"
    DATA_KEYS = "DataKeys"
    REDIS_USERS = "RedisUsers"
    SERVER_CERTIFICATE = "ServerCertificate"


@dataclass(frozen=True, slots=True)
class EnsureSecret:
    """Make a Secret with fresh material; one that exists is overwritten only with `renew`, for what cannot be used.
    Passwords are kept even then.

    `dns_names` are the subject alternative names of a certificate; one that is `for_peers` is good for calling others
    like it, too. `domain` is the domain id whose keys the users of a Redis tier may reach. A Secret of data keys gets a
    fresh one for each of `epochs` that it has none for, and loses those of `spent`; its other keys are left alone.
    `honours` is the wish to rotate passwords that fresh ones grant. `drawn_for` is the restore after which keys are
    drawn: a domain's key that was drawn for it is left alone, and data keys that were not are not kept.
    """

    name: str
    material: Material
    labels: Mapping[str, str]
    owner: Mapping[str, Any]
    dns_names: tuple[str, ...] = ()
    for_peers: bool = False
    renew: bool = False
    domain: str = ""
    epochs: tuple[str, ...] = ()
    spent: tuple[str, ...] = ()
    honours: str = ""
    drawn_for: str = ""


@dataclass(frozen=True, slots=True)
class KeepInKms:
    """Have the KMS wrap a data key for each of `epochs` that has none, and delete what wraps those of `spent`."""

    epochs: tuple[str, ...] = ()
    spent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CommitBundle:
    """Write a model's bundle: its changed shards into their free slots, then the root, conditionally.

    `shards` maps the index of each changed shard to its bytes, `pool_shards` that of each changed shard of a pool;
    `resource_version` is the root's, None to create it; `entries` and `pools` are the whole content, as the store will
    hold it, `compiled`, `keyless` and `pool_indexes` what those of `CommittedBundle` will be.
    """

    model: str
    root: Root
    entries: Mapping[str, Entry]
    shards: Mapping[int, bytes] = field(repr=False)  # they hold data keys
    resource_version: str | None
    owner: Mapping[str, Any]
    compiled: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    keyless: Mapping[str, int] = field(default_factory=dict)
    pools: Mapping[str, PoolShard] = field(default_factory=dict)
    pool_shards: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    pool_indexes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EmptySecrets:
    """Take out what Secrets of a model's bundle hold that no reader needs, each if it is still at its version."""

    model: str
    versions: Mapping[str, str]
    owner: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProbeBackend:
    """Ask a Redis tier whether it serves.

    `password_secret` and `authority_secret` name Secrets and keys in them (name, key), or are None where there is
    neither password nor TLS. With a `domain`, whose keys pods will use, everything is asked that has to hold of an
    external server, in a `cluster` of each primary.
    """

    tier: str
    endpoint: str
    server_name: str
    username: str | None
    password_secret: tuple[str, str] | None
    authority_secret: tuple[str, str] | None
    domain: str | None = None
    cluster: bool = False


class Turn(StrEnum):
    """One step in the life of a Secret with credentials; each is one write, and what it leaves behind tells the next.

    Of passwords: `STAGE` draws the following ones and admits them beside the current, `PROMOTE` makes them those that
    are used, `RETIRE` admits the previous no more. Of a certificate: `TRUST` adds the operator's new authority to those
    that clients trust, `ISSUE` makes a new certificate, `DISTRUST` takes out the former authorities.
    """

    STAGE = "Stage"
    PROMOTE = "Promote"
    RETIRE = "Retire"
    TRUST = "Trust"
    ISSUE = "Issue"
    DISTRUST = "Distrust"


@dataclass(frozen=True, slots=True)
class TurnSecret:
    """Take a Secret with credentials one step on, if it is still at `resource_version`.

    `domain` is the domain id whose keys users may reach, `honours` the wish to rotate that is granted by it,
    `dns_names` and `for_peers` are those of a certificate, as in EnsureSecret.
    """

    name: str
    turn: Turn
    resource_version: str
    labels: Mapping[str, str]
    owner: Mapping[str, Any]
    domain: str = ""
    honours: str = ""
    dns_names: tuple[str, ...] = ()
    for_peers: bool = False


class Order(StrEnum):
    """What a managed server is told about credentials; every order may be given twice.

    `SET_USERS` gives it users, rights and passwords as the Secret says, `FOLLOW` the current password for following a
    primary, `LOAD_CERTIFICATE` has it read the files of its certificate again.
    """

    SET_USERS = "SetUsers"
    FOLLOW = "Follow"
    LOAD_CERTIFICATE = "LoadCertificate"


@dataclass(frozen=True, slots=True)
class ManagedServer:
    """A server that the operator runs: the name by which plans know it, where it is, and what its certificate names."""

    name: str
    endpoint: str
    server_name: str


@dataclass(frozen=True, slots=True)
class TendServers:
    """Give the orders, by the server's name, then look at what all servers of a managed tier have.

    `users_secret` and `tls_secret` (None in plain text) name its Secrets; what they say at that moment is what is
    ordered. `foreign_tls` is whether its user made the latter, so that it is known from looks only, `follows` whether
    servers follow primaries.
    """

    tier: str
    servers: tuple[ManagedServer, ...]
    users_secret: str
    tls_secret: str | None
    orders: Mapping[str, tuple[Order, ...]] = field(default_factory=dict)
    foreign_tls: bool = False
    follows: bool = False


@dataclass(frozen=True, slots=True)
class ReconcileCluster:
    """Have the servers of a managed cluster become what `goal` says, and stay it, until the next order for the tier.

    `password_secret` and `authority_secret` name Secrets and keys in them (name, key); no authority means plain text.
    Certificates name `server_name`; `endpoint` is the address by which plans know the tier's servers.
    """

    tier: str
    goal: Goal
    port: int
    username: str
    password_secret: tuple[str, str]
    authority_secret: tuple[str, str] | None
    server_name: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class CarryOutErasure:
    """Take up the erasure that the object of this UID orders, or have whoever carries it out look what is new.

    That is an eager invalidation, or a policy that is deleted and can have none.
    """

    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class EndErasure:
    """Remove what is kept of an erasure that is over, then the finalizer of the invalidation that ordered it."""

    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class SetFinalizers:
    """Set the finalizers of the planned object, if it is still at `resource_version`.

    `unproven` is said in the log where an object goes that was to leave a receipt, and leaves none.
    """

    finalizers: tuple[str, ...]
    resource_version: str
    unproven: str = ""


@dataclass(frozen=True, slots=True)
class Create:
    """Create an object that users may also write, so it is never applied over theirs."""

    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete an object, if it still has this UID."""

    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class ReadForeign:
    """Read objects of others, by kind and name, whose names the planned object needs: are they still there?"""

    slots: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ReclaimFormer:
    """Have a round of the deletion of a former cache run, from all Redis tiers of the namespace."""

    cache: FormerCache
    round: int


@dataclass(frozen=True, slots=True)
class TellFormer:
    """Show by a metric how many former identities of a model have blocks that are yet to be deleted."""

    model: str
    waiting: int


@dataclass(frozen=True, slots=True)
class EndReclaim:
    """Let a former cache be deleted no further, and remove what was made for its deletion, before status says so."""

    cache: FormerCache


ReclaimQuestion = ReclaimFormer | TellFormer
ErasureOrder = CarryOutErasure | EndErasure
Question = (
    ReadForeign
    | ProbeBackend
    | TendServers
    | ReconcileCluster
    | PoolQuestion
    | IsolationQuestion
    | ErasureOrder
    | ReclaimQuestion
)
"""Actions that change no object of the plan; their answers are facts of a later plan, and nobody waits for them."""

Write = (
    EnsureSecret | KeepInKms | TurnSecret | CommitBundle | EmptySecrets | SetFinalizers | Create | Remove | EndReclaim
)
Action = Write | Question


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do for one key, in this order: actions, objects, deletions, statuses, then other keys.

    `apply` holds full desired objects; the writer skips those that the server already has. `wake_after_s` is when to
    plan again if nothing else happens.
    """

    actions: tuple[Action, ...] = ()
    apply: tuple[Mapping[str, Any], ...] = ()
    statuses: tuple[StatusWrite, ...] = ()
    enqueue: tuple[Key, ...] = ()
    wake_after_s: float | None = None

    @property
    def empty(self) -> bool:
        """Whether this plan writes nothing."""
        return not (self.apply or self.statuses or [a for a in self.actions if not isinstance(a, Question)])
