"""The servers of shared tiers: asked now and then how they are, beside everything else; answers go into the store."""

from __future__ import annotations

import asyncio

from kvstrata.adapters.kube import Kube, KubeError
from kvstrata.adapters.redis_probe import probe_redis
from kvstrata.adapters.resources import SECRET
from kvstrata.api.cachetier import CacheTier, Medium
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import TierReason
from kvstrata.model.facts import BackendReport
from kvstrata.model.refs import Key
from kvstrata.plan.types import ProbeBackend

from . import metrics
from .clock import utc_now
from .queue import WorkQueue
from .secrets import decode
from .store import Store


class Backends:
    """Asks tiers' servers for one operator process: one question at a time for each tier."""

    def __init__(self, kube: Kube, store: Store, queue: WorkQueue) -> None:
        self._kube, self._store, self._queue = kube, store, queue
        self._probes: dict[tuple[str, str], asyncio.Task[None]] = {}

    def begin(self, namespace: str, order: ProbeBackend) -> None:
        """Begin to ask a tier's server, unless it is being asked."""
        slot = (namespace, order.tier)
        running = self._probes.get(slot)
        if running is None or running.done():
            self._probes[slot] = asyncio.create_task(self.ask(namespace, order), name=f"probe {order.tier}")

    async def ask(self, namespace: str, order: ProbeBackend) -> None:
        """Ask a tier's server, note what it said, and queue the tier. What stands in the way is an answer, too."""
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
            answer = await probe_redis(
                order.endpoint,
                text,
                authority,
                order.server_name,
                username=order.username,
            )
            report = BackendReport(
                endpoint=order.endpoint,
                username=order.username,
                reachable=answer.reachable,
                reason=str(answer.reason),
                message=answer.message,
                at=utc_now(),
                used_bytes=answer.used_memory_bytes,
                max_bytes=answer.maxmemory_bytes,
                evicts=answer.maxmemory_policy not in ("", "noeviction"),
                version=answer.version,
            )
        if not self._is_asked(namespace, order.tier):
            return
        self._store.domain(namespace).backends[order.tier] = report
        metrics.BACKEND_UP.labels(namespace, order.tier).set(1 if report.reachable else 0)
        self._queue.add(Key("CacheTier", namespace, order.tier))

    def forget_unasked(self, namespace: str, tier: str) -> None:
        """Forget what the server of a tier said that is gone, or has none that the operator asks."""
        if not self._is_asked(namespace, tier):
            self._store.domain(namespace).backends.pop(tier, None)
            metrics.BACKEND_UP.remove(namespace, tier)

    async def _secret_value(self, namespace: str, where: tuple[str, str] | None) -> bytes | None:
        if where is None:
            return None
        raw = await self._kube.get(SECRET, namespace, where[0])
        value = decode(raw).get(where[1]) if raw else None
        if value is None:
            raise LookupError(f"Secret {where[0]} does not exist or has no key {where[1]}")
        return value

    def _is_asked(self, namespace: str, tier: str) -> bool:
        """Whether a tier exists and has a server that the operator asks."""
        found: CacheTier | None = self._store.domain(namespace).objects["CacheTier"].get(tier)
        if found is None or found.metadata.deleting or found.status.is_true(ConditionType.STALLED):
            return False
        return found.spec.medium is Medium.REDIS


def _unasked(order: ProbeBackend, reason: TierReason, message: str) -> BackendReport:
    return BackendReport(order.endpoint, order.username, reachable=False, reason=reason, message=message, at=utc_now())
