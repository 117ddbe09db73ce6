"""PrefixPool: its sources, renderings and epochs, and the life of its content.

New content gets a new epoch, written into status first and alone, as for policies. Beside published content it waits in
`status.next`, so that readers keep the old; with `invalidation: Eager`, or without readers, it replaces the old at
once.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.conditions import ConditionType
from kvstrata.api.prefixpool import NextContent, PoolInvalidation, PrefixPool, PrefixPoolStatus
from kvstrata.api.reasons import PoolReason
from kvstrata.contract.policy.keyspace import epoch_from_random
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.plan.actions import Decision, Plan, Question
from kvstrata.plan.budgets.admission import admission_of
from kvstrata.plan.budgets.usage import usage_status
from kvstrata.plan.conditions import Finding, false, kstatus, write_status
from kvstrata.plan.keys.data_keys import is_lost
from kvstrata.plan.kinds.applicable import applicable
from kvstrata.plan.kinds.pool_publish import promotion, published, renewal, renewal_due, within_guarantee
from kvstrata.plan.kinds.pool_warming import as_recorded, live
from kvstrata.plan.pools.content import Content, read_sources
from kvstrata.plan.pools.rendering import Agreed, Renderings, newest_render_id, render
from kvstrata.plan.pools.shards import committed_version, contents, keyspace_of
from kvstrata.plan.rules import first
from kvstrata.plan.rules import pool as chain
from kvstrata.plan.scopes import Epoch, pool_scope

_RENDERED = ("renderID", "manifestDigest", "tokens", "chunks", "prefixes")
_WARMED = ("published", "warmedAt", "tiers")
_COMPUTED = (*_WARMED, "bytes", "usage", "next")


def plan_pool(world: World, name: str, now: datetime) -> Plan:
    """Return the plan for one pool. Published content stays in spite of errors in spec, sources or renderings."""
    pool = world.pools.get(name)
    if pool is None or pool.metadata.deleting:
        return Plan()
    if not world.domain_id or world.domain_key is None:
        waiting = Decision(PoolReason.WAITING_FOR_DOMAIN, "the domain's identity and key are being drawn")
        return Plan(statuses=write_status(pool, now, _findings(world, pool, None, waiting), {}, can_wait=True))
    stalled = first(chain.RULES, world, pool)
    if stalled is not None:
        return Plan(statuses=write_status(pool, now, _findings(world, pool, stalled, None), {}))
    model = world.models[pool.spec.model_ref.name]
    sources = read_sources(world, pool, now)
    if sources.content is None:
        reading = Decision(PoolReason.RENDERING, "the ConfigMaps that it names are being read")
        made = Renderings(objection=sources.objection, pending=reading)
        return _report(world, pool, model, None, made, now, sources.questions, sources.again_s)
    drawn = _drawn(world, pool, sources.content)
    if drawn is not None:
        rendering = Decision(PoolReason.RENDERING, "a new epoch was drawn; pods are asked to make tokens of it")
        return Plan(
            actions=sources.questions,
            statuses=write_status(pool, now, _findings(world, pool, None, rendering), drawn),
            enqueue=_next_step(world, pool),
            wake_after_s=sources.again_s,
        )
    made = render(world, model, name, sources.content, now)
    return _report(world, pool, model, sources.content, made, now, sources.questions, sources.again_s)


def _report(
    world: World,
    pool: PrefixPool,
    model: CachedModel,
    content: Content | None,
    made: Renderings,
    now: datetime,
    questions: Iterable[Question],
    again_s: float | None,
) -> Plan:
    objection = made.objection
    rendered: dict[str, Any] = {}
    if made.agreed is not None and content is not None:
        objection = _instability(world, pool, model, made.agreed)
        rendered = {} if objection else _rendered_fields(world, pool, model, content, made.agreed)
    actions = (*questions, *made.questions)
    taken = rendered or (_succession(world, pool, model, now) if objection is None else None)
    if taken:
        waiting = Decision(PoolReason.NOT_COMMITTED, f"the bundle of CachedModel {model.name} is being written")
        findings = _findings(world, pool, None, waiting)
        return Plan(actions, statuses=write_status(pool, now, findings, taken), enqueue=_next_step(world, pool))
    waits = [
        wait_s
        for wait_s in (again_s, made.again_s, _left_s(renewal_due(world, model, pool), now))
        if wait_s is not None
    ]
    if objection is not None or not _is_rendered(pool):
        pending = None if objection is not None else made.pending
        statuses = write_status(pool, now, _findings(world, pool, objection, pending), {}, can_wait=objection is None)
        return Plan(actions, statuses=statuses, wake_after_s=_soonest(waits))
    verdict = admission_of(world, pool, None)
    if verdict.due:
        waiting = Decision(
            PoolReason.NOT_COMMITTED, "its guarantees were decided on; pods have not acknowledged them yet"
        )
        findings = _findings(world, pool, None, waiting, as_recorded(pool))
        reported = write_status(pool, now, findings, {"admission": verdict.status()})
        return Plan(actions, statuses=reported, enqueue=_next_step(world, pool), wake_after_s=_soonest(waits))
    step = live(world, model, pool, content, now)
    waits += [step.again_s] if step.again_s is not None else []
    fields = {**step.fields, "usage": _usage(world, pool, model, now), "admission": verdict.status()}
    findings = _findings(world, pool, step.stalled, step.pending, step.warm)
    reported = write_status(pool, now, findings, fields, can_wait=step.pending is not None and not step.fields)
    return Plan((*actions, *step.questions), statuses=reported, enqueue=step.enqueue, wake_after_s=_soonest(waits))


def _left_s(moment: datetime | None, now: datetime) -> float | None:
    return (moment - now).total_seconds() if moment is not None else None


def _soonest(waits: list[float]) -> float | None:
    return max(1.0, min(waits)) if waits else None


def _next_step(world: World, pool: PrefixPool) -> tuple[Key, ...]:
    own = Key(pool.INFO.kind, world.namespace, pool.name)
    return own, Key(BUNDLE, world.namespace, pool.spec.model_ref.name)


def _succession(world: World, pool: PrefixPool, model: CachedModel, now: datetime) -> dict[str, Any] | None:
    promoted = promotion(world, model, pool)
    if promoted is not None:
        return promoted
    return renewal(pool, _fresh_epoch(world, pool)) if _renewal_is_due(world, pool, model, now) else None


def _renewal_is_due(world: World, pool: PrefixPool, model: CachedModel, now: datetime) -> bool:
    due = renewal_due(world, model, pool)
    return due is not None and now >= due


def _usage(world: World, pool: PrefixPool, model: CachedModel, now: datetime) -> dict[str, Any] | None:
    slot = contents(pool)[0]
    found = committed_version(world, model, pool, slot)
    keyspace = keyspace_of(world, pool, slot)
    budgets = found[1].budgets if found is not None else ()
    bounded = [budget for budget in budgets if budget.guaranteed_bytes]
    return usage_status(world, keyspace, bounded, (model.name,), pool.status.usage, now)


def _slot(pool: PrefixPool) -> PrefixPoolStatus | NextContent:
    return pool.status.next or pool.status


def _is_rendered(pool: PrefixPool) -> bool:
    return _slot(pool).manifest_digest is not None


def _drawn(world: World, pool: PrefixPool, content: Content) -> dict[str, Any] | None:
    status, generation = pool.status, pool.spec.effective_cache_generation
    due = status.cache_generation is not None and status.cache_generation != generation
    due = due or any(is_lost(world, epoch) for epoch in status.epochs)
    if status.scope is not None and not due and _slot(pool).content_digest == content.digest:
        return None
    if status.next is not None and not due and status.content_digest == content.digest:
        # The sources are back at the published content.
        return {"next": None}
    return _fresh_slot(world, pool, content)


def _fresh_slot(world: World, pool: PrefixPool, content: Content) -> dict[str, Any]:
    status = pool.status
    scope = _fresh_epoch(world, pool).to_status()
    acted_on = {"cacheGeneration": pool.spec.effective_cache_generation}
    readable = status.scope is not None and status.published and not is_lost(world, status.scope.epoch)
    if readable and pool.spec.effective_invalidation is PoolInvalidation.LAZY:
        # A patch merges: fields that are not cleared would keep the old content's values.
        cleared = dict.fromkeys((*_RENDERED, *_WARMED))
        return acted_on | {"next": {**cleared, "scope": scope, "contentDigest": content.digest}}
    cleared = dict.fromkeys((*_RENDERED, *_COMPUTED))
    return cleared | acted_on | {"scope": scope, "contentDigest": content.digest}


def _fresh_epoch(world: World, pool: PrefixPool) -> Epoch:
    known = [slot.scope for slot in (pool.status, pool.status.next) if slot is not None and slot.scope is not None]
    rolls = max((scope.rolls for scope in known), default=-1) + 1
    holder = Key(pool.INFO.kind, world.namespace, pool.name)
    return Epoch(pool_scope(pool.name), epoch_from_random(world.entropy[:16]), rolls, holder)


def _instability(world: World, pool: PrefixPool, model: CachedModel, agreed: Agreed) -> Decision | None:
    """Return an objection if all pods now render the same content differently than before."""
    slot = _slot(pool)
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
    slot = _slot(pool)
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


def _findings(
    world: World, pool: PrefixPool, stalled: Decision | None, pending: Decision | None, warm: Finding | None = None
) -> tuple[Finding, ...]:
    model = world.models.get(pool.spec.model_ref.name)
    verdict = admission_of(world, pool, None)
    cause = stalled or pending or Decision(PoolReason.RENDERING, "pods make tokens of its prefixes")
    known, awaited = published(world, model, pool, cause)
    shown = Decision(known.reason, known.message)
    if pending is not None and pending.reason == PoolReason.NO_LIVE_PODS:
        shown, pending = pending, None
    if warm is None:
        warm = as_recorded(pool) if _slot(pool).published else false(ConditionType.WARM, cause.reason, cause.message)
    findings = (
        *kstatus(stalled, pending or awaited or verdict.waiting, shown),
        warm,
        known,
        *verdict.findings,
        within_guarantee(world, pool),
    )
    return applicable(world, pool, findings)
