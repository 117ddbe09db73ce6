"""The writer's part in deleting former caches: passes orders on, and logs what a status reports."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from kvstrata.api.base import Resource
from kvstrata.api.cachedmodel import CachedModel
from kvstrata.model.refs import Key
from kvstrata.plan.actions import EndReclaim, ReclaimQuestion

from . import metrics

log = logging.getLogger(__name__)


class Reclaimer(Protocol):
    def ask(self, namespace: str, question: ReclaimQuestion) -> None:
        """Publish the number of waiting caches, or start a round unless one is running."""

    async def end(self, namespace: str, order: EndReclaim) -> None:
        """Stop deleting a former cache, and forget it."""


async def reclaim(
    reclaimer: Reclaimer | None, namespace: str, action: ReclaimQuestion | EndReclaim, may_write: Callable[[], None]
) -> None:
    """Pass an order on; wait for an end, because the status reports it next."""
    if reclaimer is None:
        return
    if isinstance(action, EndReclaim):
        may_write()
        await reclaimer.end(namespace, action)
    else:
        reclaimer.ask(namespace, action)


def tell_reclaimed(key: Key, before: Resource | None, after: Resource | None) -> None:
    if not isinstance(after, CachedModel) or after.status.reclaimed is None:
        return
    known, told = before.status.reclaimed if isinstance(before, CachedModel) else None, after.status.reclaimed
    if known == told:
        return
    metrics.RECLAIMED_BLOCKS.labels(key.namespace, key.name).inc(told.blocks)
    metrics.RECLAIMED_BYTES.labels(key.namespace, key.name).inc(told.bytes)
    facts = {"identity": told.identity, "blocks": told.blocks, "bytes": told.bytes}
    log.info("a former cache was deleted", extra={"key": str(key), **facts})
