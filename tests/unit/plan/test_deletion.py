"""A policy that erases on deletion stays until a receipt is there, or for a reason with a way out."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.api.reasons import PolicyReason, SharedReason
from kvstrata.api.scalars import Duration
from kvstrata.api.status import ScopeStatus
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.contract.policy.keyspace import Scope, ScopeKind
from kvstrata.objects.labels import ERASES
from kvstrata.plan.actions import CarryOutErasure, Create, SetFinalizers
from kvstrata.plan.erasure.policy_deletion import (
    ABANDON,
    FINALIZER,
    DeletionCase,
    build_invalidation,
    invalidation_name,
    overdue,
    plan_deletion,
)
from tests.support import objects

EPOCH = {"kind": "Tenant", "name": "acme", "epoch": "0" * 32, "rolls": 0}


def policy(
    deleting: bool = True, cached: bool = True, wish: str | None = "Erase", why: str | None = None
) -> TenantCachePolicy:
    raw = objects.policy("acme", **({"deletionPolicy": wish} if wish else {}))
    raw["metadata"] |= {"finalizers": [FINALIZER], "annotations": {ABANDON: why} if why else {}}
    if deleting:
        raw["metadata"]["deletionTimestamp"] = "2026-11-22T10:00:00Z"
    raw["status"] = {"scope": EPOCH} if cached else {}
    return TenantCachePolicy.model_validate(raw)


CARRY_OUT = CarryOutErasure("TenantCachePolicy", "acme", policy().uid)
SET, DROP = (SetFinalizers(left, policy().metadata.resource_version) for left in ((FINALIZER,), ()))


def without_finalizer(found: TenantCachePolicy) -> TenantCachePolicy:
    return found.model_copy(update={"metadata": found.metadata.model_copy(update={"finalizers": ()})})


def invalidation(phase: str = "AwaitingAcks", of: TenantCachePolicy | None = None, **status: Any) -> CacheInvalidation:
    spec = build_invalidation(of or policy())
    raw = objects.invalidation("name", **spec["spec"])
    raw["metadata"] |= {
        "name": spec["metadata"]["name"],
        "uid": "order-1",
        "annotations": spec["metadata"]["annotations"],
    }
    raw["status"] = {"phase": phase, **status}
    return CacheInvalidation.model_validate(raw)


def test_a_policy_with_an_epoch_that_erases_gets_the_finalizer_and_others_lose_it() -> None:
    living = without_finalizer(policy(deleting=False))
    assert plan_deletion(DeletionCase(living)).action == SET
    assert plan_deletion(DeletionCase(policy(deleting=False))).action is None
    assert plan_deletion(DeletionCase(policy(deleting=False, wish="Abandon"))).action == DROP
    assert plan_deletion(DeletionCase(policy(deleting=False, cached=False))).action == DROP
    assert plan_deletion(DeletionCase(without_finalizer(policy(deleting=False, cached=False)))).action is None


def test_a_policy_that_says_nothing_of_its_deletion_erases() -> None:
    assert plan_deletion(DeletionCase(without_finalizer(policy(deleting=False, wish=None)))).action == SET


def test_the_finalizer_is_there_before_the_epoch_is() -> None:
    own, shared = Scope(ScopeKind.TENANT, "acme"), Scope(ScopeKind.GROUP, "lab")
    fresh = without_finalizer(policy(deleting=False, cached=False))
    assert plan_deletion(DeletionCase(fresh, draws=own)).action == SET
    assert plan_deletion(DeletionCase(fresh, draws=shared)).action is None


def test_the_finalizer_stays_until_the_status_names_what_is_shared() -> None:
    shared = Scope(ScopeKind.GROUP, "lab")
    assert plan_deletion(DeletionCase(policy(deleting=False), draws=shared)).action is None
    assert plan_deletion(DeletionCase(without_finalizer(policy(deleting=False)), draws=shared)).action == SET


def test_a_tenant_that_only_shares_leaves_nothing_that_would_be_erased() -> None:
    sharing = policy(deleting=False)
    scope = ScopeStatus(kind=ScopeKind.GROUP, name="lab", epoch="0" * 32, rolls=0)
    sharing = sharing.model_copy(update={"status": sharing.status.model_copy(update={"scope": scope})})
    assert plan_deletion(DeletionCase(sharing)).action == DROP
    assert plan_deletion(DeletionCase(without_finalizer(sharing))).action is None


def test_a_deleted_policy_orders_one_eager_invalidation_that_leaves_what_others_share() -> None:
    step = plan_deletion(DeletionCase(policy()))
    assert isinstance(step.action, Create)
    made = step.action.body
    CacheInvalidation.model_validate(made)
    assert made["spec"]["scope"] == {"tenant": "acme"}
    assert (made["spec"]["mode"], made["spec"]["sharedScopes"]) == ("Eager", "Exclude")
    assert made["metadata"]["annotations"] == {ERASES: policy().uid}
    assert "ownerReferences" not in made["metadata"]
    assert plan_deletion(DeletionCase(policy())) == step


def test_the_invalidations_name_fits_and_differs_for_a_policy_that_comes_later() -> None:
    raw = policy()
    long = raw.model_copy(update={"metadata": raw.metadata.model_copy(update={"name": "n" * 40, "uid": "a"})})
    later = raw.model_copy(update={"metadata": raw.metadata.model_copy(update={"name": "n" * 40, "uid": "b"})})
    assert len(invalidation_name(long)) <= 40
    assert invalidation_name(long) != invalidation_name(later)


def test_in_a_namespace_that_goes_nothing_is_created() -> None:
    step = plan_deletion(DeletionCase(policy(), namespace_deleting=True))
    assert step.action == CARRY_OUT
    begun = plan_deletion(DeletionCase(policy(), kept=frozenset({policy().uid}), nameable=False))
    assert begun.action == CARRY_OUT, "what has begun needs no name any more"


def test_a_policy_whose_blocks_nobody_can_name_goes_with_its_namespace_and_says_why() -> None:
    for given_up in (None, "whatever"):
        case = DeletionCase(policy(why=given_up), namespace_deleting=True, nameable=False)
        order = plan_deletion(case).action
        assert isinstance(order, SetFinalizers)
        assert "no receipt" in order.unproven
    assert isinstance(plan_deletion(DeletionCase(policy(), nameable=False)).action, Create)


@pytest.mark.parametrize("phase", ["Rolling", "AwaitingAcks", "Complete"])
def test_without_a_receipt_the_finalizer_stays(phase: str) -> None:
    step = plan_deletion(DeletionCase(policy(), erasing=invalidation(phase)))
    assert step.action is None
    assert step.decision is not None
    expected = PolicyReason.RECEIPT_MISSING if phase == "Complete" else SharedReason.ERASING
    assert step.decision.reason == expected


def test_with_the_receipt_the_policy_goes() -> None:
    case = DeletionCase(policy(), erasing=invalidation("Complete"), receipt="d" * 64)
    assert plan_deletion(case).action == DROP
    gone = DeletionCase(policy(), receipt="d" * 64, namespace_deleting=True)
    assert plan_deletion(gone).action == DROP


def test_an_erasure_that_failed_keeps_the_policy_says_why_and_how_out() -> None:
    failed = invalidation("Failed", message="files of pod chat-2 stayed on its node")
    for receipt in (None, "d" * 64):
        step = plan_deletion(DeletionCase(policy(), erasing=failed, receipt=receipt))
        assert step.action is None
        assert step.decision is not None
        assert step.decision.reason == PolicyReason.ERASURE_FAILED
        assert "files of pod chat-2" in step.decision.message
        assert ABANDON in step.decision.message


@pytest.mark.parametrize(("invalid", "goes"), [("True", True), ("False", False)])
def test_one_that_cannot_be_proven_any_more_goes_when_no_pod_reuses_its_blocks(invalid: str, goes: bool) -> None:
    at = {"lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}
    failed = {"type": "Failed", "status": "True", "reason": "NotProven", "message": "TierLost shared", **at}
    unreachable = {"type": "LogicallyInvalid", "status": invalid, "reason": "x", "message": "", **at}
    erasing = invalidation("Failed", conditions=[failed, unreachable])
    step = plan_deletion(DeletionCase(policy(), erasing=erasing, receipt="d" * 64))
    assert (step.action == replace(DROP, unproven="TierLost shared")) is goes


def test_who_gives_it_up_gets_a_receipt_that_says_so_before_the_policy_goes() -> None:
    given_up = policy(why="the disk was shredded")
    erasing = invalidation("AwaitingAcks")
    step = plan_deletion(DeletionCase(given_up, erasing=erasing, kept=frozenset({erasing.uid})))
    assert step.action == CarryOutErasure("CacheInvalidation", erasing.name, erasing.uid)
    assert step.decision is not None
    assert "the disk was shredded" in step.decision.message
    refused = plan_deletion(DeletionCase(given_up, erasing=invalidation("Failed"))).action
    assert refused == CARRY_OUT, "it never began, and has no receipt"
    never_begun = plan_deletion(DeletionCase(given_up)).action
    assert never_begun == CARRY_OUT
    done = DeletionCase(given_up, erasing=invalidation("Failed"), receipt="d" * 64)
    assert plan_deletion(done).action == DROP
    empty = plan_deletion(DeletionCase(policy(why="  "), erasing=erasing))
    assert empty.action is None, "giving up takes a reason"


def test_a_strangers_invalidation_of_that_name_is_named_and_not_taken_for_ours() -> None:
    other = policy()
    other = other.model_copy(update={"metadata": other.metadata.model_copy(update={"uid": "another"})})
    step = plan_deletion(DeletionCase(policy(), erasing=invalidation("Complete", of=other)))
    assert step.action is None
    assert step.decision is not None
    assert step.decision.reason == PolicyReason.NAME_TAKEN


@pytest.mark.parametrize("status", [{"phase": "AwaitingAcks"}, {"phase": "Failed"}, None])
def test_a_deletion_that_is_overdue_ends_with_a_receipt_and_never_without(status: dict[str, Any] | None) -> None:
    case = DeletionCase(
        policy(),
        erasing=invalidation(**status) if status else None,
        kept=frozenset({"order-1"} if status else ()),
        overdue="too late",
    )
    step = plan_deletion(case)
    assert isinstance(step.action, CarryOutErasure)
    assert step.action.uid == ("order-1" if status else policy().uid)
    assert plan_deletion(replace(case, receipt="f" * 64)).action == DROP


def test_an_overdue_policy_goes_without_the_receipt_that_the_chain_refuses() -> None:
    case = DeletionCase(policy(), kept=frozenset({policy().uid}), refused="two records have one number")
    assert plan_deletion(case).action == CARRY_OUT, "it is waited for until the deadline"
    running = replace(case, overdue="too late", erasing=invalidation("Receipting"), kept=frozenset({"order-1"}))
    assert isinstance(plan_deletion(running).action, CarryOutErasure), "its CacheInvalidation ends first"
    assert isinstance(plan_deletion(replace(running, erasing=invalidation("Failed"))).action, SetFinalizers)
    order = plan_deletion(replace(case, overdue="too late")).action
    assert isinstance(order, SetFinalizers)
    assert order.finalizers == ()
    assert order.unproven == "too late: the receipt is not written, because two records have one number"


def test_an_overdue_policy_without_a_domain_goes_without_a_receipt() -> None:
    order = plan_deletion(DeletionCase(policy(), erasing=invalidation("Failed"), nameable=False, overdue="late")).action
    assert isinstance(order, SetFinalizers)
    assert "no receipt" in order.unproven


@pytest.mark.parametrize("proof", [{"receipt": "f" * 64}, {"refused": "two records have one number"}])
def test_an_overdue_policy_stays_while_a_bundle_has_its_epoch(proof: dict[str, str]) -> None:
    case = DeletionCase(policy(), kept=frozenset({policy().uid}), overdue="too late", served=True, **proof)  # type: ignore[arg-type]
    step = plan_deletion(case)
    assert step.action is None
    assert step.decision is not None
    assert step.decision.reason == PolicyReason.ABANDONING
    assert "too late" in step.decision.message
    assert isinstance(plan_deletion(replace(case, served=False)).action, SetFinalizers)
    given_up = replace(case, policy=policy(why="the disk was shredded"), receipt="f" * 64)
    assert plan_deletion(given_up).action == DROP, "a person may decide otherwise"
    assert plan_deletion(replace(case, policy=policy(wish="Abandon"))).action == DROP


def test_a_deletion_is_overdue_from_the_limit_on() -> None:
    began = datetime(2026, 11, 22, 10, tzinfo=UTC)
    assert overdue(policy(), Duration("24h"), began + timedelta(hours=23, minutes=59)) == ""
    assert "24h" in overdue(policy(), Duration("24h"), began + timedelta(hours=24))
    assert overdue(policy(deleting=False), Duration("24h"), began + timedelta(days=9)) == ""


def test_a_policy_whose_owner_changed_to_abandon_goes_at_once() -> None:
    assert plan_deletion(DeletionCase(policy(wish="Abandon"))).action == DROP
    failed = DeletionCase(policy(wish="Abandon"), erasing=invalidation("Failed"), receipt="d" * 64)
    assert plan_deletion(failed).action == DROP
