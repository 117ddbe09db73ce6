"""The operator's audit log: each event once, after it was written to the API server or is certain.

An event is a call of the logger `kvstrata.audit` whose record carries a `Happened`. The process that wrote it logs it:
one that dies in between leaves no line.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kvstrata.api.base import Resource
from kvstrata.api.cachedomain import DOMAIN_NAME, AuditNames, CacheDomain
from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import SharedReason
from kvstrata.api.status import Status
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.contract.messages.audit import LOGGER, Action, Happened
from kvstrata.contract.policy.bundle import Entry
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS, ScopeKind
from kvstrata.contract.receipt.facts import Copies
from kvstrata.model.erasure import facts
from kvstrata.model.erasure.record import ErasureRecord
from kvstrata.model.guarantees import HOLDERS, Holder
from kvstrata.model.pods import Pod
from kvstrata.model.refs import Key
from kvstrata.plan.actions import CommitBundle, Material
from kvstrata.plan.bundle.restore import story_of
from kvstrata.reconcile.domain_store import DomainStore

from . import metrics

log = logging.getLogger(LOGGER)
own_log = logging.getLogger(__name__)


def record(happened: Happened) -> None:
    metrics.AUDIT_EVENTS.labels(str(happened.action.event)).inc()
    log.info("%s", happened.action, extra={"audit": happened})


def record_status(key: Key, before: Resource | None, after: Resource | None, domain: DomainStore) -> None:
    if after is None:
        return
    known = before if before is not None and before.uid == after.uid else None
    about: dict[str, Any] = {"namespace": key.namespace, "object": f"{key.kind}/{key.name}", "uid": after.uid}
    named = about | {"tenant": _tenant(after, domain)}
    _record_admission(key, named, known, after)
    stalled = _stalled(after)
    if stalled is not None and stalled != _stalled(known):
        record(Happened(action=Action.OBJECT_STALLED, reason=stalled, **named))
    if isinstance(after, CacheInvalidation) and after.status.phase is not None:
        passed = known.status.phase if isinstance(known, CacheInvalidation) else None
        if after.status.phase is not passed:
            record(Happened(action=Action.INVALIDATION_MOVED, phase=after.status.phase, **about))


def _record_admission(key: Key, about: Mapping[str, Any], before: Resource | None, after: Resource) -> None:
    if not isinstance(after, HOLDERS):
        return
    known = before if isinstance(before, HOLDERS) else None
    old, new = known.status.admission if known is not None else None, after.status.admission
    had, has = old.by_tier if old is not None else {}, new.by_tier if new is not None else {}
    denied = _denied(after)
    for tier in sorted({*had, *has}):
        was, size = had.get(tier, 0), has.get(tier, 0)
        lower = Action.GUARANTEE_RELEASED if denied is None else Action.GUARANTEE_WITHDRAWN
        if size != was:
            action = Action.GUARANTEE_ADMITTED if size > was else lower
            _record_guarantee(key, action, tier=tier, bytes=size, bytes_before=was, **about)
    if denied is not None and denied != _denied(known):
        _record_guarantee(key, Action.GUARANTEE_DENIED, reason=str(SharedReason.INSUFFICIENT_CAPACITY), **about)


def _record_guarantee(key: Key, action: Action, **facts: Any) -> None:
    metrics.ADMISSIONS.labels(key.kind, str(action).removeprefix("Guarantee").lower()).inc()
    record(Happened(action=action, **facts))


def record_sharing(namespace: str, commit: CommitBundle, before: Mapping[str, Entry], domain: DomainStore) -> None:
    """Log scopes and pools in which tenants begin or cease to share a model's blocks since the entries `before`."""
    for tenant in sorted(before.keys() | commit.entries.keys()):
        old, new = before.get(tenant), commit.entries.get(tenant)
        if old is new:
            continue
        had, has = _shared_with(old), _shared_with(new)
        if old is not None:
            _record_sharing(namespace, Action.SHARING_ENDED, commit, old, had - has, domain)
        if new is not None:
            _record_sharing(namespace, Action.SHARING_BEGAN, commit, new, has - had, domain)


def _record_sharing(
    namespace: str, action: Action, commit: CommitBundle, entry: Entry, parties: Iterable[str], domain: DomainStore
) -> None:
    policy = domain.policy_names.get(entry.policy)
    event = Happened(
        action=action,
        namespace=namespace,
        model=commit.model,
        object=f"{TenantCachePolicy.INFO.kind}/{policy}" if policy is not None else None,
        uid=entry.policy,
        tenant=entry.tenant if names_tenants(domain) else None,
        scope=entry.keyspace[:SCOPE_DIGITS],
        revision=commit.root.revision,
    )
    for party in sorted(parties):
        record(replace(event, shared_with=party))


def record_refused(namespace: str, pod: Pod, reason: str) -> None:
    metrics.ACKS_REFUSED.labels(reason).inc()
    record(Happened(action=Action.REPORT_REFUSED, namespace=namespace, model=pod.model, pod_uid=pod.uid, reason=reason))


def record_secret(
    namespace: str, name: str, material: str, *, made: int, removed: int = 0, kind: str = "Secret"
) -> None:
    """Log how many keys were created and removed in a Secret; other material counts as one."""
    about: dict[str, Any] = {"namespace": namespace, "object": f"{kind}/{name}", "material": material}
    if made:
        record(Happened(action=Action.KEYS_MADE, count=made, **about))
    if removed:
        record(Happened(action=Action.KEYS_REMOVED, count=removed, **about))


def record_data_keys(namespace: str, *, made: int = 0, removed: int = 0) -> None:
    record_secret(namespace, DOMAIN_NAME, str(Material.DATA_KEYS), made=made, removed=removed, kind="CacheDomain")


def record_turn(namespace: str, name: str, turn: str) -> None:
    record(Happened(action=Action.CREDENTIALS_TURNED, namespace=namespace, object=f"Secret/{name}", reason=turn))


def record_restore(key: Key, before: Resource | None, after: Resource | None) -> str | None:
    """Log and count a restore that the status of `after` records first; return its story."""
    if not isinstance(after, CacheDomain) or after.status.restored is None:
        return None
    known = before.status.restored if isinstance(before, CacheDomain) else None
    if known is not None and known.id == after.status.restored.id:
        return None
    story = story_of(after.status.restored)
    metrics.RESTORES.labels(key.namespace).inc()
    own_log.error("the API server went back", extra={"key": str(key), "story": story})
    return story


def names_tenants(domain: DomainStore) -> bool:
    found = domain.domain
    return found is not None and found.spec.audit_names is AuditNames.TENANTS


def _tenant(resource: Resource, domain: DomainStore) -> str | None:
    return resource.spec.tenant if isinstance(resource, TenantCachePolicy) and names_tenants(domain) else None


def _shared_with(entry: Entry | None) -> frozenset[str]:
    """Return the parties that an entry shares with, and its pools; a suspended entry shares nothing."""
    if entry is None or entry.suspended:
        return frozenset()
    parties = {ScopeKind.GROUP: {f"TenantGroup/{entry.scope.name}"}, ScopeKind.PUBLIC: {"Public"}}
    return frozenset(f"PrefixPool/{pool}" for pool in entry.pools) | parties.get(entry.scope.kind, set())


def _stalled(resource: Resource | None) -> str | None:
    status: Status | None = getattr(resource, "status", None)
    reported = status.condition(ConditionType.STALLED) if status is not None else None
    return reported.reason if reported is not None and reported.status == "True" else None


def _denied(resource: Holder | None) -> tuple[int | None] | None:
    """Return the generation whose guarantee waits for room; None if none waits."""
    reported = resource.status.condition(ConditionType.ADMITTED) if resource is not None else None
    if reported is None or reported.reason != SharedReason.INSUFFICIENT_CAPACITY:
        return None
    return (reported.observed_generation,)


def record_news(before: ErasureRecord | None, after: ErasureRecord) -> None:
    """Log and count each fact that a write added; `before` is None for a new record."""
    name = f"{CacheInvalidation.INFO.kind}/{after.invalidation}"
    for key, fact in sorted(after.erasure.facts.items()):
        if before is not None and before.erasure.facts.get(key) == fact:
            continue
        metrics.count_look(fact)
        if (event := _event_of_fact(fact)) is not None:
            record(replace(event, namespace=after.namespace, object=name, uid=after.erasure.order.uid))


def _event_of_fact(fact: facts.Fact) -> Happened | None:
    """Return the event of a fact; None if nothing changed."""
    match fact:
        case facts.Rolled():
            return Happened(action=Action.SCOPES_ROLLED, count=len(fact.revoked))
        case facts.PodSeen(uid, standing):
            return Happened(action=Action.POD_STANDS, pod_uid=uid, revision=fact.revision, reason=str(standing))
        case facts.PodErased(uid):
            return _of_copies(Happened(action=Action.POD_ERASED, pod_uid=uid), *fact.copies.values())
        case facts.EngineKept(uid):
            return Happened(action=Action.ENGINE_KEPT, pod_uid=uid)
        case facts.EngineReset(uid):
            return Happened(action=Action.ENGINE_RESET, pod_uid=uid)
        case facts.PodProbed(uid):
            left = fact.asked - fact.missed
            return Happened(action=Action.POD_PROBED, pod_uid=uid, count=fact.asked, remaining=left)
        case facts.KeyDestroyed(fingerprint):
            return Happened(action=Action.KEY_DESTROYED, fingerprint=fingerprint)
        case facts.KeyRemoved(fingerprint):
            return Happened(action=Action.KEY_REVOKED, fingerprint=fingerprint)
        case facts.Deletion() if fact.state is not facts.JobState.RUNNING:
            deleted, left, server = fact.deleted, fact.remaining.keys, fact.node or None
            about = Happened(action=Action.SERVER_DELETED, tier=fact.tier, server=server, reason=str(fact.state))
            return replace(about, blocks=deleted.keys, bytes=deleted.bytes, remaining=left)
        case facts.Look(tier):
            left = sum(amount.keys for amount in fact.left.values())
            return Happened(action=Action.TIER_VERIFIED, tier=tier, count=len(fact.left), remaining=left)
        case facts.TierLost(tier) if not fact.unused:
            return Happened(action=Action.TIER_LOST, tier=tier)
        case facts.Verdict():
            return Happened(action=Action.ERASURE_JUDGED, reason=fact.reason)
        case facts.ReceiptWritten(digest):
            return Happened(action=Action.RECEIPT_WRITTEN, receipt=digest)
    return None


def _of_copies(about: Happened, *copies: Copies) -> Happened:
    blocks, size = sum(one.erased for one in copies), sum(one.bytes for one in copies)
    return replace(about, blocks=blocks, bytes=size, remaining=sum(one.remaining for one in copies))
