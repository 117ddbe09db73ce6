"""Pieces that several kinds share: references, conditions, budgets, scopes and pod settings."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, WithJsonSchema

from kvstrata.api.base import ApiModel, Rule, StatusModel
from kvstrata.api.markers import AtomicList, MapList, SetList
from kvstrata.api.scalars import (
    Count,
    DataKey,
    Duration,
    ForeignName,
    Generation,
    LabelKey,
    LabelValue,
    ObjectName,
    Pattern,
    Quantity,
    ShortText,
    Text,
    Timestamp,
)
from kvstrata.contract.policy.keyspace import ScopeKind

__all__ = [
    "Admission",
    "AdmittedGuarantee",
    "AnyObject",
    "ApiModel",
    "Budget",
    "Budgets",
    "Classification",
    "Condition",
    "ConditionStatus",
    "ConfigMapKeyRef",
    "Count",
    "Duration",
    "Hex",
    "LabelSelector",
    "LabelSelectorRequirement",
    "LocalObjectRef",
    "ObjectRef",
    "PodCount",
    "Quantity",
    "Revision",
    "ScopeKind",
    "ScopeStatus",
    "SecretKeyRef",
    "SecretRef",
    "ServerTls",
    "Status",
    "Summary",
    "TierName",
    "TierNames",
    "TierUsage",
    "TlsMode",
    "Usage",
]

AnyObject = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})]
"""An object of another API, passed on unchanged."""


class ObjectRef(ApiModel):
    """Reference to an object of this API group in the same namespace."""

    name: ObjectName
    """Name of the object."""


class LocalObjectRef(ApiModel):
    """Reference to an object of another kind in the same namespace."""

    name: ForeignName
    """Name of the object."""


OWNED_SECRETS = ("kvstrata-", "kvs-")
"""Prefixes of the names of the operator's Secrets. An image that a user chooses can read every mounted Secret."""

_SECRET_OF_THE_USER = Rule(
    cel=" && ".join(f"!self.name.startsWith('{prefix}')" for prefix in OWNED_SECRETS),
    message=f"Secrets whose names begin with {' or '.join(OWNED_SECRETS)} belong to the operator: name another Secret",
    field_path=".name",
    holds=lambda reference: not reference.name.startswith(OWNED_SECRETS),
)


class SecretRef(ApiModel):
    """Reference to a Secret in the same namespace, except the operator's own."""

    name: ForeignName
    """Name of the Secret."""

    RULES = (_SECRET_OF_THE_USER,)


class SecretKeyRef(ApiModel):
    """One key of a Secret in the same namespace, except the operator's own."""

    name: ForeignName
    """Name of the Secret."""

    key: DataKey
    """Key within the Secret."""

    RULES = (_SECRET_OF_THE_USER,)


class ConfigMapKeyRef(ApiModel):
    """One key of a ConfigMap in the same namespace."""

    name: ForeignName
    """Name of the ConfigMap."""

    key: DataKey
    """Key within the ConfigMap."""


class Classification(StrEnum):
    """How sensitive the data of a tenant is, from the least to the most."""

    PUBLIC = "Public"
    INTERNAL = "Internal"
    CONFIDENTIAL = "Confidential"
    RESTRICTED = "Restricted"

    @property
    def level(self) -> int:
        """Rank for comparison; higher is stricter."""
        return list(Classification).index(self)


class TierName(ApiModel):
    """Names a CacheTier of the same namespace."""

    name: ObjectName
    """Name of the CacheTier."""


class Budget(ApiModel):
    """Bytes and time that one scope has on one tier."""

    tier: ObjectName
    """Name of the CacheTier."""

    guaranteed: Quantity | None = None
    """Bytes reserved for this scope; no other scope gets them. On tiers with a capacity per pod, in each pod. Absent
    means none."""

    limit: Quantity | None = None
    """Bytes that this scope never exceeds. On tiers with a capacity per pod, in each pod. Absent means no limit besides
    the tier's capacity; 0 stores nothing."""

    retention: Duration | None = None
    """Longest life of a block after it was computed, at most the tier's maxRetention. Absent means the tier's
    maxRetention; without one 24 h on Redis, and no limit on CPU and NVMe."""

    RULES = (
        Rule(
            cel="!has(self.guaranteed) || !has(self.limit) || "
            "!isQuantity(string(self.guaranteed)) || !isQuantity(string(self.limit)) || "
            "quantity(string(self.guaranteed)).compareTo(quantity(string(self.limit))) <= 0",
            message="guaranteed must not be above limit: raise limit or lower guaranteed",
            field_path=".guaranteed",
            holds=lambda budget: (
                budget.guaranteed is None or budget.limit is None or budget.guaranteed.in_bytes <= budget.limit.in_bytes
            ),
        ),
    )

    @property
    def is_bounded(self) -> bool:
        """Whether it sets any bound."""
        return any(value is not None for name, value in self if name != "tier")

    @property
    def guaranteed_bytes(self) -> int:
        """Reserved bytes; 0 when absent."""
        return self.guaranteed.in_bytes if self.guaranteed is not None else 0

    @property
    def limit_bytes(self) -> int | None:
        """Most bytes that the scope may hold; None for no limit of its own."""
        return self.limit.in_bytes if self.limit is not None else None

    @property
    def retention_s(self) -> int | None:
        """Longest life of a block in seconds; None for no limit of its own."""
        return self.retention.in_seconds if self.retention is not None else None


Budgets = Annotated[tuple[Budget, ...], Field(max_length=16), MapList("tier")]
TierNames = Annotated[tuple[TierName, ...], Field(max_length=16), MapList()]


class LabelSelectorRequirement(ApiModel):
    """One requirement of a label selector."""

    key: LabelKey
    """Key of the label."""

    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """How the label relates to the values."""

    values: Annotated[tuple[LabelValue, ...], Field(max_length=64), SetList()] = ()
    """Values for In and NotIn; empty for Exists and DoesNotExist."""

    RULES = (
        Rule(
            cel="(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
            message="values are required for In and NotIn, and must be empty for Exists and DoesNotExist",
            holds=lambda requirement: (requirement.operator in ("In", "NotIn")) == bool(requirement.values),
        ),
    )

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether `labels` satisfy this requirement."""
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case _:
                return self.key not in labels


class LabelSelector(ApiModel):
    """A Kubernetes label selector; all of its requirements must hold, and an empty one selects everything."""

    match_labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=32)] = Field(default_factory=dict)
    """Labels that must exist with exactly these values."""

    match_expressions: Annotated[tuple[LabelSelectorRequirement, ...], Field(max_length=16), AtomicList()] = ()
    """Further requirements."""

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether `labels` satisfy the selector."""
        return all(labels.get(key) == value for key, value in self.match_labels.items()) and all(
            requirement.matches(labels) for requirement in self.match_expressions
        )


class TlsMode(StrEnum):
    """Where the certificate of a server comes from."""

    ISSUED = "Issued"
    SECRET = "Secret"  # noqa: S105 - a name, not a secret
    DISABLED = "Disabled"


class ServerTls(ApiModel):
    """TLS of a server that the operator runs."""

    mode: TlsMode
    """Issued: by the operator's own authority. Secret: taken from secretRef. Disabled: plain text."""

    secret_ref: SecretRef | None = None
    """Secret of type kubernetes.io/tls with tls.crt, tls.key and ca.crt; only with mode Secret."""

    RULES = (
        Rule(
            cel="(self.mode == 'Secret') == has(self.secretRef)",
            message="secretRef is required for mode Secret and not allowed for any other mode",
            holds=lambda tls: (tls.mode is TlsMode.SECRET) == (tls.secret_ref is not None),
        ),
    )


class ConditionStatus(StrEnum):
    """Status of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(StatusModel):
    """A metav1.Condition."""

    type: Annotated[str, StringConstraints(min_length=1, max_length=316)]
    """Name of the condition."""

    status: ConditionStatus
    """True, False or Unknown."""

    reason: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    """Cause, as one of this API's reasons."""

    message: Text = ""
    """Cause, as a sentence that names the object and the fix."""

    observed_generation: Generation | None = None
    """The metadata.generation that this condition is about."""

    last_transition_time: Timestamp
    """When status last changed."""


class ScopeStatus(StatusModel):
    """A scope and its current epoch. A new epoch makes everything cached under the old one unreachable."""

    kind: ScopeKind
    """Kind of the scope."""

    name: ShortText
    """The tenant, the TenantGroup or the PrefixPool; `public` for the Public scope."""

    epoch: Annotated[
        str, StringConstraints(max_length=32), Pattern(r"^[0-9a-f]{32}$", "must be 32 hexadecimal digits in lower case")
    ]
    """Random 128-bit value in hex; a new one makes the blocks under the old one unreachable. It is not a secret."""

    rolls: Count = 0
    """How often the epoch was replaced."""


class TierUsage(StatusModel):
    """Usage of one tier by one scope."""

    tier: ShortText
    """Name of the CacheTier."""

    used: Quantity | None = None
    """Bytes in use; on a CPU or NVMe tier those of the pod that holds most."""

    limit: Quantity | None = None
    """The limit in force."""

    guaranteed: Quantity | None = None
    """The guarantee in force."""


class Usage(StatusModel):
    """Usage of a scope over all tiers. Updated when a size changes by a quarter or is within its limit again, at most
    every five minutes."""

    used: Quantity | None = None
    """Bytes in use on all tiers together."""

    limit: Quantity | None = None
    """Sum of the limits in force."""

    guaranteed: Quantity | None = None
    """Sum of the guarantees in force."""

    observed_at: Timestamp | None = None
    """When usage was read."""

    tiers: Annotated[tuple[TierUsage, ...], Field(max_length=64), MapList("tier")] = ()
    """Usage of each tier."""


class AdmittedGuarantee(StatusModel):
    """A guarantee that a tier reserves for a scope."""

    tier: ShortText
    """Name of the CacheTier."""

    guaranteed: Quantity
    """The admitted guarantee; on tiers with a capacity per pod, in each pod."""


class Admission(StatusModel):
    """Admitted guarantees. They stay admitted when others are declared, as long as they are declared and the tier has
    room."""

    models: Annotated[str, StringConstraints(max_length=64)] = ""
    """Digest of the selected models that they were admitted for; empty for all models."""

    tiers: Annotated[tuple[AdmittedGuarantee, ...], Field(max_length=32), MapList("tier")] = ()
    """One entry for each tier. A declared guarantee without an entry waits for room and reserves nothing."""

    @property
    def by_tier(self) -> dict[str, int]:
        """Admitted bytes by the name of their tier."""
        return {row.tier: row.guaranteed.in_bytes for row in self.tiers}


class Summary(StatusModel):
    """Sizes of this status in whole mebibytes, rounded up, for the columns of `kubectl get`."""

    capacity: ShortText | None = None
    """The capacity."""

    limit: ShortText | None = None
    """The limit in force."""

    guaranteed: ShortText | None = None
    """The guarantee in force."""

    used: ShortText | None = None
    """Bytes in use."""

    bytes: ShortText | None = None
    """Bytes of a pool's content, or bytes that an invalidation deleted."""


Conditions = Annotated[tuple[Condition, ...], Field(max_length=32), MapList("type")]


class Status(StatusModel):
    """Fields that every status has."""

    observed_generation: Generation | None = None
    """The metadata.generation that this status is about."""

    conditions: Conditions = ()
    """Ready, Reconciling and Stalled, and conditions of the kind."""

    summary: Summary | None = None
    """Sizes of this status in whole mebibytes, for the columns of `kubectl get`."""

    def condition(self, condition_type: str) -> Condition | None:
        """The condition of that type, or None."""
        return next((one for one in self.conditions if one.type == condition_type), None)

    def is_true(self, condition_type: str) -> bool:
        """Whether the condition of that type is there and True."""
        found = self.condition(condition_type)
        return found is not None and found.status is ConditionStatus.TRUE


PodCount = Annotated[int, Field(ge=0, le=1_000_000)]
Revision = Annotated[int, Field(ge=0, le=2**53)]
Hex = Annotated[
    str, StringConstraints(max_length=128), Pattern(r"^[0-9a-f]*$", "must be hexadecimal digits in lower case")
]
