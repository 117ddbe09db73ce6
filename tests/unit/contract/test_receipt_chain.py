"""A chain holds only whole, in order, of one domain, and by keys that followed each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvstrata.clients.signing import is_signed
from kvstrata.contract.receipt.chain import Chain, check_chain, check_one
from kvstrata.contract.receipt.record import (
    Fault,
    HandOverKind,
    Head,
    Receipt,
    ReceiptError,
    Record,
    check_signatures,
    read_link,
    read_receipt,
    signed_bytes,
)
from kvstrata.contract.receipt.residue import ReceiptClaim
from kvstrata.contract.wire import canonical_json
from tests.support.receipts import DOMAIN, NAMESPACE, erasure, issue, keys, lazy, rotated_chain, rotation

ONE, TWO, THREE = (keys(seed).current_id for seed in (1, 2, 3))


def chain(files: list[bytes], *pinned: str, head: str | None = None) -> Chain:
    return check_chain([read_receipt(data) for data in files], is_signed, pinned, head)


def fault(act: Callable[[], object]) -> Fault:
    with pytest.raises(ReceiptError) as refused:
        act()
    return refused.value.fault


def changed(data: bytes, change: Callable[[dict[str, object]], object]) -> bytes:
    """A receipt whose record was changed by someone who writes canonically and cannot sign."""
    raw = json.loads(data)
    change(raw["record"])
    return canonical_json(raw)


def opened(data: bytes) -> Receipt:
    receipt = read_receipt(data)
    check_signatures(receipt.link, is_signed)
    return receipt


def test_a_whole_chain_holds_in_whatever_order_it_is_given() -> None:
    files = rotated_chain()
    found = chain(files[::-1], ONE)
    assert [one.link.head.sequence for one in found.receipts] == [1, 2, 3, 4]
    assert found.unvouched == ()
    assert chain(files + files[:1], ONE).receipts[-1].link.digest == read_link(files[3]).digest


@pytest.mark.parametrize("pinned", [ONE, TWO])
def test_either_key_of_a_rotation_vouches_for_the_whole_line(pinned: str) -> None:
    assert chain(rotated_chain(), pinned).unvouched == ()


def test_without_a_pinned_key_a_chain_holds_and_nobody_vouches_for_it() -> None:
    assert chain(rotated_chain()).unvouched == (ONE, TWO)


def test_a_chain_of_other_keys_than_the_pinned_one_is_refused() -> None:
    assert fault(lambda: chain(rotated_chain(), THREE)) is Fault.UNKNOWN_SIGNER


def test_a_hole_is_told_from_a_late_beginning_and_an_early_end() -> None:
    files = rotated_chain()
    assert fault(lambda: chain([files[0], *files[2:]], ONE)) is Fault.CHAIN_HOLE
    assert fault(lambda: chain(files[1:], ONE)) is Fault.CHAIN_BEGINS_LATE
    newest = read_link(files[3]).digest
    assert fault(lambda: chain(files[:3], ONE, head=newest)) is Fault.CHAIN_TRUNCATED
    assert chain(files, ONE, head=newest)
    assert fault(lambda: chain([], ONE)) is Fault.CHAIN_BEGINS_LATE


def test_two_successors_are_a_fork() -> None:
    first = issue(keys(), None, erasure("order-1"))
    second, other = issue(keys(), first, erasure("order-2")), issue(keys(), first, erasure("order-3"))
    assert fault(lambda: chain([first, second, other], ONE)) is Fault.CHAIN_FORK


def test_a_receipt_that_was_replaced_breaks_the_chain_behind_it() -> None:
    first, other = issue(keys(), None, erasure("order-1")), issue(keys(), None, lazy("order-1"))
    second = issue(keys(), first, erasure("order-2"))
    assert fault(lambda: chain([other, second], ONE)) is Fault.CHAIN_BROKEN


def test_receipts_of_two_domains_are_no_chain() -> None:
    first = issue(keys(), None, erasure("order-1"))
    head = Head("ff", NAMESPACE, 2, read_link(first).digest, ONE)
    other = keys().sign(Record.of_erasure(head, erasure("order-2")))
    assert fault(lambda: chain([first, other], ONE)) is Fault.OTHER_DOMAIN


def test_a_key_that_changed_without_a_hand_over_is_refused() -> None:
    first = issue(keys(1), None, erasure("order-1"))
    second = issue(keys(2), first, erasure("order-2"))
    assert fault(lambda: chain([first, second], ONE, TWO)) is Fault.KEY_CHANGED


def test_the_old_key_signs_nothing_after_it_handed_over() -> None:
    files = rotated_chain()
    files[3] = issue(keys(1), files[2], erasure("order-3"))
    assert fault(lambda: chain(files, ONE)) is Fault.KEY_CHANGED


def test_behind_a_lost_key_its_successor_has_to_be_pinned_itself() -> None:
    first = issue(keys(1), None, erasure("order-1"))
    lost = issue(keys(2), first, rotation(keys(2), HandOverKind.LOST))
    files = [first, lost, issue(keys(2), lost, erasure("order-2"))]
    assert fault(lambda: chain(files, ONE)) is Fault.UNKNOWN_SIGNER
    assert fault(lambda: chain(files, TWO)) is Fault.UNKNOWN_SIGNER
    assert chain(files, ONE, TWO).unvouched == ()
    assert chain(files).unvouched == (ONE, TWO)


def test_a_rotation_that_the_old_key_did_not_sign_is_refused() -> None:
    first = issue(keys(1), None, erasure("order-1"))
    both = keys(2, previous=1)
    whole = json.loads(issue(both, first, rotation(both), signer=both.previous_id))
    for signatures in ([whole["signatures"][1]], [whole["signatures"][0]], whole["signatures"] * 2, []):
        data = canonical_json({**whole, "signatures": signatures})
        assert fault(lambda data=data: opened(data)) is Fault.MALFORMED  # type: ignore[misc]
    swapped = canonical_json({**whole, "signatures": whole["signatures"][::-1]})
    assert fault(lambda: opened(swapped)) is Fault.KEY_SWAPPED


def test_a_lost_key_cannot_be_followed_by_one_that_did_not_sign() -> None:
    first = issue(keys(1), None, erasure("order-1"))
    head = Head(DOMAIN, NAMESPACE, 2, read_link(first).digest, ONE)
    record = Record(head, hand_over=rotation(keys(2), HandOverKind.LOST))
    whole = json.loads(keys(2, previous=1).sign(record))
    alone = canonical_json({**whole, "signatures": whole["signatures"][:1]})
    assert fault(lambda: read_receipt(alone)) is Fault.MALFORMED


def test_a_changed_fact_is_a_forged_signature() -> None:
    data = changed(issue(keys(), None, erasure()), lambda record: record.update(namespace="team-b"))
    assert fault(lambda: opened(data)) is Fault.SIGNATURE_FORGED


def test_a_claim_that_was_added_is_refused_before_any_signature() -> None:
    data = changed(issue(keys(), None, lazy()), lambda record: record.update(claims=[str(ReceiptClaim.ERASED)]))
    assert fault(lambda: read_receipt(data)) is Fault.CLAIMS_EXCEED_FACTS


def test_a_swapped_key_is_refused_with_its_own_good_signature() -> None:
    mine, theirs = json.loads(issue(keys(1), None, erasure())), json.loads(issue(keys(2), None, erasure()))
    data = canonical_json({"record": mine["record"], "signatures": theirs["signatures"]})
    assert fault(lambda: opened(data)) is Fault.KEY_SWAPPED


def test_a_receipt_signed_all_over_by_another_key_is_refused_by_who_pins_the_right_one() -> None:
    theirs = read_receipt(issue(keys(2), None, erasure()))
    assert fault(lambda: check_one(theirs, is_signed, {ONE})) is Fault.UNKNOWN_SIGNER
    assert check_one(theirs, is_signed, {TWO}) is True
    assert check_one(theirs, is_signed, ()) is False


def test_a_signature_of_another_document_is_none_of_a_receipt() -> None:
    record = read_link(issue(keys(), None, erasure())).signed
    public = keys().current.public_key().public_bytes_raw()
    assert is_signed(public, signed_bytes(record), keys().current.sign(signed_bytes(record)))
    assert not is_signed(public, signed_bytes(record), keys().current.sign(record))


def test_a_newer_version_is_refused_by_name_and_can_still_be_followed() -> None:
    first = issue(keys(), None, erasure("order-1"))

    def newer(record: dict[str, object]) -> None:
        record.update(receipt=2, somethingNew=[1, 2])

    data = changed(first, newer)
    assert fault(lambda: read_receipt(data)) is Fault.UNKNOWN_VERSION
    link = read_link(data)
    assert (link.version, link.head.sequence, link.subject_uid) == (2, 1, "order-1")
    assert issue(keys(), data, erasure("order-2"))


@pytest.mark.parametrize("version", [0, -1, True, "1", None, 1.0])
def test_what_has_no_version_is_no_receipt(version: object) -> None:
    data = changed(issue(keys(), None, erasure()), lambda record: record.update(receipt=version))
    assert fault(lambda: read_link(data)) is Fault.MALFORMED


def test_only_the_first_has_no_predecessor() -> None:
    first = issue(keys(), None, erasure())
    assert fault(lambda: read_link(changed(first, lambda record: record.update(sequence=2)))) is Fault.MALFORMED
    assert fault(lambda: read_link(changed(first, lambda record: record.update(previous="0" * 64)))) is Fault.MALFORMED
    assert fault(lambda: read_link(changed(first, lambda record: record.update(sequence=0)))) is Fault.MALFORMED


def test_the_domain_of_a_receipt_is_signed() -> None:
    record = opened(issue(keys(), None, erasure())).record
    assert replace(record.head, domain="ff") != record.head
    data = changed(issue(keys(), None, erasure()), lambda raw: raw.update(domain="ff"))
    assert fault(lambda: opened(data)) is Fault.SIGNATURE_FORGED
