"""The facts of a receipt: actions and findings of an erasure.

A fact is a party's statement and its time; `claims` derives conclusions. People outside the cluster read receipts, so
facts hold no data key, keyspace or epoch, and a tenant's name only if the order has it. Digests replace these
(`vocabulary`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvstrata.contract.receipt.residue import ResidueItem
from kvstrata.contract.receipt.vocabulary import (
    Hbm,
    KeyCustody,
    Mode,
    Moment,
    Name,
    Party,
    PodMedium,
    RevokedKind,
    ScopeForm,
    Standing,
    SubjectKind,
    evidence,
)
from kvstrata.contract.wire import Form, HexDigest

Uid = Annotated[str, Form("[0-9A-Za-z._:-]{1,128}", "identifier of 1 to 128 letters, digits and ._:-")]
IMAGE_OF = "image of "
"""Begins the names of components that are images."""

Boot = Annotated[str, Form("[0-9A-Za-z._:-]{0,128}", "boot id")]


@dataclass(frozen=True, slots=True)
class Subject:
    kind: SubjectKind
    """Kind of the object whose creation or deletion ordered it."""

    name: Name
    """Its name."""

    uid: Uid
    """Its uid: an order gets one receipt."""

    scope: ScopeForm
    """Form of the scope that it names."""

    scope_name: Name
    """The scope as the object has it: the tenant, group, pool or model; of a prefix its model; empty for all."""

    tenants: tuple[Name, ...]
    """Tenants that a prefix is limited to, as the object has them; empty for all."""

    mode: Mode
    """Lazy: unreachable only. Eager: deleted, too."""

    hbm: Hbm
    """Order about the engines' memory."""

    tiers: tuple[Name, ...]
    """Tiers that the order is limited to; empty for all."""

    reason: str
    """The reason in the user's words, may be empty."""


@dataclass(frozen=True, slots=True)
class Revoked:
    """Blocks that were cached under one keyspace, one model's identity, or one prefix."""

    kind: RevokedKind
    """Kind of their owner."""

    name: Name | None
    """Name of the scope, model or pool; of a tenant only if the order names it, otherwise null."""

    old: HexDigest
    """Commitment to the scope and its former epoch."""

    new: HexDigest | None
    """Commitment to the epoch that replaced it; null if none."""


@dataclass(frozen=True, slots=True)
class Target:
    """The bundle revision by which a model's pods lose the revoked scopes."""

    model: Name
    """The CachedModel."""

    revision: int
    """First revision without the revoked scopes."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A party's statement, and its time."""

    by: Party
    """Kind of the party."""

    name: Uid
    """Uid of the pod or Job, or the key custody's name."""

    at: Moment
    """When."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Why a pod that could not be reached reuses nothing any more: its policy is older than it may be."""

    last_fresh: Moment
    """Latest time at which it can have read its policy."""

    stale_after_s: int
    """The staleAfter that it enforced, in seconds."""

    drain_timeout_s: int
    """How long its running requests had to end, in seconds: its maxRequestDuration; from versions before it, its
    drainTimeout."""

    waited_until: Moment
    """End of the wait for it."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Blocks in a pod's own tier."""

    found: int
    """Blocks found."""

    erased: int
    """Blocks erased."""

    remaining: int
    """Blocks left."""

    bytes: int
    """Bytes erased."""


@dataclass(frozen=True, slots=True)
class PodTier:
    tier: Name
    """Name of the CacheTier."""

    medium: PodMedium
    """Memory or files."""

    encrypted: bool
    """Whether it holds ciphertext only."""

    outlives_pod: bool
    """Whether its data stays on the node or in a volume when the pod is gone."""

    erased: Copies | None
    """Blocks erased, as reported by the pod; null without a report. Zeros for files of a pod that ended if another pod
    erased the node's folder: it counts them."""


@dataclass(frozen=True, slots=True)
class Probes:
    """Keys that a pod could have read before the erasure; it is asked for them at the end."""

    known: int
    """Known keys that the pod could have read."""

    asked: int
    """Number that it was asked for."""

    missed: int
    """Number that it did not find."""


@dataclass(frozen=True, slots=True)
class PodFact:
    """One pod that may have used revoked blocks."""

    model: Name
    """Its CachedModel."""

    uid: Uid
    """Its uid, by which its acknowledgement was checked."""

    standing: Standing
    """Acked: it reported that it enforces the revision. Fenced: it was unreachable and its time is over. Ended: the
    kubelet reported all of its containers as ended, or none as started. Open: none of these."""

    gate_boot: Boot
    """Boot id of its gate; empty if it did not acknowledge."""

    cache_boot: Boot
    """Boot id of its cache server; empty if it did not acknowledge."""

    revision: int
    """The revision that it acknowledged; 0 for none."""

    at: Moment | None
    """When it acknowledged or ended."""

    fence: Fence | None
    """Why it counts as fenced."""

    tiers: tuple[PodTier, ...]
    """The tiers inside it."""

    engine_reset: Moment | None
    """When its engine reported that it finds no earlier block; null without that report."""

    probes: Probes | None
    """Its probes at verification."""


@dataclass(frozen=True, slots=True)
class KeyFact:
    fingerprint: HexDigest
    """SHA-256 that identifies the key."""

    revoked: HexDigest
    """`old` of the revoked blocks that it encrypted."""

    custody: KeyCustody
    """Its custody."""

    removed: Statement | None
    """Statement that it was removed from its custody and from every bundle; null if it is still there."""

    destroyed: Statement | None
    """Statement that no copy of it exists; never for a Secret."""


@dataclass(frozen=True, slots=True)
class Amount:
    """Keys and bytes in a server."""

    keys: int
    """Number of keys."""

    bytes: int
    """Bytes of their values."""

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.keys + other.keys, self.bytes + other.bytes)


NOTHING = Amount(0, 0)


@dataclass(frozen=True, slots=True)
class NodeFact:
    node: Uid
    """The server's own id."""

    found: Amount
    """Keys and bytes found."""

    deleted: Amount
    """Keys and bytes deleted."""

    remaining: Amount
    """The rest, as counted by the deletion."""

    replicas: int
    """Replicas that the primary had."""

    replicas_in_step: int
    """Replicas that confirmed the deletions."""

    erased: Statement | None
    """Statement of the deletion; null if it was not done."""

    left: Amount | None
    """The rest, as found by the verifier afterwards; null if it did not look."""


@dataclass(frozen=True, slots=True)
class TierFact:
    tier: Name
    """Name of the CacheTier."""

    encrypted: bool
    """Whether it holds ciphertext only."""

    primaries: int
    """Number of its primaries."""

    waited_s: int
    """Seconds between the last pod's acknowledgement and the deletion; writes that had begun are over after 30."""

    slots_before: HexDigest | None
    """Digest of the map of slots to primaries before verification."""

    slots_after: HexDigest | None
    """The same after it."""

    nodes: tuple[NodeFact, ...]
    """Its primaries."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The look after all deletions, by another party."""

    by: Statement
    """The party that looked, and the time of the end."""

    began: Moment
    """Time of the beginning."""


@dataclass(frozen=True, slots=True)
class Timings:
    started: Moment
    """The order was taken up."""

    rolled: Moment | None
    """New epochs were in every bundle."""

    unreachable: Moment | None
    """The last pod acknowledged, ended or was fenced."""

    keys_revoked: Moment | None
    """The last data key was gone from custody and processes."""

    erased: Moment | None
    """The last copy was deleted."""

    verified: Moment | None
    """Verification was over."""

    issued: Moment
    """The facts were complete."""


@dataclass(frozen=True, slots=True)
class Component:
    name: Name
    """The operator that began, the software of tiers' servers, a CachedModel, or the image of a container in pods of a
    model or in Jobs that deleted from a tier."""

    version: Name
    """Its version; of an image the digest that the kubelet reported; of a CachedModel an identity of its blocks, which
    ends with the fingerprint of engine and model files where that is known. Blocks of all identities were erased; at
    most 64 are named, and at most 64 images of pods."""

    count: int
    """Number of operators, of tiers with such servers, of pods that served under the identity, or of pods or Jobs with
    the image."""


@evidence
class Erasure:
    subject: Subject
    """The order."""

    revoked: tuple[Revoked, ...]
    """Blocks that were made unreachable."""

    targets: tuple[Target, ...]
    """Revisions that pods had to acknowledge."""

    pods: tuple[PodFact, ...]
    """Every pod that may have used revoked blocks."""

    keys: tuple[KeyFact, ...]
    """Data keys of revoked blocks."""

    tiers: tuple[TierFact, ...]
    """Shared tiers."""

    verification: Verification | None
    """The look after all deletions."""

    residue: tuple[ResidueItem, ...]
    """The residue."""

    timings: Timings
    """Times."""

    versions: tuple[Component, ...]
    """Versions of operator and servers, identities of models, and digests of images that served and erased."""
