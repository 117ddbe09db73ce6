"""What the writer does of deletions of former caches: it hands over what plans ask for, and tells what status says."""

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
    """Has former caches deleted."""

    def ask(self, namespace: str, question: ReclaimQuestion) -> None:
        """Show what waits, or begin with a round unless the deletion is under way."""

    async def end(self, namespace: str, order: EndReclaim) -> None:
        """Let a former cache be deleted no further, and forget its deletion."""


async def reclaim(
    reclaimer: Reclaimer | None, namespace: str, action: ReclaimQuestion | EndReclaim, may_write: Callable[[], None]
) -> None:
    """Hand over what a plan asks for; an end is waited for, because status says so next."""
    if reclaimer is None:
        return
    if isinstance(action, EndReclaim):
        may_write()
        await reclaimer.end(namespace, action)
    else:
        reclaimer.ask(namespace, action)


def tell_reclaimed(key: Key, before: Resource | None, after: Resource | None) -> None:
    """Log and count what the status of `after` says was deleted of a former cache and that of `before` did not."""
    if not isinstance(after, CachedModel) or after.status.reclaimed is None:
        return
    known, told = before.status.reclaimed if isinstance(before, CachedModel) else None, after.status.reclaimed
    if known == told:
        return
    metrics.RECLAIMED_BLOCKS.labels(key.namespace, key.name).inc(told.blocks)
    metrics.RECLAIMED_BYTES.labels(key.namespace, key.name).inc(told.bytes)
    facts = {"identity": told.identity, "blocks": told.blocks, "bytes": told.bytes}
    log.info("a former cache was deleted", extra={"key": str(key), **facts})
