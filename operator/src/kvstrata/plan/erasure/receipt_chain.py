"""From the facts of an erasure to the next receipt of its domain's chain.

An order's receipt is found by the order's uid, so a crash after writing it is harmless. An object name per number can
be created only once, so concurrent writers make one chain. All times come with the facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstrata.api.cachedomain import ReceiptChain
from kvstrata.contract.receipt.facts import Erasure
from kvstrata.contract.receipt.record import HandOver, HandOverKind, Head, Link, Record


class ChainConflictError(Exception):
    """The chain cannot be continued before an administrator repairs it; the message has the remedy."""


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

    def digest_of(self, order: str) -> str:
        """Return the digest of an order's receipt; empty if there is none."""
        return next((link.digest for link in self.stored if link.subject_uid == order), "")


@dataclass(frozen=True, slots=True)
class KeysInUse:
    """Key ids of available signing keys: the current one, with its start, and the previous one if it still exists."""

    current: str
    since: str
    previous: str | None = None


def next_record(chain: ChainState, keys: KeysInUse, erasure: Erasure | None = None) -> Record | None:
    """Return the record to sign next, until the chain has the erasure's receipt and needs the previous key no more.

    If another key signed the newest record, a hand-over to the current one comes first. The previous key signs it if it
    exists. If the newest record is lost, its signer is unknown and the current key continues; a change of key is then
    visible. Its objects are created, the numbered one last; then plan again. If that one exists, another process wrote
    it: read the chain again. Raises ChainConflictError.
    """
    sequence, digest, signer = _end(chain)
    if erasure is not None and chain.digest_of(erasure.subject.uid):
        return None
    head = Head(chain.domain_id, chain.namespace, sequence + 1, digest, keys.current)
    if signer is None or signer == keys.current:
        return Record.of_erasure(head, erasure) if erasure is not None else None
    if signer == keys.previous:
        return Record(replace(head, signer=signer), hand_over=HandOver(HandOverKind.ROTATED, keys.current, keys.since))
    return Record(head, hand_over=HandOver(HandOverKind.LOST, keys.current, keys.since))


def _end(chain: ChainState) -> tuple[int, str | None, str | None]:
    """Return number and digest of the newest record, by stored records and status, and the next signer, None if
    unknown. Records counted in status but missing were deleted: the chain continues after them, so that the gap
    shows."""
    by_sequence = {link.head.sequence: link for link in chain.stored}
    if len(by_sequence) != len(chain.stored):
        raise ChainConflictError("two stored receipts have one number: verify the chain, and keep both as evidence")
    for number, link in sorted(by_sequence.items()):
        before = by_sequence.get(number - 1)
        if link.head.domain != chain.domain_id or (before is not None and link.head.previous != before.digest):
            raise ChainConflictError(
                f"stored receipt {number} does not follow the one before it in this domain's chain"
            )
    newest = chain.newest
    recorded = chain.recorded if chain.recorded is not None and chain.recorded.count and chain.recorded.head else None
    if recorded is not None and recorded.count in by_sequence and by_sequence[recorded.count].digest != recorded.head:
        raise ChainConflictError(
            f"stored receipt {recorded.count} is another than the one that the CacheDomain's status names"
        )
    if recorded is not None and (newest is None or recorded.count > newest.head.sequence):
        return recorded.count, recorded.head, None
    return (newest.head.sequence, newest.digest, newest.next_signer) if newest is not None else (0, None, None)
