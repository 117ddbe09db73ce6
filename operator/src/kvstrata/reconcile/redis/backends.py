"""Probes of external Redis servers, beside the loop; reports go into the store."""

from __future__ import annotations

import asyncio
from typing import Any

from kvstrata.api.cachetier import CacheTier, Medium
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import TierReason
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.redis.external import check_external
from kvstrata.clients.redis.probe import Access, RedisReason
from kvstrata.clients.resources import SECRET
from kvstrata.model.pods import BackendReport
from kvstrata.model.redis.cluster import SLOTS
from kvstrata.model.refs import Key
from kvstrata.plan.actions import ProbeBackend
from kvstrata.plan.redis.external import missing
from kvstrata.reconcile import metrics
from kvstrata.reconcile.background import utc_now
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.secrets import decode
from kvstrata.reconcile.store import Store

MAX_CONNECTIONS = 32
"""Concurrent connections to external servers, over all tiers; hanging ones last for seconds."""


class Backends:
    """Probes tiers' servers, one probe at a time for each tier."""

    def __init__(self, kube: Kube, store: Store, queue: WorkQueue) -> None:
        self._kube, self._store, self._queue = kube, store, queue
        self._probes: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._connections = asyncio.Semaphore(MAX_CONNECTIONS)

    def begin(self, namespace: str, order: ProbeBackend) -> None:
        slot = (namespace, order.tier)
        running = self._probes.get(slot)
        if running is None or running.done():
            self._probes[slot] = asyncio.create_task(self.ask(namespace, order), name=f"probe {order.tier}")

    async def ask(self, namespace: str, order: ProbeBackend) -> None:
        """Probe a tier, store the report, and enqueue the tier. Failures are reports, too."""
        try:
            password = await self._secret_value(namespace, order.password_secret)
            authority = await self._secret_value(namespace, order.authority_secret)
            text = password.decode() if password else None
        except (KubeError, LookupError) as error:
            report = _unasked(order, TierReason.SECRET_NOT_FOUND, str(error))
        except UnicodeDecodeError:
            where = order.password_secret or ("", "")
            sentence = f"the key {where[1]} of Secret {where[0]} is not UTF-8 text"
            report = _unasked(order, TierReason.SECRET_UNREADABLE, sentence)
        else:
            report = await self._checks(order, Access(text, authority, order.username))
        if not self._is_asked(namespace, order.tier):
            return
        self._store.domain(namespace).backends[order.tier] = report
        self._count(namespace, order, report)
        self._queue.add(Key("CacheTier", namespace, order.tier))

    async def _checks(self, order: ProbeBackend, access: Access) -> BackendReport:
        checked = await check_external(
            order.endpoint,
            order.server_name,
            access,
            order.domain,
            cluster=order.cluster,
            limit=self._connections,
        )
        answering = checked.answering
        if not answering:
            first = checked.servers[0]
            return _report(order, False, first.reason, first.message, external=checked)
        whole = len(answering) == len(checked.servers) and all(one.version for one in answering)
        bounds = [one.max_bytes for one in answering]
        return _report(
            order,
            True,
            str(RedisReason.REACHABLE),
            answering[0].message,
            used_bytes=sum(one.used_bytes for one in answering),
            max_bytes=sum(bounds) if all(bounds) else 0,
            evicts=any(one.eviction not in ("", "noeviction") for one in answering),
            version=answering[0].version if whole else "",
            software=checked.servers[0].software,
            external=checked,
        )

    def forget_unasked(self, namespace: str, tier: str) -> None:
        if not self._is_asked(namespace, tier):
            self._store.domain(namespace).backends.pop(tier, None)
            for gauge in (metrics.BACKEND_UP, metrics.BACKEND_SUITABLE, metrics.SLOTS_UNCOVERED):
                gauge.remove(namespace, tier)

    def _count(self, namespace: str, order: ProbeBackend, report: BackendReport) -> None:
        """Update metrics; unreachable servers keep the suitability of their last answer."""
        where = (namespace, order.tier)
        metrics.BACKEND_UP.labels(*where).set(1 if report.reachable else 0)
        tier = self._store.domain(namespace).objects["CacheTier"].get(order.tier)
        if tier is None or report.external is None or not report.reachable:
            return
        unsuitable = missing(tier, report, order.domain)
        metrics.BACKEND_SUITABLE.labels(*where).set(0 if unsuitable else 1)
        if report.external.mapped:
            metrics.SLOTS_UNCOVERED.labels(*where).set(SLOTS - report.external.answered)

    async def _secret_value(self, namespace: str, where: tuple[str, str] | None) -> bytes | None:
        if where is None:
            return None
        raw = await self._kube.get(SECRET, namespace, where[0])
        value = decode(raw).get(where[1]) if raw else None
        if value is None:
            raise LookupError(f"Secret {where[0]} does not exist or has no key {where[1]}")
        return value

    def _is_asked(self, namespace: str, tier: str) -> bool:
        found: CacheTier | None = self._store.domain(namespace).objects["CacheTier"].get(tier)
        if found is None or found.metadata.deleting or found.status.is_true(ConditionType.STALLED):
            return False
        return found.spec.medium is Medium.REDIS


def _unasked(order: ProbeBackend, reason: TierReason, message: str) -> BackendReport:
    return _report(order, False, reason, message)


def _report(order: ProbeBackend, reachable: bool, reason: str, message: str, **figures: Any) -> BackendReport:
    return BackendReport(
        endpoint=order.endpoint,
        username=order.username,
        reachable=reachable,
        reason=reason,
        message=message,
        at=utc_now(),
        password_secret=order.password_secret,
        authority_secret=order.authority_secret,
        cluster=order.cluster,
        **figures,
    )
