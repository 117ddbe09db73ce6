"""Condition types, and the one function that sets conditions.

Ready, Reconciling and Stalled follow kstatus: tools that wait for an object understand them without knowing the kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum

from kvstrata.api.common import Condition, ConditionStatus


class ConditionType(StrEnum):
    """Every condition of the API, with one sentence that says what True means."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> ConditionType:
        """Make a member from its name in the API and its meaning."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    READY = "Ready", "The object is in force as its spec says."
    RECONCILING = "Reconciling", "The operator is still working towards the spec."
    STALLED = "Stalled", "The operator cannot go on until someone changes something; reason and message say what."

    BACKEND_REACHABLE = "BackendReachable", "The tier's servers answer."
    CAPACITY_COMMITTED = "CapacityCommitted", "The guarantees on this tier fit into its capacity."
    ENCRYPTED = "Encrypted", "Blocks at rest on this tier are encrypted."

    TIERS_BOUND = "TiersBound", "Every tier of the model exists and can be used."
    POLICY_ENFORCED = "PolicyEnforced", "Every live pod of the model acknowledged the newest policy."
    ISOLATION_VERIFIED = "IsolationVerified", "The last probe found that tenants cannot reuse one another's blocks."
    ROLLED_OUT = "RolledOut", "Every pod runs the newest template."

    ADMITTED = "Admitted", "The policy was accepted and its guarantees were granted."
    ENFORCED = "Enforced", "Every live pod acknowledged this generation of the policy."
    WITHIN_BUDGET = "WithinBudget", "The tenant stays below its limits."
    POOLS_RESOLVED = "PoolsResolved", "Every pool that the policy names exists and lists the tenant as a reader."
    ERASES_ON_DELETION = "ErasesOnDeletion", "Deleting the policy also erases what the tenant has cached."

    MEMBERS_RESOLVED = "MembersResolved", "A policy of every listed tenant names the group."

    WARM = "Warm", "Every chunk of the pool is stored on every tier that it names."
    PUBLISHED = "Published", "Every live pod knows the pool's current content."

    LOGICALLY_INVALID = "LogicallyInvalid", "No live pod can reach the data any more."
    KEYS_REVOKED = "KeysRevoked", "The data keys are gone from the Secret and from all processes."
    KEYS_DESTROYED = "KeysDestroyed", "The custody confirmed that no copy of the data keys is left."
    ERASED = "Erased", "The data was deleted from every tier."
    VERIFIED = "Verified", "The operator looked for the data itself and found none."
    COMPLETE = "Complete", "The invalidation has done all that its mode asks for."
    FAILED = "Failed", "The invalidation ended without being complete."


_COMMON = (ConditionType.READY, ConditionType.RECONCILING, ConditionType.STALLED)
_OF_KIND: dict[str, tuple[ConditionType, ...]] = {
    "CacheDomain": (ConditionType.ENFORCED,),
    "CacheTier": (ConditionType.BACKEND_REACHABLE, ConditionType.CAPACITY_COMMITTED, ConditionType.ENCRYPTED),
    "CachedModel": (
        ConditionType.TIERS_BOUND,
        ConditionType.POLICY_ENFORCED,
        ConditionType.ISOLATION_VERIFIED,
        ConditionType.ROLLED_OUT,
    ),
    "TenantCachePolicy": (
        ConditionType.ADMITTED,
        ConditionType.ENFORCED,
        ConditionType.WITHIN_BUDGET,
        ConditionType.POOLS_RESOLVED,
        ConditionType.ERASES_ON_DELETION,
    ),
    "TenantGroup": (ConditionType.ENFORCED, ConditionType.MEMBERS_RESOLVED),
    "PrefixPool": (ConditionType.WARM, ConditionType.PUBLISHED),
    "CacheInvalidation": (
        ConditionType.LOGICALLY_INVALID,
        ConditionType.KEYS_REVOKED,
        ConditionType.KEYS_DESTROYED,
        ConditionType.ERASED,
        ConditionType.VERIFIED,
        ConditionType.COMPLETE,
        ConditionType.FAILED,
    ),
}


def condition_types(kind: str) -> tuple[ConditionType, ...]:
    """The condition types that objects of `kind` may carry, in the order of the documentation."""
    return _COMMON + _OF_KIND[kind]


def set_conditions(current: Iterable[Condition], changes: Iterable[Condition]) -> tuple[Condition, ...]:
    """The conditions after `changes`.

    A changed condition replaces that of its type. Its last_transition_time is kept when status stays the same, as
    metav1 asks. Order: as it was, new types at the end, so that an unchanged status stays equal.
    """
    result = {condition.type: condition for condition in current}
    for change in changes:
        before = result.get(change.type)
        if before is not None and before.status is change.status:
            change = change.model_copy(update={"last_transition_time": before.last_transition_time})
        result[change.type] = change
    return tuple(result.values())


def condition(
    condition_type: ConditionType,
    status: ConditionStatus | bool | None,
    reason: str,
    message: str,
    *,
    generation: int,
    now: datetime,
) -> Condition:
    """Make a condition. `status` None means Unknown; `generation` is the metadata.generation that was looked at."""
    if not isinstance(status, ConditionStatus):
        status = (
            ConditionStatus.UNKNOWN if status is None else ConditionStatus.TRUE if status else ConditionStatus.FALSE
        )
    return Condition(
        type=condition_type.value,
        status=status,
        reason=str(reason),
        message=message,
        observed_generation=generation,
        last_transition_time=now,
    )
