"""What a change of custody means, and what may be said of a key's end: never more than its custody can know."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.api.cachedomain import CacheDomain
from kvstrata.contract.receipt.claims import claims, contradiction
from kvstrata.contract.receipt.facts import Word
from kvstrata.contract.receipt.residue import Claim
from kvstrata.contract.receipt.vocabulary import KeyCustody, Party
from kvstrata.model.keys import Destruction, LetGo, Release, Revocation, Undestroyed
from kvstrata.plan.keys.custody import (
    RESIDUE,
    change_to,
    custody_of,
    destroyed_in_memory,
    in_bundles,
    key_fact,
    may_claim,
)
from tests.support.receipts import data_key, erasure, residue

T1, T2, T3 = (f"2026-11-22T10:00:0{n}Z" for n in (1, 2, 3))
A, B = "a" * 32, "b" * 32
OF_KEYS = {Claim.KEYS_REVOKED, Claim.KEYS_DESTROYED}


def destroyed(custody: KeyCustody, by: Party) -> Destruction:
    return Destruction(custody, Word(by, "custody-1", T2))


def test_a_domain_that_says_nothing_keeps_keys_in_secrets() -> None:
    domain = CacheDomain.model_validate(
        {"apiVersion": "kvstrata.io/v1alpha1", "kind": "CacheDomain", "metadata": {"name": "default"}}
    )
    assert custody_of(domain) is KeyCustody.SECRET


class TestAChangeOfCustody:
    def test_is_free_while_there_are_no_keys_or_all_are_there_already(self) -> None:
        assert not change_to(KeyCustody.KMS, {}, "team-a").refusal
        assert not change_to(KeyCustody.KMS, {A: KeyCustody.KMS}, "team-a").refusal

    def test_rolls_every_epoch_whose_key_is_elsewhere_and_is_refused_by_a_sentence_that_says_what_to_do(self) -> None:
        change = change_to(KeyCustody.KMS, {A: KeyCustody.SECRET, B: KeyCustody.KMS}, "team-a")
        assert change.rolls == {A}
        assert change.refusal.startswith("spec.keyCustody cannot become KMS while 1 data key is in custody Secret")
        assert "set it back to Secret" in change.refusal
        assert "team-a" in change.refusal
        assert A not in change.refusal

    def test_away_from_a_service_has_to_leave_the_way_to_it(self) -> None:
        change = change_to(KeyCustody.SECRET, {A: KeyCustody.KMS}, "team-a")
        assert "set it back to KMS with spec.kms as it was" in change.refusal

    def test_counts_the_keys(self) -> None:
        both = {A: KeyCustody.SECRET, B: KeyCustody.SECRET}
        assert "2 data keys are in custody Secret" in change_to(KeyCustody.MEMORY, both, "team-a").refusal


def test_only_keys_that_are_in_secrets_anyway_may_be_in_bundles() -> None:
    """A bundle is Secrets: a key in one is in etcd's history, whoever drew it."""
    assert [custody for custody in KeyCustody if in_bundles(custody)] == [KeyCustody.SECRET]
    for custody in KeyCustody:
        assert in_bundles(custody) == (Claim.KEYS_DESTROYED not in may_claim(custody))


PARTIES = (None, *Party)


@pytest.mark.parametrize(("custody", "remover", "destroyer"), list(product(KeyCustody, PARTIES, PARTIES)))
def test_a_receipt_of_a_key_s_end_contradicts_nothing_and_claims_what_its_custody_may(
    custody: KeyCustody, remover: Party | None, destroyer: Party | None
) -> None:
    removed = None if remover is None else Word(remover, "one", T1)
    end = None if destroyer is None else destroyed(custody, destroyer)
    sample = data_key()
    fact = key_fact(sample.fingerprint, sample.revoked, Revocation(custody, removed, RESIDUE[custody]), end)
    facts = erasure(keys=(fact,), residue=residue(*RESIDUE[custody]))
    assert contradiction(facts) is None
    claimed = OF_KEYS & {*claims(facts)}
    assert claimed <= may_claim(custody)
    if removed is None:
        assert fact.destroyed is None
        assert not claimed


def test_each_custody_can_come_to_what_it_may_claim() -> None:
    sample = data_key()
    word = Word(Party.OPERATOR, "operator-1", T1)
    for custody, by in (
        (KeyCustody.SECRET, None),
        (KeyCustody.MEMORY, Party.OPERATOR),
        (KeyCustody.KMS, Party.CUSTODY),
    ):
        end = None if by is None else destroyed(custody, by)
        fact = key_fact(sample.fingerprint, sample.revoked, Revocation(custody, word, RESIDUE[custody]), end)
        facts = erasure(keys=(fact,), residue=residue(*RESIDUE[custody]))
        assert OF_KEYS & {*claims(facts)} == may_claim(custody)


def test_the_operator_s_word_does_not_end_a_key_of_the_kms() -> None:
    sample, word = data_key(), Word(Party.OPERATOR, "operator-1", T1)
    end = destroyed(KeyCustody.KMS, Party.OPERATOR)
    fact = key_fact(sample.fingerprint, sample.revoked, Revocation(KeyCustody.KMS, word), end)
    assert Claim.KEYS_DESTROYED not in claims(erasure(keys=(fact,), residue=()))


def test_words_of_two_custodies_are_not_about_one_key() -> None:
    with pytest.raises(ValueError, match="different custodies"):
        key_fact("a" * 64, "b" * 64, Revocation(KeyCustody.SECRET, None), destroyed(KeyCustody.KMS, Party.CUSTODY))


@pytest.mark.parametrize(
    ("confirmed", "why_not"), [(None, None), (Word(Party.CUSTODY, "kms", T1), Undestroyed.STILL_THERE)]
)
def test_an_end_is_confirmed_or_says_why_not(confirmed: Word | None, why_not: Undestroyed | None) -> None:
    with pytest.raises(ValueError, match="confirmed"):
        Destruction(KeyCustody.KMS, confirmed, why_not)


UIDS = ("pod-1", "pod-2", "pod-3", "former-1", "former-2")
some = st.sets(st.sampled_from(UIDS))
releases = st.dictionaries(
    st.sampled_from(UIDS), st.tuples(st.sampled_from(LetGo), st.sampled_from((T1, T2, T3))), max_size=5
).map(lambda found: {uid: Release(uid, how, at) for uid, (how, at) in found.items()})


@settings(deadline=None)
@given(some, some, releases, st.sampled_from((None, T1, T2, T3)))
def test_a_key_in_memory_is_gone_when_and_only_when_everybody_who_had_it_let_go(
    holders: set[str], predecessors: set[str], released: dict[str, Release], overwritten_at: str | None
) -> None:
    found = destroyed_in_memory(
        operator="operator-1",
        holders=holders,
        predecessors=predecessors,
        releases=released,
        overwritten_at=overwritten_at,
    )
    gone = overwritten_at is not None and holders | predecessors <= released.keys()
    assert (found.confirmed is not None) == gone
    if found.confirmed is not None and overwritten_at is not None:
        moments = [overwritten_at, *(released[uid].at for uid in holders | predecessors)]
        assert found.confirmed == Word(Party.OPERATOR, "operator-1", max(moments))
