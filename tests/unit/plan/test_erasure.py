"""An erasure orders what is owed, waits for what it names, and says nothing before its fact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstrata.api.common import ConditionStatus
from kvstrata.api.reasons import InvalidationReason as R
from kvstrata.contract.receipt import Head, Record
from kvstrata.contract.receiptfacts import Amount, Copies
from kvstrata.contract.receiptresidue import Claim, Residue
from kvstrata.contract.receiptwords import Hbm, KeyCustody, ScopeForm
from kvstrata.model.erasure import ErasedPrefix, Erasure, PodNow, TierNow
from kvstrata.model.erasurefacts import (
    EngineKept,
    EngineReset,
    Fact,
    FilesErased,
    HeldKey,
    JobState,
    KeyNotDestroyed,
    ReceiptWritten,
    TierLost,
    Verdict,
)
from kvstrata.plan.erasure import (
    PATIENCE_S,
    RESIDUE_PATIENCE_S,
    STILL_S,
    Conclude,
    ErasurePhase,
    IssueReceipt,
    Step,
    next_step,
)
from kvstrata.plan.erasureorders import (
    MAX_DELETIONS_AT_ONCE,
    MAX_ROUNDS,
    AskPodToErase,
    AskPodToVerify,
    DestroyKeys,
    ResetEngine,
    RevokeKeys,
    StartDeletion,
    VerifyTier,
)
from kvstrata.plan.erasurereceipt import facts_of
from tests.support.receipts import DOMAIN, NAMESPACE, OLD_EPOCH, keys, subject

from .erasures import (
    FILES,
    KEY,
    MEMORY,
    OTHER_SLOTS,
    SLOTS,
    acked,
    around,
    at,
    deleted,
    ended,
    erased,
    fenced,
    looked,
    order,
    probed,
    removed,
    rolled,
    until_erased,
    until_verified,
    witness,
)


def step_of(*facts: Fact, now_s: float = 60, seen: object = None, **of_order: object) -> Step:
    """The next step after these facts."""
    found = Erasure(order(**of_order)).hearing(*facts)
    return next_step(found, seen or around(), at(now_s))  # type: ignore[arg-type]


def ordered(step: Step, kind: type) -> list[object]:
    """Its orders of one kind."""
    return [one for one in step.orders if isinstance(one, kind)]


def verdict_of(step: Step) -> Verdict | None:
    """The verdict that it orders to be written."""
    return next((one.verdict for one in step.orders if isinstance(one, Conclude)), None)


def holding(step: Step) -> set[str]:
    """Conditions that it calls true."""
    return {one.type for one in step.findings if one.status is ConditionStatus.TRUE}


def because(step: Step, condition: str) -> str:
    """The reason of one condition."""
    return next(one.reason for one in step.findings if one.type == condition)


def test_epochs_are_rolled_by_who_rolls_them_lazily() -> None:
    step = step_of()
    assert (step.phase, step.orders, holding(step)) == (ErasurePhase.ROLLING, (), set())


@pytest.mark.parametrize(
    "word", [(), (acked("p2", revision=6),), (fenced("p2", waited_s=329),), (replace(acked("p2"), cache_boot=""),)]
)
def test_a_pod_that_may_still_reuse_is_waited_for_by_name(word: tuple[Fact, ...]) -> None:
    step = step_of(rolled(), acked("p1"), *word)
    assert (step.phase, step.decision.reason, step.orders) == (ErasurePhase.AWAITING_ACKS, R.AWAITING_ACKS, ())
    assert "chat-p2" in step.decision.message
    assert "chat-p1" not in step.decision.message
    assert holding(step) == set()


@pytest.mark.parametrize("word", [acked("p2"), ended("p2", 3), fenced("p2")])
def test_once_every_pod_is_settled_keys_go(word: Fact) -> None:
    step = step_of(rolled(), acked("p1"), word, now_s=400)
    assert step.phase is ErasurePhase.REVOKING
    assert step.orders == (RevokeKeys("order-1", (KEY,)),)
    assert holding(step) == {"LogicallyInvalid"}


def test_whoever_had_a_key_that_was_in_memory_only_is_asked_before_anything_is_deleted() -> None:
    gone, destroyed = removed()
    facts = (rolled(), acked("p1"), acked("p2", 4), gone)
    step = step_of(*facts, now_s=400)
    assert (step.phase, step.orders) == (ErasurePhase.REVOKING, (DestroyKeys("order-1", (KEY,)),))
    assert holding(step) == {"LogicallyInvalid", "KeysRevoked"}
    assert "KeysDestroyed" in holding(step_of(*facts, destroyed, now_s=400))


def test_a_key_whose_end_nobody_can_tell_holds_up_nothing_and_its_condition_says_who_has_it() -> None:
    gone, _ = removed()
    why = KeyNotDestroyed(KEY, "1 of 2 pods have not let go", at(10))
    step = step_of(rolled(), acked("p1"), acked("p2", 4), gone, why, now_s=400)
    assert step.phase is ErasurePhase.ERASING
    lacking = next(one for one in step.findings if one.type == "KeysDestroyed")
    assert (lacking.status, lacking.reason) == ("False", R.NOT_CONFIRMED)
    assert lacking.message.endswith("1 of 2 pods have not let go")


def test_a_custody_that_is_away_is_named_and_nothing_is_deleted_before_keys_are_gone() -> None:
    step = step_of(rolled(), acked("p1"), acked("p2"), seen=around(custody_problem="the KMS answers 503"))
    assert step.decision.reason == R.CUSTODY_AWAY
    assert "503" in step.decision.message


def test_deletion_waits_until_writes_that_had_begun_are_over() -> None:
    facts = (rolled(), acked("p1"), acked("p2", 4), *removed())
    step = step_of(*facts, now_s=33)
    assert (step.phase, step.again_s, step.orders) == (ErasurePhase.WAITING_OUT_WRITES, 1, ())
    assert holding(step) == {"LogicallyInvalid", "KeysRevoked", "KeysDestroyed"}
    assert step_of(*facts, now_s=34).phase is ErasurePhase.ERASING


def test_every_primary_and_every_pod_is_told_and_slots_stand_still() -> None:
    step = step_of(rolled(), acked("p1"), acked("p2"), *removed())
    assert [(one.primary, one.round) for one in ordered(step, StartDeletion)] == [("n1", 1), ("n2", 1)]  # type: ignore[attr-defined]
    assert [one.uid for one in ordered(step, AskPodToErase)] == ["p1", "p2"]  # type: ignore[attr-defined]
    assert step.still == {"redis"}
    assert ordered(step, ResetEngine) == []


def test_slots_stand_still_from_the_write_window_to_the_verdict_and_for_an_hour_at_most() -> None:
    settled = (rolled(), acked("p1"), acked("p2", 4))
    assert step_of(*settled).still == set(), "keys go first"
    facts = (*settled, *removed())
    assert step_of(*facts, now_s=5).still == {"redis"}
    assert step_of(*facts, now_s=4 + STILL_S - 1).still == {"redis"}
    assert step_of(*facts, now_s=4 + STILL_S).still == set(), "what waits for ever holds up nobody"
    done = (*until_erased(), looked(), probed("p1"), probed("p2"))
    assert verdict_of(step_of(*done)) is not None
    assert step_of(*done).still == set()


def test_no_more_deletions_run_at_a_time_than_servers_bear() -> None:
    many = tuple(f"n{number}" for number in range(9))
    seen = around(tiers={"redis": TierNow(many, SLOTS)}, deletions_elsewhere=1)
    running = deleted("n0", state=JobState.RUNNING, ended=None)
    step = step_of(rolled(), acked("p1"), acked("p2"), *removed(), running, seen=seen)
    assert len(ordered(step, StartDeletion)) == MAX_DELETIONS_AT_ONCE - 2


@pytest.mark.parametrize(
    ("fact", "what"),
    [
        (deleted("n2", began_s=33), "began while writes could arrive"),
        (deleted("n2", remaining=Amount(1, 10)), "left a key"),
        (deleted("n2", replicas_in_step=0), "was not confirmed by a replica"),
        (deleted("n2", over_bound=7), "left what was beyond its bound"),
        (deleted("n2", state=JobState.FAILED, problem="killed"), "failed"),
    ],
)
def test_a_deletion_that_proves_nothing_is_made_again(fact: Fact, what: str) -> None:
    facts = (rolled(), acked("p1"), acked("p2", 4), *removed(), deleted("n1"), fact, erased("p1"), erased("p2"))
    step = step_of(*facts)
    assert [(one.primary, one.round) for one in ordered(step, StartDeletion)] == [("n2", 2)], what  # type: ignore[attr-defined]
    assert "Erased" not in holding(step)


def test_a_job_that_failed_is_not_followed_at_once() -> None:
    failed = deleted("n2", state=JobState.FAILED, problem="the Job's pod was killed")
    step = step_of(rolled(), acked("p1"), acked("p2", 4), *removed(), deleted("n1"), failed, now_s=40)
    assert ordered(step, StartDeletion) == []
    assert "the Job's pod was killed" in step.decision.message


def test_a_tier_that_is_away_is_named_and_waited_for_while_pods_erase() -> None:
    seen = around(tiers={"redis": TierNow(("n1", "n2"), SLOTS, False, "n2 refuses connections")})
    step = step_of(rolled(), acked("p1"), acked("p2"), *removed(), seen=seen, now_s=7200)
    assert (step.phase, step.decision.reason) == (ErasurePhase.ERASING, R.TIER_AWAY)
    assert "CacheTier redis" in step.decision.message
    assert "n2 refuses connections" in step.decision.message
    assert len(ordered(step, AskPodToErase)) == 2
    assert verdict_of(step) is None


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (erased("p2", after_s=3), "before its acknowledgement"),
        (erased("p2", boot=2), "by processes that did not acknowledge"),
        (erased("p2", remaining=1), "and something is left"),
    ],
)
def test_a_pods_answer_that_proves_nothing_is_asked_for_again(answer: Fact, what: str) -> None:
    facts = (rolled(), acked("p1"), acked("p2", 4), *removed(), deleted("n1"), deleted("n2"), erased("p1"), answer)
    step = step_of(*facts)
    assert [one.uid for one in ordered(step, AskPodToErase)] == ["p2"], what  # type: ignore[attr-defined]
    assert "Erased" not in holding(step)


def test_a_pod_that_started_anew_is_asked_when_it_has_acknowledged_again() -> None:
    seen = around(pods={"p1": PodNow("p1", "g1", "c1"), "p2": PodNow("p2", "g1", "c2")})
    facts = (rolled(), acked("p1"), acked("p2", 4), *removed(), deleted("n1"), deleted("n2"), erased("p1"))
    step = step_of(*facts, seen=seen)
    assert (step.decision.reason, step.orders) == (R.POD_GONE_MID_ERASE, ())
    again = replace(acked("p2", 20), cache_boot="c2")
    step = step_of(*facts, again, seen=seen)
    assert [one.uid for one in ordered(step, AskPodToErase)] == ["p2"]  # type: ignore[attr-defined]
    assert "LogicallyInvalid" in holding(step), "it was unreachable since the first word"


def test_a_pod_that_ended_mid_erase_took_its_memory_along() -> None:
    facts = (*until_verified()[:-4], ended("p2", 37), looked(), probed("p1"))
    assert Claim.VERIFIED in set(Record.of_erasure(HEAD, facts_of(Erasure(order()).hearing(*facts))).claimed)
    gone = around(pods={"p1": PodNow("p1", "g1", "c1")})
    assert verdict_of(step_of(*facts, seen=gone)) is not None


def test_files_of_a_pod_that_ended_are_erased_by_who_took_them_over() -> None:
    pods = (witness("p1", MEMORY), witness("p2", FILES))
    facts = (rolled(*pods), acked("p1"), ended("p2", 4), *removed(), deleted("n1"), deleted("n2"), erased("p1"))
    seen = around(heirs={("p2", "files"): "p1"})
    assert step_of(*facts, seen=seen).orders == (
        AskPodToErase("order-1", "p1", 1, ("ab" * 16,), ("files",), heir_of="p2"),
    )
    told = FilesErased("p2", "files", "p1", at(37), Copies(9, 9, 0, 900))
    assert "Erased" in holding(step_of(*facts, told, seen=seen))


def departed() -> tuple[Fact, ...]:
    """All is done but for files on a node that is gone."""
    pods = (witness("p1", MEMORY), witness("p2", FILES))
    done = (deleted("n1"), deleted("n2"), erased("p1"), looked(), probed("p1"))
    return (rolled(*pods), acked("p1"), ended("p2", 4), *removed(), *done)


def test_copies_that_nobody_can_reach_are_waited_for_then_it_fails_and_says_which() -> None:
    waiting = step_of(*departed())
    assert (verdict_of(waiting), waiting.decision.reason) == (None, R.COPY_UNREACHABLE)
    assert because(waiting, "Erased") == R.COPY_UNREACHABLE
    verdict = verdict_of(step_of(*departed(), now_s=41 + PATIENCE_S))
    assert verdict is not None
    assert not verdict.complete
    assert verdict.reason == R.COPY_UNREACHABLE
    assert "chat-p2" in verdict.message
    assert verdict_of(step_of(*departed(), now_s=7200, deadline_s=7201)) is None
    late = verdict_of(step_of(*departed(), now_s=7201, deadline_s=7201))
    assert late is not None
    assert late.reason == R.COPY_UNREACHABLE


def test_with_residue_allowed_it_completes_and_the_receipt_names_what_is_left() -> None:
    assert verdict_of(step_of(*departed(), allow_residue=True)) is None, "a moment for pods that start anew"
    step = step_of(*departed(), allow_residue=True, now_s=41 + RESIDUE_PATIENCE_S)
    verdict = verdict_of(step)
    assert verdict is not None
    assert verdict.complete
    assert verdict.reason == R.COMPLETE_WITH_RESIDUE
    facts = facts_of(Erasure(order(allow_residue=True)).hearing(*departed(), verdict))
    assert Residue.COPY_UNREACHABLE in {item.kind for item in facts.residue}
    assert "Erased" not in holding(step)


def test_a_pod_that_only_fenced_itself_off_is_a_copy_nobody_can_reach() -> None:
    facts = (rolled(), acked("p1"), fenced("p2"), *removed(), deleted("n1", 361, 362), deleted("n2", 361, 362))
    step = step_of(*facts, erased("p1"), looked(370), probed("p1", 370), now_s=400)
    assert step.decision.reason == R.COPY_UNREACHABLE
    assert holding(step) == {"LogicallyInvalid"}, "its memory may hold keys and blocks"


def test_a_pod_that_vanished_unanswered_is_residue_if_that_is_allowed() -> None:
    seen = around(pods={"p1": PodNow("p1", "g1", "c1")})
    facts = (rolled(), acked("p1"), acked("p2"), *removed(), deleted("n1"), deleted("n2"), erased("p1"))
    done = (*facts, looked(), probed("p1"))
    assert step_of(*done, seen=seen).decision.reason == R.POD_GONE_MID_ERASE
    verdict = verdict_of(step_of(*done, seen=seen, allow_residue=True, now_s=600))
    assert verdict is not None
    assert verdict.complete
    left = facts_of(Erasure(order()).hearing(*done, verdict)).residue
    assert (Residue.COPY_UNREACHABLE, "chat", 1) in {(item.kind, item.about, item.count) for item in left}


def test_verification_begins_when_everything_is_erased_and_asks_everyone() -> None:
    step = step_of(*until_erased())
    assert step.phase is ErasurePhase.VERIFYING
    assert [type(one) for one in step.orders] == [VerifyTier, AskPodToVerify, AskPodToVerify]
    assert step.still == {"redis"}
    assert "Erased" in holding(step)
    assert "Verified" not in holding(step)


@pytest.mark.parametrize(
    ("look", "what"),
    [
        (looked(35.5), "began before the last deletion was over"),
        (looked(slots_after=OTHER_SLOTS), "slots moved"),
        (replace(looked(), left={"n1": Amount(0, 0)}), "a primary was not looked at"),
    ],
)
def test_a_look_that_proves_nothing_is_made_again(look: Fact, what: str) -> None:
    step = step_of(*until_erased(), look, probed("p1"), probed("p2"))
    assert [type(one) for one in step.orders] == [VerifyTier], what
    assert "Verified" not in holding(step)


def test_that_slots_moved_is_the_reason_given() -> None:
    step = step_of(*until_erased(), looked(slots_after=OTHER_SLOTS))
    assert step.decision.reason == R.SLOT_MAP_CHANGED


def test_a_primary_that_took_over_is_emptied_and_looked_at() -> None:
    seen = around(tiers={"redis": TierNow(("n1", "n3"), SLOTS)})
    step = step_of(*until_erased(), seen=seen)
    assert [one.primary for one in ordered(step, StartDeletion)] == ["n3"]  # type: ignore[attr-defined]


def test_what_is_proven_is_concluded_though_servers_change_afterwards() -> None:
    seen = around(tiers={"redis": TierNow(("n1", "n3"), OTHER_SLOTS)})
    verdict = verdict_of(step_of(*until_verified(), seen=seen))
    assert verdict is not None
    assert verdict.complete
    assert verdict.reason == R.ERASED_AND_VERIFIED


def test_what_is_found_late_is_erased_again_and_in_the_end_named() -> None:
    facts = list(until_erased())
    for round in range(1, MAX_ROUNDS + 1):
        facts += [looked(40 * round, n1=Amount(3, 30))]
        step = step_of(*facts, now_s=1000)
        assert "Erased" not in holding(step)
        if round < MAX_ROUNDS:
            assert [(one.primary, one.round) for one in ordered(step, StartDeletion)] == [("n1", round + 1)]  # type: ignore[attr-defined]
            assert because(step, "Verified") == R.LATE_COPIES
            facts += [deleted("n1", 40 * round + 10, 40 * round + 20, round + 1)]
    facts += [looked(150, n1=Amount(3, 30)), probed("p1", 151), probed("p2", 151)]
    verdict = verdict_of(step_of(*facts, now_s=1000, allow_residue=True))
    assert verdict is not None
    assert not verdict.complete, "residue that may be left is what nobody can reach"
    assert verdict.reason == R.LATE_COPIES
    assert "primary n1 of CacheTier redis" in verdict.message


def test_a_pod_that_finds_what_it_should_miss_erases_again() -> None:
    facts = (*until_erased(), looked(), probed("p1", missed=2), probed("p2"))
    step = step_of(*facts)
    assert step.orders == (AskPodToErase("order-1", "p1", 2, ("ab" * 16,), ("cpu",)),)
    assert "Erased" not in holding(step)
    again = (*facts, erased("p1", 50, round=2))
    assert {type(one) for one in step_of(*again).orders} == {VerifyTier, AskPodToVerify}
    whole = (*again, looked(51), probed("p1", 52, round=2), probed("p2", 52))
    assert verdict_of(step_of(*whole)) is not None


def test_a_receipt_is_ordered_after_the_verdict_and_nothing_is_complete_before_it_is_written() -> None:
    verdict = verdict_of(step_of(*until_verified()))
    assert verdict is not None
    step = step_of(*until_verified(), verdict)
    assert (step.phase, len(ordered(step, IssueReceipt))) == (ErasurePhase.RECEIPTING, 1)
    assert "Complete" not in holding(step)
    stuck = step_of(*until_verified(), verdict, seen=around(receipt_problem="two stored receipts have one number"))
    assert (stuck.decision.reason, stuck.orders) == (R.RECEIPT_REFUSED, ())
    over = step_of(*until_verified(), verdict, ReceiptWritten("d" * 64))
    assert over.phase is ErasurePhase.COMPLETE
    assert over.phase.finished
    assert holding(over) >= {"LogicallyInvalid", "KeysRevoked", "KeysDestroyed", "Erased", "Verified", "Complete"}


def test_a_receipt_without_a_verdict_ends_nothing() -> None:
    assert step_of(*until_erased(), ReceiptWritten("d" * 64)).phase is ErasurePhase.VERIFYING


HEAD = Head(DOMAIN, NAMESPACE, 1, None, keys().current_id)


def test_the_whole_way_gives_a_receipt_that_proves_it_all_and_is_taken() -> None:
    verdict = verdict_of(step_of(*until_verified()))
    assert verdict is not None
    record = Record.of_erasure(HEAD, facts_of(Erasure(order()).hearing(*until_verified(), verdict)))
    assert record.claimed == tuple(Claim)
    assert record.erasure is not None
    assert (record.erasure.tiers[0].waited_s, record.erasure.tiers[0].primaries) == (31, 2)


def test_facts_are_closed_by_the_verdict() -> None:
    verdict = Verdict(True, R.ERASED_AND_VERIFIED, "done", at(60))
    closed = Erasure(order()).hearing(*until_verified(), verdict)
    later = closed.hearing(ended("p1", 100), deleted("n1", 200, 201, 2), replace(verdict, complete=False, at=at(1)))
    assert facts_of(later) == facts_of(closed)
    assert later.facts == closed.facts


def test_a_deadline_ends_it_with_what_was_open_then() -> None:
    step = step_of(rolled(), acked("p1"), now_s=60, deadline_s=60)
    verdict = verdict_of(step)
    assert verdict is not None
    assert not verdict.complete
    assert verdict.reason == R.DEADLINE_EXCEEDED
    assert "chat-p2" in verdict.message
    early = step_of(rolled(), acked("p1"), now_s=57, deadline_s=60)
    assert (verdict_of(early), early.again_s) == (None, 3)
    proven = verdict_of(step_of(*until_verified(), now_s=60, deadline_s=60))
    assert proven is not None
    assert proven.complete, "what is proven in the end is complete"


def test_a_failed_erasure_gets_a_receipt_with_what_is_left() -> None:
    facts = (rolled(), acked("p1"))
    verdict = verdict_of(step_of(*facts, deadline_s=60))
    assert verdict is not None
    record = Record.of_erasure(HEAD, facts_of(Erasure(order(deadline_s=60)).hearing(*facts, verdict)))
    assert record.claimed == ()
    assert record.erasure is not None
    kinds = {item.kind for item in record.erasure.residue}
    assert {Residue.POD_OPEN, Residue.SERVER_UNREACHABLE, Residue.KEY_KEPT} <= kinds
    done = step_of(*facts, verdict, ReceiptWritten("d" * 64), deadline_s=60)
    assert (done.phase, because(done, "Failed")) == (ErasurePhase.FAILED, R.DEADLINE_EXCEEDED)


def test_one_that_is_given_up_says_so_in_its_receipt() -> None:
    verdict = verdict_of(step_of(rolled(), seen=around(abandoned="ticket 4711")))
    assert verdict is not None
    assert (verdict.complete, verdict.reason) == (False, R.ABANDONED)
    facts = facts_of(Erasure(order(subject=subject(reason=""))).hearing(rolled(), verdict))
    assert Residue.ABANDONED in {item.kind for item in facts.residue}
    assert facts.subject.reason == "abandoned: ticket 4711"
    assert Record.of_erasure(HEAD, facts).claimed == ()


def test_keys_in_secrets_are_revoked_and_never_destroyed() -> None:
    held = rolled(keys=(HeldKey(KEY, OLD_EPOCH, KeyCustody.SECRET),))
    step = step_of(held, *until_verified()[1:])
    assert "KeysRevoked" in holding(step)
    assert "KeysDestroyed" not in holding(step)
    assert because(step, "KeysDestroyed") == R.KEYS_IN_SECRETS


def test_without_keys_none_is_called_revoked_and_nothing_waits_for_it() -> None:
    step = step_of(rolled(keys=()), *until_verified()[1:])
    assert because(step, "KeysRevoked") == because(step, "KeysDestroyed") == R.NO_DATA_KEYS
    verdict = verdict_of(step)
    assert verdict is not None
    assert verdict.complete


def test_engines_are_emptied_where_the_order_says_so() -> None:
    reset = subject(hbm=Hbm.RESET_ENGINE)
    step = step_of(*until_verified(), subject=reset)
    assert step.orders == (ResetEngine("order-1", "p1"), ResetEngine("order-1", "p2"))
    done = (*until_verified(), EngineReset("p1", at(50)), EngineReset("p2", at(50)))
    assert verdict_of(step_of(*done, subject=reset)) is not None
    kept = facts_of(Erasure(order()).hearing(*until_verified()))
    assert Residue.ENGINE_MEMORY in {item.kind for item in kept.residue}


def test_an_engine_that_cannot_forget_is_named_waited_for_and_left_only_where_residue_is_allowed() -> None:
    reset = subject(hbm=Hbm.RESET_ENGINE)
    facts = (*until_verified(), EngineReset("p1", at(50)), EngineKept("p2", at(50)))
    step = step_of(*facts, subject=reset)
    assert (step.orders, step.decision.reason) == ((), R.ENGINE_NOT_RESET)
    assert "chat-p2" in step.decision.message
    failed = verdict_of(step_of(*facts, subject=reset, now_s=2000))
    assert failed is not None
    assert (failed.complete, failed.reason) == (False, R.ENGINE_NOT_RESET)
    left = verdict_of(step_of(*facts, subject=reset, allow_residue=True, now_s=2000))
    assert left is not None
    assert (left.complete, left.reason) == (True, R.COMPLETE_WITH_RESIDUE)
    kept = facts_of(Erasure(order(subject=reset)).hearing(*facts))
    assert Residue.ENGINE_MEMORY in {item.kind for item in kept.residue}
    gone = verdict_of(step_of(*facts, ended("p2", 60), subject=reset, now_s=70))
    assert gone is not None
    assert gone.complete


def test_what_the_order_leaves_out_is_named_and_denies_nothing() -> None:
    left_out = {"excluded_tiers": ("disk",), "excluded_scopes": ("team",)}
    facts = facts_of(Erasure(order(**left_out)).hearing(*until_verified()))
    named = {(item.kind, item.about) for item in facts.residue}
    assert {(Residue.TIER_EXCLUDED, "disk"), (Residue.SHARED_SCOPE_EXCLUDED, "team")} <= named
    assert "Verified" in holding(step_of(*until_verified(), **left_out))


def test_a_tier_that_was_removed_before_it_was_erased_is_residue() -> None:
    facts = (rolled(), acked("p1"), acked("p2"), *removed(), erased("p1"), erased("p2"), TierLost("redis", at(20)))
    done = (*facts, probed("p1"), probed("p2"))
    step = step_of(*done, seen=around(tiers={}))
    assert "Erased" not in holding(step)
    verdict = verdict_of(step_of(*done, seen=around(tiers={}), now_s=2000))
    assert verdict is not None
    assert not verdict.complete
    assert "TierLost" in verdict.message


def test_where_nothing_was_held_it_completes_and_claims_nothing_of_it() -> None:
    step = step_of(rolled(witness("p1")), acked("p1"), *removed(), tiers=())
    verdict = verdict_of(step)
    assert verdict is not None
    assert verdict.complete
    assert verdict.reason == R.NOTHING_HELD
    assert holding(step) == {"LogicallyInvalid", "KeysRevoked", "KeysDestroyed"}


def test_writes_into_pods_are_waited_out_where_the_keyspace_lives_on() -> None:
    facts = (rolled(), acked("p1"), acked("p2"), *removed())
    assert step_of(*facts, now_s=10, tiers=()).phase is ErasurePhase.ERASING
    prefix = ErasedPrefix("chat", ("c1",))
    assert step_of(*facts, now_s=10, tiers=(), prefix=prefix).phase is ErasurePhase.WAITING_OUT_WRITES
    assert step_of(*facts, now_s=33, tiers=(), prefix=prefix).phase is ErasurePhase.ERASING


def test_of_a_prefix_its_chunks_alone_are_ordered_to_go() -> None:
    order_of_prefix = subject(scope=ScopeForm.PREFIX, hbm=Hbm.ROLL_SCOPES)
    prefix = {"prefix": ErasedPrefix("chat", ("c1", "c2")), "subject": order_of_prefix}
    erasing = step_of(rolled(), acked("p1"), acked("p2"), *removed(), **prefix)
    assert {one.chunks for one in erasing.orders} == {("c1", "c2")}  # type: ignore[union-attr]
