"""A pool's published content: whether pods know it, when new content takes over, and when it is renewed."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.common import Budget
from kvstrata.api.conditions import ConditionType
from kvstrata.api.prefixpool import PrefixPool
from kvstrata.api.reasons import PoolReason
from kvstrata.api.scalars import Quantity
from kvstrata.contract.policy.pools import PoolRef
from kvstrata.model.world import World
from kvstrata.objects.quantities import binary
from kvstrata.plan.actions import Decision
from kvstrata.plan.budgets.capacity import within_budget
from kvstrata.plan.bundle.enforcement import Coverage, coverage
from kvstrata.plan.conditions import Finding, false, true, unknown
from kvstrata.plan.pools.rendering import newest_render_id
from kvstrata.plan.pools.shards import committed_version, contents, has_replaced_versions
from kvstrata.plan.scopes import Epoch

RENEW_AFTER = 3, 4
"""Fraction of its retention after which a pool's content is recomputed."""

_OF_A_CONTENT = ("contentDigest", "renderID", "manifestDigest", "tokens", "chunks", "prefixes")


def published(
    world: World, model: CachedModel | None, pool: PrefixPool, cause: Decision
) -> tuple[Finding, Decision | None]:
    """Return whether every serving pod knows the published content and no replaced one, and the reason for waiting.
    `cause` is why nothing is published yet."""
    kind = ConditionType.PUBLISHED
    slots = [slot for slot in contents(pool) if slot.published]
    if not slots or model is None:
        return false(kind, cause.reason, f"no reader is sent to it: {cause.message}"), None
    found = [committed_version(world, model, pool, slot) for slot in slots]
    versions = [one for one in found if one is not None and one[1].published]
    if len(versions) < len(slots) or has_replaced_versions(world, model, pool):
        waiting = Decision(PoolReason.NOT_COMMITTED, f"the bundle of CachedModel {model.name} is being written")
        return false(kind, waiting.reason, waiting.message), waiting
    total = _coverage(world, model, versions[0][0])
    if not total.live:
        sentence = f"no pod of CachedModel {model.name} serves: no content is stored or read"
        return unknown(kind, PoolReason.NO_LIVE_PODS, sentence), None
    if total.complete:
        return true(kind, PoolReason.PUBLISHED, "every serving pod knows it"), None
    waiting = Decision(PoolReason.AWAITING_ACKS, f"{total} know it; waiting for {', '.join(sorted(total.missing)[:3])}")
    return false(kind, waiting.reason, waiting.message), waiting


def promotion(world: World, model: CachedModel, pool: PrefixPool) -> dict[str, Any] | None:
    """Return the status fields that promote the next content; None before it is time. It is time when every pod directs
    readers to the new content, and no pod renders the old one."""
    following = pool.status.next
    if following is None or not following.published:
        return None
    found = committed_version(world, model, pool, following)
    if found is None or not found[1].published or not _coverage(world, model, found[0]).complete:
        return None
    newest = newest_render_id(world, model)
    if any(pod.render_id != newest for pod in world.live_pods(model.name)):
        return None
    reported = following.to_kubernetes()
    size = max((tier.bytes for tier in following.tiers), default=0)
    fields = {name: reported.get(name) for name in (*_OF_A_CONTENT, "scope", "tiers", "warmedAt", "published")}
    return fields | {"bytes": binary(size), "usage": None, "next": None}


def renewal_due(world: World, model: CachedModel, pool: PrefixPool) -> datetime | None:
    """Return when the published content must be recomputed before it expires; None for never."""
    status = pool.status
    found = committed_version(world, model, pool, status)
    if found is None or status.next is not None or not status.published or status.warmed_at is None:
        return None
    bounds = [b.retention_s for b in found[1].budgets if b.tier in found[1].tiers and b.retention_s is not None]
    if not bounds:
        return None
    return status.warmed_at + timedelta(seconds=min(bounds) * RENEW_AFTER[0] / RENEW_AFTER[1])


def renewal(pool: PrefixPool, drawn: Epoch) -> dict[str, Any]:
    reported = pool.status.to_kubernetes()
    return {"next": {name: reported.get(name) for name in _OF_A_CONTENT} | {"scope": drawn.to_status()}}


def guarantees_of(pool: PrefixPool) -> list[Budget]:
    """Return the guarantees of published content; none unless the pool is pinned."""
    slot = next((slot for slot in contents(pool) if slot.published), None)
    rows = slot.tiers if pool.spec.is_pinned and slot is not None else ()
    return [Budget(tier=row.name, guaranteed=Quantity(str(row.bytes))) for row in rows if row.bytes]


def within_guarantee(world: World, pool: PrefixPool) -> Finding:
    model = world.models.get(pool.spec.model_ref.name)
    return within_budget(world, guarantees_of(pool), [model] if model is not None else [])


def _coverage(world: World, model: CachedModel, ref: PoolRef) -> Coverage:
    return coverage(world, model.name, ref.since)
