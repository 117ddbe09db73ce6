"""From the facts of an erasure to the next receipt of its domain's chain.

An order's receipt is found by the order's uid, so a crash after writing it is harmless. An object name per number can
be created only once, so concurrent writers make one chain. All times come with the facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.api.cachedomain import ReceiptChain
from kvstrata.contract.receipt.facts import Erasure
from kvstrata.contract.receipt.record import HandOver, HandOverKind, Head, Link, Record


@dataclass(frozen=True, slots=True)
class ChainState:
    """A domain's stored chain, and the CacheDomain's status about it, which may be older or newer. Signatures of
    `stored` were checked, so the chain never continues after a foreign record."""

    domain_id: str
    namespace: str
    stored: Sequence[Link]
    recorded: ReceiptChain | None = None

    @property
    def newest(self) -> Link | None:
        return max(self.stored, key=lambda link: link.head.sequence, default=None)


@dataclass(frozen=True, slots=True)
class KeysInUse:
    """Key ids of available signing keys: the current one, with its start, and the previous one if it still exists."""

    current: str
    since: str
    previous: str | None = None


@dataclass(frozen=True, slots=True)
class Receipted:
    """The receipt exists: its digest, and the state of the chain."""

    digest: str
    count: int
    head: str


@dataclass(frozen=True, slots=True)
class ChainConflict:
    """The chain cannot be continued: stored records contradict each other or the status."""

    message: str


ReceiptStep = Record | Receipted | ChainConflict
"""A record is to be signed and its objects created, the numbered one last; then plan again. If that one exists, another
process wrote it: read the chain again."""


def plan_receipt(chain: ChainState, keys: KeysInUse, erasure: Erasure) -> ReceiptStep:
    """Return the next step towards an erasure's receipt; Receipted is the last. If another key signed the newest
    record, a hand-over comes first."""
    place = _place(chain)
    if isinstance(place, ChainConflict):
        return place
    done = next((link for link in chain.stored if link.subject_uid == erasure.subject.uid), None)
    if done is not None:
        return Receipted(done.digest, place.sequence, place.digest or done.digest)
    hand_over = _hand_over(chain, place, keys)
    if hand_over is not None:
        return hand_over
    return Record.of_erasure(_head(chain, place, keys.current), erasure)


def plan_hand_over(chain: ChainState, keys: KeysInUse) -> Record | ChainConflict | None:
    """Return the hand-over required before the previous key may be removed; None if none is."""
    place = _place(chain)
    return place if isinstance(place, ChainConflict) else _hand_over(chain, place, keys)


@dataclass(frozen=True, slots=True)
class _Place:
    """The newest record: number, digest, and the next signer, None if unknown."""

    sequence: int = 0
    digest: str | None = None
    signer: str | None = None


def _place(chain: ChainState) -> _Place | ChainConflict:
    """Return the end of the chain, by stored records and status. Records counted in status but missing were deleted:
    the chain continues after them, so that the gap shows."""
    by_sequence = {link.head.sequence: link for link in chain.stored}
    if len(by_sequence) != len(chain.stored):
        return ChainConflict("two stored receipts have one number: verify the chain, and keep both as evidence")
    for number, link in sorted(by_sequence.items()):
        before = by_sequence.get(number - 1)
        if link.head.domain != chain.domain_id or (before is not None and link.head.previous != before.digest):
            return ChainConflict(f"stored receipt {number} does not follow the one before it in this domain's chain")
    newest = chain.newest
    recorded = chain.recorded if chain.recorded is not None and chain.recorded.count and chain.recorded.head else None
    if recorded is not None and recorded.count in by_sequence and by_sequence[recorded.count].digest != recorded.head:
        return ChainConflict(
            f"stored receipt {recorded.count} is another than the one that the CacheDomain's status names"
        )
    if recorded is not None and (newest is None or recorded.count > newest.head.sequence):
        return _Place(recorded.count, recorded.head)
    if newest is None:
        return _Place()
    return _Place(newest.head.sequence, newest.digest, newest.next_signer)


def _hand_over(chain: ChainState, place: _Place, keys: KeysInUse) -> Record | None:
    """Return the record that hands the chain over to the current key, if another signs it. The previous key signs it if
    it exists. If the newest record is lost, its signer is unknown and the current key continues; a change of key is
    then visible."""
    if place.signer is None or place.signer == keys.current:
        return None
    kind = HandOverKind.ROTATED if place.signer == keys.previous else HandOverKind.LOST
    signer = place.signer if kind is HandOverKind.ROTATED else keys.current
    return Record(_head(chain, place, signer), hand_over=HandOver(kind, keys.current, keys.since))


def _head(chain: ChainState, place: _Place, signer: str) -> Head:
    return Head(chain.domain_id, chain.namespace, place.sequence + 1, place.digest, signer)
