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
    """Reaction to a probe that finds isolation broken."""

    REPORT = "Report"
    FENCE_REUSE = "FenceReuse"


class ProbeSpec(ApiModel):
    """Probes that test on running pods whether scopes are isolated."""

    mode: ProbeMode | None = None
    """Scheduled: on schedule, and soon after keyspaces changed. Never: pods are not probed, and their isolation is not
    verified. Absent means Scheduled. For each probe the engine computes four prompts of one chunk."""

    interval: Annotated[Duration, Between("10s", "168h")] | None = None
    """Time between two probes of a pod. Absent means 5m."""

    on_failure: OnProbeFailure | None = None
    """Reaction when one scope finds blocks that another one stored. Report: condition, event and metric. FenceReuse: in
    addition no reuse for this model, as with reuse.mode Disabled, until cacheGeneration is raised. Absent means
    Report."""

    @property
    def interval_s(self) -> int:
        """Effective interval in seconds."""
        return self.interval.in_seconds if self.interval is not None else DEFAULT_PROBE_INTERVAL_S


class ProbeFailure(StatusModel):
    """A probe that found isolation broken."""

    time: Timestamp
    """When the probe found it."""

    reason: ShortText
    """The reason that condition IsolationVerified has for it."""

    message: Annotated[str, StringConstraints(max_length=1024)]
    """The pod and tiers, the scope that stored the blocks, and the scope that found them."""

    cache_generation: Generation
    """The cacheGeneration in which it was found. The failure stands until a higher one is declared."""


class ProbeStatus(StatusModel):
    """Results of isolation probes; updated once per interval."""

    time: Timestamp | None = None
    """When the least recently probed pod answered."""

    revision: Revision | None = None
    """The oldest bundle revision under which a pod was probed."""

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
"""Most former identities in status. Blocks of further ones expire by age."""


class FormerPhase(StrEnum):
    """State of the blocks of a former identity."""

    IN_USE = "InUse"
    """A pod of this model still has the identity, or another model has it."""

    KEPT = "Kept"
    """A rollback reuses them, until rollbackWindow is over."""

    RECLAIMING = "Reclaiming"
    """They are being deleted from Redis tiers."""


class FormerIdentity(StatusModel):
    """A former cache identity of the model, whose blocks may still be in Redis tiers."""

    identity: Hex
    """The identity."""

    phase: FormerPhase
    """InUse: a pod of this model or another model has the identity. Kept: for a rollback, until rollbackWindow is over.
    Reclaiming: its blocks are being deleted."""

    message: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """The end of the retention, the user of the identity, or the progress of the deletion."""

    unused_since: Timestamp | None = None
    """Since when no pod of the model has it and the rollout is complete; rollbackWindow counts from here."""

    round: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Number of the current deletion attempt; absent for the first."""

    blocks: Count | None = None
    """Blocks deleted by attempts that did not finish, as far as they reported them."""

    bytes: Count | None = None
    """Bytes of these blocks."""


class ReclaimedCache(StatusModel):
    """A completed deletion of a former identity's blocks."""

    identity: Hex
    """The identity."""

    time: Timestamp
    """When the deletion was complete."""

    blocks: Count
    """Blocks deleted from all Redis tiers of the namespace, as far as deletions reported them."""

    bytes: Count
    """Bytes of these blocks."""
