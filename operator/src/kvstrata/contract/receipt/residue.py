"""Residue of an erasure: a closed list, so that every word of a receipt has one meaning."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.contract import Meaningful
from kvstrata.contract.receipt.vocabulary import Name


class ReceiptClaim(Meaningful):
    """Claims of a receipt about the blocks that it lists as revoked, in the order in which an erasure reaches them."""

    UNREACHABLE = "Unreachable", "no pod reuses blocks cached under the listed scopes"
    KEYS_REVOKED = (
        "KeysRevoked",
        "the listed data keys are gone from their custody, and no pod has them in use or in files",
    )
    KEYS_DESTROYED = "KeysDestroyed", "no copy of the listed data keys exists, as their custody confirmed"
    ERASED = "Erased", "the listed tiers, and the pods' memory and files, deleted the blocks and confirmed it"
    VERIFIED = "Verified", "a party other than the deleting one checked every server and every pod, and found nothing"


_BEYOND_UNREACHABLE = frozenset(ReceiptClaim) - {ReceiptClaim.UNREACHABLE}
_COPIES = frozenset({ReceiptClaim.ERASED, ReceiptClaim.VERIFIED})
_NOTHING: frozenset[ReceiptClaim] = frozenset()
_ORDERED = (_NOTHING, True)


class Residue(Meaningful):
    """Kinds of residue. `denies` are the claims that cannot stand beside it.

    Residue that the order itself left out (`asked`) denies nothing: claims are about listed blocks.
    """

    denies: frozenset[ReceiptClaim]
    asked: bool

    def __init__(
        self, _value: str, _meaning: str, denies: frozenset[ReceiptClaim] = _NOTHING, asked: bool = False
    ) -> None:
        self.denies, self.asked = denies, asked

    ETCD_HISTORY = (
        "EtcdHistory",
        "data keys were in Secrets: etcd keeps revisions of them until it is compacted and defragmented",
        frozenset({ReceiptClaim.KEYS_DESTROYED}),
    )
    ETCD_BACKUPS = (
        "EtcdBackups",
        "data keys were in Secrets: backups of etcd or of Secrets made before still hold them",
        frozenset({ReceiptClaim.KEYS_DESTROYED}),
    )
    KEY_KEPT = "KeyKept", "a data key is still in its custody", _BEYOND_UNREACHABLE - _COPIES
    POD_OPEN = (
        "PodOpen",
        "a pod neither acknowledged nor ended, and has not been away long enough to be fenced: it may still reuse",
        frozenset(ReceiptClaim),
    )
    POD_UNREACHABLE = (
        "PodUnreachable",
        "a pod could not be reached: it reuses nothing any more; its memory, files and copies of keys are as they were",
        _BEYOND_UNREACHABLE,
    )
    COPY_UNREACHABLE = (
        "CopyUnreachable",
        "files of a pod that is gone are on a node or volume that could not be reached",
        _COPIES,
    )
    UNSEEN_FOLDERS = (
        "UnseenFolders",
        "files of pods that ended before the order may be in a tier's folder on nodes without a pod that erased it",
    )
    SERVER_UNREACHABLE = "ServerUnreachable", "a server of a tier did not answer", _COPIES
    KEYS_REMAIN = "KeysRemain", "keys were found that are not deleted", _COPIES
    TIER_LOST = "TierLost", "a tier was removed, or its servers replaced, before it was erased", _COPIES
    FREED_STORAGE = (
        "FreedStorage",
        "deleted blocks were not encrypted: freed memory or disk may hold their bytes until it is used again",
    )
    SHARED_SCOPE_EXCLUDED = (
        "SharedScopeExcluded",
        "a scope shared with others was left out, as ordered: its members still reuse the blocks there",
        *_ORDERED,
    )
    TIER_EXCLUDED = (
        "TierExcluded",
        "a tier was left out, as ordered: it keeps its blocks until they expire",
        *_ORDERED,
    )
    LEFT_TO_AGE = (
        "LeftToAge",
        "nothing was deleted, as ordered: bytes stay in tiers until they expire or are evicted",
        *_ORDERED,
    )
    CONTINUATIONS = (
        "Continuations",
        "a tier keeps blocks of text after the prefix: only a request that begins with the prefix finds them; the "
        "count is an upper bound: all blocks of the scopes there",
        *_ORDERED,
    )
    ABANDONED = (
        "Abandoned",
        "a person or a deadline ended the erasure, for the reason in the order: steps that are not listed as done were "
        "not done",
    )
    ENGINE_MEMORY = (
        "EngineMemory",
        "engines keep blocks in their own memory, unreachable, until they use it for others",
        *_ORDERED,
    )


@dataclass(frozen=True, slots=True)
class ResidueItem:
    """One kind of residue, and its amount."""

    kind: Residue
    """Its kind."""

    about: Name
    """Its subject: a tier, a model, a group, a node and its folder; never a tenant. May be empty."""

    count: int
    """Number of keys, pods, files or servers; 0 if unknown."""
