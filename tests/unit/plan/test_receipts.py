"""The next receipt of a chain, by its facts alone: the same from wherever one starts again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvstrata.api.cachedomain import ReceiptChain
from kvstrata.clients.signing import SigningKeys, is_signed
from kvstrata.contract.receipt.chain import check_chain
from kvstrata.contract.receipt.facts import Erasure
from kvstrata.contract.receipt.record import Fault, HandOverKind, Link, ReceiptError, read_link, read_receipt
from kvstrata.contract.wire import canonical_json
from kvstrata.plan.erasure.receipt_chain import ChainConflictError, ChainState, KeysInUse, next_record
from tests.support.receipts import DOMAIN, NAMESPACE, erasure, issue, keys, lazy, rotated_chain


class Store:
    """Where receipts are kept: a number is written once, and the status that tells of them may be behind."""

    def __init__(self, *files: bytes) -> None:
        self.files = {read_link(data).head.sequence: data for data in files}
        self.told: ReceiptChain | None = None

    def state(self) -> ChainState:
        return ChainState(DOMAIN, NAMESPACE, [read_link(data) for data in self.files.values()], self.told)

    def receipt(self, facts: Erasure, signing: SigningKeys, *, dies: bool = False) -> tuple[str, int]:
        """Write until the receipt is there; return its digest and the newest number. One that dies told nobody."""
        in_use = KeysInUse(signing.current_id, signing.since, signing.previous_id)
        for _ in range(3):
            chain = self.state()
            step = next_record(chain, in_use, facts)
            if step is None:
                assert chain.newest is not None
                count = chain.newest.head.sequence
                if not dies:
                    self.told = ReceiptChain(count=count, head=chain.newest.digest)
                return chain.digest_of(facts.subject.uid), count
            assert step.head.sequence not in self.files
            self.files[step.head.sequence] = signing.sign(step)
        raise AssertionError("no receipt after three writes")

    def verified(self, *pinned: str) -> int:
        return len(check_chain([read_receipt(data) for data in self.files.values()], is_signed, pinned).receipts)


def conflict(state: ChainState) -> str:
    with pytest.raises(ChainConflictError) as refused:
        next_record(state, KeysInUse(keys().current_id, keys().since), erasure("new"))
    return str(refused.value)


def links(*files: bytes) -> list[Link]:
    return [read_link(data) for data in files]


def test_receipts_follow_each_other() -> None:
    store = Store()
    for number in (1, 2, 3):
        digest, count = store.receipt(erasure(f"order-{number}"), keys())
        assert (count, digest) == (number, read_link(store.files[number]).digest)
    assert store.verified(keys().current_id) == 3


@pytest.mark.parametrize("told", [False, True])
def test_one_that_died_after_writing_finds_its_receipt_and_writes_no_other(told: bool) -> None:
    store = Store()
    store.receipt(erasure("order-1"), keys())
    first = store.receipt(erasure("order-2"), keys(), dies=not told)
    later = replace(erasure("order-2"), timings=replace(erasure().timings, issued="2026-11-22T11:00:00Z"))
    assert store.receipt(later, keys()) == first
    assert len(store.files) == 2


def test_an_older_order_is_found_behind_newer_ones() -> None:
    store = Store()
    first, _ = store.receipt(erasure("order-1"), keys())
    store.receipt(erasure("order-2"), keys())
    assert store.receipt(erasure("order-1"), keys()) == (first, 2)


def test_the_same_chain_and_facts_give_the_same_record() -> None:
    store, in_use = Store(), KeysInUse(keys().current_id, keys().since)
    assert next_record(store.state(), in_use, erasure()) == next_record(store.state(), in_use, erasure())


def test_a_chain_of_the_previous_key_is_handed_over_first() -> None:
    store = Store()
    store.receipt(erasure("order-1"), keys(1))
    store.receipt(erasure("order-2"), keys(2, previous=1))
    assert [read_receipt(store.files[n]).record.hand_over is not None for n in (1, 2, 3)] == [False, True, False]
    assert store.verified(keys(1).current_id) == 3
    store.receipt(erasure("order-3"), keys(2))
    assert store.verified(keys(1).current_id) == 4


def test_a_chain_of_a_key_that_is_gone_goes_on_and_says_so() -> None:
    store = Store()
    store.receipt(erasure("order-1"), keys(1))
    store.receipt(erasure("order-2"), keys(3))
    change = read_receipt(store.files[2]).record.hand_over
    assert change is not None
    assert change.kind is HandOverKind.LOST
    with pytest.raises(ReceiptError) as refused:
        store.verified(keys(1).current_id)
    assert refused.value.fault is Fault.UNKNOWN_SIGNER
    assert store.verified(keys(1).current_id, keys(3).current_id) == 3


def test_a_previous_key_may_go_when_no_chain_needs_a_hand_over() -> None:
    store, both = Store(), keys(2, previous=1)
    in_use = KeysInUse(both.current_id, both.since, both.previous_id)
    assert next_record(store.state(), in_use) is None
    store.receipt(erasure("order-1"), keys(1))
    step = next_record(store.state(), in_use)
    assert step is not None
    store.files[2] = both.sign(step)
    assert next_record(store.state(), in_use) is None


def test_receipts_that_were_deleted_leave_a_hole_that_shows_and_stop_nobody() -> None:
    store = Store()
    for number in (1, 2, 3):
        store.receipt(erasure(f"order-{number}"), keys())
    del store.files[3]
    assert store.receipt(erasure("order-4"), keys())[1] == 4
    with pytest.raises(ReceiptError) as refused:
        store.verified(keys().current_id)
    assert refused.value.fault is Fault.CHAIN_HOLE
    store.files.clear()
    assert store.receipt(erasure("order-5"), keys())[1] == 5


def test_a_status_that_is_behind_is_caught_up_with() -> None:
    store = Store()
    store.receipt(erasure("order-1"), keys())
    told = store.told
    store.receipt(erasure("order-2"), keys())
    store.told = told
    assert store.receipt(erasure("order-3"), keys())[1] == 3
    assert store.verified(keys().current_id) == 3


def test_a_chain_that_contradicts_itself_or_its_status_is_not_continued() -> None:
    first = issue(keys(), None, erasure("order-1"))
    second, other = issue(keys(), first, erasure("order-2")), issue(keys(), first, lazy("order-2"))
    assert "one number" in conflict(ChainState(DOMAIN, NAMESPACE, links(first, second, other)))
    fake = issue(keys(), None, lazy("order-1"))
    assert "does not follow" in conflict(ChainState(DOMAIN, NAMESPACE, links(fake, second)))
    assert "does not follow" in conflict(ChainState("ff", NAMESPACE, links(first)))
    told = ReceiptChain(count=2, head=read_link(other).digest)
    assert "another than" in conflict(ChainState(DOMAIN, NAMESPACE, links(first, second), told))


def test_what_a_newer_operator_wrote_is_continued_by_one_that_was_rolled_back() -> None:
    raw = json.loads(rotated_chain()[0])
    raw["record"].update(receipt=2, more={"of": "it"})
    newer = read_link(canonical_json(raw))
    in_use = KeysInUse(keys().current_id, keys().since)
    step = next_record(ChainState(DOMAIN, NAMESPACE, [newer]), in_use, erasure("order-2"))
    assert step is not None
    assert (step.head.sequence, step.head.previous) == (2, newer.digest)
