"""CacheDomain: the namespace's identity, key and public epoch, and a summary of its pods."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from kvstrata.api.base import API_VERSION
from kvstrata.api.cachedomain import DOMAIN_NAME, CacheDomain
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import DomainReason
from kvstrata.contract.policy.keyspace import PUBLIC_SCOPE, derive_keyspace
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.objects import labels, names
from kvstrata.plan.actions import Create, Decision, EnsureSecret, Material, Plan
from kvstrata.plan.budgets.admission import admission_of, admitted_bytes
from kvstrata.plan.budgets.capacity import within_budget
from kvstrata.plan.budgets.classification import because_of, shared_levels, tiers_admitted
from kvstrata.plan.budgets.usage import usage_status
from kvstrata.plan.bundle import restore
from kvstrata.plan.bundle.compile import as_admitted, enforced
from kvstrata.plan.bundle.enforcement import ENFORCED, Coverage, coverage, enforced_finding, rules_are_committed
from kvstrata.plan.conditions import Finding, false, kstatus, write_status
from kvstrata.plan.keys import custody as keycustody
from kvstrata.plan.keys.data_keys import LOOK_AGAIN_S, is_lost, plan_data_keys
from kvstrata.plan.kinds.applicable import applicable
from kvstrata.plan.ownership import FOREIGN_S, name_conflict, read_foreign
from kvstrata.plan.rules.policy import budget_problem
from kvstrata.plan.scopes import fresh_epoch, held

DOMAIN_ID_BYTES = 8


def plan_domain(world: World, now: datetime) -> Plan:
    domain = world.domain
    if domain is None:
        return Plan(actions=(Create(_new_domain(world.namespace)),)) if _inhabited(world) else Plan()
    if domain.metadata.deleting:
        return Plan()
    previous = held(domain.status.scope, PUBLIC_SCOPE)
    adopted = keycustody.to_adopt(world, domain)
    if adopted is not None and previous is not None:
        waiting = Decision(DomainReason.CREATING, f"data keys are kept in custody {adopted} from now on")
        changed = {"keyCustody": str(adopted)}
        return Plan(
            statuses=write_status(domain, now, kstatus(None, waiting, waiting), changed), enqueue=_everyone(world)
        )
    if domain.status.domain_id is None or previous is None or is_lost(world, previous.epoch):
        epoch = fresh_epoch(world, PUBLIC_SCOPE, Key(domain.INFO.kind, world.namespace, DOMAIN_NAME), previous)
        fields = {
            "domainID": domain.status.domain_id or world.entropy[16 : 16 + DOMAIN_ID_BYTES].hex(),
            "scope": epoch.to_status(),
            "usage": None,
            "keyCustody": str(keycustody.active_custody(domain) if adopted is None else adopted),
        }
        waiting = Decision(DomainReason.CREATING, "the domain's identity was drawn")
        return Plan(
            statuses=write_status(domain, now, kstatus(None, waiting, waiting), fields), enqueue=_everyone(world)
        )
    found = restore.discovered(world, domain, now)
    if found is not None:
        reported = restore.announcement(found)
        findings = (
            *kstatus(None, reported, reported),
            false(ConditionType.RESTORED, reported.reason, reported.message),
        )
        kept = domain.status.conditions
        return Plan(
            statuses=write_status(domain, now, findings, {"restored": found}, kept=kept), enqueue=_everyone(world)
        )
    restored = domain.status.restored
    conflict = name_conflict(world, domain)
    if world.domain_key is None or restore.key_is_old(world):
        if conflict is not None and ("Secret", names.DOMAIN_KEY_SECRET) in world.foreign:
            statuses = write_status(domain, now, kstatus(conflict, None, conflict), {})
            return Plan(actions=read_foreign(world, domain), statuses=statuses, wake_after_s=FOREIGN_S)
        key = EnsureSecret(
            name=names.DOMAIN_KEY_SECRET,
            material=Material.DOMAIN_KEY,
            labels=labels.of_domain("domain-key"),
            owner=domain.owner_reference(),
            renew=names.DOMAIN_KEY_SECRET in world.secrets,
            drawn_for=restored.id if restored is not None else "",
        )
        if world.domain_key is not None:
            return Plan(actions=(key,), enqueue=_everyone(world))
        waiting = (
            Decision(
                DomainReason.KEY_LOST,
                f"Secret {names.DOMAIN_KEY_SECRET} is gone or unreadable: a new key is drawn, and everything that was "
                "cached under the old one is unreachable",
            )
            if world.bundles
            else Decision(DomainReason.CREATING, f"the domain's key is written to Secret {names.DOMAIN_KEY_SECRET}")
        )
        return Plan(
            actions=(key,),
            statuses=write_status(domain, now, kstatus(None, waiting, waiting), {}),
            enqueue=_everyone(world),
        )
    report = _report(world, domain, now, conflict)
    keys = plan_data_keys(world, domain, now)
    waits = [wait_s for wait_s in (keys.wake_after_s, report.wake_after_s) if wait_s is not None]
    if conflict is not None:
        waits.append(FOREIGN_S)
    actions = (*read_foreign(world, domain), *keys.actions)
    return replace(report, actions=actions, enqueue=keys.enqueue, wake_after_s=min(waits, default=None))


def _report(world: World, domain: CacheDomain, now: datetime, conflict: Decision | None) -> Plan:
    total = Coverage()
    revision = 0
    for model, committed in world.bundles.items():
        total += coverage(world, model, committed.bundle.root.revision)
        revision = max(revision, committed.bundle.root.revision)
    enforced = enforced_finding(total)
    if not world.models:
        enforced = Finding(
            ENFORCED,
            enforced.status,
            DomainReason.NO_MODELS,
            "no CachedModel exists in this namespace: there is nothing to enforce",
        )
    behind = sorted(model.name for model in world.models.values() if not rules_are_committed(world, model))
    if behind:
        enforced = false(
            ENFORCED, DomainReason.NOT_COMMITTED, f"the bundle of CachedModel {', '.join(behind[:3])} is being written"
        )
    pending = Decision(enforced.reason, enforced.message) if enforced.status == "False" else None
    fields: dict[str, object] = {
        "bundleRevision": revision,
        "enforcedBy": total.shown,
        "podsAcked": total.acked,
        "podsLive": total.live,
        "usage": _usage(world, domain, now),
    }
    ready = Decision(DomainReason.READY, "the domain has its identity and key")
    if enforced.status == "Unknown":
        ready = Decision(enforced.reason, enforced.message)
    wrong = budget_problem(world, domain.spec.public_budgets, "spec.publicBudgets")
    verdict = admission_of(world, domain, wrong)
    fields["admission"] = verdict.status()
    levels, models = shared_levels(world, PUBLIC_SCOPE), world.models.values()
    admitted = tiers_admitted(world, levels, because_of(world, PUBLIC_SCOPE), models)
    within = within_budget(world, domain.spec.public_budgets, models, wrong, levels)
    restored = restore.restored_finding(world, domain, now)
    fields["restored"] = restore.record(domain, restored, now)
    stalled = conflict or wrong or keycustody.refused_change(world, domain)
    keys = _keys(world, domain)
    awaited = pending or verdict.waiting
    findings = (*kstatus(stalled, awaited, ready), *verdict.findings, enforced, within, *admitted, *keys, *restored)
    can_wait = pending is not None and stalled is None and not verdict.due
    statuses = write_status(domain, now, applicable(world, domain, findings), fields, can_wait=can_wait)
    return Plan(statuses=statuses, wake_after_s=LOOK_AGAIN_S if restore.is_doubted(restored) else None)


def _keys(world: World, domain: CacheDomain) -> tuple[Finding, ...]:
    lost = sum(is_lost(world, epoch) for epoch in world.keys_lost)
    return keycustody.keys_at_hand(world, domain, lost)


def _usage(world: World, domain: CacheDomain, now: datetime) -> dict[str, object] | None:
    reported = domain.status.scope
    keyspace = (
        derive_keyspace(world.domain_key, PUBLIC_SCOPE, reported.epoch) if reported and world.domain_key else None
    )
    admitted = admitted_bytes(world, domain)
    budgets = [as_admitted(admitted, enforced(budget)) for budget in domain.spec.public_budgets]
    return usage_status(world, keyspace, budgets, world.models, domain.status.usage, now)


def _inhabited(world: World) -> bool:
    return bool(world.tiers or world.models or world.policies or world.groups or world.pools or world.invalidations)


def _everyone(world: World) -> tuple[Key, ...]:
    return (
        Key("CacheDomain", world.namespace, DOMAIN_NAME),
        *(Key("CachedModel", world.namespace, name) for name in world.models),
        *(Key("TenantCachePolicy", world.namespace, name) for name in world.policies),
        *(Key(BUNDLE, world.namespace, name) for name in world.models),
    )


def _new_domain(namespace: str) -> dict[str, object]:
    return {
        "apiVersion": API_VERSION,
        "kind": CacheDomain.INFO.kind,
        "metadata": {"name": DOMAIN_NAME, "namespace": namespace},
        "spec": {},
    }
