"""Condition types, and which kind has which.

Ready, Reconciling and Stalled follow kstatus: tools that wait for an object understand them without knowing the kind.
Reconciling and Stalled are True or absent.
"""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    """Every condition of the API, with one sentence on the meaning of True."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> ConditionType:
        """Make a member from its name in the API and its meaning."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    READY = "Ready", "The spec is admitted, and every live pod enforces it. Without a live pod it is admitted."
    RECONCILING = "Reconciling", "The operator is still working towards the spec."
    STALLED = (
        "Stalled",
        "The operator cannot continue until a user changes something; reason and message state the cause.",
    )

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
        "Every slot of the tier's cluster has a server that answers.",
    )
    CAPACITY_COMMITTED = "CapacityCommitted", "The guarantees on this tier fit into its capacity."
    ENCRYPTED = "Encrypted", "Blocks at rest on this tier are encrypted."

    PASSWORDS_CURRENT = (
        "PasswordsCurrent",
        "Every server that the operator runs has the passwords of the Secret, and they are within their allowed age.",
    )
    CERTIFICATE_CURRENT = (
        "CertificateCurrent",
        "Every server that the operator runs presents the certificate of the Secret, and it is valid.",
    )

    HAS_ROOM = (
        "HasRoom",
        "The tier's server or files take new blocks. A full tier still serves the blocks that it holds.",
    )
    EVICTS_WHEN_FULL = "EvictsWhenFull", "A full tier evicts blocks to take new ones; otherwise it refuses new ones."
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
        "The spec was accepted, and all guarantees that it declares are reserved. While a guarantee waits for room, "
        "nothing of it is reserved, limits hold, and the object is not Ready.",
    )
    ENFORCED = "Enforced", "Every live pod acknowledged this generation of the policy."
    WITHIN_BUDGET = "WithinBudget", "Every serving pod enforces the object's budgets."
    TIERS_ADMITTED = (
        "TiersAdmitted",
        "Every tier of the models may store data of this classification. A warning: Ready does not need it.",
    )
    POOLS_RESOLVED = "PoolsResolved", "Every pool that the policy names exists and lists the tenant as a reader."
    ERASES_ON_DELETION = "ErasesOnDeletion", "Deleting the policy also erases the tenant's cached data."

    KEYS_AT_HAND = (
        "KeysAtHand",
        "The operator has the data key of every epoch in use. A warning: Ready does not need it.",
    )
    RESTORED = (
        "Restored",
        "The API server was found to be older than pods: blocks cached before are unreadable now, and pods enforce "
        "the policy again.",
    )

    MEMBERS_RESOLVED = "MembersResolved", "A policy of every listed tenant names the group."

    WARM = "Warm", "Every chunk of the pool is stored on every tier that it names."
    PUBLISHED = "Published", "Every live pod knows the pool's current content."

    LOGICALLY_INVALID = "LogicallyInvalid", "No live pod can reach the data any more."
    KEYS_REVOKED = "KeysRevoked", "The data keys are removed from their custody and from all processes."
    KEYS_DESTROYED = "KeysDestroyed", "The custody of the data keys confirmed that no copy of them is left."
    ERASED = "Erased", "The data was deleted from every tier."
    VERIFIED = "Verified", "The operator searched for the data and found none."
    COMPLETE = "Complete", "The invalidation has done everything that its mode requires."
    FAILED = "Failed", "The invalidation ended without being complete."


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
    },
    "CachedModel": {
        ConditionType.TIERS_BOUND: "with tiers",
        ConditionType.TIERS_ORDERED: "with two tiers or more",
        ConditionType.POLICY_ENFORCED: "while a pod serves",
        ConditionType.ISOLATION_VERIFIED: "while a pod serves and is probed, and after a failure",
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
"""When each condition is present; empty for always. `plan/kinds/applicable.py` decides it."""


def condition_types(kind: str) -> dict[ConditionType, str]:
    """The condition types that objects of `kind` may have, and when, in the order of the documentation."""
    return _COMMON | _OF_KIND[kind]
