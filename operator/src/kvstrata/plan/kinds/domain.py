"""CacheDomain: the namespace's identity, key and public epoch, and a summary of its pods."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from kvstrata.api.base import API_VERSION
from kvstrata.api.cachedomain import DOMAIN_NAME, CacheDomain, Restored
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import DomainReason, SharedReason
from kvstrata.contract.policy.keyspace import PUBLIC_SCOPE
from kvstrata.model.refs import Key
from kvstrata.model.world import World
from kvstrata.objects import labels, names
from kvstrata.plan.actions import Create, Decision, EnsureSecret, Material, Plan, bundle_keys, key_of
from kvstrata.plan.budgets.admission import admission_of, admitted_bytes
from kvstrata.plan.budgets.capacity import within_budget
from kvstrata.plan.budgets.classification import shared_levels, tiers_admitted
from kvstrata.plan.budgets.usage import usage_status
from kvstrata.plan.bundle import restore
from kvstrata.plan.bundle.compile import as_admitted, enforced
from kvstrata.plan.bundle.enforcement import ENFORCED, Coverage, coverage, enforced_finding, rules_are_committed
from kvstrata.plan.conditions import false, kstatus, write_status
from kvstrata.plan.keys import custody as keycustody
from kvstrata.plan.keys.data_keys import LOOK_AGAIN_S, is_lost, plan_data_keys
from kvstrata.plan.ownership import foreign_of, foreign_wait_s, name_conflict, read_foreign, secrets_to_take_back
from kvstrata.plan.redis.backend import with_stores
from kvstrata.plan.rules.policy import budget_problem
from kvstrata.plan.scopes import fresh_epoch, held, keyspace_of

DOMAIN_ID_BYTES = 8


def plan_domain(world: World, now: datetime) -> Plan:
    domain = world.domain
    if domain is None:
        is_used = world.tiers or world.models or world.policies or world.groups or world.pools or world.invalidations
        return Plan(actions=(Create(_new_domain(world.namespace)),)) if is_used else Plan()
    if domain.metadata.deleting:
        return Plan()
    if (begun := _begun(world, domain)) is not None:
        waiting, fields = begun
        return Plan(
            statuses=write_status(domain, now, kstatus(pending=waiting), fields), enqueue=_everyone(world, domain)
        )
    found = restore.discovered(world, domain, now)
    if found is not None:
        detected = Decision(DomainReason.RESTORE_DETECTED, restore.story_of(Restored.model_validate(found)))
        findings = (*kstatus(pending=detected), false(ConditionType.RESTORED, *detected))
        statuses = write_status(domain, now, findings, {"restored": found}, keeps_others=True)
        return Plan(statuses=statuses, enqueue=_everyone(world, domain))
    conflict = name_conflict(world, domain)
    if world.domain_key is None or restore.key_is_old(world):
        if any(secret == names.DOMAIN_KEY_SECRET for _, secret in foreign_of(world, domain)):
            statuses = write_status(domain, now, kstatus(conflict), {})
            return Plan(
                actions=read_foreign(world, domain), statuses=statuses, wake_after_s=foreign_wait_s(domain, now)
            )
        return _draw_key(world, domain, now)
    report = _report(world, domain, now, conflict)
    keys = plan_data_keys(world, domain, now)
    waits = (keys.wake_after_s, report.wake_after_s, foreign_wait_s(domain, now) if conflict is not None else None)
    return replace(
        report,
        actions=(*read_foreign(world, domain), *secrets_to_take_back(world, domain), *keys.actions),
        enqueue=keys.enqueue,
        wake_after_s=min((wait_s for wait_s in waits if wait_s is not None), default=None),
    )


def _begun(world: World, domain: CacheDomain) -> tuple[Decision, dict[str, object]] | None:
    """Return the status fields that precede all else, and why; None once they are written."""
    previous = held(domain.status.scope, PUBLIC_SCOPE)
    adopted = keycustody.to_adopt(world, domain)
    if adopted is not None and previous is not None:
        kept = Decision(DomainReason.CREATING, f"data keys are kept in custody {adopted} from now on")
        return kept, {"keyCustody": str(adopted)}
    if domain.status.domain_id is not None and previous is not None and not is_lost(world, previous.epoch):
        return None
    return Decision(DomainReason.CREATING, "the domain's identity was drawn"), {
        "domainID": domain.status.domain_id or world.entropy[16 : 16 + DOMAIN_ID_BYTES].hex(),
        "scope": with_stores(world, fresh_epoch(world, PUBLIC_SCOPE, previous)),
        "usage": None,
        "keyCustody": str(keycustody.active_custody(domain) if adopted is None else adopted),
    }


def _draw_key(world: World, domain: CacheDomain, now: datetime) -> Plan:
    restored, secret = domain.status.restored, names.DOMAIN_KEY_SECRET
    key = EnsureSecret(
        name=secret,
        material=Material.DOMAIN_KEY,
        labels=labels.of_domain("domain-key"),
        owner=domain.owner_reference(),
        renew=secret in world.secrets,
        drawn_for=restored.id if restored is not None else "",
    )
    if world.domain_key is not None:
        return Plan(actions=(key,), enqueue=_everyone(world, domain))
    waiting = Decision(DomainReason.CREATING, f"the domain's key is written to Secret {secret}")
    if world.bundles:
        waiting = Decision(
            DomainReason.KEY_LOST,
            f"Secret {secret} is gone or unreadable: a new key is drawn, and everything that was cached under the old "
            "one is unreachable",
        )
    statuses = write_status(domain, now, kstatus(pending=waiting), {})
    return Plan(actions=(key,), statuses=statuses, enqueue=_everyone(world, domain))


def _report(world: World, domain: CacheDomain, now: datetime, conflict: Decision | None) -> Plan:
    revisions = {model: committed.bundle.root.revision for model, committed in world.bundles.items()}
    total = sum((coverage(world, model, revision) for model, revision in revisions.items()), Coverage())
    enforcement, models = enforced_finding(total), world.models.values()
    if not models:
        message = "no CachedModel exists in this namespace: there is nothing to enforce"
        enforcement = replace(enforcement, reason=SharedReason.NO_MODELS, message=message)
    behind = sorted(model.name for model in models if not rules_are_committed(world, model))
    if behind:
        message = f"the bundle of CachedModel {', '.join(behind[:3])} is being written"
        enforcement = false(ENFORCED, SharedReason.NOT_COMMITTED, message)
    pending, ready = enforcement.failure, Decision(DomainReason.READY, "the domain has its identity and key")
    if enforcement.status == "Unknown":
        ready = enforcement.cause
    budgets, admitted = domain.spec.public_budgets, admitted_bytes(world, domain)
    in_force = [as_admitted(admitted, enforced(budget)) for budget in budgets]
    keyspace = keyspace_of(world.domain_key, domain.status.scope)
    wrong = budget_problem(world, budgets, "spec.publicBudgets")
    verdict = admission_of(world, domain, wrong)
    restored = restore.restored_finding(world, domain, now)
    fields: dict[str, object] = {
        "scope": with_stores(world, domain.status.scope),
        "bundleRevision": max(revisions.values(), default=0),
        "enforcedBy": total.shown,
        "podsAcked": total.acked,
        "podsLive": total.live,
        "usage": usage_status(world, keyspace, in_force, world.models, domain.status.usage, now),
        "admission": verdict.status(),
        "restored": restore.record(domain, restored, now),
    }
    stalled = conflict or wrong or keycustody.refused_change(world, domain)
    findings = (
        *kstatus(stalled, pending or verdict.waiting, ready),
        verdict.finding,
        enforcement if any(map(world.serving_pods, world.models)) else None,
        within_budget(world, budgets, models, wrong, shared_levels(world, PUBLIC_SCOPE), keyspace),
        tiers_admitted(world, PUBLIC_SCOPE, models),
        keycustody.keys_at_hand(world, domain, sum(is_lost(world, epoch) for epoch in world.keys_lost)),
        restored,
    )
    can_wait = pending is not None and stalled is None and not verdict.due
    # A pod that is not believed must be read again later.
    is_doubted = restored is not None and restored.reason == DomainReason.WITNESS_NOT_BELIEVED
    return Plan(
        statuses=write_status(domain, now, findings, fields, can_wait=can_wait),
        wake_after_s=LOOK_AGAIN_S if is_doubted else None,
    )


def _everyone(world: World, domain: CacheDomain) -> tuple[Key, ...]:
    others = (*world.models.values(), *world.policies.values())
    return key_of(domain), *map(key_of, others), *bundle_keys(world)


def _new_domain(namespace: str) -> dict[str, object]:
    return {
        "apiVersion": API_VERSION,
        "kind": CacheDomain.INFO.kind,
        "metadata": {"name": DOMAIN_NAME, "namespace": namespace},
        "spec": {},
    }
