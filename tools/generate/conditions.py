"""The conditions and reasons of each kind, for the reference."""

from __future__ import annotations

from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import (
    DomainReason,
    GroupReason,
    InvalidationReason,
    ModelReason,
    PolicyReason,
    PoolReason,
    SharedReason,
    TierReason,
)
from kvstrata.contract import Meaningful

_COMMON = {
    ConditionType.READY: "",
    ConditionType.RECONCILING: "while the operator works towards the spec or waits",
    ConditionType.STALLED: "while a user has to change something",
}
_OF_KIND: dict[str, dict[ConditionType, str]] = {
    "CacheDomain": {
        ConditionType.ADMITTED: "while the spec declares guarantees",
        ConditionType.ENFORCED: "while a pod serves",
        ConditionType.WITHIN_BUDGET: "while a pod uses a tier for which the spec sets a budget",
        ConditionType.TIERS_ADMITTED: "while a tier takes data of some classifications only, and a policy is Public",
        ConditionType.KEYS_AT_HAND: "unless keys are in Secrets",
        ConditionType.RESTORED: "after the API server was found to be older than pods",
    },
    "CacheTier": {
        ConditionType.BACKEND_REACHABLE: "on Redis; with NVMe while a pod uses the tier",
        ConditionType.SERVERS_SUITABLE: "with external servers",
        ConditionType.SLOTS_COVERED: "with several primaries",
        ConditionType.REPLICATION_HEALTHY: "with replicas that the operator runs",
        ConditionType.CAPACITY_COMMITTED: "while a guarantee on the tier is declared",
        ConditionType.ENCRYPTED: "on Redis and NVMe, while a pod uses the tier or encryption is Disabled",
        ConditionType.PASSWORDS_CURRENT: "with servers that the operator runs",
        ConditionType.CERTIFICATE_CURRENT: "with servers that the operator runs, unless TLS is Disabled",
        ConditionType.HAS_ROOM: "on Redis; with NVMe while a pod uses the tier",
        ConditionType.EVICTS_WHEN_FULL: "on Redis, while a pod uses the tier",
        ConditionType.RETENTION_KEPT: "on CPU and NVMe with maxRetention, while a pod uses the tier",
        ConditionType.RESTORE_PAYS: "on Redis and NVMe, once a pod has measured loads and prefill",
    },
    "CachedModel": {
        ConditionType.TIERS_BOUND: "with tiers",
        ConditionType.TIERS_ORDERED: "with two tiers or more",
        ConditionType.POLICY_ENFORCED: "while a pod serves",
        ConditionType.CERTIFICATE_CURRENT: "while a pod serves, unless TLS is Disabled",
        ConditionType.ISOLATION_VERIFIED: "while a pod serves and is probed, and after a failure",
        ConditionType.IDENTITY_RESOLVED: "while a pod serves",
        ConditionType.ROLLED_OUT: "",
    },
    "TenantCachePolicy": {
        ConditionType.ADMITTED: "",
        ConditionType.ENFORCED: "while a pod of the policy's models serves",
        ConditionType.WITHIN_BUDGET: "while a pod uses a tier for which the spec sets a budget",
        ConditionType.TIERS_ADMITTED: "while a tier takes data of some classifications only",
        ConditionType.POOLS_RESOLVED: "with pools",
        ConditionType.ERASES_ON_DELETION: "with deletionPolicy Erase",
    },
    "TenantGroup": {
        ConditionType.ADMITTED: "while the spec declares guarantees",
        ConditionType.ENFORCED: "while a pod serves, and a member has a policy",
        ConditionType.WITHIN_BUDGET: "while a pod uses a tier for which the spec sets a budget",
        ConditionType.TIERS_ADMITTED: "while a tier takes data of some classifications only, and members share blocks",
        ConditionType.MEMBERS_RESOLVED: "",
    },
    "PrefixPool": {
        ConditionType.WARM: "while a pod of the model serves",
        ConditionType.PUBLISHED: "while a pod of the model serves",
        ConditionType.ADMITTED: "while the pool is pinned and has a size",
        ConditionType.WITHIN_BUDGET: "while the pool is pinned and published, and a pod uses its tiers",
    },
    "CacheInvalidation": {
        ConditionType.LOGICALLY_INVALID: "",
        ConditionType.KEYS_REVOKED: "with mode Eager, unless there is no key to revoke",
        ConditionType.KEYS_DESTROYED: "with mode Eager, unless there is no key to destroy",
        ConditionType.ERASED: "with mode Eager",
        ConditionType.VERIFIED: "with mode Eager",
        ConditionType.COMPLETE: "when all is done",
        ConditionType.FAILED: "when it ended without being complete",
    },
}
"""When each condition is present; empty for always. Its judge in `plan` returns None while it is not."""


def condition_types(kind: str) -> dict[ConditionType, str]:
    """The condition types that objects of `kind` may have, and when, in the order of the documentation."""
    pausable = {ConditionType.PAUSED: "while paused"} if SharedReason.PAUSED in REASONS[kind] else {}
    return _COMMON | pausable | _OF_KIND[kind]


_S = SharedReason
_ENFORCED = (
    _S.INVALID_SPEC, _S.TIER_NOT_FOUND, _S.GUARANTEE_EXCEEDS_CAPACITY, _S.RETENTION_EXCEEDS_TIER,
    _S.CLASSIFICATION_NOT_ALLOWED, _S.TIERS_ADMITTED, _S.GUARANTEES_ADMITTED, _S.INSUFFICIENT_CAPACITY,
    _S.GUARANTEES_EXCEED_CAPACITY, _S.BUDGETS_NOT_ENFORCED, _S.BUDGETS_ENFORCED, _S.USED_ABOVE_LIMIT,
    _S.MEMORY_NOT_GOVERNED, _S.NOT_COMMITTED, _S.AWAITING_ACKS, _S.ALL_PODS_ACKNOWLEDGED, _S.NO_LIVE_PODS,
)  # fmt: skip
"""Shared reasons of kinds that set budgets and that pods enforce."""

REASONS: dict[str, tuple[Meaningful, ...]] = {
    "CacheDomain": (*DomainReason, *_ENFORCED, _S.NAME_CONFLICT, _S.NO_MODELS),
    "CacheTier": (
        *TierReason, _S.INVALID_SPEC, _S.SECRET_NOT_FOUND, _S.AWAITING_KEYS, _S.TIERS_CONFLICT, _S.NAME_CONFLICT,
        _S.CHILD_REFUSED, _S.PAUSED, _S.BUDGETS_NOT_ENFORCED, _S.GUARANTEES_EXCEED_CAPACITY,
    ),
    "CachedModel": (
        *ModelReason, _S.INVALID_SPEC, _S.WAITING_FOR_DOMAIN, _S.SECRET_NOT_FOUND, _S.TIER_NOT_FOUND, _S.TIERS_CONFLICT,
        _S.NAME_CONFLICT, _S.CHILD_REFUSED, _S.PAUSED, _S.ROLLING_OUT, _S.NOT_COMMITTED, _S.AWAITING_ACKS,
        _S.ALL_PODS_ACKNOWLEDGED, _S.NO_LIVE_PODS, _S.FINGERPRINT_MISSING,
    ),
    "TenantCachePolicy": (
        *PolicyReason, *_ENFORCED, _S.WAITING_FOR_DOMAIN, _S.MODEL_NOT_FOUND, _S.NO_MODELS, _S.AWAITING_KEYS,
        _S.POOL_NOT_FOUND, _S.ERASING,
    ),
    "TenantGroup": (*GroupReason, *_ENFORCED),
    "PrefixPool": (
        *PoolReason, _S.INVALID_SPEC, _S.WAITING_FOR_DOMAIN, _S.MODEL_NOT_FOUND, _S.TIER_NOT_FOUND, _S.ROLLING_OUT,
        _S.NO_LIVE_PODS, _S.NOT_COMMITTED, _S.AWAITING_ACKS, _S.AWAITING_KEYS, _S.GUARANTEES_ADMITTED,
        _S.INSUFFICIENT_CAPACITY, _S.GUARANTEES_EXCEED_CAPACITY, _S.BUDGETS_ENFORCED, _S.BUDGETS_NOT_ENFORCED,
        _S.MEMORY_NOT_GOVERNED, _S.FINGERPRINT_MISSING,
    ),
    "CacheInvalidation": (
        *InvalidationReason, _S.INVALID_SPEC, _S.WAITING_FOR_DOMAIN, _S.AWAITING_ACKS, _S.POOL_NOT_FOUND,
        _S.MODEL_NOT_FOUND, _S.ERASING,
    ),
}  # fmt: skip
"""The reasons of each kind."""
