"""What nobody can reach, or may not be waited for, ends an erasure in time, and the receipt names what is left."""

from __future__ import annotations

from dataclasses import replace

from kvstrata.api.cacheinvalidation import Phase
from kvstrata.api.reasons import InvalidationReason as R
from kvstrata.contract.receipt.facts import Copies
from kvstrata.contract.receipt.record import Record
from kvstrata.contract.receipt.residue import ReceiptClaim, Residue
from kvstrata.contract.receipt.vocabulary import Hbm
from kvstrata.model.erasure.facts import EngineKept, EngineReset, Fact, HeldTier, ReceiptWritten, TierLost, Verdict
from kvstrata.model.erasure.record import Erasure
from kvstrata.plan.erasure.next_step import PATIENCE_S, RESIDUE_PATIENCE_S
from kvstrata.plan.erasure.orders import AskPodToErase
from kvstrata.plan.erasure.receipt import facts_of
from tests.support.receipts import subject

from .erasure_steps import HEAD, because, departed, holding, step_of, verdict_of
from .erasures import (
    FILES,
    MEMORY,
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
    until_verified,
    witness,
)


def test_a_pod_that_ended_mid_erase_took_its_memory_along() -> None:
    facts = (*until_verified()[:-4], ended("p2", 37), looked(), probed("p1"))
    assert ReceiptClaim.VERIFIED in set(Record.of_erasure(HEAD, facts_of(Erasure(order()).with_facts(*facts))).claimed)
    gone = around(pods={"p1": ("g1", "c1")})
    assert verdict_of(step_of(*facts, seen=gone)) is not None


def test_files_that_an_ended_pod_left_in_an_unknown_folder_are_erased_by_no_other_and_claimed_by_no_receipt() -> None:
    pods, files = (witness("p1", FILES), witness("p2", FILES)), {"files": Copies(9, 9, 0, 900)}
    own = replace(erased("p1"), copies=files)
    facts = (rolled(*pods), acked("p1"), ended("p2", 4), *removed(), deleted("n1"), deleted("n2"), own)
    step = step_of(*facts)
    assert [one for one in step.orders if isinstance(one, AskPodToErase)] == []
    assert "Erased" not in holding(step)
    done = step_of(*facts, looked(), probed("p1"))
    assert (done.decision.reason, because(done, "Erased")) == (R.COPY_UNREACHABLE, R.COPY_UNREACHABLE)
    assert "files of pod chat-p2 on CacheTier files stayed on its node" in done.decision.message
    before = replace(erased("p2", 3), copies=files)
    assert "Erased" in holding(step_of(*facts, acked("p2", 2), before)), "it erased them before it ended"


def test_files_that_ended_pods_left_are_residue_by_node_and_folder_with_the_number_of_pods() -> None:
    here, there = (replace(FILES, place=f"node-{n}:/disks/kvs1/d1/files/chat") for n in (1, 2))
    pods = (witness("p1", here), witness("p2", here), witness("p3", there))
    facts = (rolled(*pods), ended("p1", 4), ended("p2", 4), ended("p3", 4), *removed())
    assert "(node-1:/disks/kvs1/d1/files/chat)" in step_of(*facts, tiers=()).decision.message
    left = facts_of(Erasure(order(tiers=())).with_facts(*facts)).residue
    named = [(item.about, item.count) for item in left if item.kind is Residue.COPY_UNREACHABLE]
    assert named == [(here.place, 2), (there.place, 1)]


def test_files_of_an_ended_pod_are_erased_by_one_with_the_same_folder_and_counted_by_it() -> None:
    here, there = (replace(FILES, place=f"node-{n}:/disks/kvs1/d1/files/chat") for n in (1, 2))
    pods, found = (witness("p1", here), witness("p2", here)), {"files": Copies(9, 9, 0, 900)}
    facts = (rolled(*pods), acked("p1"), ended("p2", 4), *removed())
    own = replace(erased("p1"), copies=found)
    short = step_of(*facts, own, tiers=())
    assert [one for one in short.orders if isinstance(one, AskPodToErase)] == [AskPodToErase("p1", 2, ("files",))]
    assert "Erased" not in holding(short), "it found files in a place of another"
    exhausted = [replace(own, round=turn) for turn in (1, 2, 3)]
    step = step_of(*facts, *exhausted, probed("p1", round=3), tiers=())
    assert (step.orders, step.decision.reason) == ((), R.COPY_UNREACHABLE)
    whole = Erasure(order(tiers=())).with_facts(
        *facts, own, replace(own, round=2, folders=("files",)), probed("p1", 50)
    )
    rows = {pod.uid: pod.tiers[0].erased for pod in facts_of(whole).pods}
    assert rows == {"p1": Copies(9, 9, 0, 900), "p2": Copies(0, 0, 0, 0)}, "a cache server counts since its start"
    assert Residue.COPY_UNREACHABLE not in {item.kind for item in facts_of(whole).residue}
    assert ReceiptClaim.VERIFIED in set(Record.of_erasure(HEAD, facts_of(whole)).claimed)
    away = (rolled(witness("p1", there), witness("p2", here)), *facts[1:], replace(own, folders=("files",)))
    named = [item.about for item in facts_of(Erasure(order(tiers=())).with_facts(*away)).residue]
    assert here.place in named, "another node's"


def test_folders_where_no_pod_looked_are_named_for_each_tier_and_deny_no_claim() -> None:
    facts = facts_of(Erasure(order(folders=("disks",))).with_facts(*until_verified()))
    assert [item.about for item in facts.residue if item.kind is Residue.UNSEEN_FOLDERS] == ["disks"]
    assert ReceiptClaim.VERIFIED in set(Record.of_erasure(HEAD, facts).claimed)


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
    facts = facts_of(Erasure(order(allow_residue=True)).with_facts(*departed(), verdict))
    assert Residue.COPY_UNREACHABLE in {item.kind for item in facts.residue}
    assert "Erased" not in holding(step)


def test_a_pod_that_only_fenced_itself_off_is_a_copy_nobody_can_reach() -> None:
    facts = (rolled(), acked("p1"), fenced("p2"), *removed(), deleted("n1", 361, 362), deleted("n2", 361, 362))
    step = step_of(*facts, erased("p1"), looked(370), probed("p1", 370), now_s=400)
    assert step.decision.reason == R.COPY_UNREACHABLE
    assert holding(step) == {"LogicallyInvalid"}, "its memory may hold keys and blocks"


def test_a_pod_that_vanished_unanswered_is_residue_if_that_is_allowed() -> None:
    seen = around(pods={"p1": ("g1", "c1")})
    facts = (rolled(), acked("p1"), acked("p2"), *removed(), deleted("n1"), deleted("n2"), erased("p1"))
    done = (*facts, looked(), probed("p1"))
    assert step_of(*done, seen=seen).decision.reason == R.POD_GONE_MID_ERASE
    verdict = verdict_of(step_of(*done, seen=seen, allow_residue=True, now_s=600))
    assert verdict is not None
    assert verdict.complete
    left = facts_of(Erasure(order()).with_facts(*done, verdict)).residue
    assert (Residue.COPY_UNREACHABLE, "chat", 1) in {(item.kind, item.about, item.count) for item in left}


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


def test_an_overdue_erasure_ends_unproven_though_its_epochs_never_rolled_or_its_receipt_is_refused() -> None:
    late = around(overdue="too late")
    assert verdict_of(step_of(seen=late, now_s=59)) is None, "its epochs may be rolled still"
    verdict = verdict_of(step_of(seen=late, now_s=61))
    assert verdict is not None
    assert (verdict.complete, verdict.reason, verdict.abandoned) == (False, R.NOT_PROVEN, "too late")
    facts = facts_of(Erasure(order(subject=subject(reason=""))).with_facts(verdict))
    assert {Residue.ABANDONED, Residue.SERVER_UNREACHABLE} <= {item.kind for item in facts.residue}
    assert Record.of_erasure(HEAD, facts).claimed == ()
    refused = around(overdue="too late", receipt_problem="two records have one number")
    step = step_of(*until_verified(), verdict, seen=refused)
    assert (step.phase, step.decision.reason, because(step, "Failed")) == (Phase.FAILED, R.NOT_PROVEN, R.NOT_PROVEN)
    assert "two records have one number" in step.decision.message
    assert step_of(*until_verified(), verdict, seen=late).phase is Phase.RECEIPTING, "it is tried again"


def test_a_failed_erasure_gets_a_receipt_with_what_is_left() -> None:
    facts = (rolled(), acked("p1"))
    verdict = verdict_of(step_of(*facts, deadline_s=60))
    assert verdict is not None
    record = Record.of_erasure(HEAD, facts_of(Erasure(order(deadline_s=60)).with_facts(*facts, verdict)))
    assert record.claimed == ()
    assert record.erasure is not None
    kinds = {item.kind for item in record.erasure.residue}
    assert {Residue.POD_OPEN, Residue.SERVER_UNREACHABLE, Residue.KEY_KEPT} <= kinds
    done = step_of(*facts, verdict, ReceiptWritten("d" * 64), deadline_s=60)
    assert (done.phase, because(done, "Failed")) == (Phase.FAILED, R.DEADLINE_EXCEEDED)


def test_one_that_is_given_up_says_so_in_its_receipt() -> None:
    verdict = verdict_of(step_of(rolled(), seen=around(abandoned="ticket 4711")))
    assert verdict is not None
    assert (verdict.complete, verdict.reason) == (False, R.ABANDONED)
    facts = facts_of(Erasure(order(subject=subject(reason=""))).with_facts(rolled(), verdict))
    assert Residue.ABANDONED in {item.kind for item in facts.residue}
    assert facts.subject.reason == "abandoned: ticket 4711"
    assert Record.of_erasure(HEAD, facts).claimed == ()


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
    kept = facts_of(Erasure(order(subject=reset)).with_facts(*facts))
    assert Residue.ENGINE_MEMORY in {item.kind for item in kept.residue}
    gone = verdict_of(step_of(*facts, ended("p2", 60), subject=reset, now_s=70))
    assert gone is not None
    assert gone.complete


def test_what_the_order_leaves_out_is_named_and_denies_nothing() -> None:
    left_out = {"excluded_tiers": ("disk",), "excluded_scopes": ("team",)}
    facts = facts_of(Erasure(order(**left_out)).with_facts(*until_verified()))
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


def test_a_lost_tier_is_named_and_is_not_waited_for() -> None:
    facts = (rolled(), acked("p1"), acked("p2"), *removed(), erased("p1"), erased("p2"), TierLost("redis", at(20)))
    verdict = verdict_of(step_of(*facts, probed("p1"), probed("p2"), seen=around(tiers={}), now_s=60))
    assert verdict is not None
    assert (verdict.complete, verdict.reason) == (False, R.NOT_PROVEN)
    assert "TierLost redis" in verdict.message


def test_a_tier_that_no_pod_used_is_no_residue_and_keeps_no_claim_away() -> None:
    unused = TierLost("redis", at(20), unused=True)
    nothing = (rolled(witness("p1"), witness("p2")), ended("p1", 4), ended("p2", 4), *removed(), unused)
    verdict = verdict_of(step_of(*nothing, seen=around(tiers={}), now_s=60))
    assert verdict is not None
    assert (verdict.complete, verdict.reason) == (True, R.NOTHING_HELD)
    pods = (rolled(), acked("p1"), acked("p2"), *removed(), erased("p1"), erased("p2"), unused)
    assert {"Erased", "Verified"} <= holding(step_of(*pods, probed("p1"), probed("p2"), seen=around(tiers={})))
    facts = facts_of(Erasure(order()).with_facts(*pods))
    assert facts.tiers == ()
    assert Residue.TIER_LOST not in {item.kind for item in facts.residue}


def test_a_server_that_vanished_before_it_was_erased_is_residue_and_the_others_are_erased() -> None:
    lost = (TierLost("redis", at(20), server="kvs-redis-0-0"), TierLost("redis", at(21), server="kvs-redis-1-0"))
    begun = step_of(rolled(), acked("p1"), acked("p2"), *removed(), *lost)
    assert {type(one).__name__ for one in begun.orders} >= {"StartDeletion", "AskPodToErase"}
    facts = (*until_verified(), *lost)
    assert {"Erased", "Verified"}.isdisjoint(holding(step_of(*facts)))
    verdict = verdict_of(step_of(*facts))
    assert verdict is not None
    assert not verdict.complete
    assert "TierLost redis" in verdict.message
    left = facts_of(Erasure(order()).with_facts(*facts)).residue
    assert [(item.about, item.count) for item in left if item.kind is Residue.TIER_LOST] == [("redis", 2)]


def test_where_nothing_was_held_it_completes_and_claims_nothing_of_it() -> None:
    step = step_of(rolled(witness("p1")), acked("p1"), *removed(), tiers=())
    verdict = verdict_of(step)
    assert verdict is not None
    assert verdict.complete
    assert verdict.reason == R.NOTHING_HELD
    assert holding(step) == {"LogicallyInvalid", "KeysRevoked", "KeysDestroyed"}


def test_what_pods_held_in_memory_is_gone_when_all_of_them_ended() -> None:
    """A model and a policy that are deleted at once: no pod is left to be asked."""

    def judged(held: HeldTier, *facts: Fact, now_s: int = 70) -> Verdict | None:
        there = rolled(witness("p1", held), witness("p2", held))
        return verdict_of(step_of(there, ended("p1", 60), *facts, *removed(), tiers=(), now_s=now_s))

    gone = judged(MEMORY, ended("p2", 60))
    assert gone is not None
    assert (gone.complete, gone.reason) == (True, R.NOTHING_HELD)
    assert judged(MEMORY) is None, "a pod that neither acknowledged nor ended may still reuse it"
    assert judged(MEMORY, acked("p2")) is None, "a pod that is left erases"
    assert judged(FILES, ended("p2", 60)) is None, "files may stay on the node"
    late = judged(FILES, ended("p2", 60), now_s=2000)
    assert late is not None
    assert (late.complete, late.reason) == (False, R.COPY_UNREACHABLE)


def test_a_namespace_that_goes_ends_it_in_a_quarter_of_an_hour_or_by_its_own_deadline_if_that_is_sooner() -> None:
    going = around(unattended=at(7200))
    waiting = (rolled(), acked("p1"))
    for deadline_s, ends_s in ((None, 8100), (9000, 8100), (8000, 8000)):
        assert verdict_of(step_of(*waiting, seen=going, now_s=ends_s - 1, deadline_s=deadline_s)) is None
        late = verdict_of(step_of(*waiting, seen=going, now_s=ends_s, deadline_s=deadline_s))
        assert late is not None
        assert late.reason == R.DEADLINE_EXCEEDED
        assert ("namespace" in late.message) == (ends_s == 8100)
