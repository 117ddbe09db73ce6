"""Parts of a plan. Answers to requests to pods are facts of a later plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from kvstrata.api.base import Resource
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.contract.policy.bundle import Entry, Root
from kvstrata.contract.policy.pools import PoolShard
from kvstrata.model.pods import BackendAccess, Pod
from kvstrata.model.reclaim import FormerCache
from kvstrata.model.redis.cluster import Goal
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World


def key_of(resource: Resource) -> Key:
    return Key(resource.INFO.kind, resource.namespace, resource.name)


def bundle_keys(world: World) -> tuple[Key, ...]:
    return tuple(Key(BUNDLE, world.namespace, name) for name in sorted(world.models))


class Action:
    """A part of a plan that is carried out before its objects are written."""

    __slots__ = ()


class Question(Action):
    """An action that changes no object of the plan; its result is a fact of a later plan, and no plan waits for it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ReadSource(Question):
    name: str
    key: str


@dataclass(frozen=True, slots=True)
class RenderPool(Question):
    """Ask a pod to name the chunks of prefixes, one after the other. `pool` is the object that is planned again with
    the answers, of kind `asker` (a pool or an invalidation)."""

    pool: str
    pod: Pod
    prefixes: tuple[PrefixSource, ...] = field(repr=False)
    asker: str = "PrefixPool"


@dataclass(frozen=True, slots=True)
class WarmPool(Question):
    """Have a pod compute prefixes of a pool's version, one after the other.

    The version's keyspace begins with `scope`, and `manifest` is its digest. `timeout_s` is per prefix, and `at_once`
    limits concurrent computations of all the model's pods, for any pool.
    """

    pool: str
    pool_uid: str
    pod: Pod
    scope: str
    manifest: str
    prefixes: tuple[PrefixSource, ...] = field(repr=False)
    timeout_s: float = 600.0
    at_once: int = 1


@dataclass(frozen=True, slots=True)
class InspectPool(Question):
    pool: str
    pool_uid: str
    pod: Pod


@dataclass(frozen=True, slots=True)
class ProbePod(Question):
    """Have a pod probe isolation under `revision` or a later one, in at most `readers` foreign scopes. `keyspaces` is a
    digest of those in that revision's bundle."""

    model: str
    pod: Pod
    revision: int
    keyspaces: str
    readers: int


@dataclass(frozen=True, slots=True)
class ReadEvents(Question):
    """Read the warnings about the object with this UID, then plan `again`."""

    uid: str
    again: Key


class Decision(NamedTuple):
    """A reason of the API, and a sentence that names the object and the fix."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class StatusWrite:
    """A status to write if the object is still at `resource_version`. A None value removes its field. `can_wait`: it
    reports progress only, so a later one may replace it."""

    key: Key
    resource_version: str
    status: Mapping[str, Any]
    can_wait: bool = False


class Material(StrEnum):
    DOMAIN_KEY = "DomainKey"
    DATA_KEYS = "DataKeys"
    REDIS_USERS = "RedisUsers"
    SERVER_CERTIFICATE = "ServerCertificate"


@dataclass(frozen=True, slots=True)
class EnsureSecret(Action):
    """Create a Secret with fresh material; `renew` also replaces unusable material of an existing one, but no password.

    `for_peers`: the certificate is valid for clients too. `domain` limits the keys of a Redis tier's users. A Secret of
    data keys gets a fresh one for each of `epochs` without one and loses those of `spent`; other keys stay. `honours`
    is the rotation request that fresh passwords grant. `drawn_for` is the restore after which keys are drawn: a domain
    key drawn for it stays, data keys that were not are dropped.
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
class TakeBack(Action):
    """Give a Secret its owner reference, and a mark of its content."""

    name: str
    owner: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class KeepInKms(Action):
    """Have the KMS wrap a data key for each of `epochs` without one, and delete the wrapping keys of `spent`."""

    epochs: tuple[str, ...] = ()
    spent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CommitBundle(Action):
    """Write a model's bundle: changed shards into their free slots, then the root, conditionally.

    `shards` and `pool_shards` hold changed shards by index; `resource_version` is the root's, None to create it;
    `entries` and `pools` are the whole content; the rest as in `CommittedBundle`.
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
class EmptySecrets(Action):
    """Remove contents that no reader needs from Secrets of a model's bundle, each if still at its version."""

    model: str
    versions: Mapping[str, str]
    owner: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProbeBackend(Question):
    """Check all requirements of an external Redis server for the domain with this id."""

    tier: str
    access: BackendAccess
    domain: str


class Turn(StrEnum):
    """One step in the life of a Secret with credentials; each is one write, and its result determines the next.

    Passwords: `STAGE` draws the next ones and admits them beside the current, `PROMOTE` puts them in use, `RETIRE`
    drops the previous ones. Certificates: `TRUST` adds the operator's new authority, `ISSUE` makes a new certificate,
    `DISTRUST` removes former authorities.
    """

    STAGE = "Stage"
    PROMOTE = "Promote"
    RETIRE = "Retire"
    TRUST = "Trust"
    ISSUE = "Issue"
    DISTRUST = "Distrust"


@dataclass(frozen=True, slots=True)
class TurnSecret(Action):
    """Take one step with a Secret of credentials, if it is still at `resource_version`. `domain`, `honours`,
    `dns_names` and `for_peers` are as in EnsureSecret."""

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
    """An idempotent instruction to a managed server about credentials. `SET_USERS` sets users, rights and passwords as
    in the Secret, `FOLLOW` the password for following a primary, `LOAD_CERTIFICATE` reloads the certificate's files."""

    SET_USERS = "SetUsers"
    FOLLOW = "Follow"
    LOAD_CERTIFICATE = "LoadCertificate"


@dataclass(frozen=True, slots=True)
class ManagedServer:
    name: str
    endpoint: str
    server_name: str


@dataclass(frozen=True, slots=True)
class TendServers(Question):
    """Send the orders, by server name, then read the credentials of all servers of a managed tier.

    The Secrets are read at that moment; `tls_secret` is None in plain text. `foreign_tls`: the latter is its user's,
    known from looks only.
    """

    tier: str
    servers: tuple[ManagedServer, ...]
    users_secret: str
    tls_secret: str | None
    orders: Mapping[str, tuple[Order, ...]] = field(default_factory=dict)
    foreign_tls: bool = False


@dataclass(frozen=True, slots=True)
class ReconcileCluster(Question):
    """Keep the servers of a managed cluster, at this port of its pods, at `goal` until the next order for the tier."""

    tier: str
    goal: Goal
    port: int
    access: BackendAccess


@dataclass(frozen=True, slots=True)
class _OfObject:
    kind: str
    name: str
    uid: str


class ErasureOrder(_OfObject, Question):
    """An order about the erasure that the object orders."""


class CarryOutErasure(ErasureOrder):
    """Start the erasure that the object of this UID orders, or wake the running one. The object is an eager
    invalidation, or a deleted policy that can have none."""


class EndErasure(ErasureOrder):
    """Remove the record of a finished erasure, then the finalizer of the invalidation."""


class Remove(_OfObject, Action):
    """Delete the object if it still has this UID."""


@dataclass(frozen=True, slots=True)
class SetFinalizers(Action):
    """Set the finalizers of the planned object, if it is still at `resource_version`. `unproven` is logged when an
    object goes without the receipt that it should leave."""

    finalizers: tuple[str, ...]
    resource_version: str
    unproven: str = ""


@dataclass(frozen=True, slots=True)
class Create(Action):
    """Create an object that users may also write; it is never applied over theirs."""

    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReadForeign(Question):
    """Check whether foreign objects, by kind and name, still hold names that the planned object needs."""

    slots: tuple[tuple[str, str], ...]
    owner: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReclaimFormer(Question):
    """Run a round of the deletion of a former cache from all Redis tiers of the namespace."""

    cache: FormerCache
    round: int


@dataclass(frozen=True, slots=True)
class EndReclaim(Action):
    """Stop the deletion of a former cache and remove its objects, before status reports it."""

    cache: FormerCache


@dataclass(frozen=True, slots=True)
class StandBack(Question):
    """Report that another installation serves the namespace."""

    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do for one key, in this order: actions, objects, deletions, statuses, then other keys. `apply` holds full
    desired objects; the writer skips those that the server already has. The names of `needs` are needed later, and are
    looked at if another is taken. Plan again after `wake_after_s`."""

    actions: tuple[Action, ...] = ()
    apply: tuple[Mapping[str, Any], ...] = ()
    statuses: tuple[StatusWrite, ...] = ()
    enqueue: tuple[Key, ...] = ()
    wake_after_s: float | None = None
    needs: tuple[Mapping[str, Any], ...] = ()
