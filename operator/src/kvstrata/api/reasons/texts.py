"""Base of reasons, and the texts of reasons that mean the same on several kinds."""

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
NO_MODELS = ("NoModels", "No CachedModel exists that the object applies to.")
WAITING_FOR_DOMAIN = ("WaitingForDomain", "The domain's identity, key or epochs are being generated.")
ERASING = ("Erasing", "Servers and pods are deleting the cached data.")
ROLLING_OUT = ("RollingOut", "Some pods still run an older template.")
MODEL_NOT_FOUND = ("ModelNotFound", "A named CachedModel does not exist.")
TIER_NOT_FOUND = ("TierNotFound", "A named CacheTier does not exist.")
POOL_NOT_FOUND = ("PoolNotFound", "A named PrefixPool does not exist.")
AWAITING_KEYS = (
    "AwaitingKeys",
    "A data key is being generated, or a serving pod has not reported that it encrypts and has the keys of all "
    "keyspaces of its policy.",
)
SECRET_NOT_FOUND = ("SecretNotFound", "A named Secret does not exist or lacks a key.")
NAME_CONFLICT = (
    "NameConflict",
    "An object with the name of one of this object's children exists and has another owner.",
)
CHILD_REFUSED = (
    "ChildRefused",
    "The API server refuses a child of this object; the message has the child's name and the error.",
)
BUDGETS_NOT_ENFORCED = (
    "BudgetsNotEnforced",
    "A serving pod does not report that it enforces budgets on a tier.",
)
BUDGETS_ENFORCED = ("BudgetsEnforced", "Every serving pod keeps within the budgets.")
MEMORY_NOT_GOVERNED = (
    "MemoryNotGoverned",
    "A pod does not report that it keeps its memory within budgets; it may run an older version.",
)
GUARANTEES_EXCEED_CAPACITY = (
    "GuaranteesExceedCapacity",
    "Pods enforce more guarantees than a tier can keep, until bundles with fewer guarantees reach them. Meanwhile "
    "pods cut each guarantee by the same share, and Redis refuses blocks for lack of memory.",
)
GUARANTEES_ADMITTED = ("GuaranteesAdmitted", "All declared guarantees are reserved.")
INSUFFICIENT_CAPACITY = (
    "InsufficientCapacity",
    "A tier has no room for a guarantee beside admitted ones and older ones that wait. Nothing of it is reserved "
    "until there is room; limits hold.",
)
GUARANTEE_EXCEEDS_CAPACITY = (
    "GuaranteeExceedsCapacity",
    "A guarantee exceeds the part of its tier's capacity that blocks may take.",
)
RETENTION_EXCEEDS_TIER = ("RetentionExceedsTier", "A retention is longer than the tier's maxRetention.")
TIERS_CONFLICT = (
    "TiersConflict",
    "Two CacheTiers exclude each other: a pod can have only one of this medium, or both use one Redis server.",
)
CLASSIFICATION_NOT_ALLOWED = (
    "ClassificationNotAllowed",
    "A tier may not store data of this classification; pods do not store it there.",
)
TIERS_ADMITTED = ("TiersAdmitted", "Every tier of the models may store data of this classification.")
