"""Kubernetes Events: own ones about objects, written once, and warnings of others about pods, read on demand."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from kvstrata.api.base import Resource
from kvstrata.api.cacheinvalidation import CacheInvalidationStatus
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import SharedReason
from kvstrata.api.scalars import format_timestamp
from kvstrata.api.status import Condition, Status
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import EVENT
from kvstrata.model.pods import EventLook, Warned
from kvstrata.model.refs import GROUP_VERSION
from kvstrata.plan.actions import ReadEvents
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.store import Store

from .background import Background, Clock, utc_now

log = logging.getLogger(__name__)

LATE_S = 60.0
"""Enforcement after this time is late; pods acknowledge within seconds."""

_AWAITED = (SharedReason.AWAITING_ACKS, SharedReason.NOT_COMMITTED)
_STEPS = (ConditionType.LOGICALLY_INVALID, ConditionType.KEYS_REVOKED, ConditionType.ERASED, ConditionType.VERIFIED)

FORGET_AFTER = timedelta(minutes=10)
"""Longer than plans wait before they ask again."""


@dataclass(frozen=True, slots=True)
class News:
    """An Event's reason and message."""

    reason: str
    message: str
    warning: bool = False


def news_of(before: Resource | None, after: Resource) -> Iterator[News]:
    """Yield the Events of a status write: an object is stalled, or no longer is; a change was enforced late; a step of
    an invalidation. They follow from the difference alone, so a status at rest causes none."""
    was, new = _status(before if before is not None and before.uid == after.uid else None), _status(after)
    if (why := _true(new, ConditionType.STALLED)) is not None:
        if (known := _true(was, ConditionType.STALLED)) is None or known.reason != why.reason:
            yield News("Stalled", f"{why.reason}: {why.message}", warning=True)
    elif was.is_true(ConditionType.STALLED) and not after.metadata.deleting:
        ready = new.condition(ConditionType.READY)
        yield News("Recovered", f"{ready.reason}: {ready.message}" if ready is not None else "")
    for kind in (ConditionType.ENFORCED, ConditionType.POLICY_ENFORCED):
        waited, done = was.condition(kind), _true(new, kind)
        if waited is None or done is None or waited.reason not in _AWAITED:
            continue
        # Before that a wrong spec may have been in the way.
        begun = (_true(was, ConditionType.RECONCILING) or waited).last_transition_time
        took_s = (done.last_transition_time - max(begun, waited.last_transition_time)).total_seconds()
        if took_s >= LATE_S:
            yield News("EnforcedLate", f"enforced after {took_s:.0f} s; until then: {waited.message}", warning=True)
    if isinstance(new, CacheInvalidationStatus):
        former = was if isinstance(was, CacheInvalidationStatus) else CacheInvalidationStatus()
        if former.phase is None and new.phase is not None and not new.phase.finished:
            yield News("Begun", new.message or "new epochs are being written")
        reached = [found for kind in _STEPS if (found := _true(new, kind)) is not None and not was.is_true(kind)]
        yield from (News(found.reason, found.message) for found in reached)
        if new.receipt_digest is not None and former.receipt_digest is None:
            yield News("ReceiptWritten", f"the receipt has the digest {new.receipt_digest}")


def _status(resource: Resource | None) -> Status:
    found: Status = getattr(resource, "status", None) or Status()
    return found


def _true(status: Status, kind: str) -> Condition | None:
    return status.condition(kind) if status.is_true(kind) else None


class Events:
    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    async def publish(self, about: Resource, reason: str, message: str, *, warning: bool = False) -> None:
        at, named = format_timestamp(utc_now()), {"name": about.name, "namespace": about.namespace}
        body = {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {"name": f"{about.name}.{secrets.token_hex(8)}", "namespace": about.namespace},
            "involvedObject": {"apiVersion": GROUP_VERSION, "kind": about.INFO.kind, **named, "uid": about.uid},
            "type": "Warning" if warning else "Normal",
            "reason": reason,
            "message": message[:1024],
            "source": {"component": "kvstrata"},
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        try:
            await self._kube.create(EVENT, about.namespace, body)
        except KubeError as error:
            log.warning("an event was not taken", extra={"event": reason, "about": about.name, "error": str(error)})


async def warnings_about(kube: Kube, namespace: str, uid: str) -> tuple[Warned, ...]:
    """Return the warnings about the object with this UID, the newest last. Raises KubeError."""
    found = [raw async for raw in kube.list(EVENT, namespace, None, f"involvedObject.uid={uid},type=Warning")]
    found.sort(key=lambda raw: str(raw.get("lastTimestamp") or raw.get("eventTime") or ""))
    return tuple(Warned(raw.get("reason") or "", raw.get("message") or "") for raw in found)


class EventReader(Background):
    """Reads warnings about objects; the slots are their UIDs."""

    def __init__(self, kube: Kube, store: Store, queue: WorkQueue, now: Clock = utc_now) -> None:
        super().__init__(queue)
        self._kube, self._store, self._now = kube, store, now

    def begin(self, namespace: str, order: ReadEvents) -> None:
        self._begin(order.uid, self.read(namespace, order), "warnings cannot be read", order.again)

    async def read(self, namespace: str, order: ReadEvents) -> None:
        """Read once. Without the right to read, the object is reported without its events."""
        try:
            found = await warnings_about(self._kube, namespace, order.uid)
        except KubeError as error:
            log.warning("warnings cannot be read", extra={"about": str(order.again), "error": str(error)})
            found = ()
        looks = self._store.domain(namespace).event_looks
        for old in [uid for uid, look in looks.items() if self._now() - look.at > FORGET_AFTER]:
            del looks[old]
        looks[order.uid] = EventLook(self._now(), found)
        self._queue.add(order.again)
