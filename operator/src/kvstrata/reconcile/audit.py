"""The operator's audit log: each event once, after it was written to the API server or is certain.

An event is a call of the logger `kvstrata.audit` whose record carries a `Happened`. The process that wrote it logs it:
one that dies in between leaves no line.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from kvstrata.api.base import Resource
from kvstrata.api.cachedomain import DOMAIN_NAME, AuditNames, CacheDomain
from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.api.common import Status
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import PolicyReason
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.contract.messages.audit import LOGGER, Action, Happened
from kvstrata.contract.policy.bundle import Entry
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS, ScopeKind
from kvstrata.model.guarantees import HOLDERS, Holder
from kvstrata.model.pods import Pod
from kvstrata.model.refs import Key
from kvstrata.plan.actions import CommitBundle, Material
from kvstrata.plan.bundle.restore import story_of
from kvstrata.reconcile.domain_store import DomainStore

from . import metrics

log = logging.getLogger(LOGGER)
own_log = logging.getLogger(__name__)


class Outcome(StrEnum):
    ADMITTED = "admitted"
    DENIED = "denied"
    WITHDRAWN = "withdrawn"
    RELEASED = "released"


_ACTIONS = {
    Outcome.ADMITTED: Action.GUARANTEE_ADMITTED,
    Outcome.DENIED: Action.GUARANTEE_DENIED,
    Outcome.WITHDRAWN: Action.GUARANTEE_WITHDRAWN,
    Outcome.RELEASED: Action.GUARANTEE_RELEASED,
}


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
    for tier in sorted({*had, *has}):
        was, size = had.get(tier, 0), has.get(tier, 0)
        sizes = {"tier": tier, "bytes": size, "bytes_before": was}
        if size > was:
            _record_guarantee(key, Outcome.ADMITTED, **about, **sizes)
        elif size < was:
            _record_guarantee(key, Outcome.WITHDRAWN if _waits(after) else Outcome.RELEASED, **about, **sizes)
    if _waits(after) and (
        known is None or not _waits(known) or _observed_generation(known) != _observed_generation(after)
    ):
        _record_guarantee(key, Outcome.DENIED, reason=str(PolicyReason.INSUFFICIENT_CAPACITY), **about)


def _record_guarantee(key: Key, outcome: Outcome, **facts: Any) -> None:
    metrics.ADMISSIONS.labels(key.kind, outcome).inc()
    record(Happened(action=_ACTIONS[outcome], **facts))


def record_sharing(namespace: str, commit: CommitBundle, before: Mapping[str, Entry], domain: DomainStore) -> None:
    """Log the scopes and pools in which tenants begin or cease to share a model's blocks; `before` are the bundle's
    previous entries."""
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
    for party in sorted(parties):
        record(
            Happened(
                action=action,
                namespace=namespace,
                model=commit.model,
                object=f"{TenantCachePolicy.INFO.kind}/{policy}" if policy is not None else None,
                uid=entry.policy,
                tenant=entry.tenant if names_tenants(domain) else None,
                scope=entry.keyspace[:SCOPE_DIGITS],
                shared_with=party,
                revision=commit.root.revision,
            )
        )


def record_refused(namespace: str, pod: Pod, reason: str) -> None:
    metrics.ACKS_REFUSED.labels(reason).inc()
    record(Happened(action=Action.REPORT_REFUSED, namespace=namespace, model=pod.model, pod_uid=pod.uid, reason=reason))


def record_secret(namespace: str, name: str, material: str, *, made: int, removed: int = 0) -> None:
    """Log how many keys were created and removed in a Secret; other material counts as one."""
    _record_made(namespace, f"Secret/{name}", material, made, removed)


def record_data_keys(namespace: str, *, made: int, removed: int) -> None:
    _record_made(namespace, f"CacheDomain/{DOMAIN_NAME}", str(Material.DATA_KEYS), made, removed)


def _record_made(namespace: str, place: str, material: str, made: int, removed: int) -> None:
    about: dict[str, Any] = {"namespace": namespace, "object": place, "material": material}
    if made:
        record(Happened(action=Action.KEYS_MADE, count=made, **about))
    if removed:
        record(Happened(action=Action.KEYS_REMOVED, count=removed, **about))


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
    found: CacheDomain | None = domain.objects["CacheDomain"].get(DOMAIN_NAME)
    return found is not None and found.spec.effective_audit_names is AuditNames.TENANTS


def _tenant(resource: Resource, domain: DomainStore) -> str | None:
    return resource.spec.tenant if isinstance(resource, TenantCachePolicy) and names_tenants(domain) else None


def _shared_with(entry: Entry | None) -> frozenset[str]:
    """Return the parties that an entry shares with, and its pools; a suspended entry shares nothing."""
    if entry is None or entry.suspended:
        return frozenset()
    pools = frozenset(f"PrefixPool/{pool}" for pool in entry.pools)
    match entry.scope.kind:
        case ScopeKind.GROUP:
            return pools | {f"TenantGroup/{entry.scope.name}"}
        case ScopeKind.PUBLIC:
            return pools | {"Public"}
        case _:
            return pools


def _stalled(resource: Resource | None) -> str | None:
    status: Status | None = getattr(resource, "status", None)
    reported = status.condition(ConditionType.STALLED) if status is not None else None
    return reported.reason if reported is not None and reported.status == "True" else None


def _waits(resource: Holder) -> bool:
    reported = resource.status.condition(ConditionType.ADMITTED)
    return reported is not None and reported.reason == PolicyReason.INSUFFICIENT_CAPACITY


def _observed_generation(resource: Holder) -> int | None:
    reported = resource.status.condition(ConditionType.ADMITTED)
    return reported.observed_generation if reported is not None else None
