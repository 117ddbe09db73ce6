"""Probes of external Redis servers, beside the loop; reports and values of their Secrets go into the store."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from kvstrata.api.cachetier import Medium
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import SharedReason, TierReason
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.redis.external import check_external
from kvstrata.clients.redis.probe import Access
from kvstrata.contract.policy.tiers import MAX_AUTHORITY_BYTES, MAX_PASSWORD_BYTES, password_in
from kvstrata.model.pods import BackendReport
from kvstrata.model.redis.cluster import SLOTS
from kvstrata.model.refs import Key
from kvstrata.plan.actions import ProbeBackend
from kvstrata.plan.redis.external import missing
from kvstrata.reconcile import metrics
from kvstrata.reconcile.background import Background, utc_now
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.secrets import secret_value
from kvstrata.reconcile.store import Store

MAX_CONNECTIONS = 32
"""Concurrent connections to external servers, over all tiers; hanging ones last for seconds."""


class Backends(Background):
    """Probes tiers' servers, one probe at a time for each tier."""

    def __init__(self, kube: Kube, store: Store, queue: WorkQueue) -> None:
        super().__init__(queue)
        self._kube, self._store = kube, store
        self._connections = asyncio.Semaphore(MAX_CONNECTIONS)

    def begin(self, namespace: str, order: ProbeBackend) -> None:
        slot = (namespace, order.tier)
        self._begin(slot, self.ask(namespace, order), "a probe of a tier failed", Key("CacheTier", *slot))

    async def ask(self, namespace: str, order: ProbeBackend) -> None:
        """Probe a tier, store the report, and enqueue the tier. Failures are reports, too. Pods get a password or
        authority that changed after a server answered with it."""
        asked, read = order.access, dict[tuple[str, str], bytes]()
        try:
            password = await self._secret_value(namespace, asked.password, MAX_PASSWORD_BYTES)
            authority = await self._secret_value(namespace, asked.authority, MAX_AUTHORITY_BYTES)
            text = password_in(password).decode() if password else None
        except (KubeError, LookupError) as error:
            report = _report(order, False, SharedReason.SECRET_NOT_FOUND, str(error))
        except UnicodeDecodeError:
            where = asked.password or ("", "")
            sentence = f"the key {where[1]} of Secret {where[0]} is not UTF-8 text"
            report = _report(order, False, TierReason.SECRET_UNREADABLE, sentence)
        else:
            pairs = ((asked.password, password), (asked.authority, authority))
            read = {where: value for where, value in pairs if where is not None and value is not None}
            report = await self._checks(order, Access(text, authority, asked.username, self._store.allowed_servers))
        if not self._is_asked(namespace, order.tier):
            return
        if report.reachable:
            self._queue.add_all(self._store.take_access(namespace, order.tier, read))
        elif not read.items() <= self._store.domain(namespace).access.get(order.tier, read).items():
            report = replace(report, message=f"{report.message}. Pods keep the password and authority that they have")
        self._store.domain(namespace).backends[order.tier] = report
        self._count(namespace, order, report)
        self._queue.add(Key("CacheTier", namespace, order.tier))

    async def _checks(self, order: ProbeBackend, access: Access) -> BackendReport:
        asked, limit = order.access, self._connections
        checked = await check_external(
            asked.endpoint, asked.server_name, access, order.domain, cluster=asked.cluster, limit=limit
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
            str(TierReason.REACHABLE),
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
            domain = self._store.domain(namespace)
            domain.backends.pop(tier, None)
            domain.access.pop(tier, None)
            for gauge in (metrics.BACKEND_UP, metrics.BACKEND_SUITABLE, metrics.SLOTS_UNCOVERED):
                gauge.remove(namespace, tier)

    def _count(self, namespace: str, order: ProbeBackend, report: BackendReport) -> None:
        """Update metrics; unreachable servers keep the suitability of their last answer."""
        where = (namespace, order.tier)
        metrics.BACKEND_UP.labels(*where).set(1 if report.reachable else 0)
        tier = self._store.domain(namespace).tiers.get(order.tier)
        if tier is None or report.external is None or not report.reachable:
            return
        unsuitable = missing(tier, report, order.domain)
        metrics.BACKEND_SUITABLE.labels(*where).set(0 if unsuitable else 1)
        if report.external.mapped:
            metrics.SLOTS_UNCOVERED.labels(*where).set(SLOTS - report.external.answered)

    async def _secret_value(self, namespace: str, where: tuple[str, str] | None, most: int) -> bytes | None:
        """Raises LookupError if it is absent, or has more than `most` bytes."""
        value = await secret_value(self._kube, namespace, where)
        if where is not None and value is not None and len(value) > most:
            raise LookupError(f"the key {where[1]} of Secret {where[0]} has more than {most} bytes")
        return value

    def _is_asked(self, namespace: str, tier: str) -> bool:
        found = self._store.domain(namespace).tiers.get(tier)
        if found is None or found.metadata.deleting or found.spec.medium is not Medium.REDIS:
            return False
        stalled = found.status.condition(ConditionType.STALLED)
        return stalled is None or stalled.status != "True" or stalled.reason == TierReason.SERVERS_DO_NOT_START


def _report(order: ProbeBackend, reachable: bool, reason: str, message: str, **figures: Any) -> BackendReport:
    return BackendReport(order.access, reachable, reason, message, utc_now(), **figures)
