"""An erasure orders what is owed, waits for what it names, and says nothing before its fact."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from kvstrata.api.cacheinvalidation import Phase
from kvstrata.api.reasons import InvalidationReason as R
from kvstrata.api.reasons import SharedReason
from kvstrata.contract.receipt.facts import Component
from kvstrata.contract.receipt.record import Record
from kvstrata.contract.receipt.residue import ReceiptClaim, Residue
from kvstrata.contract.receipt.vocabulary import Hbm, KeyCustody
from kvstrata.model.erasure.facts import EngineReset, Fact, HeldKey, JobState, KeyNotDestroyed, ReceiptWritten, Verdict
from kvstrata.model.erasure.record import ErasedPrefix, Erasure, TierNow
from kvstrata.plan.erasure.next_step import STILL_S
from kvstrata.plan.erasure.orders import (
    MAX_DELETIONS_AT_ONCE,
    AskPodToErase,
    AskPodToVerify,
    DestroyKeys,
    IssueReceipt,
    ResetEngine,
    RevokeKeys,
    StartDeletion,
    VerifyTier,
)
from kvstrata.plan.erasure.receipt import facts_of
from tests.support.receipts import OLD_EPOCH, subject

from .erasure_steps import HEAD, because, holding, ordered, step_of, verdict_of
from .erasures import (
    KEY,
    OTHER_SLOTS,
    SLOTS,
    acked,
    around,
    at,
    deleted,
    ended,
    fenced,
    looked,
    order,
    probed,
    removed,
    rolled,
    servers_seen,
    until_erased,
    until_verified,
)


def test_epochs_are_rolled_by_who_rolls_them_lazily() -> None:
    step = step_of()
    assert (step.phase, step.orders, holding(step)) == (Phase.ROLLING, (), set())


@pytest.mark.parametrize(
    "word", [(), (acked("p2", revision=6),), (fenced("p2", waited_s=329),), (replace(acked("p2"), cache_boot=""),)]
)
def test_a_pod_that_may_still_reuse_is_waited_for_by_name(word: tuple[Fact, ...]) -> None:
    step = step_of(rolled(), acked("p1"), *word)
    assert (step.phase, step.decision.reason, step.orders) == (Phase.AWAITING_ACKS, SharedReason.AWAITING_ACKS, ())
    assert "chat-p2" in step.decision.message
    assert "chat-p1" not in step.decision.message
    assert holding(step) == set()


@pytest.mark.parametrize("word", [acked("p2"), ended("p2", 3), fenced("p2")])
def test_once_every_pod_is_settled_keys_go(word: Fact) -> None:
    step = step_of(rolled(), acked("p1"), word, now_s=400)
    assert step.phase is Phase.REVOKING
    assert step.orders == (RevokeKeys((KEY,)),)
    assert holding(step) == {"LogicallyInvalid"}


def test_the_kms_is_asked_to_end_a_removed_key_before_anything_is_deleted() -> None:
    gone, destroyed = removed()
    facts = (rolled(), acked("p1"), acked("p2", 4), gone)
    step = step_of(*facts, now_s=400)
    assert (step.phase, step.orders) == (Phase.REVOKING, (DestroyKeys((KEY,)),))
    assert holding(step) == {"LogicallyInvalid", "KeysRevoked"}
    assert "KeysDestroyed" in holding(step_of(*facts, destroyed, now_s=400))


def test_a_key_whose_end_is_not_confirmed_holds_up_nothing_and_its_condition_says_why() -> None:
    gone, _ = removed()
    why = KeyNotDestroyed(KEY, "key k can be exported", at(10))
    step = step_of(rolled(), acked("p1"), acked("p2", 4), gone, why, now_s=400)
    assert step.phase is Phase.ERASING
    lacking = next(one for one in step.findings if one.type == "KeysDestroyed")
    assert (lacking.status, lacking.reason) == ("False", R.NOT_CONFIRMED)
    assert lacking.message.endswith("key k can be exported")


def test_a_custody_that_is_away_is_named_and_nothing_is_deleted_before_keys_are_gone() -> None:
    step = step_of(rolled(), acked("p1"), acked("p2"), seen=around(custody_problem="the KMS answers 503"))
    assert step.decision.reason == R.CUSTODY_AWAY
    assert "503" in step.decision.message


def test_deletion_waits_until_writes_that_had_begun_are_over() -> None:
    facts = (rolled(), acked("p1"), acked("p2", 4), *removed())
    step = step_of(*facts, now_s=33)
    assert (step.phase, step.again_s, step.orders) == (Phase.WAITING_OUT_WRITES, 1, ())
    assert holding(step) == {"LogicallyInvalid", "KeysRevoked", "KeysDestroyed"}
    assert step_of(*facts, now_s=34).phase is Phase.ERASING


def test_every_primary_and_every_pod_is_told_and_slots_stand_still() -> None:
    step = step_of(rolled(), acked("p1"), acked("p2"), *removed())
    assert [(one.primary, one.round) for one in ordered(step, StartDeletion)] == [("n1", 1), ("n2", 1)]  # type: ignore[attr-defined]
    assert [one.uid for one in ordered(step, AskPodToErase)] == ["p1", "p2"]  # type: ignore[attr-defined]
    assert step.pinned_tiers == {"redis"}
    assert ordered(step, ResetEngine) == []


def test_slots_stand_still_from_the_write_window_to_the_verdict_and_for_an_hour_at_most() -> None:
    settled = (rolled(), acked("p1"), acked("p2", 4))
    assert step_of(*settled).pinned_tiers == set(), "keys go first"
    facts = (*settled, *removed())
    assert step_of(*facts, now_s=5).pinned_tiers == {"redis"}
    assert step_of(*facts, now_s=4 + STILL_S - 1).pinned_tiers == {"redis"}
    assert step_of(*facts, now_s=4 + STILL_S).pinned_tiers == set(), "what waits for ever holds up nobody"
    done = (*until_erased(), looked(), probed("p1"), probed("p2"))
    assert verdict_of(step_of(*done)) is not None
    assert step_of(*done).pinned_tiers == set()


def test_no_more_deletions_run_at_a_time_than_servers_bear() -> None:
    many = tuple(f"n{number}" for number in range(9))
    seen = around(tiers={"redis": TierNow(many, SLOTS)}, deletions_elsewhere=1)
    running = deleted("n0", state=JobState.RUNNING, ended=None)
    step = step_of(rolled(), acked("p1"), acked("p2"), *removed(), running, seen=seen)
    assert len(ordered(step, StartDeletion)) == MAX_DELETIONS_AT_ONCE - 2


def test_verification_begins_when_everything_is_erased_and_asks_everyone() -> None:
    step = step_of(*until_erased())
    assert step.phase is Phase.VERIFYING
    assert [type(one) for one in step.orders] == [VerifyTier, AskPodToVerify, AskPodToVerify]
    assert step.pinned_tiers == {"redis"}
    assert "Erased" in holding(step)
    assert "Verified" not in holding(step)


def test_what_is_proven_is_concluded_though_servers_change_afterwards() -> None:
    seen = around(tiers={"redis": TierNow(("n1", "n3"), OTHER_SLOTS)})
    verdict = verdict_of(step_of(*until_verified(), seen=seen))
    assert verdict is not None
    assert verdict.complete
    assert verdict.reason == R.ERASED_AND_VERIFIED


def test_a_receipt_is_ordered_after_the_verdict_and_nothing_is_complete_before_it_is_written() -> None:
    verdict = verdict_of(step_of(*until_verified()))
    assert verdict is not None
    step = step_of(*until_verified(), verdict)
    assert (step.phase, len(ordered(step, IssueReceipt))) == (Phase.RECEIPTING, 1)
    assert "Complete" not in holding(step)
    stuck = step_of(*until_verified(), verdict, seen=around(receipt_problem="two stored receipts have one number"))
    assert (stuck.decision.reason, stuck.orders) == (R.RECEIPT_REFUSED, ())
    over = step_of(*until_verified(), verdict, ReceiptWritten("d" * 64))
    assert over.phase is Phase.COMPLETE
    assert over.phase.finished
    assert holding(over) >= {"LogicallyInvalid", "KeysRevoked", "KeysDestroyed", "Erased", "Verified", "Complete"}


def test_a_receipt_without_a_verdict_ends_nothing() -> None:
    assert step_of(*until_erased(), ReceiptWritten("d" * 64)).phase is Phase.VERIFYING


def test_the_whole_way_gives_a_receipt_that_proves_it_all_and_is_taken() -> None:
    verdict = verdict_of(step_of(*until_verified()))
    assert verdict is not None
    record = Record.of_erasure(HEAD, facts_of(Erasure(order()).with_facts(*until_verified(), verdict)))
    assert record.claimed == tuple(ReceiptClaim)
    assert record.erasure is not None
    assert (record.erasure.tiers[0].waited_s, record.erasure.tiers[0].primaries) == (31, 2)


def test_facts_are_closed_by_the_verdict() -> None:
    verdict = Verdict(True, R.ERASED_AND_VERIFIED, "done", at(60))
    closed = Erasure(order()).with_facts(*until_verified(), verdict)
    later = closed.with_facts(ended("p1", 100), deleted("n1", 200, 201, 2), replace(verdict, complete=False, at=at(1)))
    assert facts_of(later) == facts_of(closed)
    assert later.facts == closed.facts


def test_servers_are_named_as_they_were_seen_first_whenever_that_is_heard() -> None:
    begun = order(versions=(Component("operator", "0.1.0", 1),))
    facts = (servers_seen(9, "8.0.0"), servers_seen(3, "7.0.5"), servers_seen(5, "7.0.5", "other"))
    for heard in permutations(facts):
        named = facts_of(Erasure(begun).with_facts(*heard)).versions
        assert named == (Component("operator", "0.1.0", 1), Component("tiers on Redis", "7.0.5", 2))


def test_keys_in_secrets_are_revoked_and_never_destroyed() -> None:
    held = rolled(keys=(HeldKey(KEY, OLD_EPOCH, KeyCustody.SECRET),))
    step = step_of(held, *until_verified()[1:])
    assert "KeysRevoked" in holding(step)
    assert "KeysDestroyed" not in holding(step)
    assert because(step, "KeysDestroyed") == R.KEYS_IN_SECRETS


def test_without_keys_no_condition_speaks_of_them_and_nothing_waits_for_it() -> None:
    step = step_of(rolled(keys=()), *until_verified()[1:])
    assert not {"KeysRevoked", "KeysDestroyed"} & {finding.type for finding in step.findings}
    verdict = verdict_of(step)
    assert verdict is not None
    assert verdict.complete


def test_engines_are_emptied_where_the_order_says_so() -> None:
    reset = subject(hbm=Hbm.RESET_ENGINE)
    step = step_of(*until_verified(), subject=reset)
    assert step.orders == (ResetEngine("p1"), ResetEngine("p2"))
    done = (*until_verified(), EngineReset("p1", at(50)), EngineReset("p2", at(50)))
    assert verdict_of(step_of(*done, subject=reset)) is not None
    kept = facts_of(Erasure(order()).with_facts(*until_verified()))
    assert Residue.ENGINE_MEMORY in {item.kind for item in kept.residue}


def test_writes_into_pods_are_waited_out_where_the_keyspace_lives_on() -> None:
    facts = (rolled(), acked("p1"), acked("p2"), *removed())
    assert step_of(*facts, now_s=10, tiers=()).phase is Phase.ERASING
    prefix = ErasedPrefix("chat", ("c1",), "d" * 64)
    assert step_of(*facts, now_s=10, tiers=(), prefix=prefix).phase is Phase.WAITING_OUT_WRITES
    assert step_of(*facts, now_s=33, tiers=(), prefix=prefix).phase is Phase.ERASING


def test_what_a_deletion_came_to_stands_as_it_was_heard_first_so_looks_since_then_count() -> None:
    first, again = deleted("n1", 35, 36), deleted("n1", 35, 42)
    for heard in ((first, again), (again, first)):
        assert [one for one in Erasure(order()).with_facts(*heard).of(type(first)) if one.node == "n1"] == [first]
    assert "Verified" in holding(step_of(*until_verified(), again))
