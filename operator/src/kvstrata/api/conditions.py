"""Condition types, and which kind has which.

Ready, Reconciling and Stalled follow kstatus: tools that wait for an object understand them without knowing the kind.
"""

from __future__ import annotations

from enum import StrEnum


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

    BACKEND_REACHABLE = "BackendReachable", "The tier's servers answer, or pods use its files."
    SERVERS_SUITABLE = (
        "ServersSuitable",
        "The servers of an external tier passed every check. Pods use them as soon as all but those that warn passed.",
    )
    REPLICATION_HEALTHY = (
        "ReplicationHealthy",
        "Every primary of the tier's cluster has its replicas, all in step with it.",
    )
    SLOTS_COVERED = (
        "SlotsCovered",
        "Every slot of the tier's cluster has a server that answers; of one external server, that it answers.",
    )
    CAPACITY_COMMITTED = "CapacityCommitted", "The guarantees on this tier fit into its capacity."
    ENCRYPTED = "Encrypted", "Blocks at rest on this tier are encrypted."

    PASSWORDS_CURRENT = (
        "PasswordsCurrent",
        "Every server that the operator runs has the passwords of the Secret, and they are not older than they may be.",
    )
    CERTIFICATE_CURRENT = (
        "CertificateCurrent",
        "Every server that the operator runs shows the certificate of the Secret, and it is valid; absent without TLS.",
    )

    HAS_ROOM = "HasRoom", "The tier's server or files take new blocks; what is full serves those that it has."
    EVICTS_WHEN_FULL = "EvictsWhenFull", "A full tier makes room for new blocks; otherwise it refuses them."
    RETENTION_KEPT = "RetentionKept", "No block lives longer on this tier than its maxRetention."

    TIERS_BOUND = "TiersBound", "Every tier of the model exists and can be used."
    TIERS_ORDERED = (
        "TiersOrdered",
        "Tiers are listed from fast to slow, and none is smaller than a faster one. A warning: Ready does not need it.",
    )
    POLICY_ENFORCED = "PolicyEnforced", "Every live pod of the model acknowledged the newest policy."
    ISOLATION_VERIFIED = "IsolationVerified", "The last probe found that tenants cannot reuse one another's blocks."
    ROLLED_OUT = "RolledOut", "Every pod runs the newest template."

    ADMITTED = (
        "Admitted",
        "The spec was accepted, and all guarantees that it declares are reserved. What waits for room runs without a "
        "guarantee, within its limit, and Ready does not need it.",
    )
    ENFORCED = "Enforced", "Every live pod acknowledged this generation of the policy."
    WITHIN_BUDGET = "WithinBudget", "Everything that the object sets limits for stays below them."
    TIERS_ADMITTED = (
        "TiersAdmitted",
        "Every tier of the models takes the data by its classification; absent where no tier asks for one. A warning: "
        "Ready does not need it.",
    )
    POOLS_RESOLVED = "PoolsResolved", "Every pool that the policy names exists and lists the tenant as a reader."
    ERASES_ON_DELETION = "ErasesOnDeletion", "Deleting the policy also erases what the tenant has cached."

    KEYS_AT_HAND = (
        "KeysAtHand",
        "The operator has the data key of every epoch in use; absent where keys are in Secrets. A warning: Ready does "
        "not need it.",
    )
    RESTORED = (
        "Restored",
        "The API server was found to be older than pods: what was cached before can no longer be read, and pods "
        "enforce the policy again. Absent where that was never found.",
    )

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
    "CacheDomain": (
        ConditionType.ADMITTED,
        ConditionType.ENFORCED,
        ConditionType.WITHIN_BUDGET,
        ConditionType.TIERS_ADMITTED,
        ConditionType.KEYS_AT_HAND,
        ConditionType.RESTORED,
    ),
    "CacheTier": (
        ConditionType.BACKEND_REACHABLE,
        ConditionType.SERVERS_SUITABLE,
        ConditionType.SLOTS_COVERED,
        ConditionType.REPLICATION_HEALTHY,
        ConditionType.CAPACITY_COMMITTED,
        ConditionType.ENCRYPTED,
        ConditionType.PASSWORDS_CURRENT,
        ConditionType.CERTIFICATE_CURRENT,
        ConditionType.HAS_ROOM,
        ConditionType.EVICTS_WHEN_FULL,
        ConditionType.RETENTION_KEPT,
    ),
    "CachedModel": (
        ConditionType.TIERS_BOUND,
        ConditionType.TIERS_ORDERED,
        ConditionType.POLICY_ENFORCED,
        ConditionType.ISOLATION_VERIFIED,
        ConditionType.ROLLED_OUT,
    ),
    "TenantCachePolicy": (
        ConditionType.ADMITTED,
        ConditionType.ENFORCED,
        ConditionType.WITHIN_BUDGET,
        ConditionType.TIERS_ADMITTED,
        ConditionType.POOLS_RESOLVED,
        ConditionType.ERASES_ON_DELETION,
    ),
    "TenantGroup": (
        ConditionType.ADMITTED,
        ConditionType.ENFORCED,
        ConditionType.WITHIN_BUDGET,
        ConditionType.TIERS_ADMITTED,
        ConditionType.MEMBERS_RESOLVED,
    ),
    "PrefixPool": (
        ConditionType.WARM,
        ConditionType.PUBLISHED,
        ConditionType.ADMITTED,
        ConditionType.WITHIN_BUDGET,
    ),
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
