"""What became of guarantees, one line of the log for each decision, and a count: after the status that says so was
written. It names objects and tiers, never tenants."""

from __future__ import annotations

import logging
from enum import StrEnum

from kvstrata.api.base import Resource
from kvstrata.api.cachedomain import CacheDomain
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import PolicyReason
from kvstrata.model.claims import HOLDERS, Holder
from kvstrata.model.refs import Key
from kvstrata.plan.restore import story_of

from . import metrics

log = logging.getLogger("kvstrata.audit")


class Outcome(StrEnum):
    """What became of an object's guarantees on one tier."""

    ADMITTED = "admitted"
    DENIED = "denied"
    WITHDRAWN = "withdrawn"
    RELEASED = "released"


def tell_admission(key: Key, before: Resource | None, after: Resource | None) -> None:
    """Log and count what the status of `after` says of guarantees and that of `before` did not."""
    if not isinstance(after, HOLDERS):
        return
    known = before if isinstance(before, HOLDERS) and before.uid == after.uid else None
    old, new = known.status.admission if known is not None else None, after.status.admission
    had, has = old.by_tier if old is not None else {}, new.by_tier if new is not None else {}
    waits = _waits(after)
    for tier in sorted({*had, *has}):
        was, size = had.get(tier, 0), has.get(tier, 0)
        if size > was:
            _tell(key, Outcome.ADMITTED, tier=tier, bytes=size, bytes_before=was)
        elif size < was:
            outcome = Outcome.WITHDRAWN if waits is not None else Outcome.RELEASED
            _tell(key, outcome, tier=tier, bytes=size, bytes_before=was)
    if waits is not None and (known is None or _waits(known) is None or _told_of(known) != _told_of(after)):
        _tell(key, Outcome.DENIED, why=waits)


def tell_restore(key: Key, before: Resource | None, after: Resource | None) -> str | None:
    """Log and count that the status of `after` records a restore which that of `before` did not; return its story."""
    if not isinstance(after, CacheDomain) or after.status.restored is None:
        return None
    known = before.status.restored if isinstance(before, CacheDomain) else None
    if known is not None and known.id == after.status.restored.id:
        return None
    story = story_of(after.status.restored)
    metrics.RESTORES.labels(key.namespace).inc()
    log.error("the API server went back", extra={"key": str(key), "story": story})
    return story


def _waits(resource: Holder) -> str | None:
    """Return what its status says of the room that it waits for, None if it waits for none."""
    told = resource.status.condition(ConditionType.ADMITTED)
    return told.message if told is not None and told.reason == PolicyReason.INSUFFICIENT_CAPACITY else None


def _told_of(resource: Holder) -> int | None:
    """Return the generation that its condition Admitted speaks of."""
    told = resource.status.condition(ConditionType.ADMITTED)
    return told.observed_generation if told is not None else None


def _tell(key: Key, outcome: Outcome, **facts: object) -> None:
    metrics.ADMISSIONS.labels(key.kind, outcome).inc()
    log.info("guarantee %s", outcome, extra={"key": str(key), "outcome": str(outcome), **facts})
