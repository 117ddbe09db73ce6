"""What becomes of the cache of a CachedModel's former identities, and what its status tells of that."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from kvstrata.api.base import StatusModel
from kvstrata.api.common import Count, Hex
from kvstrata.api.scalars import Timestamp

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
