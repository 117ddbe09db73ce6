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


_SETTLED = ("Settled", "There is nothing left to do for this generation.")
_PROGRESSING = ("Progressing", "The operator is still working towards the spec.")
_INVALID_SPEC = ("InvalidSpec", "This version cannot read the spec; the last enforced one stays in force.")
_NOT_COMMITTED = ("NotCommitted", "The change is not in every bundle yet; it is being written.")
_AWAITING_ACKS = ("AwaitingAcks", "Some live pods have not acknowledged yet.")
_ALL_ACKED = ("AllPodsAcknowledged", "Every live pod acknowledged.")
_NO_LIVE_PODS = ("NoLivePods", "No pod serves, so there is nobody to enforce anything.")
_NO_MODELS = ("NoModels", "There is no CachedModel that this is for.")
_WAITING_FOR_DOMAIN = ("WaitingForDomain", "The domain's identity, key or epochs are being drawn.")
_ROLLING_OUT = ("RollingOut", "Some pods still run an older template.")
_MODEL_NOT_FOUND = ("ModelNotFound", "A CachedModel that is named does not exist.")
_TIER_NOT_FOUND = ("TierNotFound", "A CacheTier that is named does not exist.")
_POOL_NOT_FOUND = ("PoolNotFound", "A PrefixPool that is named does not exist.")
_AWAITING_KEYS = (
    "AwaitingKeys",
    "A data key is being drawn, or a serving pod has not said that it encrypts and has the keys of all keyspaces of "
    "its policy.",
)
_SECRET_NOT_FOUND = ("SecretNotFound", "A Secret that is named does not exist or lacks a key.")
_CHILD_REFUSED = (
    "ChildRefused",
    "The API server refuses an object that belongs to this one; the message has its name and the API server's words.",
)
_SECRET_NOT_ALLOWED = ("SecretNotAllowed", "A Secret that is named belongs to the operator.")
_BUDGETS_NOT_ENFORCED = (
    "BudgetsNotEnforced",
    "Nobody says that budgets are kept: this version keeps none on this medium, or a pod does not say so.",
)
_BUDGETS_ENFORCED = ("BudgetsEnforced", "Every serving pod keeps within the budgets.")
_MEMORY_NOT_GOVERNED = (
    "MemoryNotGoverned",
    "A pod does not say that it keeps its memory within budgets; it may run an older version.",
)
_GUARANTEES_EXCEED_CAPACITY = (
    "GuaranteesExceedCapacity",
    "Pods were told of more guarantees than a tier can keep now, and are being told which of them stand. Meanwhile "
    "each is cut by the same share in pods, and on Redis the server refuses blocks for want of memory.",
)
_GUARANTEES_ADMITTED = ("GuaranteesAdmitted", "All declared guarantees are reserved.")
_INSUFFICIENT_CAPACITY = (
    "InsufficientCapacity",
    "A tier has no room for a guarantee beside those that others have, or older ones wait for; it counts as none until "
    "there is room, and limits hold.",
)
_BUDGET_NOT_SUPPORTED = (
    "BudgetNotSupported",
    "A budget on a tier of medium HBM has guaranteed or limit, where only retention is possible; or a group that "
    "shares pools only has budgets.",
)
_GUARANTEE_EXCEEDS_CAPACITY = (
    "GuaranteeExceedsCapacity",
    "A guarantee is more than blocks may take of its tier's capacity.",
)
_RETENTION_EXCEEDS_TIER = ("RetentionExceedsTier", "A retention is longer than the tier's maxRetention.")
_TIERS_CONFLICT = (
    "TiersConflict",
    "Two CacheTiers exclude each other: a pod can have only one of their medium, or both are on one Redis server.",
)
_NO_BUDGET = ("NoBudget", "No limit is set.")
_CLASSIFICATION_NOT_ALLOWED = (
    "ClassificationNotAllowed",
    "A tier does not take data of this classification; pods keep it off.",
)
_TIERS_ADMITTED = ("TiersAdmitted", "Every tier of the models takes data of this classification.")


class DomainReason(Reason):
    """Reasons on a CacheDomain."""

    SETTLED = _SETTLED
    PROGRESSING = _PROGRESSING
    INVALID_SPEC = _INVALID_SPEC
    CREATING = "Creating", "The domain's identity and key are being drawn."
    READY = "DomainReady", "The domain has its identity and key."
    KEY_LOST = "DomainKeyLost", "The Secret with the domain key is gone or unreadable although scopes exist."
    BUDGETS_NOT_ENFORCED = _BUDGETS_NOT_ENFORCED
    BUDGETS_ENFORCED = _BUDGETS_ENFORCED
    MEMORY_NOT_GOVERNED = _MEMORY_NOT_GOVERNED
    GUARANTEES_ADMITTED = _GUARANTEES_ADMITTED
    INSUFFICIENT_CAPACITY = _INSUFFICIENT_CAPACITY
    GUARANTEES_EXCEED_CAPACITY = _GUARANTEES_EXCEED_CAPACITY
    TIER_NOT_FOUND = _TIER_NOT_FOUND
    BUDGET_NOT_SUPPORTED = _BUDGET_NOT_SUPPORTED
    GUARANTEE_EXCEEDS_CAPACITY = _GUARANTEE_EXCEEDS_CAPACITY
    RETENTION_EXCEEDS_TIER = _RETENTION_EXCEEDS_TIER
    CLASSIFICATION_NOT_ALLOWED = _CLASSIFICATION_NOT_ALLOWED
    TIERS_ADMITTED = _TIERS_ADMITTED
    NO_MODELS = _NO_MODELS
    NOT_COMMITTED = _NOT_COMMITTED
    AWAITING_ACKS = _AWAITING_ACKS
    ALL_PODS_ACKNOWLEDGED = _ALL_ACKED
    NO_LIVE_PODS = _NO_LIVE_PODS
    NO_BUDGET = _NO_BUDGET


class TierReason(Reason):
    """Reasons on a CacheTier."""

    SECRET_NOT_ALLOWED = _SECRET_NOT_ALLOWED
    SETTLED = _SETTLED
    PROGRESSING = _PROGRESSING
    INVALID_SPEC = _INVALID_SPEC
    SECRET_NOT_FOUND = _SECRET_NOT_FOUND
    SECRET_UNREADABLE = "SecretUnreadable", "The password in a Secret that is named is not UTF-8 text."
    READY = "TierReady", "The tier can be used."
    IN_POD = "InPod", "The tier lives inside the pods of the models that list it."
    KEYS_HELD = "KeysHeld", "Every serving pod encrypts, and has the keys of all keyspaces of its policy."
    AWAITING_KEYS = _AWAITING_KEYS
    PLAINTEXT_LEFT = (
        "PlaintextLeft",
        "Blocks may be left that were stored before the tier required encryption; pods look for them and delete them.",
    )
    NO_LIVE_PODS = _NO_LIVE_PODS
    ENCRYPTION_DISABLED = "EncryptionDisabled", "The spec says encryption: Disabled."
    NOT_AT_REST = "NotAtRest", "The medium is memory of a pod, which is not encrypted."
    TIERS_CONFLICT = _TIERS_CONFLICT
    CLASSIFICATION_NOT_SUPPORTED = (
        "ClassificationNotSupported",
        "The engine's own memory holds every request, so that no data can be kept off it by its classification.",
    )
    NAME_CONFLICT = "NameConflict", "An object that would belong to this one exists and belongs to someone else."
    CHILD_REFUSED = _CHILD_REFUSED
    BUDGETS_NOT_ENFORCED = _BUDGETS_NOT_ENFORCED
    GUARANTEES_FIT = "GuaranteesFit", "All declared guarantees together fit into what blocks may take of the capacity."
    GUARANTEES_EXCEED_CAPACITY = _GUARANTEES_EXCEED_CAPACITY
    GUARANTEES_WAITING = (
        "GuaranteesWaiting",
        "Guarantees that do not fit any more wait for room; those that are admitted fit.",
    )
    EVICTS_OWN_BLOCKS = "EvictsOwnBlocks", "A scope that finds no room makes it among its own blocks."
    SERVER_TOO_SMALL = "ServerTooSmall", "The server may hold less than blocks may take of the tier's capacity."
    EVICTION_NOT_RECONCILED = "EvictionNotReconciled", "This version does not evict from this medium or in this order."
    REMOVED_IN_TIME = "RemovedInTime", "Pods remove blocks that have reached the tier's maxRetention."
    RETENTION_NOT_RECONCILED = "RetentionNotReconciled", "This version does not keep maxRetention on this medium."
    EXPIRES_BY_ITSELF = "ExpiresByItself", "Each block gets its time to live when it is stored."
    ROOM_LEFT = "RoomLeft", "The server has memory for new blocks, or makes room itself."
    OUT_OF_MEMORY = "OutOfMemory", "The server holds all that it may and refuses new blocks for now."
    DISK_FULL = "DiskFull", "The disk of a pod's files has no room for new blocks for now."
    DISK_READ_ONLY = "DiskReadOnly", "The file system of a pod's files takes no writing."
    FLOOR_REACHED = "FloorReached", "Files may take less than the capacity, because the file system has little left."
    REACHABLE = "Reachable", "The tier's servers answer, or pods use its files."
    PODS_DISCONNECTED = "PodsDisconnected", "Pods do not reach the tier's server, or do not use its files."
    UNREACHABLE = "Unreachable", "There is no route to the tier's server."
    CONNECTION_REFUSED = "ConnectionRefused", "Nothing listens at the tier's address."
    TIMEOUT = "Timeout", "The tier's server did not answer in time."
    NO_SUCH_HOST = "NoSuchHost", "The host of the tier's address cannot be resolved."
    TLS_FAILED = "TLSFailed", "The server does not speak TLS as expected."
    CERTIFICATE_REFUSED = "CertificateRefused", "The server's certificate is not trusted or names another host."
    WRONG_PASSWORD = "WrongPassword", "The server refuses the password."
    PASSWORD_REQUIRED = "PasswordRequired", "The server asks for a password and none is configured."
    PASSWORD_UNEXPECTED = "PasswordUnexpected", "A password is configured and the server has none."
    NO_PERMISSION = "NoPermission", "The user may not ask the server for its state."
    LOADING = "Loading", "The server is loading its data."
    NOT_REDIS = "NotRedis", "What answers at the tier's address is no Redis server."
    DISCONNECTED = "Disconnected", "The server closed the connection; it may expect TLS."
    INVALID_ENDPOINT = "InvalidEndpoint", "The tier's address is not of the form host:port."
    INVALID_CERTIFICATE_AUTHORITY = "InvalidCertificateAuthority", "The certificate authority is not PEM."
    ERROR = "Error", "The server answered with an error."
    SUITABLE = "Suitable", "The external servers passed every check."
    CLUSTER_MODE_MISMATCH = (
        "ClusterModeMismatch",
        "A server is in cluster mode and spec.redis.external.cluster is not true, or the other way round.",
    )
    READ_ONLY_REPLICA = "ReadOnlyReplica", "The server at the tier's address is a replica, which takes no blocks."
    TOO_OLD = "TooOld", "A server is older than Redis 7.0, whose commands and script rules are needed."
    MISSING_PERMISSIONS = (
        "MissingPermissions",
        "The user may not run a command that pods need, or not on the domain's keys; the message names which.",
    )
    SLOTS_COVERED = "SlotsCovered", "All slots of the cluster have a server that answers."
    REPLICAS_IN_STEP = "ReplicasInStep", "Every primary has all its replicas in step."
    REPLICAS_MISSING = "ReplicasMissing", "Servers of the cluster are missing, do not answer, or are not in step."
    NO_REPLICAS = "NoReplicas", "The spec asks for no replicas: what a lost server held are misses."
    COMMAND_FAILED = "CommandFailed", "A server of the cluster refused a command; it is tried again."
    SLOTS_UNCOVERED = "SlotsUncovered", "Slots of the cluster belong to no server."
    SERVERS_AWAY = "ServersAway", "Servers that have slots of the cluster do not answer the operator."
    NOT_NOEVICTION = (
        "NotNoeviction",
        "A server's maxmemory-policy is not noeviction, so it may delete any tenant's blocks, guaranteed or not. A "
        "warning: the tier is used.",
    )
    MEMORY_UNBOUNDED = (
        "MemoryUnbounded",
        "A server has no maxmemory, so nothing but the node's memory bounds it. A warning: the tier is used.",
    )
    PASSWORDS_SET = "PasswordsSet", "Every server admits the passwords of the Secret and no others."
    PASSWORDS_OVERLAP = (
        "PasswordsOverlap",
        "New passwords are used, and the previous ones still admitted, because pods read files of Secrets late.",
    )
    PASSWORDS_OVERDUE = "PasswordsOverdue", "A rotation is due and waits for a server that does not answer."
    ROTATING_PASSWORDS = "RotatingPasswords", "Servers come to admit new passwords, which nobody uses yet."
    SETTING_USERS = "SettingUsers", "A server has other users or passwords than the Secret says, and is told."
    PASSWORDS_LOST = (
        "PasswordsLost",
        "A server was started with passwords that no Secret holds any more, so that its pod is replaced.",
    )
    CERTIFICATE_SHOWN = "CertificateShown", "Every server shows the certificate of the Secret."
    LOADING_CERTIFICATE = "LoadingCertificate", "A server does not show the certificate of the Secret yet, and is told."
    CHANGING_AUTHORITY = "ChangingAuthority", "Clients trust two authorities while one takes the other's place."
    CERTIFICATE_EXPIRED = "CertificateExpired", "The certificate in the Secret is not valid any more."
    INVALID_TLS_SECRET = (
        "InvalidTlsSecret",
        "The Secret with the servers' certificate lacks a key, or what is in it does not fit together.",
    )


class ModelReason(Reason):
    """Reasons on a CachedModel."""

    SECRET_NOT_ALLOWED = _SECRET_NOT_ALLOWED
    SETTLED = _SETTLED
    PROGRESSING = _PROGRESSING
    INVALID_SPEC = _INVALID_SPEC
    WAITING_FOR_DOMAIN = _WAITING_FOR_DOMAIN
    SECRET_NOT_FOUND = _SECRET_NOT_FOUND
    READY = "ModelReady", "The model serves, and its pods enforce the newest policy."
    TIERS_BOUND = "TiersBound", "Every tier exists and can be used."
    TIER_NOT_FOUND = _TIER_NOT_FOUND
    TIER_NOT_READY = "TierNotReady", "A CacheTier of the model is not ready; the model serves without it."
    TIERS_CONFLICT = _TIERS_CONFLICT
    TIERS_ORDERED = "TiersOrdered", "Tiers are listed from fast to slow, and none is smaller than a faster one."
    NOT_FAST_TO_SLOW = (
        "NotFastToSlow",
        "A tier in memory is listed behind a slower one; it serves before it all the same.",
    )
    LOWER_TIER_SMALLER = (
        "LowerTierSmaller",
        "A tier holds less than a faster one, so it has mostly let go of what that one has no room for.",
    )
    AUTHENTICATION_NOT_RECONCILED = (
        "AuthenticationNotReconciled",
        "This version authenticates callers by API keys only.",
    )
    REUSE_NOT_RECONCILED = "ReuseNotReconciled", "This version reuses equal beginnings only, not parts anywhere."
    TIMING_NOT_RECONCILED = "TimingNotReconciled", "This version does not pad the time of the first token."
    ADAPTER_NOT_RECONCILED = "AdapterNotReconciled", "This version does not load LoRA adapters."
    WARMUP_NEEDS_TIERS = (
        "WarmupNeedsTiers",
        "A warm start is asked for, and the model has no memory tier or no slower one to load it from.",
    )
    CHUNK_SIZE_MISMATCH = "ChunkSizeMismatch", "The chunk size is not a multiple of the engine's block size."
    TIER_STALLED = "TierStalled", "A CacheTier of the model is stalled; the model serves without it."
    NAME_CONFLICT = "NameConflict", "An object that would belong to this one exists and belongs to someone else."
    CHILD_REFUSED = _CHILD_REFUSED
    PODS_REPORT_PROBLEM = (
        "PodsReportProblem",
        "A pod cannot read its policy or its API keys.",
    )
    ROLLING_OUT = _ROLLING_OUT
    ROLLED_OUT = "RolledOut", "Every pod runs the newest template."
    ROLLOUT_STUCK = "RolloutStuck", "Pods do not become ready within startupTimeout."
    PODS_NOT_READY = "PodsNotReady", "Fewer pods are ready than spec asks for."
    SCALED_TO_ZERO = "ScaledToZero", "The spec asks for no replicas."
    NOT_COMMITTED = _NOT_COMMITTED
    AWAITING_ACKS = _AWAITING_ACKS
    ALL_PODS_ACKNOWLEDGED = _ALL_ACKED
    NO_LIVE_PODS = _NO_LIVE_PODS
    NOT_PROBED = "NotProbed", "This version does not probe isolation, so nothing was proven."


class PolicyReason(Reason):
    """Reasons on a TenantCachePolicy."""

    SETTLED = _SETTLED
    PROGRESSING = _PROGRESSING
    INVALID_SPEC = _INVALID_SPEC
    WAITING_FOR_DOMAIN = _WAITING_FOR_DOMAIN
    ACCEPTED = "Accepted", "The policy was accepted."
    TENANT_CONFLICT = "TenantConflict", "An older policy of the same namespace is for the same tenant; that one stands."
    GROUP_NOT_FOUND = "GroupNotFound", "The TenantGroup does not exist; the tenant stays isolated."
    NOT_A_MEMBER = "NotAMember", "The TenantGroup does not list the tenant; the tenant stays isolated."
    TIER_NOT_FOUND = _TIER_NOT_FOUND
    MODEL_NOT_FOUND = _MODEL_NOT_FOUND
    NO_MODELS = _NO_MODELS
    BUDGET_NOT_SUPPORTED = _BUDGET_NOT_SUPPORTED
    GUARANTEE_EXCEEDS_CAPACITY = _GUARANTEE_EXCEEDS_CAPACITY
    RETENTION_EXCEEDS_TIER = _RETENTION_EXCEEDS_TIER
    CLASSIFICATION_NOT_ALLOWED = _CLASSIFICATION_NOT_ALLOWED
    TIERS_ADMITTED = _TIERS_ADMITTED
    LAST_VALID_IN_FORCE = "LastValidInForce", "This spec is not in force; the last valid one still is."
    NEVER_ENFORCED = "NeverEnforced", "No valid version of this policy was ever in force."
    NOT_COMMITTED = _NOT_COMMITTED
    AWAITING_KEYS = _AWAITING_KEYS
    AWAITING_ACKS = _AWAITING_ACKS
    ALL_PODS_ACKNOWLEDGED = _ALL_ACKED
    NO_LIVE_PODS = _NO_LIVE_PODS
    NO_BUDGET = _NO_BUDGET
    BUDGETS_NOT_ENFORCED = _BUDGETS_NOT_ENFORCED
    BUDGETS_ENFORCED = _BUDGETS_ENFORCED
    MEMORY_NOT_GOVERNED = _MEMORY_NOT_GOVERNED
    GUARANTEES_ADMITTED = _GUARANTEES_ADMITTED
    INSUFFICIENT_CAPACITY = _INSUFFICIENT_CAPACITY
    GUARANTEES_EXCEED_CAPACITY = _GUARANTEES_EXCEED_CAPACITY
    NO_POOLS = "NoPools", "The policy reads no PrefixPool."
    POOLS_RESOLVED = "PoolsResolved", "The tenant may read every PrefixPool that the policy lists."
    POOL_NOT_FOUND = _POOL_NOT_FOUND
    POOL_OF_OTHER_MODEL = "PoolOfOtherModel", "A PrefixPool is of a CachedModel that the policy does not select."
    NOT_A_READER = "NotAReader", "A PrefixPool does not list the tenant among its readers."
    NARROWED_BY_SCOPE = (
        "NarrowedByScope",
        "Another tenant of the same scope may not read a PrefixPool, so none of the scope does.",
    )
    ERASURE_NOT_RECONCILED = (
        "ErasureNotReconciled",
        "This version makes data unreachable when the policy is deleted, but does not erase it.",
    )


class GroupReason(Reason):
    """Reasons on a TenantGroup."""

    SETTLED = _SETTLED
    PROGRESSING = _PROGRESSING
    INVALID_SPEC = _INVALID_SPEC
    NO_MEMBERS = "NoMembers", "No policy of a listed tenant names the group, or none is there with sharing PoolsOnly."
    ALL_MEMBERS_JOINED = (
        "AllMembersJoined",
        "A policy of every listed tenant names the group, or is there with sharing PoolsOnly.",
    )
    MEMBERS_WITHOUT_POLICY = (
        "MembersWithoutPolicy",
        "Some listed tenants have no policy that names the group, or none at all with sharing PoolsOnly.",
    )
    TIER_NOT_FOUND = _TIER_NOT_FOUND
    BUDGET_NOT_SUPPORTED = _BUDGET_NOT_SUPPORTED
    GUARANTEE_EXCEEDS_CAPACITY = _GUARANTEE_EXCEEDS_CAPACITY
    RETENTION_EXCEEDS_TIER = _RETENTION_EXCEEDS_TIER
    CLASSIFICATION_NOT_ALLOWED = _CLASSIFICATION_NOT_ALLOWED
    TIERS_ADMITTED = _TIERS_ADMITTED
    BUDGETS_NOT_ENFORCED = _BUDGETS_NOT_ENFORCED
    BUDGETS_ENFORCED = _BUDGETS_ENFORCED
    MEMORY_NOT_GOVERNED = _MEMORY_NOT_GOVERNED
    GUARANTEES_ADMITTED = _GUARANTEES_ADMITTED
    INSUFFICIENT_CAPACITY = _INSUFFICIENT_CAPACITY
    GUARANTEES_EXCEED_CAPACITY = _GUARANTEES_EXCEED_CAPACITY
    NO_BUDGET = _NO_BUDGET
    NOT_COMMITTED = _NOT_COMMITTED
    AWAITING_ACKS = _AWAITING_ACKS
    ALL_PODS_ACKNOWLEDGED = _ALL_ACKED
    NO_LIVE_PODS = _NO_LIVE_PODS


class PoolReason(Reason):
    """Reasons on a PrefixPool."""

    SETTLED = _SETTLED
    PROGRESSING = _PROGRESSING
    INVALID_SPEC = _INVALID_SPEC
    WAITING_FOR_DOMAIN = _WAITING_FOR_DOMAIN
    MODEL_NOT_FOUND = _MODEL_NOT_FOUND
    TIER_NOT_FOUND = _TIER_NOT_FOUND
    TIER_NOT_IN_MODEL = "TierNotInModel", "A CacheTier that is named is none of the model's, or the model has none."
    TIER_NOT_SUPPORTED = (
        "TierNotSupported",
        "Pools cannot be kept on a tier of medium HBM, where blocks cannot be shared.",
    )
    TIER_NOT_ALLOWED = (
        "TierNotAllowed",
        "A CacheTier that is named takes data of some classifications only, and pools have none.",
    )
    TEMPLATE_ARGUMENTS_REFUSED = (
        "TemplateArgumentsRefused",
        "A prefix has chatTemplateKwargs that no caller may send, so that no request could begin with it.",
    )
    SOURCE_NOT_FOUND = "SourceNotFound", "A ConfigMap that is named does not exist or lacks the key."
    SOURCE_REFUSED = (
        "SourceRefused",
        "A ConfigMap's key does not hold what its format says, or the gate or the engine refuses the prefix as they "
        "would refuse a caller's.",
    )
    PREFIX_TOO_LONG = "PrefixTooLong", "A prefix is longer than what the engine takes, or than a pool can hold."
    TOO_MANY_CHUNKS = "TooManyChunks", "All prefixes together have more chunks than a pool can hold."
    NO_WHOLE_CHUNK = (
        "NoWholeChunk",
        "A prefix has not one whole chunk that no continuation changes; the message has its tokens.",
    )
    UNSTABLE_TEMPLATE = (
        "UnstableTemplate",
        "The chat template makes other tokens of the same prefix at other times: it writes a date, a time or a random "
        "value into it.",
    )
    REPLICAS_DISAGREE = "ReplicasDisagree", "Pods that should be equal make different tokens of the same prefix."
    RENDERING = "Rendering", "Pods are making tokens of the prefixes."
    ROLLING_OUT = _ROLLING_OUT
    NO_LIVE_PODS = _NO_LIVE_PODS
    PODS_TOO_OLD = "PodsTooOld", "Pods run a version that cannot render prefixes; they have to be replaced."
    TOO_MANY_POOLS = "TooManyPools", "A CachedModel has more pools than its bundle has room for; the eldest are kept."
    NOT_COMMITTED = _NOT_COMMITTED
    AWAITING_ACKS = _AWAITING_ACKS
    AWAITING_KEYS = _AWAITING_KEYS
    WARMING = "Warming", "Pods compute the chunks, or are asked what they hold of them."
    RENEWING = "Renewing", "What readers have is computed anew before its retention ends."
    WARMING_TIMED_OUT = "WarmingTimedOut", "Not all is stored within warmup.timeout; it is tried again at times."
    RENDER_MISMATCH = (
        "RenderMismatch",
        "A real request with the prefix begins with other tokens than the prefix came to by itself.",
    )
    CHUNKS_LOST = "ChunksLost", "A tier lost chunks, which are computed again."
    WARM = "Warm", "Every tier of the pool holds every chunk."
    PUBLISHED = "Published", "Every serving pod knows what readers are to have."
    GUARANTEES_ADMITTED = _GUARANTEES_ADMITTED
    INSUFFICIENT_CAPACITY = _INSUFFICIENT_CAPACITY
    GUARANTEES_EXCEED_CAPACITY = _GUARANTEES_EXCEED_CAPACITY
    BUDGETS_ENFORCED = _BUDGETS_ENFORCED
    BUDGETS_NOT_ENFORCED = _BUDGETS_NOT_ENFORCED
    MEMORY_NOT_GOVERNED = _MEMORY_NOT_GOVERNED
    NO_BUDGET = _NO_BUDGET


class InvalidationReason(Reason):
    """Reasons on a CacheInvalidation."""

    SETTLED = _SETTLED
    PROGRESSING = _PROGRESSING
    INVALID_SPEC = _INVALID_SPEC
    WAITING_FOR_DOMAIN = _WAITING_FOR_DOMAIN
    ROLLING_EPOCHS = "RollingEpochs", "New epochs are being written."
    AWAITING_ACKS = _AWAITING_ACKS
    LOGICALLY_INVALID = (
        "LogicallyInvalid",
        "No pod can reach the data any more: each acknowledged or fenced itself off.",
    )
    LAZY_COMPLETE = "LazyComplete", "The data is unreachable; its bytes age out of each tier."
    TENANT_NOT_FOUND = "TenantNotFound", "No TenantCachePolicy of the namespace is for the tenant."
    GROUP_NOT_FOUND = "GroupNotFound", "The TenantGroup does not exist."
    POOL_NOT_FOUND = _POOL_NOT_FOUND
    SHARED_SCOPE_CHOICE_REQUIRED = (
        "SharedScopeChoiceRequired",
        "The tenant shares a scope: sharedScopes must say whether that is rolled or left.",
    )
    SCOPE_NOT_RECONCILED = "ScopeNotReconciled", "This version invalidates tenants, groups, pools and whole namespaces."
    EAGER_NOT_RECONCILED = "EagerNotReconciled", "This version makes data unreachable but does not erase it."
    RESET_NOT_RECONCILED = "ResetNotReconciled", "This version does not empty the engines' prefix caches."
    DEADLINE_EXCEEDED = "DeadlineExceeded", "The deadline passed before the invalidation was complete."


CHILD_REFUSED = _CHILD_REFUSED[0]
"""The reason of every kind that has objects of its own."""

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
