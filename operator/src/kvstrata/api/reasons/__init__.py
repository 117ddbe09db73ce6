"""Reasons in conditions, on which programs may depend: one enumeration for each kind.

Every member has a sentence that documents it. Reasons that mean the same on several kinds have the same text.
"""

from __future__ import annotations

from kvstrata.api.reasons import texts
from kvstrata.api.reasons.invalidation import InvalidationReason
from kvstrata.api.reasons.texts import Reason
from kvstrata.api.reasons.tier import TierReason

__all__ = [
    "CHILD_REFUSED",
    "NAME_CONFLICT",
    "REASONS",
    "DomainReason",
    "GroupReason",
    "InvalidationReason",
    "ModelReason",
    "PolicyReason",
    "PoolReason",
    "Reason",
    "TierReason",
]


class DomainReason(Reason):
    """Reasons on a CacheDomain."""

    INVALID_SPEC = texts.INVALID_SPEC
    CREATING = "Creating", "The domain's identity and key are being generated."
    READY = "DomainReady", "The domain has its identity and key."
    KEY_LOST = "DomainKeyLost", "The Secret with the domain key is gone or unreadable although scopes exist."
    RESTORE_DETECTED = (
        "RestoreDetected",
        "A pod holds a newer bundle than the API server, which was restored from a backup; the key is being replaced.",
    )
    NAME_CONFLICT = texts.NAME_CONFLICT
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
    BUDGETS_NOT_ENFORCED = texts.BUDGETS_NOT_ENFORCED
    BUDGETS_ENFORCED = texts.BUDGETS_ENFORCED
    MEMORY_NOT_GOVERNED = texts.MEMORY_NOT_GOVERNED
    GUARANTEES_ADMITTED = texts.GUARANTEES_ADMITTED
    INSUFFICIENT_CAPACITY = texts.INSUFFICIENT_CAPACITY
    GUARANTEES_EXCEED_CAPACITY = texts.GUARANTEES_EXCEED_CAPACITY
    TIER_NOT_FOUND = texts.TIER_NOT_FOUND
    GUARANTEE_EXCEEDS_CAPACITY = texts.GUARANTEE_EXCEEDS_CAPACITY
    RETENTION_EXCEEDS_TIER = texts.RETENTION_EXCEEDS_TIER
    CLASSIFICATION_NOT_ALLOWED = texts.CLASSIFICATION_NOT_ALLOWED
    TIERS_ADMITTED = texts.TIERS_ADMITTED
    NO_MODELS = texts.NO_MODELS
    NOT_COMMITTED = texts.NOT_COMMITTED
    AWAITING_ACKS = texts.AWAITING_ACKS
    ALL_PODS_ACKNOWLEDGED = texts.ALL_ACKED
    NO_LIVE_PODS = texts.NO_LIVE_PODS


class ModelReason(Reason):
    """Reasons on a CachedModel."""

    INVALID_SPEC = texts.INVALID_SPEC
    WAITING_FOR_DOMAIN = texts.WAITING_FOR_DOMAIN
    SECRET_NOT_FOUND = texts.SECRET_NOT_FOUND
    READY = "ModelReady", "The model serves, and its pods enforce the newest policy."
    TIERS_BOUND = "TiersBound", "Every tier exists and can be used."
    TIER_NOT_FOUND = texts.TIER_NOT_FOUND
    TIER_NOT_READY = "TierNotReady", "A CacheTier of the model is not ready; the model serves without it."
    TIERS_CONFLICT = texts.TIERS_CONFLICT
    TIERS_ORDERED = "TiersOrdered", "Tiers are listed from fast to slow, and none is smaller than a faster one."
    NOT_FAST_TO_SLOW = "NotFastToSlow", "A tier in memory is listed behind a slower one; pods still use it first."
    LOWER_TIER_SMALLER = (
        "LowerTierSmaller",
        "A tier is smaller than a faster one, so it has evicted most of the blocks that the faster one evicts.",
    )
    WARMUP_NEEDS_TIERS = (
        "WarmupNeedsTiers",
        "A warm start is configured, and the model has no memory tier, or no slower tier to load it from.",
    )
    TIER_STALLED = "TierStalled", "A CacheTier of the model is stalled; the model serves without it."
    NAME_CONFLICT = texts.NAME_CONFLICT
    CHILD_REFUSED = texts.CHILD_REFUSED
    PODS_REPORT_PROBLEM = (
        "PodsReportProblem",
        "A pod cannot read its policy or its API keys.",
    )
    ROLLING_OUT = texts.ROLLING_OUT
    ROLLED_OUT = "RolledOut", "Every pod runs the newest template."
    ROLLOUT_STUCK = "RolloutStuck", "Pods do not become ready within startupTimeout."
    PODS_NOT_READY = "PodsNotReady", "Fewer pods are ready than the spec asks for."
    SCALED_TO_ZERO = "ScaledToZero", "The spec asks for no replicas."
    NOT_COMMITTED = texts.NOT_COMMITTED
    AWAITING_ACKS = texts.AWAITING_ACKS
    ALL_PODS_ACKNOWLEDGED = texts.ALL_ACKED
    NO_LIVE_PODS = texts.NO_LIVE_PODS
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
    PROBE_UNSUPPORTED = "ProbeUnsupported", "A pod runs a version that cannot be probed."


class PolicyReason(Reason):
    """Reasons on a TenantCachePolicy."""

    INVALID_SPEC = texts.INVALID_SPEC
    WAITING_FOR_DOMAIN = texts.WAITING_FOR_DOMAIN
    ACCEPTED = "Accepted", "The policy was accepted."
    TENANT_CONFLICT = (
        "TenantConflict",
        "An older policy of the same namespace is for the same tenant; the older one stays in force.",
    )
    GROUP_NOT_FOUND = "GroupNotFound", "The TenantGroup does not exist; the tenant stays isolated."
    NOT_A_MEMBER = "NotAMember", "The TenantGroup does not list the tenant; the tenant stays isolated."
    TIER_NOT_FOUND = texts.TIER_NOT_FOUND
    MODEL_NOT_FOUND = texts.MODEL_NOT_FOUND
    NO_MODELS = texts.NO_MODELS
    GUARANTEE_EXCEEDS_CAPACITY = texts.GUARANTEE_EXCEEDS_CAPACITY
    RETENTION_EXCEEDS_TIER = texts.RETENTION_EXCEEDS_TIER
    CLASSIFICATION_NOT_ALLOWED = texts.CLASSIFICATION_NOT_ALLOWED
    TIERS_ADMITTED = texts.TIERS_ADMITTED
    LAST_VALID_IN_FORCE = "LastValidInForce", "This spec is not in force; the last valid one still is."
    NEVER_ENFORCED = "NeverEnforced", "No valid version of this policy was ever in force."
    NOT_COMMITTED = texts.NOT_COMMITTED
    AWAITING_KEYS = texts.AWAITING_KEYS
    AWAITING_ACKS = texts.AWAITING_ACKS
    ALL_PODS_ACKNOWLEDGED = texts.ALL_ACKED
    NO_LIVE_PODS = texts.NO_LIVE_PODS
    BUDGETS_NOT_ENFORCED = texts.BUDGETS_NOT_ENFORCED
    BUDGETS_ENFORCED = texts.BUDGETS_ENFORCED
    MEMORY_NOT_GOVERNED = texts.MEMORY_NOT_GOVERNED
    GUARANTEES_ADMITTED = texts.GUARANTEES_ADMITTED
    INSUFFICIENT_CAPACITY = texts.INSUFFICIENT_CAPACITY
    GUARANTEES_EXCEED_CAPACITY = texts.GUARANTEES_EXCEED_CAPACITY
    POOLS_RESOLVED = "PoolsResolved", "The tenant may read every PrefixPool that the policy lists."
    POOL_NOT_FOUND = texts.POOL_NOT_FOUND
    POOL_OF_OTHER_MODEL = "PoolOfOtherModel", "A PrefixPool is of a CachedModel that the policy does not select."
    NOT_A_READER = "NotAReader", "A PrefixPool does not list the tenant among its readers."
    NARROWED_BY_SCOPE = (
        "NarrowedByScope",
        "Another tenant of the same scope may not read a PrefixPool, so none of the scope does.",
    )
    ERASES = "Erases", "Deleting the policy erases the tenant's cached data, and leaves a receipt."
    SHARES_ALL = "SharesAll", "The tenant shares all its blocks, so deleting the policy erases nothing."
    BEING_DELETED = "BeingDeleted", "The policy is being deleted; its tenant's requests reuse nothing any more."
    ERASING = texts.ERASING
    ERASURE_FAILED = "ErasureFailed", "The policy was deleted, and the erasure failed; a person has to decide."
    NAME_TAKEN = "NameTaken", "Another CacheInvalidation has the name of the one that erases for the deleted policy."
    CREATION_REFUSED = (
        "CreationRefused",
        "The policy was deleted, and the API server refuses the CacheInvalidation that erases for it.",
    )
    RECEIPT_MISSING = "ReceiptMissing", "The erasure for a deleted policy is over, and its receipt is not written."
    ABANDONING = "Abandoning", "The erasure for a deleted policy is given up; its receipt is being written."


class GroupReason(Reason):
    """Reasons on a TenantGroup."""

    INVALID_SPEC = texts.INVALID_SPEC
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
    TIER_NOT_FOUND = texts.TIER_NOT_FOUND
    GUARANTEE_EXCEEDS_CAPACITY = texts.GUARANTEE_EXCEEDS_CAPACITY
    RETENTION_EXCEEDS_TIER = texts.RETENTION_EXCEEDS_TIER
    CLASSIFICATION_NOT_ALLOWED = texts.CLASSIFICATION_NOT_ALLOWED
    TIERS_ADMITTED = texts.TIERS_ADMITTED
    BUDGETS_NOT_ENFORCED = texts.BUDGETS_NOT_ENFORCED
    BUDGETS_ENFORCED = texts.BUDGETS_ENFORCED
    MEMORY_NOT_GOVERNED = texts.MEMORY_NOT_GOVERNED
    GUARANTEES_ADMITTED = texts.GUARANTEES_ADMITTED
    INSUFFICIENT_CAPACITY = texts.INSUFFICIENT_CAPACITY
    GUARANTEES_EXCEED_CAPACITY = texts.GUARANTEES_EXCEED_CAPACITY
    NOT_COMMITTED = texts.NOT_COMMITTED
    AWAITING_ACKS = texts.AWAITING_ACKS
    ALL_PODS_ACKNOWLEDGED = texts.ALL_ACKED
    NO_LIVE_PODS = texts.NO_LIVE_PODS


class PoolReason(Reason):
    """Reasons on a PrefixPool."""

    INVALID_SPEC = texts.INVALID_SPEC
    WAITING_FOR_DOMAIN = texts.WAITING_FOR_DOMAIN
    MODEL_NOT_FOUND = texts.MODEL_NOT_FOUND
    TIER_NOT_FOUND = texts.TIER_NOT_FOUND
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
    ROLLING_OUT = texts.ROLLING_OUT
    NO_LIVE_PODS = texts.NO_LIVE_PODS
    PODS_TOO_OLD = "PodsTooOld", "Pods run a version that cannot render prefixes; they have to be replaced."
    TOO_MANY_POOLS = "TooManyPools", "A CachedModel has more pools than its bundle has room for; the oldest are kept."
    NOT_COMMITTED = texts.NOT_COMMITTED
    AWAITING_ACKS = texts.AWAITING_ACKS
    AWAITING_KEYS = texts.AWAITING_KEYS
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
    WARM = "Warm", "Every tier of the pool holds every chunk."
    PUBLISHED = "Published", "Every serving pod knows the readers' content."
    GUARANTEES_ADMITTED = texts.GUARANTEES_ADMITTED
    INSUFFICIENT_CAPACITY = texts.INSUFFICIENT_CAPACITY
    GUARANTEES_EXCEED_CAPACITY = texts.GUARANTEES_EXCEED_CAPACITY
    BUDGETS_ENFORCED = texts.BUDGETS_ENFORCED
    BUDGETS_NOT_ENFORCED = texts.BUDGETS_NOT_ENFORCED
    MEMORY_NOT_GOVERNED = texts.MEMORY_NOT_GOVERNED


CHILD_REFUSED, NAME_CONFLICT = texts.CHILD_REFUSED[0], texts.NAME_CONFLICT[0]
"""Reasons of every kind that has objects of its own."""

REASONS: dict[str, type[Reason]] = {
    "CacheDomain": DomainReason,
    "CacheTier": TierReason,
    "CachedModel": ModelReason,
    "TenantCachePolicy": PolicyReason,
    "TenantGroup": GroupReason,
    "PrefixPool": PoolReason,
    "CacheInvalidation": InvalidationReason,
}
"""The enumeration of reasons of each kind."""
