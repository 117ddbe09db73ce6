"""What proves nothing is done again, and whoever is away or started anew is waited for by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstrata.api.cacheinvalidation import Phase
from kvstrata.api.reasons import InvalidationReason as R
from kvstrata.contract.receipt.facts import Amount
from kvstrata.model.erasure.facts import Fact, JobState
from kvstrata.model.erasure.record import TierNow
from kvstrata.plan.erasure.orders import MAX_ROUNDS, AskPodToErase, AskPodToVerify, StartDeletion, VerifyTier

from .erasure_steps import because, holding, ordered, step_of, verdict_of
from .erasures import OTHER_SLOTS, SLOTS, acked, around, deleted, erased, looked, probed, removed, rolled, until_erased


@pytest.mark.parametrize(
    ("fact", "what"),
    [
        (deleted("n2", began_s=33), "began while writes could arrive"),
        (deleted("n2", remaining=Amount(1, 10)), "left a key"),
        (deleted("n2", replicas_in_step=0), "was not confirmed by a replica"),
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
    assert (step.phase, step.decision.reason) == (Phase.ERASING, R.TIER_AWAY)
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
    seen = around(pods={"p1": ("g1", "c1"), "p2": ("g1", "c2")})
    facts = (rolled(), acked("p1"), acked("p2", 4), *removed(), deleted("n1"), deleted("n2"), erased("p1"))
    step = step_of(*facts, seen=seen)
    assert (step.decision.reason, step.orders) == (R.POD_GONE_MID_ERASE, ())
    again = replace(acked("p2", 20), cache_boot="c2")
    step = step_of(*facts, again, seen=seen)
    assert [one.uid for one in ordered(step, AskPodToErase)] == ["p2"]  # type: ignore[attr-defined]
    assert "LogicallyInvalid" in holding(step), "it was unreachable since the first word"


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
    assert step.orders == (AskPodToErase("p1", 2, ("cpu",)),)
    assert "Erased" not in holding(step)
    again = (*facts, erased("p1", 50, round=2))
    assert {type(one) for one in step_of(*again).orders} == {VerifyTier, AskPodToVerify}
    whole = (*again, looked(51), probed("p1", 52, round=2), probed("p2", 52))
    assert verdict_of(step_of(*whole)) is not None
