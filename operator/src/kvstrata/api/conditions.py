"""Condition types.

Ready, Reconciling and Stalled follow kstatus: tools that wait for an object understand them without knowing the kind.
Reconciling and Stalled are True or absent; a judge in `plan` returns None while another one is not present.
"""

from __future__ import annotations

from kvstrata.contract import Meaningful


class ConditionType(Meaningful):
    """Every condition of the API, with one sentence on the meaning of True."""

    READY = "Ready", "The spec is admitted, and every live pod enforces it. Without a live pod it is admitted."
    RECONCILING = "Reconciling", "The operator is still working towards the spec."
    STALLED = (
        "Stalled",
        "The operator cannot continue until a user changes something; reason and message state the cause.",
    )

    PAUSED = "Paused", "The annotation kvstrata.io/paused keeps the operator from changing the object's children."

    BACKEND_REACHABLE = "BackendReachable", "The tier's servers answer, or pods use its files."
    SERVERS_SUITABLE = (
        "ServersSuitable",
        "The servers of an external tier passed every check. Pods use them as soon as all but those that warn passed.",
    )
    REPLICATION_HEALTHY = (
        "ReplicationHealthy",
        "Every primary of the tier's cluster has its replicas, all in step with it.",
    )
    SLOTS_COVERED = "SlotsCovered", "Every slot of the tier's cluster has a server that answers."
    CAPACITY_COMMITTED = "CapacityCommitted", "The guarantees on this tier fit into its capacity."
    ENCRYPTED = "Encrypted", "Blocks at rest on this tier are encrypted."

    PASSWORDS_CURRENT = (
        "PasswordsCurrent",
        "Every server that the operator runs has the passwords of the Secret, and they are within their allowed age.",
    )
    CERTIFICATE_CURRENT = (
        "CertificateCurrent",
        "Every server or pod that the operator runs presents the certificate of the Secret, and it is valid.",
    )

    HAS_ROOM = (
        "HasRoom",
        "The tier's server or files take new blocks. A full tier still serves the blocks that it holds.",
    )
    EVICTS_WHEN_FULL = "EvictsWhenFull", "A full tier evicts blocks to take new ones; otherwise it refuses new ones."
    RESTORE_PAYS = (
        "RestorePays",
        "Loading the tier's blocks takes pods less time than computing them. A warning: Ready does not need it.",
    )
    RETENTION_KEPT = "RetentionKept", "No block lives longer on this tier than its maxRetention."

    TIERS_BOUND = "TiersBound", "Every tier of the model exists and can be used."
    TIERS_ORDERED = (
        "TiersOrdered",
        "Tiers are listed from fast to slow, and none is smaller than a faster one. A warning: Ready does not need it.",
    )
    POLICY_ENFORCED = "PolicyEnforced", "Every live pod of the model acknowledged the newest policy."
    ISOLATION_VERIFIED = "IsolationVerified", "The last probe found that tenants cannot reuse one another's blocks."
    IDENTITY_RESOLVED = (
        "IdentityResolved",
        "Every serving pod has a fingerprint of its engine and model, the same for pods of one declared identity. A "
        "warning: Ready does not need it.",
    )
    ROLLED_OUT = "RolledOut", "Every pod runs the newest template."

    ADMITTED = (
        "Admitted",
        "The spec was accepted, and all guarantees that it declares are reserved. While a guarantee waits for room, "
        "nothing of it is reserved, limits hold, and the object is not Ready.",
    )
    ENFORCED = "Enforced", "Every live pod acknowledged this generation of the policy."
    WITHIN_BUDGET = (
        "WithinBudget",
        "Every serving pod enforces the object's budgets, and none reports use above a limit.",
    )
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
