"""What reasons are, and the texts of those that mean the same on several kinds."""

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


PROGRESSING = ("Progressing", "The operator is still working towards the spec.")
INVALID_SPEC = ("InvalidSpec", "This version cannot read the spec; the last enforced one stays in force.")
NOT_COMMITTED = ("NotCommitted", "The change is not in every bundle yet; it is being written.")
AWAITING_ACKS = ("AwaitingAcks", "Some live pods have not acknowledged yet.")
ALL_ACKED = ("AllPodsAcknowledged", "Every live pod acknowledged.")
NO_LIVE_PODS = ("NoLivePods", "No pod serves: there is nothing to enforce.")
NO_MODELS = ("NoModels", "There is no CachedModel that this is for.")
WAITING_FOR_DOMAIN = ("WaitingForDomain", "The domain's identity, key or epochs are being drawn.")
ERASING = ("Erasing", "Servers and pods are deleting what was cached.")
ROLLING_OUT = ("RollingOut", "Some pods still run an older template.")
MODEL_NOT_FOUND = ("ModelNotFound", "A CachedModel that is named does not exist.")
TIER_NOT_FOUND = ("TierNotFound", "A CacheTier that is named does not exist.")
POOL_NOT_FOUND = ("PoolNotFound", "A PrefixPool that is named does not exist.")
AWAITING_KEYS = (
    "AwaitingKeys",
    "A data key is being drawn, or a serving pod has not said that it encrypts and has the keys of all keyspaces of "
    "its policy.",
)
SECRET_NOT_FOUND = ("SecretNotFound", "A Secret that is named does not exist or lacks a key.")
NAME_CONFLICT = ("NameConflict", "An object that would belong to this one exists and belongs to someone else.")
CHILD_REFUSED = (
    "ChildRefused",
    "The API server refuses an object that belongs to this one; the message has its name and the API server's words.",
)
BUDGETS_NOT_ENFORCED = (
    "BudgetsNotEnforced",
    "A serving pod does not report that it enforces budgets on a tier.",
)
BUDGETS_ENFORCED = ("BudgetsEnforced", "Every serving pod keeps within the budgets.")
MEMORY_NOT_GOVERNED = (
    "MemoryNotGoverned",
    "A pod does not say that it keeps its memory within budgets; it may run an older version.",
)
GUARANTEES_EXCEED_CAPACITY = (
    "GuaranteesExceedCapacity",
    "Pods were told of more guarantees than a tier can keep now, and are being told which of them stand. Meanwhile "
    "each is cut by the same share in pods, and on Redis the server refuses blocks for want of memory.",
)
GUARANTEES_ADMITTED = ("GuaranteesAdmitted", "All declared guarantees are reserved.")
INSUFFICIENT_CAPACITY = (
    "InsufficientCapacity",
    "A tier has no room for a guarantee beside those that others have, or older ones wait for; it counts as none until "
    "there is room, and limits hold.",
)
GUARANTEE_EXCEEDS_CAPACITY = (
    "GuaranteeExceedsCapacity",
    "A guarantee is more than blocks may take of its tier's capacity.",
)
RETENTION_EXCEEDS_TIER = ("RetentionExceedsTier", "A retention is longer than the tier's maxRetention.")
TIERS_CONFLICT = (
    "TiersConflict",
    "Two CacheTiers exclude each other: a pod can have only one of their medium, or both are on one Redis server.",
)
CLASSIFICATION_NOT_ALLOWED = (
    "ClassificationNotAllowed",
    "A tier does not take data of this classification; pods keep it off.",
)
TIERS_ADMITTED = ("TiersAdmitted", "Every tier of the models takes data of this classification.")
