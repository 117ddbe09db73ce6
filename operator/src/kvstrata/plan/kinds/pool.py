"""PrefixPool: its sources, renderings and epochs, and the life of its content.

New content gets a new epoch, written into status first and alone, as for policies. Beside published content it waits in
`status.next`, so that readers keep the old; with `invalidation: Eager`, or without readers, it replaces the old at
once. It takes over when every pod directs readers to it, and is computed again before it expires.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.common import Budget
from kvstrata.api.conditions import ConditionType
from kvstrata.api.prefixpool import PoolContent, PoolInvalidation, PrefixPool
from kvstrata.api.reasons import PoolReason, SharedReason
from kvstrata.api.scalars import Quantity
from kvstrata.api.status import ScopeStatus
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.objects.quantities import binary
from kvstrata.plan.actions import Decision, Plan, Question, key_of
from kvstrata.plan.budgets.admission import admission_of
from kvstrata.plan.budgets.capacity import within_budget
from kvstrata.plan.budgets.usage import usage_status
from kvstrata.plan.bundle.enforcement import coverage
from kvstrata.plan.conditions import Finding, false, kstatus, true, unknown, write_status
from kvstrata.plan.keys.data_keys import is_lost
from kvstrata.plan.kinds.pool_warming import Step, as_recorded, cold, live
from kvstrata.plan.pools.content import Content, Progress, read_sources
from kvstrata.plan.pools.rendering import Agreed, newest_render_id, render
from kvstrata.plan.pools.shards import committed_version, contents, has_replaced_versions, keyspace_of_slot, newest_of
from kvstrata.plan.redis.backend import with_stores
from kvstrata.plan.rules import first
from kvstrata.plan.rules import pool as chain
from kvstrata.plan.scopes import fresh_epoch, generation_due, pool_scope

RENEW_AFTER = 3, 4
"""Fraction of its retention after which a pool's content is recomputed."""

_RENDERED = ("contentDigest", "renderID", "manifestDigest", "tokens", "chunks", "prefixes")
_CONTENT = tuple(field.alias or name for name, field in PoolContent.model_fields.items())


def plan_pool(world: World, name: str, now: datetime) -> Plan:
    """Return the plan for one pool. Published content stays in spite of errors in spec, sources or renderings."""
    pool = world.pools.get(name)
    if pool is None or pool.metadata.deleting:
        return Plan()
    step, following = _next_step(world, pool, now), pool.status.next
    fields: dict[str, Any] = {"scope": with_stores(world, pool.status.scope), **step.fields}
    slot = fields.get("next", following.to_kubernetes()) if following is not None else None
    if following is not None and slot is not None and slot["scope"]["epoch"] == following.scope.epoch:
        fields["next"] = {**slot, "scope": with_stores(world, following.scope)}
    statuses = write_status(pool, now, _findings(world, pool, step), fields, can_wait=step.can_wait)
    return Plan(step.questions, statuses=statuses, enqueue=step.enqueue, wake_after_s=step.again_s)


def _next_step(world: World, pool: PrefixPool, now: datetime) -> Step:
    if not world.domain_id or world.domain_key is None:
        waiting = Decision(SharedReason.WAITING_FOR_DOMAIN, world.domain_awaited)
        return Step(pending=waiting, can_wait=True)
    stalled = first(chain.RULES, world, pool)
    if stalled is not None:
        return Step(stalled=stalled)
    model = world.models[pool.spec.model_ref.name]
    sources = read_sources(world, pool, now)
    made: Progress[Agreed] = Progress(objection=sources.objection, pending=sources.pending)
    if sources.made is not None:
        if (drawn := _drawn(world, pool, sources.made)) is not None:
            why = Decision(PoolReason.RENDERING, "a new epoch was drawn; pods are asked to make tokens of it")
            step = Step(pending=why, fields=drawn, enqueue=_followers(world, pool))
            return replace(step, questions=sources.questions, again_s=sources.again_s)
        made = render(world, model, pool.name, sources.made, now)
    return _rendered(world, pool, model, sources, made, now)


def _rendered(
    world: World,
    pool: PrefixPool,
    model: CachedModel,
    sources: Progress[Content],
    made: Progress[Agreed],
    now: datetime,
) -> Step:
    questions: tuple[Question, ...] = (*sources.questions, *made.questions)
    objection = made.objection
    taken: dict[str, Any] | None = None
    if made.made is not None and sources.made is not None:
        objection = _instability(world, pool, model, made.made)
        if objection is None:
            taken = _rendered_fields(world, pool, model, sources.made, made.made)
    if objection is None:
        taken = taken or _promotion(world, model, pool) or _renewal(world, model, pool, now)
    if taken:
        waiting = Decision(SharedReason.NOT_COMMITTED, f"the bundle of CachedModel {model.name} is being written")
        return Step(pending=waiting, fields=taken, questions=questions, enqueue=_followers(world, pool))
    if objection is not None or newest_of(pool).manifest_digest is None:
        pending = made.pending if objection is None else None
        step = Step(stalled=objection, pending=pending, can_wait=objection is None)
    elif (verdict := admission_of(world, pool, None)).due:
        message = "its guarantees were decided on; pods have not acknowledged them yet"
        waiting = Decision(SharedReason.NOT_COMMITTED, message)
        fields: dict[str, Any] = {"admission": verdict.status()}
        step = Step(as_recorded(pool), pending=waiting, fields=fields, enqueue=_followers(world, pool))
    else:
        step = live(world, model, pool, sources.made, now)
        fields = {**step.fields, "usage": _usage(world, pool, model, now), "admission": verdict.status()}
        step = replace(step, fields=fields, can_wait=step.pending is not None and not step.fields)
    due = _renewal_due(world, model, pool)
    left_s = (due - now).total_seconds() if due is not None else None
    waits = [wait_s for wait_s in (sources.again_s, made.again_s, left_s, step.again_s) if wait_s is not None]
    again_s = max(1.0, min(waits)) if waits else None
    return replace(step, questions=(*questions, *step.questions), again_s=again_s)


def _followers(world: World, pool: PrefixPool) -> tuple[Key, ...]:
    return key_of(pool), Key(BUNDLE, world.namespace, pool.spec.model_ref.name)


def _findings(world: World, pool: PrefixPool, step: Step) -> tuple[Finding | None, ...]:
    model = world.models.get(pool.spec.model_ref.name)
    verdict = admission_of(world, pool, None)
    cause = step.stalled or step.pending or Decision(PoolReason.RENDERING, "pods make tokens of its prefixes")
    published = _published(world, model, pool)
    awaited = published.failure if published is not None else None
    if published is None:
        published = false(ConditionType.PUBLISHED, cause.reason, f"no reader is sent to it: {cause.message}")
    ready, pending = published.cause, step.pending
    if pending is not None and pending.reason == SharedReason.NO_LIVE_PODS:
        ready, pending = pending, None
    serves = bool(world.serving_pods(pool.spec.model_ref.name))
    return (
        *kstatus(step.stalled, pending or awaited or verdict.waiting, ready),
        (step.warm or cold(newest_of(pool), pool, cause)) if serves else None,
        published if serves else None,
        verdict.finding,
        within_budget(world, _guarantees(pool), [model] if model is not None else []),
    )


def _published(world: World, model: CachedModel | None, pool: PrefixPool) -> Finding | None:
    """Return whether every serving pod knows the published content and no replaced one; None if none is published."""
    kind = ConditionType.PUBLISHED
    slots = [slot for slot in contents(pool) if slot.published]
    if not slots or model is None:
        return None
    found = [committed_version(world, model, pool, slot) for slot in slots]
    versions = [one for one in found if one is not None and one[1].published]
    if len(versions) < len(slots) or has_replaced_versions(world, model, pool):
        return false(kind, SharedReason.NOT_COMMITTED, f"the bundle of CachedModel {model.name} is being written")
    total = coverage(world, model.name, versions[0][0].since)
    if not total.live:
        message = f"no pod of CachedModel {model.name} serves: no content is stored or read"
        return unknown(kind, SharedReason.NO_LIVE_PODS, message)
    if total.complete:
        return true(kind, PoolReason.PUBLISHED, "every serving pod knows it")
    message = f"{total} know it; waiting for {', '.join(sorted(total.missing)[:3])}"
    return false(kind, SharedReason.AWAITING_ACKS, message)


def _promotion(world: World, model: CachedModel, pool: PrefixPool) -> dict[str, Any] | None:
    """Return the status fields that promote the next content; None before it is time. It is time when every pod directs
    readers to the new content, and no pod renders the old one."""
    following = pool.status.next
    if following is None or not following.published:
        return None
    found = committed_version(world, model, pool, following)
    if found is None or not found[1].published or not coverage(world, model.name, found[0].since).complete:
        return None
    newest = newest_render_id(world, model)
    if any(pod.render_id != newest for pod in world.live_pods(model.name)):
        return None
    reported = following.to_kubernetes()
    size = max((tier.bytes for tier in following.tiers), default=0)
    fields = {name: reported.get(name) for name in _CONTENT}
    return fields | {"bytes": binary(size), "usage": None, "next": None}


def _renewal_due(world: World, model: CachedModel, pool: PrefixPool) -> datetime | None:
    """Return when the published content must be recomputed before it expires; None for never."""
    status = pool.status
    found = committed_version(world, model, pool, status)
    if found is None or status.next is not None or not status.published or status.warmed_at is None:
        return None
    bounds = [b.retention_s for b in found[1].budgets if b.tier in found[1].tiers and b.retention_s is not None]
    if not bounds:
        return None
    return status.warmed_at + timedelta(seconds=min(bounds) * RENEW_AFTER[0] / RENEW_AFTER[1])


def _renewal(world: World, model: CachedModel, pool: PrefixPool, now: datetime) -> dict[str, Any] | None:
    """Return the status fields that begin to recompute the published content; None before it is time."""
    due = _renewal_due(world, model, pool)
    if due is None or now < due:
        return None
    reported, scope = pool.status.to_kubernetes(), with_stores(world, _fresh_epoch(world, pool))
    return {"next": {name: reported.get(name) for name in _RENDERED} | {"scope": scope}}


def _guarantees(pool: PrefixPool) -> list[Budget]:
    """Return the guarantees of published content; none unless the pool is pinned."""
    slot = next((slot for slot in contents(pool) if slot.published), None)
    rows = slot.tiers if pool.spec.pinned and slot is not None else ()
    return [Budget(tier=row.name, guaranteed=Quantity(str(row.bytes))) for row in rows if row.bytes]


def _usage(world: World, pool: PrefixPool, model: CachedModel, now: datetime) -> dict[str, Any] | None:
    slot = contents(pool)[0]
    found = committed_version(world, model, pool, slot)
    bounded = [budget for budget in found[1].budgets if budget.guaranteed_bytes] if found is not None else []
    return usage_status(world, keyspace_of_slot(world, pool, slot), bounded, (model.name,), pool.status.usage, now)


def _drawn(world: World, pool: PrefixPool, content: Content) -> dict[str, Any] | None:
    status = pool.status
    due = generation_due(pool) or any(is_lost(world, epoch) for epoch in status.epochs)
    if status.scope is not None and not due and newest_of(pool).content_digest == content.digest:
        return None
    if status.next is not None and not due and status.content_digest == content.digest:
        # The sources are back at the published content.
        return {"next": None}
    return _fresh_slot(world, pool, content)


def _fresh_slot(world: World, pool: PrefixPool, content: Content) -> dict[str, Any]:
    status = pool.status
    acted_on = {"cacheGeneration": pool.spec.cache_generation}
    drawn = {"scope": with_stores(world, _fresh_epoch(world, pool)), "contentDigest": content.digest}
    readable = status.scope is not None and status.published and not is_lost(world, status.scope.epoch)
    # A patch merges: fields that are not cleared would keep the old content's values.
    if readable and pool.spec.invalidation is PoolInvalidation.LAZY:
        return acted_on | {"next": dict.fromkeys(_CONTENT) | drawn}
    return {**dict.fromkeys((*_CONTENT, "bytes", "usage", "next")), **acted_on, **drawn}


def _fresh_epoch(world: World, pool: PrefixPool) -> ScopeStatus:
    known = [scope for slot in contents(pool) if (scope := slot.scope) is not None]
    return fresh_epoch(world, pool_scope(pool.name), max(known, key=lambda scope: scope.rolls, default=None))


def _instability(world: World, pool: PrefixPool, model: CachedModel, agreed: Agreed) -> Decision | None:
    """Return an objection if all pods now render the same content differently than before."""
    slot = newest_of(pool)
    before = slot.manifest_digest
    if before is None or before == agreed.manifest or slot.render_id != newest_render_id(world, model):
        return None
    return Decision(
        PoolReason.UNSTABLE_TEMPLATE,
        f"pods make other tokens of it than before ({agreed.manifest[:8]}, not {before[:8]}): the chat "
        "template or the tokenizer changes by itself; when it is fixed, raise spec.cacheGeneration",
    )


def _rendered_fields(
    world: World, pool: PrefixPool, model: CachedModel, content: Content, agreed: Agreed
) -> dict[str, Any]:
    """Return the status fields of the rendering; empty if unchanged. Another template with the same tokens changes only
    its name; other tokens make new content."""
    slot = newest_of(pool)
    rendered: dict[str, Any] = {
        "renderID": newest_render_id(world, model),
        "manifestDigest": agreed.manifest,
        "tokens": agreed.tokens,
        "chunks": agreed.chunks,
        "prefixes": [
            {"name": name, "tokens": made.tokens, "chunks": made.chunks} for name, made in agreed.prefixes.items()
        ],
    }
    reported = slot.to_kubernetes()
    if all(reported.get(name) == value for name, value in rendered.items()):
        return {}
    if slot.manifest_digest not in (None, agreed.manifest):
        drawn = _fresh_slot(world, pool, content)
        return drawn | ({"next": drawn["next"] | rendered} if drawn.get("next") else rendered)
    if pool.status.next is not None:
        return {"next": pool.status.next.to_kubernetes() | rendered}
    return rendered
