"""Reasons on a CacheInvalidation."""

from __future__ import annotations

from kvstrata.api.reasons import texts
from kvstrata.api.reasons.texts import Reason


class InvalidationReason(Reason):
    """Reasons on a CacheInvalidation."""

    INVALID_SPEC = texts.INVALID_SPEC
    WAITING_FOR_DOMAIN = texts.WAITING_FOR_DOMAIN
    ROLLING_EPOCHS = "RollingEpochs", "New epochs are being written."
    AWAITING_ACKS = texts.AWAITING_ACKS
    LOGICALLY_INVALID = (
        "LogicallyInvalid",
        "No pod can reach the data any more: each acknowledged or fenced itself off.",
    )
    LAZY_COMPLETE = "LazyComplete", "The data is unreachable; its bytes age out of each tier."
    TENANT_NOT_FOUND = "TenantNotFound", "No TenantCachePolicy of the namespace is for the tenant."
    POLICY_GONE = "PolicyGone", "The deleted TenantCachePolicy that it erases for is gone, or is not being deleted."
    GROUP_NOT_FOUND = "GroupNotFound", "The TenantGroup does not exist."
    POOL_NOT_FOUND = texts.POOL_NOT_FOUND
    MODEL_NOT_FOUND = texts.MODEL_NOT_FOUND
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
    DEADLINE_EXCEEDED = "DeadlineExceeded", "The deadline passed before the invalidation was complete."
    REVOKING_KEYS = "RevokingKeys", "Data keys are being removed from their custody."
    DESTROYING_KEYS = "DestroyingKeys", "Every holder of the data keys is asked to confirm that they are gone."
    CUSTODY_AWAY = "CustodyAway", "The custody of the data keys does not answer; the erasure waits for it."
    KEYS_REVOKED = "KeysRevoked", "The data keys are gone from their custody and from every pod."
    KEYS_DESTROYED = "KeysDestroyed", "The custody confirmed that no copy of the data keys exists."
    KEYS_IN_SECRETS = "KeysInSecrets", "Data keys were in Secrets: etcd's history and backups may have copies."
    NOT_CONFIRMED = "NotConfirmed", "The custody has not confirmed that no copy of the data keys exists."
    WAITING_OUT_WRITES = "WaitingOutWrites", "Writes that began earlier may still arrive in shared tiers."
    ERASING = texts.ERASING
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
    NOTHING_HELD = "NothingHeld", "No tier and no pod held anything."
    RECEIPTING = "Receipting", "The receipt is being written."
    RECEIPT_REFUSED = "ReceiptRefused", "The receipt cannot be appended to the domain's chain."
    ERASED_AND_VERIFIED = "ErasedAndVerified", "The data is gone, and a receipt proves it."
    COMPLETE_WITH_RESIDUE = (
        "CompleteWithResidue",
        "All reachable copies are erased; the receipt names the remaining ones.",
    )
    ABANDONED = "Abandoned", "A person gave the erasure up."
