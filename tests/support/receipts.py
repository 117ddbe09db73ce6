"""Facts of erasures, keys that are always the same, and chains of receipts made of them."""

from __future__ import annotations

from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvstrata.clients.signing import SigningKeys
from kvstrata.contract.policy.data_key import key_id
from kvstrata.contract.policy.keyspace import ScopeKind
from kvstrata.contract.receipt.facts import (
    Amount,
    Component,
    Copies,
    Erasure,
    KeyFact,
    NodeFact,
    PodFact,
    PodTier,
    Probes,
    Revoked,
    Statement,
    Subject,
    Target,
    TierFact,
    Timings,
    Verification,
)
from kvstrata.contract.receipt.record import HandOver, HandOverKind, Head, Record, read_link
from kvstrata.contract.receipt.residue import Residue, ResidueItem
from kvstrata.contract.receipt.vocabulary import (
    Hbm,
    KeyCustody,
    Mode,
    Party,
    PodMedium,
    RevokedKind,
    ScopeForm,
    Standing,
    SubjectKind,
    epoch_commitment,
)

DOMAIN = "00112233445566aa"
NAMESPACE = "team-a"
SINCE = "2026-11-20T08:00:00Z"
T0, T1, T2, T3, T4 = (f"2026-11-22T10:0{minute}:00Z" for minute in range(5))


def keys(seed: int = 1, previous: int | None = None) -> SigningKeys:
    """Signing keys that a seed stands for."""
    old = None if previous is None else Ed25519PrivateKey.from_private_bytes(bytes([previous]) * 32)
    return SigningKeys(Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32), SINCE, old)


OLD_EPOCH = epoch_commitment(DOMAIN, ScopeKind.TENANT, "acme", "0" * 31 + "1")
NEW_EPOCH = epoch_commitment(DOMAIN, ScopeKind.TENANT, "acme", "0" * 31 + "2")
OPERATOR = Statement(Party.OPERATOR, "operator-pod-uid", T4)
JOB = Statement(Party.JOB, "job-uid", T3)
KMS = Statement(Party.CUSTODY, "transit:cluster-id", T4)


def subject(uid: str = "order-1", **changes: object) -> Subject:
    """An order to forget the tenant acme."""
    whole = Subject(
        kind=SubjectKind.INVALIDATION,
        name="forget-acme",
        uid=uid,
        scope=ScopeForm.TENANT,
        scope_name="acme",
        tenants=(),
        mode=Mode.EAGER,
        hbm=Hbm.RESET_ENGINE,
        tiers=(),
        reason="the contract ended",
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def pod(uid: str = "pod-1", **changes: object) -> PodFact:
    """A pod that acknowledged, erased its memory and its files, and had no hit when the probe read its blocks."""
    whole = PodFact(
        model="chat",
        uid=uid,
        standing=Standing.ACKED,
        gate_boot=f"gate-{uid}",
        cache_boot=f"cache-{uid}",
        revision=7,
        at=T1,
        fence=None,
        tiers=(
            PodTier("cpu", PodMedium.CPU, False, False, Copies(5, 5, 0, 5000)),
            PodTier("files", PodMedium.NVME, True, True, Copies(9, 9, 0, 9000)),
        ),
        engine_reset=T2,
        probes=Probes(3, 2, 2),
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def node(name: str = "node-1", **changes: object) -> NodeFact:
    """A primary that was emptied and found empty."""
    nothing = Amount(0, 0)
    whole = NodeFact(name, Amount(40, 4000), Amount(40, 4000), nothing, 1, 1, JOB, nothing)
    return replace(whole, **changes)  # type: ignore[arg-type]


def tier(name: str = "redis", **changes: object) -> TierFact:
    """An encrypted tier of two primaries."""
    slots = "5" * 64
    whole = TierFact(name, True, 2, 30, slots, slots, (node("node-1"), node("node-2")))
    return replace(whole, **changes)  # type: ignore[arg-type]


def data_key(**changes: object) -> KeyFact:
    """A data key that a KMS wrapped, and that is destroyed."""
    whole = KeyFact(key_id(b"k" * 32), OLD_EPOCH, KeyCustody.KMS, OPERATOR, KMS)
    return replace(whole, **changes)  # type: ignore[arg-type]


def erasure(uid: str = "order-1", **changes: object) -> Erasure:
    """An erasure that proves everything and leaves nothing."""
    whole = Erasure(
        subject=subject(uid),
        revoked=(Revoked(RevokedKind.TENANT, "acme", OLD_EPOCH, NEW_EPOCH),),
        targets=(Target("chat", 7),),
        pods=(pod("pod-1"), pod("pod-2")),
        keys=(data_key(),),
        tiers=(tier(),),
        verification=Verification(OPERATOR, T3),
        residue=(),
        timings=Timings(T0, T0, T1, T2, T3, T4, T4),
        versions=(Component("operator", "0.1.0", 1), Component("gate", "0.1.0", 2)),
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def lazy(uid: str = "order-2") -> Erasure:
    """An invalidation that deletes nothing, with keys in a Secret."""
    return erasure(
        uid,
        subject=subject(uid, name="roll-acme", mode=Mode.LAZY, hbm=Hbm.ROLL_SCOPES, reason=""),
        pods=(pod("pod-1", tiers=(), engine_reset=None, probes=None),),
        keys=(data_key(custody=KeyCustody.SECRET, destroyed=None),),
        tiers=(),
        verification=None,
        residue=residue(Residue.ENGINE_MEMORY, Residue.ETCD_BACKUPS, Residue.ETCD_HISTORY, Residue.LEFT_TO_AGE),
    )


def residue(*kinds: Residue) -> tuple[ResidueItem, ...]:
    """One item of each kind."""
    return tuple(ResidueItem(kind, "", 1) for kind in kinds)


def issue(signing: SigningKeys, previous: bytes | None, facts: Erasure | HandOver, signer: str | None = None) -> bytes:
    """The receipt that follows `previous`."""
    before = read_link(previous) if previous is not None else None
    head = Head(
        DOMAIN,
        NAMESPACE,
        before.head.sequence + 1 if before else 1,
        before.digest if before else None,
        signer or signing.current_id,
    )
    record = Record(head, hand_over=facts) if isinstance(facts, HandOver) else Record.of_erasure(head, facts)
    return signing.sign(record)


def rotation(to: SigningKeys, kind: HandOverKind = HandOverKind.ROTATED) -> HandOver:
    """The hand-over to a key."""
    return HandOver(kind, to.current_id, SINCE)


def rotated_chain() -> list[bytes]:
    """Two erasures under key 1, the hand-over to key 2, and an erasure under that."""
    first = issue(keys(1), None, erasure("order-1"))
    second = issue(keys(1), first, lazy("order-2"))
    both = keys(2, previous=1)
    third = issue(both, second, rotation(both), signer=both.previous_id)
    return [first, second, third, issue(keys(2), third, erasure("order-3"))]
