"""A receipt claims what its facts prove, and no fact can be left out without a claim going with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstrata.contract.policy.data_key import key_id
from kvstrata.contract.policy.keyspace import ScopeKind
from kvstrata.contract.receipt.claims import claims, contradiction, required_residue
from kvstrata.contract.receipt.facts import Amount, Copies, Erasure, Fence, Probes, Revoked, Statement, Verification
from kvstrata.contract.receipt.record import Fault, Head, ReceiptError, Record
from kvstrata.contract.receipt.residue import ReceiptClaim, Residue
from kvstrata.contract.receipt.vocabulary import (
    Hbm,
    KeyCustody,
    Mode,
    Party,
    PodMedium,
    RevokedKind,
    ScopeForm,
    Standing,
    epoch_commitment,
    prefix_commitment,
)
from tests.support.receipts import (
    DOMAIN,
    JOB,
    NAMESPACE,
    NEW_EPOCH,
    OLD_EPOCH,
    OPERATOR,
    T1,
    T3,
    data_key,
    erasure,
    keys,
    lazy,
    node,
    pod,
    residue,
    subject,
    tier,
)

EVERYTHING = tuple(ReceiptClaim)
HEAD = Head(DOMAIN, NAMESPACE, 1, None, keys().current_id)
FENCED = {"standing": Standing.FENCED, "gate_boot": "", "cache_boot": "", "revision": 0, "at": None, "probes": None}


def fence(waited: str) -> Fence:
    """A fence of five minutes and thirty seconds from ten o'clock on."""
    return Fence("2026-11-22T10:00:00Z", 300, 30, waited)


def emptied(**changes: object) -> Erasure:
    """The whole erasure with another shared tier."""
    return erasure(tiers=(tier(**changes),))


def without(pod_change: dict[str, object]) -> Erasure:
    """The whole erasure with one pod that is otherwise."""
    return erasure(pods=(pod("pod-1"), pod("pod-2", **pod_change)))


def test_whole_facts_prove_everything_and_leave_nothing() -> None:
    assert claims(erasure()) == EVERYTHING
    assert required_residue(erasure()) == frozenset()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"revision": 6}, "an older revision"),
        ({"gate_boot": ""}, "no gate that said it"),
        ({"cache_boot": ""}, "no cache server that said it"),
        ({"at": None}, "no moment"),
        ({"model": "other"}, "a model without a revision to reach"),
        ({"standing": Standing.OPEN}, "no word at all"),
        ({"standing": Standing.ENDED, "at": None}, "an end that nobody saw"),
        ({**FENCED, "fence": None}, "a fence without its times"),
        ({**FENCED, "fence": fence("2026-11-22T10:05:29Z")}, "a fence a second too early"),
    ],
)
def test_a_pod_that_may_still_reuse_leaves_nothing_to_claim(change: dict[str, object], why: str) -> None:
    assert claims(without(change)) == (), why
    assert Residue.POD_OPEN in required_residue(without(change))


def test_a_fenced_pod_leaves_unreachable_and_nothing_beyond() -> None:
    facts = without({**FENCED, "fence": fence("2026-11-22T10:05:30Z")})
    assert claims(facts) == (ReceiptClaim.UNREACHABLE,)
    assert required_residue(facts) == {Residue.POD_UNREACHABLE}


def test_a_pod_that_ended_took_its_memory_along_and_left_its_files() -> None:
    gone = {"standing": Standing.ENDED, "revision": 0, "gate_boot": "", "cache_boot": "", "probes": None}
    memory, files = (replace(one, erased=None) for one in pod().tiers)
    assert claims(without({**gone, "tiers": (memory,)})) == EVERYTHING
    left = without({**gone, "tiers": (memory, files)})
    assert claims(left) == (ReceiptClaim.UNREACHABLE, ReceiptClaim.KEYS_REVOKED, ReceiptClaim.KEYS_DESTROYED)
    assert required_residue(left) == {Residue.COPY_UNREACHABLE}
    inherited = replace(files, erased=Copies(9, 9, 0, 9000))
    assert claims(without({**gone, "tiers": (memory, inherited)})) == EVERYTHING


def test_of_nothing_nothing_is_claimed() -> None:
    assert claims(erasure(revoked=(), keys=())) == ()
    assert ReceiptClaim.KEYS_REVOKED not in claims(erasure(keys=()))
    assert ReceiptClaim.ERASED not in claims(erasure(tiers=(), pods=(pod(tiers=()),)))


@pytest.mark.parametrize(
    ("change", "proven"),
    [
        ({"removed": None}, ()),
        ({"removed": Statement(Party.POD, "pod-1", T1)}, ()),
        ({"destroyed": None}, (ReceiptClaim.KEYS_REVOKED,)),
        ({"destroyed": Statement(Party.POD, "pod-1", T1)}, (ReceiptClaim.KEYS_REVOKED,)),
        ({"destroyed": Statement(Party.OPERATOR, "operator-1", T3)}, (ReceiptClaim.KEYS_REVOKED,)),
        ({"destroyed": Statement(Party.CUSTODY, "kms", T3)}, (ReceiptClaim.KEYS_REVOKED, ReceiptClaim.KEYS_DESTROYED)),
        ({"custody": KeyCustody.SECRET, "destroyed": None}, (ReceiptClaim.KEYS_REVOKED,)),
    ],
)
def test_keys_are_gone_by_the_word_of_who_can_know(change: dict[str, object], proven: tuple[ReceiptClaim, ...]) -> None:
    found = claims(erasure(keys=(data_key(**change),)))
    assert tuple(one for one in found if one in (ReceiptClaim.KEYS_REVOKED, ReceiptClaim.KEYS_DESTROYED)) == proven


def test_one_key_that_is_left_is_enough() -> None:
    other = data_key(fingerprint=key_id(b"o" * 32), removed=None, destroyed=None)
    facts = erasure(keys=(data_key(), other))
    assert claims(facts) == (ReceiptClaim.UNREACHABLE, ReceiptClaim.ERASED, ReceiptClaim.VERIFIED)
    assert required_residue(facts) == {Residue.KEY_KEPT}


@pytest.mark.parametrize(
    "facts",
    [
        emptied(primaries=3),
        emptied(primaries=0, nodes=()),
        emptied(waited_s=29),
        emptied(nodes=(node("node-1"), node("node-2", erased=None))),
        emptied(nodes=(node("node-1"), node("node-2", remaining=Amount(1, 1)))),
        emptied(nodes=(node("node-1"), node("node-2", remaining=Amount(0, 1)))),
        emptied(nodes=(node("node-1"), node("node-2", replicas_in_step=0))),
        without({"tiers": (replace(pod().tiers[0], erased=None),)}),
        without({"tiers": (replace(pod().tiers[0], erased=Copies(5, 4, 1, 4000)),)}),
        erasure(subject=subject(mode=Mode.LAZY)),
    ],
)
def test_erased_needs_every_server_and_every_pod_empty(facts: Erasure) -> None:
    assert claims(facts) == (ReceiptClaim.UNREACHABLE, ReceiptClaim.KEYS_REVOKED, ReceiptClaim.KEYS_DESTROYED)


@pytest.mark.parametrize(
    "facts",
    [
        erasure(verification=None),
        erasure(verification=Verification(replace(OPERATOR, by=Party.JOB), T3)),
        erasure(verification=Verification(replace(OPERATOR, name=JOB.name), T3)),
        emptied(slots_after="6" * 64),
        emptied(slots_before=None, slots_after=None),
        emptied(nodes=(node("node-1"), node("node-2", left=None))),
        without({"probes": None}),
        without({"probes": Probes(3, 2, 1)}),
        without({"probes": Probes(3, 0, 0)}),
        erasure(pods=(pod(probes=Probes(0, 0, 0)),)),
    ],
)
def test_verified_needs_another_who_looked_everywhere_and_asked_every_pod(facts: Erasure) -> None:
    assert claims(facts) == (
        ReceiptClaim.UNREACHABLE,
        ReceiptClaim.KEYS_REVOKED,
        ReceiptClaim.KEYS_DESTROYED,
        ReceiptClaim.ERASED,
    )


def test_what_the_verifier_still_finds_takes_erased_back() -> None:
    facts = emptied(nodes=(node("node-1"), node("node-2", left=Amount(1, 10))))
    assert ReceiptClaim.ERASED not in claims(facts)
    assert required_residue(facts) == {Residue.KEYS_REMAIN}


def test_without_anything_found_there_is_no_key_to_ask_for() -> None:
    nothing = tier(nodes=tuple(node(one, found=Amount(0, 0), deleted=Amount(0, 0)) for one in ("node-1", "node-2")))
    facts = erasure(pods=(pod(probes=Probes(0, 0, 0)),), tiers=(nothing,))
    assert claims(facts) == EVERYTHING


@pytest.mark.parametrize("kind", list(Residue))
def test_residue_denies_what_it_makes_untrue(kind: Residue) -> None:
    proven = claims(erasure(residue=residue(kind)))
    assert not set(proven) & kind.denies
    assert kind.denies or set(proven) == set(EVERYTHING)
    assert not (kind.asked and kind.denies)


def test_a_secret_leaves_residue_in_etcd_and_its_backups() -> None:
    facts = erasure(keys=(data_key(custody=KeyCustody.SECRET, destroyed=None),))
    assert required_residue(facts) == {Residue.ETCD_HISTORY, Residue.ETCD_BACKUPS}


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        (emptied(encrypted=False), Residue.FREED_STORAGE),
        (without({"tiers": (replace(pod().tiers[1], encrypted=False),)}), Residue.FREED_STORAGE),
        (emptied(primaries=3), Residue.SERVER_UNREACHABLE),
        (without({"engine_reset": None}), Residue.ENGINE_MEMORY),
        (erasure(subject=subject(hbm=Hbm.ROLL_SCOPES)), Residue.ENGINE_MEMORY),
        (lazy(), Residue.LEFT_TO_AGE),
    ],
)
def test_residue_that_the_facts_show_has_to_be_named(facts: Erasure, kind: Residue) -> None:
    named = tuple(sorted(required_residue(facts) - {kind}))
    assert kind in required_residue(facts)
    with pytest.raises(ReceiptError) as refused:
        Record.of_erasure(HEAD, replace(facts, residue=residue(*named)))
    assert refused.value.fault is Fault.RESIDUE_WITHHELD
    assert Record.of_erasure(HEAD, replace(facts, residue=residue(kind, *named)))


def test_memory_that_a_pod_frees_is_overwritten_and_no_residue() -> None:
    memory = pod().tiers[0]
    assert memory.medium is PodMedium.CPU
    assert not memory.encrypted
    assert required_residue(without({"tiers": (memory,)})) == frozenset()


@pytest.mark.parametrize(
    "facts",
    [
        erasure(keys=(data_key(custody=KeyCustody.SECRET),)),
        erasure(keys=(data_key(revoked="0" * 64),)),
        erasure(keys=(data_key(), data_key())),
        erasure(pods=(pod("pod-1"), pod("pod-1"))),
        erasure(tiers=(tier(), tier())),
        emptied(nodes=(node("node-1"), node("node-1"))),
        emptied(nodes=(node("node-1", deleted=Amount(41, 1)), node("node-2"))),
        emptied(nodes=(node("node-1", replicas_in_step=2), node("node-2"))),
        without({"probes": Probes(3, 2, 3)}),
        without({"probes": Probes(1, 2, 2)}),
        without({"tiers": (replace(pod().tiers[0], erased=Copies(5, 6, 0, 1)),)}),
        erasure(revoked=(Revoked(RevokedKind.TENANT, "globex", OLD_EPOCH, NEW_EPOCH),)),
        erasure(subject=subject(scope=ScopeForm.ALL, scope_name="")),
    ],
)
def test_facts_that_cannot_all_be_so_are_no_receipt(facts: Erasure) -> None:
    assert contradiction(facts)
    with pytest.raises(ReceiptError) as refused:
        Record.of_erasure(HEAD, facts)
    assert refused.value.fault is Fault.CONTRADICTION


def test_a_tenant_is_named_only_where_its_order_names_it() -> None:
    unnamed = (Revoked(RevokedKind.TENANT, None, OLD_EPOCH, NEW_EPOCH),)
    assert contradiction(erasure(subject=subject(scope=ScopeForm.ALL, scope_name=""), revoked=unnamed)) is None
    prefix = subject(scope=ScopeForm.PREFIX, scope_name="chat", tenants=("acme",))
    assert contradiction(erasure(subject=prefix)) is None


def test_a_claim_beyond_the_facts_is_refused_and_a_modest_one_is_not() -> None:
    facts = lazy()
    with pytest.raises(ReceiptError) as refused:
        Record(HEAD, facts, (ReceiptClaim.UNREACHABLE, ReceiptClaim.ERASED)).check()
    assert refused.value.fault is Fault.CLAIMS_EXCEED_FACTS
    Record(HEAD, facts, ()).check()


def test_commitments_tell_apart_what_they_stand_for_and_take_the_secret_to_make() -> None:
    made = {
        epoch_commitment(domain, kind, name, epoch)
        for domain in ("a", "b")
        for kind in (ScopeKind.TENANT, ScopeKind.GROUP)
        for name in ("acme", "globex")
        for epoch in ("0" * 32, "1" * 32)
    }
    assert len(made) == 16
    assert prefix_commitment(b"k" * 32, "chat", "d") != prefix_commitment(b"o" * 32, "chat", "d")
    assert key_id(b"k" * 32) != key_id(b"o" * 32)
