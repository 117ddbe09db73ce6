"""Reasons in conditions, on which programs may depend.

Each kind has an enumeration of its own; `SharedReason` has those that mean the same on several kinds. Every member has
a sentence that documents it.
"""

from __future__ import annotations

from kvstrata.api.reasons.tier import TierReason as TierReason
from kvstrata.contract import Meaningful


class SharedReason(Meaningful):
    """Reasons that mean the same on several kinds."""

    INVALID_SPEC = "InvalidSpec", "This version cannot read the spec; the last enforced one stays in force."
    NOT_COMMITTED = "NotCommitted", "The change is not in every bundle yet; it is being written."
    AWAITING_ACKS = "AwaitingAcks", "Some live pods have not acknowledged yet."
    ALL_PODS_ACKNOWLEDGED = "AllPodsAcknowledged", "Every live pod acknowledged."
    NO_LIVE_PODS = "NoLivePods", "No pod serves: there is nothing to enforce."
    NO_MODELS = "NoModels", "No CachedModel exists that the object applies to."
    WAITING_FOR_DOMAIN = "WaitingForDomain", "The domain's identity, key or epochs are being generated."
    ERASING = "Erasing", "Servers and pods are deleting the cached data."
    ROLLING_OUT = "RollingOut", "Some pods still run an older template."
    MODEL_NOT_FOUND = "ModelNotFound", "A named CachedModel does not exist."
    TIER_NOT_FOUND = "TierNotFound", "A named CacheTier does not exist."
    POOL_NOT_FOUND = "PoolNotFound", "A named PrefixPool does not exist."
    AWAITING_KEYS = (
        "AwaitingKeys",
        "A data key is being generated, or a serving pod has not reported that it encrypts and has the keys of all "
        "keyspaces of its policy.",
    )
    SECRET_NOT_FOUND = "SecretNotFound", "A named Secret does not exist or lacks a key."
    NAME_CONFLICT = (
        "NameConflict",
        "An object with the name of one of this object's children exists and has another owner.",
    )
    OPERATOR_NAMESPACE = (
        "OperatorNamespace",
        "The object is in the operator's own namespace, which is never served: its Secrets are about all others.",
    )
    CHILD_REFUSED = (
        "ChildRefused",
        "The API server refuses a child of this object; the message has the child's name and the error.",
    )
    PAUSED = "Paused", "The object is paused by its annotation; policies and erasures are carried out nevertheless."
    BUDGETS_NOT_ENFORCED = "BudgetsNotEnforced", "A serving pod does not report that it enforces budgets on a tier."
    USED_ABOVE_LIMIT = (
        "UsedAboveLimit",
        "A pod reports more bytes of the scope on a tier than its limit; the message names tier, use and limit. After "
        "a lower limit this lasts until pods have removed the rest.",
    )
    BUDGETS_ENFORCED = "BudgetsEnforced", "Every serving pod keeps within the budgets."
    FINGERPRINT_MISSING = (
        "FingerprintMissing",
        "A pod serves without reuse, because its engine and cache server do not agree on a fingerprint.",
    )
    MEMORY_NOT_GOVERNED = (
        "MemoryNotGoverned",
        "A pod does not report that it keeps its memory within budgets; it may run an older version.",
    )
    GUARANTEES_EXCEED_CAPACITY = (
        "GuaranteesExceedCapacity",
        "Pods enforce more guarantees than a tier can keep, until bundles with fewer guarantees reach them. Meanwhile "
        "pods cut each guarantee by the same share, and Redis refuses blocks for lack of memory.",
    )
    GUARANTEES_ADMITTED = "GuaranteesAdmitted", "All declared guarantees are reserved."
    INSUFFICIENT_CAPACITY = (
        "InsufficientCapacity",
        "A tier has no room for a guarantee beside admitted ones and older ones that wait. Nothing of it is reserved "
        "until there is room; limits hold.",
    )
    GUARANTEE_EXCEEDS_CAPACITY = (
        "GuaranteeExceedsCapacity",
        "A guarantee exceeds the part of its tier's capacity that blocks may take.",
    )
    RETENTION_EXCEEDS_TIER = "RetentionExceedsTier", "A retention is longer than the tier's maxRetention."
    TIERS_CONFLICT = (
        "TiersConflict",
        "Two CacheTiers exclude each other: a pod can have only one of this medium, or both use one Redis server.",
    )
    CLASSIFICATION_NOT_ALLOWED = (
        "ClassificationNotAllowed",
        "A tier may not store data of this classification; pods do not store it there.",
    )
    TIERS_ADMITTED = "TiersAdmitted", "Every tier of the models may store data of this classification."


class DomainReason(Meaningful):
    """Reasons on a CacheDomain."""

    CREATING = "Creating", "The domain's identity and key are being generated."
    READY = "DomainReady", "The domain has its identity and key."
    KEY_LOST = "DomainKeyLost", "The Secret with the domain key is gone or unreadable although scopes exist."
    RESTORE_DETECTED = (
        "RestoreDetected",
        "A pod holds a newer bundle than the API server, which was restored from a backup; the key is being replaced.",
    )
    KEY_REPLACED = (
        "KeyReplaced",
        "After a restore the domain's key was replaced, and pods enforce bundles under the new key.",
    )
    WITNESS_NOT_BELIEVED = (
        "WitnessNotBelieved",
        "A pod reports a newer bundle than the API server's, and the operator rejects the report: it is implausibly "
        "new, or repeated within an hour.",
    )
    KEY_CUSTODY_IN_USE = (
        "KeyCustodyInUse",
        "The spec names another custody than that of the existing keys; these and new keys stay in the existing one.",
    )
    KEY_CUSTODY_AWAY = (
        "KeyCustodyAway",
        "The key management service does not answer or refuses requests, or the operator may not call it; pods keep "
        "their keys.",
    )
    SERVED_BY_ANOTHER = (
        "ServedByAnother",
        "Another installation serves the namespace, or is to by an annotation; this one writes nothing else there.",
    )
    KEYS_AT_HAND = "KeysAtHand", "The operator has every data key that is in use."
    KEYS_UNWRAPPING = (
        "KeysUnwrapping",
        "The operator restarted and has data keys unwrapped; pods that have their keys continue.",
    )
    KEYS_LOST = (
        "KeysLost",
        "The data keys of some epochs cannot be unwrapped any more; their scopes get new epochs and start with a cold "
        "cache.",
    )


class ModelReason(Meaningful):
    """Reasons on a CachedModel."""

    READY = "ModelReady", "The model serves, and its pods enforce the newest policy."
    TIERS_BOUND = "TiersBound", "Every tier exists and can be used."
    TIER_NOT_READY = "TierNotReady", "A CacheTier of the model is not ready; the model serves without it."
    TIERS_ORDERED = "TiersOrdered", "Tiers are listed from fast to slow, and none is smaller than a faster one."
    NOT_FAST_TO_SLOW = "NotFastToSlow", "A tier in memory or on disk is behind a slower one; pods still use it first."
    LOWER_TIER_SMALLER = (
        "LowerTierSmaller",
        "A tier is smaller than a faster one, so it has evicted most of the blocks that the faster one evicts.",
    )
    TIER_STALLED = "TierStalled", "A CacheTier of the model is stalled; the model serves without it."
    PODS_REPORT_PROBLEM = "PodsReportProblem", "A pod cannot read its policy or its API keys."
    CERTIFICATE_UNUSABLE = (
        "CertificateUnusable",
        "The certificate of a Secret has another key, is not readable, or is not valid now; the message names the "
        "Secret. Pods that serve keep the former one; others are not ready without one.",
    )
    CERTIFICATE_SHOWN = "CertificateShown", "Every server or serving pod presents the certificate of the Secret."
    VERSION_NOT_GOVERNED = (
        "VersionNotGoverned",
        "A pod's LMCache has a version that cannot be governed; the pod serves without reuse.",
    )
    ROLLED_OUT = "RolledOut", "Every pod runs the newest template."
    ROLLOUT_STUCK = "RolloutStuck", "Pods do not become ready within startupTimeout."
    PODS_NOT_READY = "PodsNotReady", "Fewer pods are ready than the spec asks for."
    IMAGE_NOT_PULLED = "ImageNotPulled", "A node cannot pull an image of a pod; the message names it and what to check."
    UNSCHEDULABLE = "Unschedulable", "No node has room for a pod; the message has the sizes."
    CONTAINER_EXITS = (
        "ContainerExits",
        "A container of a pod ends again and again; the message has the last error of its log.",
    )
    CONTAINER_NOT_STARTED = "ContainerNotStarted", "A node cannot start a container; the message quotes Kubernetes."
    VOLUME_NOT_MOUNTED = "VolumeNotMounted", "A node cannot mount a volume of a pod; the message names it."
    PODS_REFUSED = "PodsRefused", "The API server refuses pods, by a quota or a webhook; the message quotes it."
    SCALED_TO_ZERO = "ScaledToZero", "The spec asks for no replicas."
    IDENTITY_RESOLVED = (
        "IdentityResolved",
        "Every serving pod has a fingerprint, and pods with one declared identity have the same.",
    )
    FINGERPRINTS_DIFFER = (
        "FingerprintsDiffer",
        "Pods with one declared identity run different engines or weights, so they share no blocks.",
    )
    NOT_PROBED = "NotProbed", "A pod was not probed yet, so its isolation is not verified."
    ISOLATION_SHOWN = (
        "IsolationShown",
        "In every tier of every pod, other scopes missed the blocks that one scope stored, and that scope hit them "
        "before and after.",
    )
    FOREIGN_HIT = (
        "ForeignHit",
        "A scope found blocks of another scope. The failure stands until cacheGeneration is raised.",
    )
    WRONG_HIT = (
        "WrongHit",
        "Blocks were found for other tokens than their own. The failure stands until cacheGeneration is raised.",
    )
    CONTROL_MISSED = (
        "ControlMissed",
        "In a tier a scope missed its own blocks, or no other scope may look there, so misses prove nothing.",
    )
    ONE_SCOPE = "OneScope", "One scope uses the model, so there is no other scope to probe with."
    REUSE_OFF = "ReuseOff", "Reuse is disabled, so there is nothing to probe."
    PROBE_UNANSWERED = "ProbeUnanswered", "A pod has not answered a probe for three intervals."


class PolicyReason(Meaningful):
    """Reasons on a TenantCachePolicy."""

    ACCEPTED = "Accepted", "The policy was accepted."
    TENANT_CONFLICT = (
        "TenantConflict",
        "An older policy of the same namespace is for the same tenant; the older one stays in force.",
    )
    GROUP_NOT_FOUND = "GroupNotFound", "The TenantGroup does not exist; the tenant stays isolated."
    NOT_A_MEMBER = "NotAMember", "The TenantGroup does not list the tenant; the tenant stays isolated."
    LAST_VALID_IN_FORCE = "LastValidInForce", "This spec is not in force; the last valid one still is."
    NEVER_ENFORCED = "NeverEnforced", "No valid version of this policy was ever in force."
    POOLS_RESOLVED = "PoolsResolved", "The tenant may read every PrefixPool that the policy lists."
    POOL_OF_OTHER_MODEL = "PoolOfOtherModel", "A PrefixPool is of a CachedModel that the policy does not select."
    NOT_A_READER = "NotAReader", "A PrefixPool does not list the tenant among its readers."
    NARROWED_BY_SCOPE = (
        "NarrowedByScope",
        "Another tenant of the same scope may not read a PrefixPool, so none of the scope does.",
    )
    ERASES = "Erases", "Deleting the policy erases the tenant's cached data, and leaves a receipt."
    SHARES_ALL = "SharesAll", "The tenant shares all its blocks, so deleting the policy erases nothing."
    BEING_DELETED = "BeingDeleted", "The policy is being deleted; its tenant's requests reuse nothing any more."
    ERASURE_FAILED = "ErasureFailed", "The policy was deleted, and the erasure failed; a person has to decide."
    NAME_TAKEN = "NameTaken", "Another CacheInvalidation has the name of the one that erases for the deleted policy."
    CREATION_REFUSED = (
        "CreationRefused",
        "The policy was deleted, and the API server refuses the CacheInvalidation that erases for it.",
    )
    RECEIPT_MISSING = "ReceiptMissing", "The erasure for a deleted policy is over, and its receipt is not written."
    ABANDONING = "Abandoning", "The erasure for a deleted policy is given up; its receipt is being written."


class GroupReason(Meaningful):
    """Reasons on a TenantGroup."""

    NO_MEMBERS = (
        "NoMembers",
        "No policy of a listed tenant names the group; with sharing PoolsOnly, no listed tenant has a policy.",
    )
    ALL_MEMBERS_JOINED = (
        "AllMembersJoined",
        "A policy of every listed tenant names the group; with sharing PoolsOnly, every listed tenant has a policy.",
    )
    MEMBERS_WITHOUT_POLICY = (
        "MembersWithoutPolicy",
        "Some listed tenants have no policy that names the group; with sharing PoolsOnly, some have no policy.",
    )


class PoolReason(Meaningful):
    """Reasons on a PrefixPool."""

    TIER_NOT_IN_MODEL = "TierNotInModel", "The model does not list a CacheTier that the pool names, or has no tiers."
    TIER_NOT_ALLOWED = (
        "TierNotAllowed",
        "A named CacheTier takes data of some classifications only, and pools have no classification.",
    )
    TEMPLATE_ARGUMENTS_REFUSED = (
        "TemplateArgumentsRefused",
        "A prefix has chatTemplateKwargs that callers may not send, so no request could begin with it.",
    )
    SOURCE_NOT_FOUND = "SourceNotFound", "A named ConfigMap does not exist or lacks the key."
    SOURCE_REFUSED = (
        "SourceRefused",
        "A ConfigMap's key is not in the declared format, or the gate or the engine refuses the prefix, as it would "
        "refuse a caller's.",
    )
    PREFIX_TOO_LONG = "PrefixTooLong", "A prefix is longer than the engine accepts, or than a pool can hold."
    TOO_MANY_CHUNKS = "TooManyChunks", "All prefixes together have more chunks than a pool can hold."
    NO_WHOLE_CHUNK = (
        "NoWholeChunk",
        "The part of a prefix that no continuation changes is shorter than a chunk; the message has its tokens.",
    )
    UNSTABLE_TEMPLATE = (
        "UnstableTemplate",
        "The chat template makes different tokens of the same prefix at different times: it writes a date, a time or "
        "a random value.",
    )
    REPLICAS_DISAGREE = "ReplicasDisagree", "Pods that should be equal make different tokens of the same prefix."
    RENDERING = "Rendering", "Pods are rendering the prefixes into tokens."
    TOO_MANY_POOLS = "TooManyPools", "A CachedModel has more pools than its bundle has room for; the oldest are kept."
    WARMING = "Warming", "Pods are computing the chunks, or reporting which of them they hold."
    RENEWING = "Renewing", "The readers' content is computed again before its retention ends."
    WARMING_TIMED_OUT = (
        "WarmingTimedOut",
        "Not all chunks are stored within warmup.timeout; warming is repeated at intervals.",
    )
    RENDER_MISMATCH = (
        "RenderMismatch",
        "A real request with the prefix begins with other tokens than those that the prefix was rendered to.",
    )
    CHUNKS_LOST = "ChunksLost", "A tier lost chunks, which are being computed again."
    FINGERPRINT_CHANGED = (
        "FingerprintChanged",
        "Pods run another engine or other model files than those that computed the chunks, and compute them again.",
    )
    WARM = "Warm", "Every tier of the pool holds every chunk."
    PUBLISHED = "Published", "Every serving pod knows the readers' content."


class InvalidationReason(Meaningful):
    """Reasons on a CacheInvalidation."""

    ROLLING_EPOCHS = "RollingEpochs", "New epochs are being written."
    LOGICALLY_INVALID = (
        "LogicallyInvalid",
        "No pod can reach the data any more: each acknowledged or fenced itself off.",
    )
    LAZY_COMPLETE = "LazyComplete", "The data is unreachable; its bytes age out of each tier."
    TENANT_NOT_FOUND = "TenantNotFound", "No TenantCachePolicy of the namespace is for the tenant."
    POLICY_GONE = "PolicyGone", "The deleted TenantCachePolicy that it erases for is gone, or is not being deleted."
    GROUP_NOT_FOUND = "GroupNotFound", "The TenantGroup does not exist."
    SHARED_SCOPE_CHOICE_REQUIRED = (
        "SharedScopeChoiceRequired",
        "The tenant shares a scope: set sharedScopes to Roll or Exclude.",
    )
    PREFIX_NOT_ERASABLE = (
        "PrefixNotErasable",
        "A prefix cannot be erased with these settings: copies would be left where requests find them again.",
    )
    TOO_MANY_SCOPES = "TooManyScopes", "One invalidation takes 4,096 scopes, and an eager one 2,048."
    PREFIX_REFUSED = "PrefixRefused", "The prefix has no chunks that pods agree on, or too many."
    NAMING_CHUNKS = "NamingChunks", "Pods are naming the chunks of the prefix."
    NOTHING_TO_ERASE = "NothingToErase", "The named object has no scope of its own with an epoch."
    NOT_PROVEN = (
        "NotProven",
        "The CacheDomain's deletionDeadline passed, or a tier is gone that may hold blocks; the message has the rest.",
    )
    DEADLINE_EXCEEDED = "DeadlineExceeded", "The deadline passed before the invalidation was complete."
    REVOKING_KEYS = "RevokingKeys", "Data keys are being removed from their custody."
    DESTROYING_KEYS = "DestroyingKeys", "Every holder of the data keys is asked to confirm that they are gone."
    CUSTODY_AWAY = "CustodyAway", "The custody of the data keys does not answer; the erasure waits for it."
    KEYS_REVOKED = "KeysRevoked", "The data keys are gone from their custody and from every pod."
    KEYS_DESTROYED = "KeysDestroyed", "The custody confirmed that no copy of the data keys exists."
    KEYS_IN_SECRETS = "KeysInSecrets", "Data keys were in Secrets: etcd's history and backups may have copies."
    NOT_CONFIRMED = "NotConfirmed", "The custody has not confirmed that no copy of the data keys exists."
    WAITING_OUT_WRITES = "WaitingOutWrites", "Writes that began earlier may still arrive in shared tiers."
    TIER_AWAY = "TierAway", "Servers of a tier do not answer; the erasure waits for them."
    POD_GONE_MID_ERASE = "PodGoneMidErase", "A pod that acknowledged does not answer any more, or restarted."
    COPY_UNREACHABLE = "CopyUnreachable", "Copies are on a pod or a node that the erasure cannot reach."
    ENGINE_NOT_RESET = "EngineNotReset", "An engine cannot empty its prefix cache: its pod must end, or be replaced."
    ERASED = "Erased", "Every tier and every pod was emptied, and acknowledged it."
    VERIFYING = "Verifying", "The operator searches every server and asks every pod."
    SLOT_MAP_CHANGED = "SlotMapChanged", "Slots moved while a tier was searched; it is searched again."
    LATE_COPIES = "LateCopies", "Copies were found again after they had been deleted."
    NOT_VERIFIED = "NotVerified", "All orders are done, and the facts do not prove that all data is gone."
    VERIFIED = "Verified", "Every server was found empty, and every lookup in every pod missed."
    NOTHING_HELD = "NothingHeld", "No tier and no pod holds anything: nothing was held, or it ended with its pods."
    RECEIPTING = "Receipting", "The receipt is being written."
    RECEIPT_REFUSED = "ReceiptRefused", "The receipt cannot be appended to the domain's chain."
    ERASED_AND_VERIFIED = "ErasedAndVerified", "The data is gone, and a receipt proves it."
    COMPLETE_WITH_RESIDUE = (
        "CompleteWithResidue",
        "All reachable copies are erased; the receipt names the remaining ones.",
    )
    ABANDONED = "Abandoned", "A person gave the erasure up."
