"""Reasons: the words in conditions that programs may depend on, one enumeration for each kind.

Every member carries the sentence that documents it. Reasons that mean the same on several kinds have the same text.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Reason(StrEnum):
    """Base of the enumerations: a member is its text in the API and a sentence."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:
        """Make a member from its text in the API and its meaning."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member


_SUCCEEDED = ("ReconcileSucceeded", "Everything is as the spec says.")
_PROGRESSING = ("Progressing", "The operator is still working towards the spec.")
_INVALID_SPEC = ("InvalidSpec", "The spec cannot be read by this version; the last enforced one stays in force.")
_DELETING = ("Deleting", "The object is being deleted.")
_APPLY_FAILED = ("ApplyFailed", "The apiserver refused an object that belongs to this one.")
_AWAITING_ACKS = ("AwaitingAcks", "Some live pods have not acknowledged the newest policy yet.")
_ALL_ACKED = ("AllPodsAcked", "Every live pod acknowledged the newest policy.")
_NO_LIVE_PODS = ("NoLivePods", "There are no live pods that could enforce anything.")
_NOT_PROBED = ("NotProbed", "This version does not probe isolation, so nothing was proven.")
_BUDGET_ON_HBM = (
    "BudgetOnHBM",
    "A budget on a tier of medium HBM has guaranteed or limit; only retention is possible there.",
)
_TIER_NOT_FOUND = ("TierNotFound", "A CacheTier that is named does not exist.")
_OVERCOMMITTED = ("GuaranteesExceedCapacity", "The guarantees on a tier exceed its capacity.")
_NOT_IMPLEMENTED = ("NotImplemented", "The spec uses a field that this version validates but does not carry out.")


class CacheDomainReason(Reason):
    """Reasons on a CacheDomain."""

    RECONCILE_SUCCEEDED = _SUCCEEDED
    PROGRESSING = _PROGRESSING
    INVALID_SPEC = _INVALID_SPEC
    DELETING = _DELETING
    APPLY_FAILED = _APPLY_FAILED
    AWAITING_ACKS = _AWAITING_ACKS
    ALL_PODS_ACKED = _ALL_ACKED
    NO_LIVE_PODS = _NO_LIVE_PODS
    DOMAIN_KEY_MISSING = "DomainKeyMissing", "The Secret with the domain key is gone although scopes exist."
    DOMAIN_KEY_INVALID = "DomainKeyInvalid", "The Secret with the domain key cannot be read."
    BUDGET_ON_HBM = _BUDGET_ON_HBM
    TIER_NOT_FOUND = _TIER_NOT_FOUND


class CacheTierReason(Reason):
    """Reasons on a CacheTier."""

    RECONCILE_SUCCEEDED = _SUCCEEDED
    PROGRESSING = _PROGRESSING
    INVALID_SPEC = _INVALID_SPEC
    DELETING = _DELETING
    APPLY_FAILED = _APPLY_FAILED
    NOT_IMPLEMENTED = _NOT_IMPLEMENTED
    ENCRYPTION_UNAVAILABLE = (
        "EncryptionUnavailable",
        "Encryption is required, and this version cannot encrypt blocks; nothing is stored on the tier.",
    )
    ENCRYPTION_DISABLED = "EncryptionDisabled", "The spec says encryption: Disabled."
    NOT_AT_REST = "NotAtRest", "The medium is memory of a pod, which is not encrypted."
    MEDIUM_NOT_RECONCILED = "MediumNotReconciled", "This version does not provide tiers of this medium."
    CLUSTER_NOT_RECONCILED = (
        "ClusterNotReconciled",
        "This version runs one Redis server, not several shards or replicas.",
    )
    ENDPOINT_UNREACHABLE = "EndpointUnreachable", "No connection to the tier's servers could be made."
    AUTHENTICATION_FAILED = "AuthenticationFailed", "The tier's servers refused the password."
    TLS_FAILED = "TLSFailed", "The certificate of the tier's servers could not be verified."
    SECRET_NOT_FOUND = "SecretNotFound", "A Secret that is named does not exist or lacks a key."
    SERVERS_NOT_READY = "ServersNotReady", "The tier's servers are starting."
    REACHABLE = "Reachable", "The tier's servers answer."
    IN_POD = "InPod", "The tier lives inside the pods of the models that list it."
    WITHIN_CAPACITY = "WithinCapacity", "The guarantees fit into the capacity."
    GUARANTEES_EXCEED_CAPACITY = _OVERCOMMITTED


class CachedModelReason(Reason):
    """Reasons on a CachedModel."""

    RECONCILE_SUCCEEDED = _SUCCEEDED
    PROGRESSING = _PROGRESSING
    INVALID_SPEC = _INVALID_SPEC
    DELETING = _DELETING
    APPLY_FAILED = _APPLY_FAILED
    NOT_IMPLEMENTED = _NOT_IMPLEMENTED
    TIER_NOT_FOUND = _TIER_NOT_FOUND
    TIER_NOT_READY = "TierNotReady", "A CacheTier of the model is not ready; the model serves without it."
    TIER_STALLED = "TierStalled", "A CacheTier of the model is stalled; the model serves without it."
    TIERS_CONFLICT = "TiersConflict", "The list of tiers names two tiers of a medium of which a pod can have only one."
    TIERS_BOUND = "TiersBound", "Every tier exists and is ready."
    AUTHENTICATION_UNSUPPORTED = (
        "AuthenticationUnsupported",
        "This version authenticates callers by API keys only.",
    )
    REUSE_UNSUPPORTED = "ReuseUnsupported", "This version reuses equal beginnings only, not parts anywhere."
    TRANSFER_UNSUPPORTED = "TransferUnsupported", "This version moves blocks by shared memory only."
    TIMING_UNSUPPORTED = "TimingUnsupported", "This version does not pad the time of the first token."
    ADAPTER_UNSUPPORTED = "AdapterUnsupported", "This version does not load LoRA adapters."
    SECRET_NOT_FOUND = "SecretNotFound", "A Secret that is named does not exist or lacks a key."
    NAME_CONFLICT = "NameConflict", "An object that would belong to this model exists and belongs to someone else."
    CHUNK_SIZE_MISMATCH = "ChunkSizeMismatch", "The chunk size is not a multiple of the engine's block size."
    ROLLING_OUT = "RollingOut", "Some pods still run an older template."
    ROLLED_OUT = "RolledOut", "Every pod runs the newest template."
    ROLLOUT_STUCK = "RolloutStuck", "Pods do not become ready within startupTimeout."
    PODS_NOT_READY = "PodsNotReady", "Fewer pods are ready than spec asks for."
    SCALED_TO_ZERO = "ScaledToZero", "The spec asks for no replicas."
    AWAITING_ACKS = _AWAITING_ACKS
    ALL_PODS_ACKED = _ALL_ACKED
    NO_LIVE_PODS = _NO_LIVE_PODS
    BUNDLE_TOO_LARGE = "BundleTooLarge", "The compiled policy does not fit; the last one stays in force."
    NOT_PROBED = _NOT_PROBED
    PROBE_PASSED = "ProbePassed", "The last probe found no reuse between tenants that must not share."
    PROBE_FAILED = "ProbeFailed", "The last probe found reuse between tenants that must not share."


class TenantCachePolicyReason(Reason):
    """Reasons on a TenantCachePolicy."""

    RECONCILE_SUCCEEDED = _SUCCEEDED
    PROGRESSING = _PROGRESSING
    INVALID_SPEC = _INVALID_SPEC
    DELETING = _DELETING
    NOT_IMPLEMENTED = _NOT_IMPLEMENTED
    ADMITTED = "Admitted", "The policy was accepted and its guarantees were granted."
    TENANT_CONFLICT = "TenantConflict", "An older policy of the same namespace is for the same tenant; that one stands."
    GROUP_NOT_FOUND = "GroupNotFound", "The TenantGroup does not exist; the tenant stays isolated."
    NOT_A_MEMBER = "NotAMember", "The TenantGroup does not list the tenant; the tenant stays isolated."
    TIER_NOT_FOUND = _TIER_NOT_FOUND
    BUDGET_ON_HBM = _BUDGET_ON_HBM
    CLASSIFICATION_NOT_ALLOWED = (
        "ClassificationNotAllowed",
        "A tier does not allow the tenant's classification; nothing of the tenant is stored there.",
    )
    RETENTION_TOO_LONG = "RetentionTooLong", "The retention exceeds the tier's maxRetention, which applies instead."
    GUARANTEES_EXCEED_CAPACITY = _OVERCOMMITTED
    MODEL_NOT_FOUND = "ModelNotFound", "A CachedModel that the policy names does not exist."
    NO_MODELS = "NoModels", "There is no CachedModel that the policy is for."
    POOLS_UNSUPPORTED = "PoolsUnsupported", "This version does not reconcile PrefixPools."
    POOL_NOT_FOUND = "PoolNotFound", "A PrefixPool that the policy names does not exist."
    NOT_A_READER = "NotAReader", "A PrefixPool that the policy names does not list the tenant as a reader."
    NO_POOLS = "NoPools", "The policy names no PrefixPools."
    POOLS_RESOLVED = "PoolsResolved", "Every PrefixPool exists and lists the tenant as a reader."
    SUSPENDED = "Suspended", "Reuse is off for this tenant, because the spec says suspended: true."
    AWAITING_ACKS = _AWAITING_ACKS
    ALL_PODS_ACKED = _ALL_ACKED
    NO_LIVE_PODS = _NO_LIVE_PODS
    WITHIN_BUDGET = "WithinBudget", "The tenant stays below its limits."
    LIMIT_REACHED = "LimitReached", "The tenant has reached a limit; its own oldest blocks make room."
    USAGE_UNKNOWN = "UsageUnknown", "Usage has not been read yet."


class TenantGroupReason(Reason):
    """Reasons on a TenantGroup."""

    RECONCILE_SUCCEEDED = _SUCCEEDED
    PROGRESSING = _PROGRESSING
    INVALID_SPEC = _INVALID_SPEC
    DELETING = _DELETING
    NOT_IMPLEMENTED = _NOT_IMPLEMENTED
    ADMITTED = "Admitted", "The group was accepted and its guarantees were granted."
    TIER_NOT_FOUND = _TIER_NOT_FOUND
    BUDGET_ON_HBM = _BUDGET_ON_HBM
    GUARANTEES_EXCEED_CAPACITY = _OVERCOMMITTED
    NO_MEMBERS = "NoMembers", "No policy of a listed tenant names the group."
    AWAITING_ACKS = _AWAITING_ACKS
    ALL_PODS_ACKED = _ALL_ACKED
    NO_LIVE_PODS = _NO_LIVE_PODS
    WITHIN_BUDGET = "WithinBudget", "The group stays below its limits."
    LIMIT_REACHED = "LimitReached", "The group has reached a limit; its own oldest blocks make room."
    USAGE_UNKNOWN = "UsageUnknown", "Usage has not been read yet."


class PrefixPoolReason(Reason):
    """Reasons on a PrefixPool."""

    RECONCILE_SUCCEEDED = _SUCCEEDED
    PROGRESSING = _PROGRESSING
    INVALID_SPEC = _INVALID_SPEC
    DELETING = _DELETING
    POOLS_UNSUPPORTED = "PoolsUnsupported", "This version does not reconcile PrefixPools."
    MODEL_NOT_FOUND = "ModelNotFound", "The CachedModel does not exist."
    TIER_NOT_FOUND = _TIER_NOT_FOUND
    CONFIG_MAP_NOT_FOUND = "ConfigMapNotFound", "A ConfigMap that is named does not exist or lacks the key."
    UNSTABLE_TEMPLATE = "UnstableTemplate", "The chat template renders differently by date."
    WARMING = "Warming", "Prefixes are being computed."
    WARM = "Warm", "Every chunk is stored on every tier that the pool names."
    AWAITING_ACKS = _AWAITING_ACKS
    PUBLISHED = "Published", "Every live pod knows the pool's current content."


class CacheInvalidationReason(Reason):
    """Reasons on a CacheInvalidation."""

    PROGRESSING = _PROGRESSING
    INVALID_SPEC = _INVALID_SPEC
    DELETING = _DELETING
    NOT_IMPLEMENTED = _NOT_IMPLEMENTED
    PENDING = "Pending", "The invalidation has not begun."
    ROLLING = "Rolling", "New epochs are being written."
    AWAITING_ACKS = "AwaitingAcks", "Some pods have not acknowledged the new epochs yet."
    ALL_PODS_ACKED = "AllPodsAcked", "Every live pod acknowledged the new epochs."
    FENCED_OUT = "FencedOut", "Every pod acknowledged, or was unreachable for so long that it has fenced itself off."
    NO_LIVE_PODS = _NO_LIVE_PODS
    COMPLETE = "Complete", "The invalidation has done all that its mode asks for."
    SCOPE_NOT_FOUND = "ScopeNotFound", "The tenant, group, pool or model of the scope does not exist."
    SHARED_SCOPES_REQUIRED = (
        "SharedScopesRequired",
        "The tenant shares or shared a scope: sharedScopes must say whether that is rolled or left.",
    )
    EAGER_UNSUPPORTED = "EagerUnsupported", "This version makes data unreachable but does not erase it."
    PREFIX_UNSUPPORTED = "PrefixUnsupported", "This version cannot invalidate single prefixes."
    RESET_ENGINE_UNSUPPORTED = "ResetEngineUnsupported", "This version cannot empty the engines' prefix caches."
    TIER_NOT_FOUND = _TIER_NOT_FOUND
    COPY_UNREACHABLE = "CopyUnreachable", "A copy is where nobody can reach it."
    DEADLINE_EXCEEDED = "DeadlineExceeded", "The deadline passed before the invalidation was complete."


REASONS: dict[str, type[Reason]] = {
    "CacheDomain": CacheDomainReason,
    "CacheTier": CacheTierReason,
    "CachedModel": CachedModelReason,
    "TenantCachePolicy": TenantCachePolicyReason,
    "TenantGroup": TenantGroupReason,
    "PrefixPool": PrefixPoolReason,
    "CacheInvalidation": CacheInvalidationReason,
}
"""The enumeration of reasons of each kind."""
