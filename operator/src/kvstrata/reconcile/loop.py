"""The reconcile loop: take a key, plan it from the world, write. `PLANNERS` has each kind's plan."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import datetime

from kvstrata.clients.kube import KubeError, NotLeadingError
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.objects.context import BuildContext
from kvstrata.plan.actions import Plan
from kvstrata.plan.bundle.commit import plan_bundle
from kvstrata.plan.claim import plan_claim
from kvstrata.plan.kinds.domain import plan_domain
from kvstrata.plan.kinds.group import plan_group
from kvstrata.plan.kinds.invalidation import plan_invalidation
from kvstrata.plan.kinds.model import plan_model
from kvstrata.plan.kinds.policy import plan_policy
from kvstrata.plan.kinds.pool import plan_pool
from kvstrata.plan.kinds.rejected import plan_in_own_namespace, plan_unreadable
from kvstrata.plan.kinds.tier import plan_tier

from . import metrics
from .background import utc_now
from .queue import WorkQueue
from .store import Store
from .writer import Writer

log = logging.getLogger(__name__)


class Loop:
    def __init__(self, store: Store, queue: WorkQueue, writer: Writer, ctx: BuildContext, workers: int) -> None:
        self._store, self._queue, self._writer, self._ctx, self._workers = store, queue, writer, ctx, workers

    async def run(self) -> None:
        """Work until cancelled, or until a worker finds that this process no longer leads."""
        # Counted on scrape, not at every key.
        metrics.QUEUE_DEPTH.set_function(lambda: len(self._queue))
        async with asyncio.TaskGroup() as group:
            for number in range(self._workers):
                group.create_task(self._work(), name=f"worker {number}")

    async def _work(self) -> None:
        while True:
            await self.reconcile(await self._queue.take())

    async def reconcile(self, key: Key) -> None:
        started = time.monotonic()
        try:
            await self._writer.bundles.catch_up(key)
            await self._writer.carry_out(key, plan(self._store.world(key.namespace), self._ctx, key, utc_now()))
        except KubeError as error:
            delay_s = self._queue.failed(key, error.retry_after_s)
            metrics.FAILURES.labels(key.kind, error.reason).inc()
            level = logging.DEBUG if error.is_conflict else logging.WARNING
            log.log(level, "a write was refused", extra={"key": str(key), "error": str(error), "again_in_s": delay_s})
        except NotLeadingError:
            raise
        except Exception:
            delay_s = self._queue.failed(key)
            metrics.FAILURES.labels(key.kind, "Bug").inc()
            log.exception("a plan failed; this is a defect", extra={"key": str(key), "again_in_s": delay_s})
        else:
            self._queue.done(key)
            metrics.RECONCILES.labels(key.kind).observe(time.monotonic() - started)


Planner = Callable[[World, BuildContext, str, datetime], Plan]

PLANNERS: Mapping[str, Planner] = {
    "CacheDomain": lambda world, _ctx, _name, now: plan_domain(world, now),
    "CacheTier": plan_tier,
    "CachedModel": plan_model,
    "TenantCachePolicy": lambda world, _ctx, name, now: plan_policy(world, name, now),
    "TenantGroup": lambda world, _ctx, name, now: plan_group(world, name, now),
    "PrefixPool": lambda world, _ctx, name, now: plan_pool(world, name, now),
    "CacheInvalidation": lambda world, _ctx, name, now: plan_invalidation(world, name, now),
    BUNDLE: lambda world, _ctx, name, now: plan_bundle(world, name, now),
}


def plan(world: World, ctx: BuildContext, key: Key, now: datetime) -> Plan:
    """Pure: the same world and time give the same plan."""
    if (unclaimed := plan_claim(world, key, now)) is not None:
        return unclaimed
    if key in world.unreadable:
        return plan_unreadable(world, key, now)
    if (refused := plan_in_own_namespace(world, ctx.operator_namespace, key, now)) is not None:
        return refused
    return PLANNERS[key.kind](world, ctx, key.name, now)
