"""Whatever the facts: a receipt reads back as written, claims no more than they prove, and not one byte may differ."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.clients.signing import is_signed
from kvstrata.contract.receipt.claims import claims, contradiction, required_residue
from kvstrata.contract.receipt.facts import Amount, Erasure, NodeFact, PodFact, TierFact
from kvstrata.contract.receipt.record import Fault, Head, Receipt, ReceiptError, Record, check_signatures, read_receipt
from kvstrata.contract.receipt.residue import ReceiptClaim, Residue, ResidueItem
from kvstrata.contract.receipt.vocabulary import Mode, Moment, Standing
from kvstrata.contract.wire import MAX_EXACT_NUMBER, canonical_json, from_wire, to_wire
from tests.support.amounts import examples
from tests.support.receipts import DOMAIN, NAMESPACE, erasure, issue, keys, lazy, residue, rotated_chain

BEARS = pytest.mark.claim("a receipt claims no more than its facts prove")
REFUSED = pytest.mark.claim("a receipt of which anything is changed is refused")

HEAD = Head(DOMAIN, NAMESPACE, 1, None, keys().current_id)
MOMENT = Moment.__metadata__[0]  # type: ignore[attr-defined]


@cache
def of_type(kind: Any) -> st.SearchStrategy[Any]:
    """Everything that a field's type allows."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        if arguments[1] is MOMENT:
            return st.datetimes().map(lambda at: at.strftime("%Y-%m-%dT%H:%M:%SZ").zfill(20))
        return st.from_regex(arguments[1].pattern, fullmatch=True, alphabet=st.characters(exclude_categories=["Cs"]))
    if types.NoneType in arguments:
        return st.none() | of_type(next(one for one in arguments if one is not types.NoneType))
    if origin is tuple:
        return st.lists(of_type(arguments[0]), max_size=2).map(tuple)
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        return st.builds(kind, **{field.name: of_type(hints[field.name]) for field in fields(kind)})
    if issubclass(kind, StrEnum):
        return st.sampled_from(list(kind))
    texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    return {str: texts, int: st.integers(0, MAX_EXACT_NUMBER), bool: st.booleans()}[kind]


@settings(max_examples=examples(60))
@given(of_type(Erasure))
def test_any_facts_read_back_as_they_were_written(facts: Erasure) -> None:
    assert from_wire(Erasure, to_wire(facts)) == facts


@settings(max_examples=examples(60))
@given(of_type(Erasure))
def test_any_facts_are_either_no_receipt_or_one_that_claims_just_what_they_prove(facts: Erasure) -> None:
    named = {item.kind for item in facts.residue}
    whole = replace(facts, residue=(*facts.residue, *residue(*(required_residue(facts) - named))))
    if contradiction(whole):
        with pytest.raises(ReceiptError):
            Record.of_erasure(HEAD, whole)
        return
    record = Record.of_erasure(HEAD, whole)
    assert opened(keys().sign(record)).record == record
    assert record.claimed == claims(whole)


def opened(data: bytes) -> Receipt:
    receipt = read_receipt(data)
    check_signatures(receipt.link, is_signed)
    return receipt


Weakening = Callable[[Erasure], Erasure]


def of_pod(change: Callable[[PodFact], PodFact]) -> Weakening:
    return lambda facts: replace(facts, pods=(change(facts.pods[0]), *facts.pods[1:]))


def of_tier(change: Callable[[TierFact], TierFact]) -> Weakening:
    return lambda facts: replace(facts, tiers=(change(facts.tiers[0]), *facts.tiers[1:]))


def of_node(**changes: object) -> Weakening:
    return of_tier(lambda tier: replace(tier, nodes=(replace(tier.nodes[0], **changes), *tier.nodes[1:])))  # type: ignore[arg-type]


def unseen(node: NodeFact) -> NodeFact:
    """Nobody looked at a server. That somebody found something there is kept: it speaks against a claim, not for it."""
    return replace(node, left=None) if node.left is None or node.left == Amount(0, 0) else node


WEAKENINGS: tuple[Weakening, ...] = (
    lambda facts: replace(facts, verification=None),
    lambda facts: replace(facts, subject=replace(facts.subject, mode=Mode.LAZY)),
    lambda facts: replace(facts, targets=tuple(replace(one, revision=one.revision + 1) for one in facts.targets)),
    lambda facts: replace(facts, targets=()),
    lambda facts: replace(facts, keys=tuple(replace(key, destroyed=None) for key in facts.keys)),
    lambda facts: replace(facts, keys=tuple(replace(key, removed=None, destroyed=None) for key in facts.keys)),
    of_pod(lambda pod: replace(pod, probes=None)),
    of_pod(lambda pod: replace(pod, revision=0)),
    of_pod(lambda pod: replace(pod, standing=Standing.OPEN)),
    of_pod(lambda pod: replace(pod, standing=Standing.FENCED)),
    of_pod(lambda pod: replace(pod, cache_boot="")),
    of_pod(lambda pod: replace(pod, tiers=tuple(replace(one, erased=None) for one in pod.tiers))),
    of_tier(lambda tier: replace(tier, nodes=tier.nodes[:1])),
    of_tier(lambda tier: replace(tier, waited_s=0)),
    of_tier(lambda tier: replace(tier, slots_after=None)),
    of_node(erased=None),
    of_node(remaining=Amount(1, 1)),
    of_tier(lambda tier: replace(tier, nodes=(unseen(tier.nodes[0]), *tier.nodes[1:]))),
    of_node(left=Amount(1, 1)),
    of_node(replicas_in_step=0),
    *(
        lambda facts, kind=kind: replace(facts, residue=(*facts.residue, ResidueItem(kind, "", 1)))  # type: ignore[misc]
        for kind in Residue
        if kind.denies
    ),
)


@BEARS
@given(st.permutations(WEAKENINGS))
def test_no_fact_that_is_taken_away_adds_a_claim_and_each_costs_one(order: list[Weakening]) -> None:
    facts = erasure()
    for weaken in order:
        before = set(claims(facts))
        facts = weaken(facts)
        assert set(claims(facts)) <= before
        assert set(claims(weaken(erasure()))) < set(ReceiptClaim)
    assert claims(facts) == ()


@BEARS
@given(st.lists(st.sampled_from(WEAKENINGS), max_size=3), st.sets(st.sampled_from(list(ReceiptClaim))))
def test_what_a_receipt_says_is_taken_if_and_only_if_its_facts_bear_it(
    weakenings: list[Weakening], said: set[ReceiptClaim]
) -> None:
    facts = erasure()
    for weaken in weakenings:
        facts = weaken(facts)
    facts = replace(facts, residue=(*facts.residue, *residue(*required_residue(facts))))
    record = Record(HEAD, facts, tuple(claim for claim in ReceiptClaim if claim in said))
    if said <= set(claims(facts)):
        record.check()
    else:
        with pytest.raises(ReceiptError) as refused:
            record.check()
        assert refused.value.fault is Fault.CLAIMS_EXCEED_FACTS


@REFUSED
@pytest.mark.parametrize("which", range(4))
def test_a_receipt_of_which_any_byte_is_another_is_refused(which: int) -> None:
    data = rotated_chain()[which]
    opened(data)
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        with pytest.raises(ReceiptError):
            opened(bytes(flipped))


@REFUSED
@settings(max_examples=examples(200))
@given(st.data())
def test_a_receipt_with_bytes_put_in_or_taken_out_is_refused(data: st.DataObject) -> None:
    whole = issue(keys(), None, lazy())
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 20)))
    put = data.draw(st.binary(max_size=8) | st.text(' \t\n{}[],:"0e', max_size=4).map(str.encode))
    changed = whole[:start] + put + whole[end:]
    if changed.removesuffix(b"\n") == whole:
        return
    with pytest.raises(ReceiptError):
        opened(changed)


@REFUSED
@settings(max_examples=examples(200))
@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["record", "signatures", "receipt", "sequence", "x"]), inner, max_size=4),
    max_leaves=12,
).map(lambda value: canonical_json(value) if "\\ud" not in ascii(value) else b"{}"))  # fmt: skip
def test_whatever_is_read_is_a_receipt_or_refused_as_none(data: bytes) -> None:
    with pytest.raises(ReceiptError):
        read_receipt(data)


@REFUSED
@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b"9" * 5000, b'{"record":NaN,"signatures":[]}', b"\xff", b"", b"1e999"]
)
def test_what_breaks_parsers_is_refused_like_everything_else(data: bytes) -> None:
    with pytest.raises(ReceiptError):
        read_receipt(data)
