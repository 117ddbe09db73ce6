"""Status of a CachedModel: isolation probes, with their spec, and caches of former identities."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from kvstrata.api.base import ApiModel, StatusModel
from kvstrata.api.common import Count, Duration, Hex, PodCount, Revision
from kvstrata.api.markers import Between
from kvstrata.api.scalars import Generation, ShortText, Timestamp

DEFAULT_PROBE_INTERVAL_S = 300


class ProbeMode(StrEnum):
    """Whether pods are probed."""

    SCHEDULED = "Scheduled"
    NEVER = "Never"


class OnProbeFailure(StrEnum):
    """What follows when a probe finds that isolation is broken."""

    REPORT = "Report"
    FENCE_REUSE = "FenceReuse"


class ProbeSpec(ApiModel):
    """The probe that shows isolation on running pods."""

    mode: ProbeMode | None = None
    """Scheduled: on schedule, and soon after keyspaces changed. Never: not at all, and nothing is shown. Absent means
    Scheduled. A probe has the engine compute four prompts of one chunk."""

    interval: Annotated[Duration, Between("10s", "168h")] | None = None
    """Time between two probes of a pod. Absent means 5m."""

    on_failure: OnProbeFailure | None = None
    """When one scope finds what another one stored. Report: say so by condition, event and metric. FenceReuse: also
    reuse nothing any more, as with reuse.mode Disabled, until cacheGeneration is raised. Absent means Report."""

    @property
    def interval_s(self) -> int:
        """Effective interval in seconds."""
        return self.interval.in_seconds if self.interval is not None else DEFAULT_PROBE_INTERVAL_S


class ProbeFailure(StatusModel):
    """Isolation that was found broken."""

    time: Timestamp
    """When it was found."""

    reason: ShortText
    """What was found, as the condition's reason."""

    message: Annotated[str, StringConstraints(max_length=1024)]
    """Where, and whose blocks were found by whom."""

    cache_generation: Generation
    """The cacheGeneration in which it was found. It stands until a higher one is declared."""


class ProbeStatus(StatusModel):
    """What probes of isolation found; renewed once in an interval."""

    time: Timestamp | None = None
    """When the pod that was probed longest ago answered."""

    revision: Revision | None = None
    """The oldest bundle revision that a pod was probed under."""

    pods: PodCount | None = None
    """Pods that were probed."""

    lookups: Count | None = None
    """Lookups that had to miss and did, in the last probe of each pod."""

    controls: Count | None = None
    """Lookups that had to hit and did, in the last probe of each pod."""

    failure: ProbeFailure | None = None
    """The last failure."""


DEFAULT_ROLLBACK_WINDOW_S = 3600
MAX_FORMER_IDENTITIES = 32
"""Of how many former identities status tells. The blocks of others go by their age."""


class FormerPhase(StrEnum):
    """What becomes of blocks of an identity that the model had before."""

    IN_USE = "InUse"
    """A pod of this model still has the identity, or another model has it."""

    KEPT = "Kept"
    """A rollback finds them, until rollbackWindow is over."""

    RECLAIMING = "Reclaiming"
    """They are being deleted from Redis tiers."""


class FormerIdentity(StatusModel):
    """A cache identity that the model had, and whose blocks may still be in Redis tiers."""

    identity: Hex
    """The identity."""

    phase: FormerPhase
    """InUse: a pod still has it, or another model does. Kept: for a rollback, until rollbackWindow is over. Reclaiming:
    its blocks are being deleted."""

    message: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """Until when or for whom it is kept, or how far its deletion is."""

    unused_since: Timestamp | None = None
    """When no pod of the model had it any more and the rollout was over; rollbackWindow counts from here."""

    round: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """How often its deletion was begun, from the second time on."""

    blocks: Count | None = None
    """Blocks that deletions which did not come to their end deleted, as far as they told."""

    bytes: Count | None = None
    """Bytes of these."""


class ReclaimedCache(StatusModel):
    """What was deleted of a former identity."""

    identity: Hex
    """The identity."""

    time: Timestamp
    """When that was done."""

    blocks: Count
    """Blocks that were deleted from all Redis tiers of the namespace, as far as deletions told."""

    bytes: Count
    """Bytes of these."""
