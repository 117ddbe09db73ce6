"""Pieces that several kinds' specs share: references, budgets, label selectors and TLS."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from kvstrata.api.base import ApiModel, Rule
from kvstrata.api.markers import atomic_list, map_list, set_list
from kvstrata.api.scalars import DataKey, Duration, ForeignName, LabelKey, LabelValue, ObjectName, Quantity
from kvstrata.contract.policy.rate import MAX_PER_MINUTE

AnyObject = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})]
"""An object of another API, passed on unchanged."""


Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=32)]


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


def not_owned(field: str) -> Rule:
    """The named (API-cased) field must not name one of the operator's Secrets."""
    return Rule(
        cel=" && ".join(f"!self.{field}.startsWith('{prefix}')" for prefix in OWNED_SECRETS),
        message=f"Secrets whose names begin with {' or '.join(OWNED_SECRETS)} belong to the operator: name another "
        "Secret",
        field_path=f".{field}",
        holds=lambda reference: not reference.to_kubernetes()[field].startswith(OWNED_SECRETS),
    )


class SecretRef(ApiModel):
    """Reference to a Secret in the same namespace, except the operator's own."""

    name: ForeignName
    """Name of the Secret."""

    RULES = (not_owned("name"),)


class SecretKeyRef(SecretRef):
    """One key of a Secret in the same namespace, except the operator's own."""

    key: DataKey
    """Key within the Secret."""


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


class RateLimit(ApiModel):
    """Rates that a gate allows a tenant. Each replica counts for itself: two admit twice as much."""

    requests_per_minute: Annotated[int, Field(ge=1, le=MAX_PER_MINUTE)] | None = None
    """Requests in a minute, on each replica; as many may come at once. Absent means the default: for a tenant that of
    the CachedModel, for a CachedModel no limit."""

    tokens_per_minute: Annotated[int, Field(ge=1, le=MAX_PER_MINUTE)] | None = None
    """Tokens of prompts and answers in a minute, on each replica. They are charged when an answer has ended: a tenant
    that exceeds them waits. Absent means the default: for a tenant that of the CachedModel, for a CachedModel no limit.
    """


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
    maxRetention; without one 24 h on Redis, and no limit on CPU and NVMe. A tenant of a shared scope can shorten it."""

    RULES = (
        Rule(
            cel="!has(self.guaranteed) || !has(self.limit) || "
            "!isQuantity(string(self.guaranteed)) || !isQuantity(string(self.limit)) || "
            "quantity(string(self.guaranteed)).compareTo(quantity(string(self.limit))) <= 0",
            message="guaranteed must not be above limit: raise limit or lower guaranteed",
            field_path=".guaranteed",
            holds=lambda budget: budget.limit_bytes is None or budget.guaranteed_bytes <= budget.limit_bytes,
        ),
    )

    @property
    def is_bounded(self) -> bool:
        return any(value is not None for name, value in self if name != "tier")

    @property
    def guaranteed_bytes(self) -> int:
        return self.guaranteed.in_bytes if self.guaranteed is not None else 0

    @property
    def limit_bytes(self) -> int | None:
        return self.limit.in_bytes if self.limit is not None else None

    @property
    def retention_s(self) -> int | None:
        return self.retention.in_seconds if self.retention is not None else None


Budgets = Annotated[tuple[Budget, ...], Field(max_length=16), map_list("tier")]
TierNames = Annotated[tuple[TierName, ...], Field(max_length=16), map_list()]


class LabelSelectorRequirement(ApiModel):
    """One requirement of a label selector."""

    key: LabelKey
    """Key of the label."""

    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """How the label relates to the values."""

    values: Annotated[tuple[LabelValue, ...], Field(max_length=64), set_list()] = ()
    """Values for In and NotIn; empty for Exists and DoesNotExist."""

    RULES = (
        Rule(
            cel="(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
            message="values are required for In and NotIn, and must be empty for Exists and DoesNotExist",
            holds=lambda requirement: (requirement.operator in ("In", "NotIn")) == bool(requirement.values),
        ),
    )

    def matches(self, labels: Mapping[str, str]) -> bool:
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

    match_labels: Labels = Field(default_factory=dict)
    """Labels that must exist with exactly these values."""

    match_expressions: Annotated[tuple[LabelSelectorRequirement, ...], Field(max_length=16), atomic_list()] = ()
    """Further requirements."""

    def matches(self, labels: Mapping[str, str]) -> bool:
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
