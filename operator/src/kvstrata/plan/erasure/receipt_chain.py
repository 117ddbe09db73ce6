"""From the facts of an erasure to the next receipt of its domain's chain.

The receipt of an order is found again by the order's uid, whatever was written of it elsewhere: one that dies between
writing it and saying so in a status finds the same. The next number's object can be created once only, so two that
write at the same time end in one chain. Nothing here is drawn or read off a clock: moments come with the facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.api.cachedomain import ReceiptChain
from kvstrata.contract.receipt.facts import Erasure
from kvstrata.contract.receipt.record import HandOver, HandOverKind, Head, Link, Record


@dataclass(frozen=True, slots=True)
class ChainState:
    """A domain's chain as it is stored, and what the CacheDomain's status tells of it, which may be older or newer.

    `stored` are records whose signatures were checked: a chain is not continued behind what somebody else put there.
    """

    domain_id: str
    namespace: str
    stored: Sequence[Link]
    told: ReceiptChain | None = None


@dataclass(frozen=True, slots=True)
class KeysInUse:
    """Key ids of what can sign: the current key, since when it does, and the one before if it is still there."""

    current: str
    since: str
    previous: str | None = None


@dataclass(frozen=True, slots=True)
class IssueReceipt:
    """Sign this record and create its objects, the one that is named by its number last; then plan again.

    If that one exists, another wrote it: read the chain anew.
    """

    record: Record


@dataclass(frozen=True, slots=True)
class Receipted:
    """The receipt is there: its digest, and how the chain stands."""

    digest: str
    count: int
    head: str


@dataclass(frozen=True, slots=True)
class ChainConflict:
    """The chain cannot be continued: what is stored contradicts itself, or what status tells."""

    message: str


ReceiptStep = IssueReceipt | Receipted | ChainConflict


def plan_receipt(chain: ChainState, keys: KeysInUse, erasure: Erasure) -> ReceiptStep:
    """Return the next step towards the receipt of an erasure, which is the last when it is Receipted.

    A chain whose newest record another key signed is handed over first.
    """
    place = _place(chain)
    if isinstance(place, ChainConflict):
        return place
    done = next((link for link in chain.stored if link.subject_uid == erasure.subject.uid), None)
    if done is not None:
        return Receipted(done.digest, place.sequence, place.digest or done.digest)
    hand_over = _hand_over(chain, place, keys)
    if hand_over is not None:
        return IssueReceipt(hand_over)
    return IssueReceipt(Record.of_erasure(_head(chain, place, keys.current), erasure))


def plan_hand_over(chain: ChainState, keys: KeysInUse) -> IssueReceipt | ChainConflict | None:
    """Return the hand-over that a chain needs before the previous key may go; None if it needs none."""
    place = _place(chain)
    if isinstance(place, ChainConflict):
        return place
    record = _hand_over(chain, place, keys)
    return None if record is None else IssueReceipt(record)


@dataclass(frozen=True, slots=True)
class _Place:
    """The newest record: its number, its digest, and which key signs behind it, None if that is not known."""

    sequence: int = 0
    digest: str | None = None
    signer: str | None = None


def _place(chain: ChainState) -> _Place | ChainConflict:
    """Return where the chain stands, by what is stored and by what status tells.

    Records that status counts and nobody finds were deleted: the chain goes on behind them, so that the hole shows.
    """
    by_sequence = {link.head.sequence: link for link in chain.stored}
    if len(by_sequence) != len(chain.stored):
        return ChainConflict("two stored receipts have one number: verify the chain, and keep both as evidence")
    for number, link in sorted(by_sequence.items()):
        before = by_sequence.get(number - 1)
        if link.head.domain != chain.domain_id or (before is not None and link.head.previous != before.digest):
            return ChainConflict(f"stored receipt {number} does not follow the one before it in this domain's chain")
    newest = by_sequence[max(by_sequence)] if by_sequence else None
    told = chain.told if chain.told is not None and chain.told.count and chain.told.head else None
    if told is not None and told.count in by_sequence and by_sequence[told.count].digest != told.head:
        return ChainConflict(f"stored receipt {told.count} is another than the one that the CacheDomain's status names")
    if told is not None and (newest is None or told.count > newest.head.sequence):
        return _Place(told.count, told.head)
    if newest is None:
        return _Place()
    return _Place(newest.head.sequence, newest.digest, newest.next_signer)


def _hand_over(chain: ChainState, place: _Place, keys: KeysInUse) -> Record | None:
    """Return the record by which the chain goes over to the current key, if another signs it.

    The key before signs it too, if it is there. Where the newest record is lost, and with it which key signed it, the
    current key goes on: if it was another's, that shows as a key that changed.
    """
    if place.signer is None or place.signer == keys.current:
        return None
    kind = HandOverKind.ROTATED if place.signer == keys.previous else HandOverKind.LOST
    signer = place.signer if kind is HandOverKind.ROTATED else keys.current
    return Record(_head(chain, place, signer), hand_over=HandOver(kind, keys.current, keys.since))


def _head(chain: ChainState, place: _Place, signer: str) -> Head:
    return Head(chain.domain_id, chain.namespace, place.sequence + 1, place.digest, signer)
