"""Pieces that several kinds' statuses share: conditions, scopes, usage and admitted guarantees."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from kvstrata.api.base import StatusModel
from kvstrata.api.markers import atomic_list, map_list, set_list
from kvstrata.api.scalars import Count, Generation, ObjectName, Pattern, Quantity, ShortText, Text, Timestamp
from kvstrata.contract.policy.keyspace import ScopeKind


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


MAX_STORES = 64
MAX_REACHED = 256
"""Most CachedModels that a status names as reached."""


class Store(StatusModel):
    """A place outside of pods that holds blocks: the servers of a Redis tier, or a folder of nodes."""

    tier: ShortText
    """Name of its CacheTier."""

    places: Annotated[tuple[Annotated[str, StringConstraints(max_length=2048)], ...], Field(max_length=64), set_list()]
    """Its identity: endpoints of external servers, the UID of a managed tier, or a folder and its tier's name."""


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

    stores: Annotated[tuple[Store, ...], Field(max_length=MAX_STORES), atomic_list()] = ()
    """Stores outside of pods that may have blocks under this epoch. Erasures name those that are no tier's any more."""

    models: Annotated[tuple[ObjectName, ...], Field(max_length=MAX_REACHED), atomic_list()] | None = None
    """Of a TenantGroup: CachedModels with pods that may ever have had this epoch; invalidations wait for no others.
    Absent for all: if an earlier version drew it, or there were more than 256."""


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

    tiers: Annotated[tuple[TierUsage, ...], Field(max_length=64), map_list("tier")] = ()
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

    tiers: Annotated[tuple[AdmittedGuarantee, ...], Field(max_length=32), map_list("tier")] = ()
    """One entry for each tier. A declared guarantee without an entry waits for room and reserves nothing."""

    @property
    def by_tier(self) -> dict[str, int]:
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
    """Bytes in use; of a scope with limits, on the tiers that have one."""

    bytes: ShortText | None = None
    """Bytes of a pool's content, or bytes that an invalidation deleted."""


Conditions = Annotated[tuple[Condition, ...], Field(max_length=32), map_list("type")]


class Status(StatusModel):
    """Fields that every status has."""

    observed_generation: Generation | None = None
    """The metadata.generation that this status is about."""

    conditions: Conditions = ()
    """Ready, Reconciling and Stalled, and conditions of the kind."""

    summary: Summary | None = None
    """Sizes of this status in whole mebibytes, for the columns of `kubectl get`."""

    def condition(self, condition_type: str) -> Condition | None:
        return next((one for one in self.conditions if one.type == condition_type), None)

    def is_true(self, condition_type: str) -> bool:
        found = self.condition(condition_type)
        return found is not None and found.status is ConditionStatus.TRUE


class ScopedStatus(Status):
    """Status of an object with a scope of its own."""

    scope: ScopeStatus | None = None
    """Its scope and the epoch in force."""

    usage: Usage | None = None
    """Usage of the scope."""

    admission: Admission | None = None
    """Admitted guarantees; absent if none was ever declared."""


class EnforcedStatus(ScopedStatus):
    """Status of an object that pods enforce as part of their compiled policy."""

    enforced_by: ShortText | None = None
    """Serving pods that enforce this generation, out of all (`2/3`); `no pods` if none serves."""

    enforced_generation: Generation | None = None
    """The metadata.generation that every live pod has acknowledged."""

    digest: Annotated[str, StringConstraints(max_length=128)] | None = None
    """Digest of the compiled policy in force."""

    cache_generation: Generation | None = None
    """The cacheGeneration that was last acted on."""


PodCount = Annotated[int, Field(ge=0, le=1_000_000)]
Revision = Annotated[int, Field(ge=0, le=2**53)]


class CoverageStatus(Status):
    """Status of an object with pods that read bundles."""

    enforced_by: ShortText | None = None
    """Serving pods that enforce the newest policy, out of all (`2/3`); `no pods` if none serves."""

    pods_acked: PodCount | None = None
    """Pods that acknowledged the newest revision of their bundle."""

    pods_live: PodCount | None = None
    """Pods that serve."""


ResolvedIdentity = Annotated[
    str,
    StringConstraints(max_length=128),
    Pattern(r"^[0-9a-f.]*$", "must be hexadecimal digits in lower case, with a dot before the fingerprint"),
]
"""A cache identity and a fingerprint; without the latter all blocks of the identity."""

Hex = Annotated[
    str, StringConstraints(max_length=128), Pattern(r"^[0-9a-f]*$", "must be hexadecimal digits in lower case")
]
