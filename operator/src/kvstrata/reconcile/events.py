"""Kubernetes Events: own ones about objects, written once, and warnings of others about pods, read on demand."""

from __future__ import annotations

import logging
import secrets
from datetime import timedelta

from kvstrata.api.base import Resource
from kvstrata.api.scalars import format_timestamp
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import EVENT
from kvstrata.model.pods import EventLook, Warned
from kvstrata.model.refs import GROUP_VERSION
from kvstrata.plan.actions import ReadEvents
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.store import Store

from .background import Background, Clock, utc_now

log = logging.getLogger(__name__)

FORGET_AFTER = timedelta(minutes=10)
"""Longer than plans wait before they ask again."""


class Events:
    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    async def publish(self, about: Resource, reason: str, message: str, *, warning: bool = False) -> None:
        at = format_timestamp(utc_now())
        body = {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {"name": f"{about.name}.{secrets.token_hex(8)}", "namespace": about.namespace},
            "involvedObject": {
                "apiVersion": GROUP_VERSION,
                "kind": about.INFO.kind,
                "name": about.name,
                "namespace": about.namespace,
                "uid": about.uid,
            },
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
