"""Verification of a domain's chain of receipts: that it is whole, and that pinned keys vouch for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvstrata.contract.receipt.record import Fault, HandOverKind, IsSigned, Receipt, ReceiptError, check_signatures


@dataclass(frozen=True, slots=True)
class Chain:
    """A whole chain. `unvouched` are the keys, in order, that no pinned key vouches for: no unbroken line of hand-overs
    connects them with one."""

    receipts: tuple[Receipt, ...]
    unvouched: tuple[str, ...]


def check_one(receipt: Receipt, is_signed: IsSigned, pinned: Collection[str]) -> bool:
    """Return whether a pinned key signed the receipt; with none pinned, False.

    Raises ReceiptError if a signature does not hold, or if keys are pinned and this is signed by another.
    """
    check_signatures(receipt.link, is_signed)
    signer = receipt.link.head.signer
    if pinned and signer not in pinned:
        raise ReceiptError(Fault.UNKNOWN_SIGNER, f"it is signed by key {signer[:16]}")
    return signer in pinned


def check_chain(
    receipts: Iterable[Receipt], is_signed: IsSigned, pinned: Collection[str], head: str | None = None
) -> Chain:
    """Return the chain that the receipts form, in any order.

    `head` is the digest of the record that should be the newest; without it, records missing at the end go unnoticed.
    Raises ReceiptError for a hole, a fork, a wrong link, a beginning or an end that is missing, another domain, a
    signature that does not hold, a key that changed without a hand-over, or, with keys pinned, a line of keys of which
    none is.
    """
    ordered = _in_order(receipts)
    lines = _key_lines(ordered, is_signed)
    last = ordered[-1].link
    if head is not None and last.digest != head:
        raise ReceiptError(
            Fault.CHAIN_TRUNCATED, f"it ends with number {last.head.sequence}, whose digest is {last.digest[:16]}"
        )
    unvouched = tuple(key for line in lines if not set(line) & set(pinned) for key in line)
    if pinned and unvouched:
        raise ReceiptError(Fault.UNKNOWN_SIGNER, f"key {unvouched[0][:16]} signed a part of it")
    return Chain(tuple(ordered), unvouched)


def _in_order(receipts: Iterable[Receipt]) -> Sequence[Receipt]:
    by_sequence: dict[int, dict[str, Receipt]] = defaultdict(dict)
    for receipt in receipts:
        by_sequence[receipt.link.head.sequence][receipt.link.digest] = receipt
    if not by_sequence:
        raise ReceiptError(Fault.CHAIN_BEGINS_LATE, "there is none")
    if len({one.link.head.domain for same in by_sequence.values() for one in same.values()}) > 1:
        raise ReceiptError(Fault.OTHER_DOMAIN, "give those of one")
    for sequence, same in sorted(by_sequence.items()):
        if len(same) > 1:
            raise ReceiptError(Fault.CHAIN_FORK, f"there are {len(same)} with number {sequence}")
    ordered = [next(iter(by_sequence[sequence].values())) for sequence in sorted(by_sequence)]
    first = ordered[0].link.head.sequence
    if first != 1:
        raise ReceiptError(Fault.CHAIN_BEGINS_LATE, f"the first one here is number {first}")
    for before, after in pairwise(ordered):
        number = after.link.head.sequence
        if number != before.link.head.sequence + 1:
            raise ReceiptError(Fault.CHAIN_HOLE, f"number {before.link.head.sequence + 1} is not here")
        if after.link.head.previous != before.link.digest:
            raise ReceiptError(Fault.CHAIN_BROKEN, f"number {number} follows another number {number - 1} than this one")
    return ordered


def _key_lines(ordered: Sequence[Receipt], is_signed: IsSigned) -> list[list[str]]:
    """Return the keys that signed, in lines within which each handed over to the next.

    Records behind a hand-over commit to all before it, so a pinned key vouches for the whole of its line, in both
    directions. A lost key ends its line.
    """
    lines = [[ordered[0].link.head.signer]]
    for receipt in ordered:
        check_signatures(receipt.link, is_signed)
        change, signer = receipt.record.hand_over, receipt.link.head.signer
        lost = change is not None and change.kind is HandOverKind.LOST
        if not lost and signer != lines[-1][-1]:
            number = receipt.link.head.sequence
            raise ReceiptError(Fault.KEY_CHANGED, f"number {number} is signed by key {signer[:16]}")
        if change is None:
            continue
        if lost:
            lines.append([change.new_key])
        else:
            lines[-1].append(change.new_key)
    return lines
