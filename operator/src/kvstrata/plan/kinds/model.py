"""CachedModel: its pods and the objects around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from kvstrata.api.cachedmodel import MAX_WITNESSES, CachedModel
from kvstrata.api.cachetier import CacheTier
from kvstrata.api.common import TlsMode
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import ModelReason
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.objects import labels, names
from kvstrata.objects.applied import missing
from kvstrata.objects.children import model_children
from kvstrata.objects.context import BuildContext
from kvstrata.objects.pod.identity import cache_identity
from kvstrata.plan.actions import Decision, EnsureSecret, Material, Plan, ReportFormer, ReportIsolation
from kvstrata.plan.bundle.enforcement import coverage, rules_are_committed
from kvstrata.plan.conditions import Finding, false, kstatus, true, unknown, write_status
from kvstrata.plan.isolation import isolation, probes_due
from kvstrata.plan.kinds.applicable import applicable
from kvstrata.plan.kinds.model_rollback import FormerCaches, former_caches
from kvstrata.plan.ownership import FOREIGN_S, name_conflict, no_longer_wanted, read_foreign
from kvstrata.plan.redis.backend import in_force
from kvstrata.plan.redis.external import is_awaited
from kvstrata.plan.rules import first
from kvstrata.plan.rules import model as chain
from kvstrata.plan.rules import tier as tier_chain
from kvstrata.plan.rules.model import tiers_ordered
from kvstrata.plan.rules.pool import pools_of
from kvstrata.plan.witnesses import witnesses_of


def plan_model(world: World, ctx: BuildContext, name: str, now: datetime) -> Plan:
    model = world.models.get(name)
    if model is None or model.metadata.deleting:
        return Plan((ReportIsolation(name, failed=False), ReportFormer(name, 0)))
    made = _plan(world, ctx, model, now)
    questions, probe_in_s = probes_due(world, model, now)
    wakes = (made.wake_after_s, _next_fence_s(world, model, now), probe_in_s)
    return replace(
        made,
        actions=(*made.actions, *questions),
        wake_after_s=min((moment for moment in wakes if moment is not None), default=None),
    )


def _plan(world: World, ctx: BuildContext, model: CachedModel, now: datetime) -> Plan:
    if not world.domain_id or world.domain_key is None:
        waiting = Decision(ModelReason.WAITING_FOR_DOMAIN, "the domain's identity and key are being drawn")
        return Plan(statuses=write_status(model, now, kstatus(None, waiting, waiting), {}, can_wait=True))
    stalled = first(chain.RULES, world, model)
    if stalled:
        return Plan(
            statuses=write_status(
                model,
                now,
                (*kstatus(stalled, None, stalled), *_observed(world, model, now)),
                _counts(world, model, now),
            )
        )
    if conflict := name_conflict(world, model):
        return _conflicting(world, model, now, conflict)
    awaited = next((tier.name for tier in _listed(world, model) if is_awaited(world, tier)), None)
    if awaited is not None:
        asking = Decision(ModelReason.TIER_NOT_READY, f"the servers of CacheTier {awaited} are being checked")
        findings = (*kstatus(None, asking, asking), *_observed(world, model, now))
        statuses = write_status(model, now, findings, _counts(world, model, now), can_wait=True)
        return Plan(
            _certificate(world, ctx, model), statuses=statuses, enqueue=_first_bundle(world, model), wake_after_s=1
        )
    usable = _usable(world, model)
    identity = world.memo.get(cache_identity, model.name, (model.spec,), lambda: cache_identity(model))
    children = _children(world, ctx, model, usable, identity)
    if conflict := name_conflict(world, model, children):
        return _conflicting(world, model, now, conflict)
    rolled_out = _rolled_out(world, model).status == "True" and _is_written(world, children)
    former = former_caches(world, model, identity, now, rolled_out=rolled_out)
    return Plan(
        actions=(
            *_certificate(world, ctx, model),
            *no_longer_wanted(world, model, children),
            *former.ends,
            *former.questions,
        ),
        apply=children,
        statuses=_report(world, model, now, identity, children, former),
        enqueue=_first_bundle(world, model),
        wake_after_s=former.wake_after_s,
    )


def _conflicting(world: World, model: CachedModel, now: datetime, conflict: Decision) -> Plan:
    findings = (*kstatus(conflict, None, conflict), *_observed(world, model, now))
    statuses = write_status(model, now, findings, _counts(world, model, now))
    return Plan(actions=read_foreign(world, model), statuses=statuses, wake_after_s=FOREIGN_S)


def _first_bundle(world: World, model: CachedModel) -> tuple[Key, ...]:
    return (Key(BUNDLE, world.namespace, model.name),) if model.name not in world.bundles else ()


def _listed(world: World, model: CachedModel) -> tuple[CacheTier, ...]:
    return tuple(world.tiers[name] for name in model.spec.tier_names)


def _usable(world: World, model: CachedModel) -> tuple[CacheTier, ...]:
    listed = (tier for tier in _listed(world, model) if not first(tier_chain.RULES, world, tier))
    return tuple(using for tier in listed if (using := in_force(tier)) is not None)


def _children(
    world: World, ctx: BuildContext, model: CachedModel, tiers: tuple[CacheTier, ...], identity: str
) -> tuple[dict[str, Any], ...]:
    committed = world.bundles.get(model.name)
    shard_count = max(1, len(committed.bundle.root.shards)) if committed else 1
    has_pools = bool(pools_of(world, model) or (committed is not None and committed.bundle.root.pools))
    domain_id = world.domain_id or ""

    def render() -> tuple[dict[str, Any], ...]:
        return model_children(
            ctx,
            domain_id,
            model,
            tiers,
            identity,
            shard_count=shard_count,
            has_pools=has_pools,
            service_monitors=ctx.service_monitors,
        )

    # Objects follow from specs: a status write rebuilds none.
    own = (model.spec, model.name, model.namespace, model.uid, model.metadata.labels)
    of_tiers = tuple((tier.name, tier.uid, tier.spec) for tier in tiers)
    inputs = (ctx, domain_id, own, of_tiers, identity, shard_count, has_pools)
    return world.memo.get(CachedModel, model.name, inputs, render)


def _certificate(world: World, ctx: BuildContext, model: CachedModel) -> tuple[EnsureSecret, ...]:
    name = names.gate_tls(model.name)
    facts = world.secrets.get(name)
    due = facts is not None and (facts.renewal_due or not facts.issued_by_current_ca)
    if facts is not None and not due:
        return ()
    return (
        EnsureSecret(
            name=name,
            material=Material.SERVER_CERTIFICATE,
            labels=labels.of_model(model.name),
            owner=model.owner_reference(),
            dns_names=names.gate_dns_names(model.name, model.namespace, ctx.cluster_domain),
            renew=due,
        ),
    )


def _report(
    world: World,
    model: CachedModel,
    now: datetime,
    identity: str,
    children: tuple[Mapping[str, Any], ...],
    former: FormerCaches,
) -> tuple[Any, ...]:
    rolled_out, enforced = _rolled_out(world, model), _enforced(world, model)
    isolated = isolation(world, model, now).finding
    if not _is_written(world, children):
        rolled_out = false(ConditionType.ROLLED_OUT, ModelReason.ROLLING_OUT, "the Deployment is being written")
    tiers_bound = _tiers_bound(world, model)
    pending = _problem_of_a_pod(world, model) or next(
        (Decision(f.reason, f.message) for f in (rolled_out, enforced) if f.status == "False"),
        None,
    )
    ready = Decision(ModelReason.READY, "the model serves, and its pods enforce the newest policy")
    if enforced.status == "Unknown":
        ready = Decision(enforced.reason, enforced.message)
    scheme, port = ("http", 80) if model.gate_tls_mode is TlsMode.DISABLED else ("https", 443)
    fields = {
        **_counts(world, model, now),
        "identity": identity,
        **former.fields,
        "selector": ",".join(f"{k}={v}" for k, v in labels.selector_of_model(model.name).items()),
        "endpoint": f"{scheme}://{names.model_child(model.name)}.{model.namespace}.svc:{port}/v1",
    }
    if rolled_out.status == "True":
        fields["cacheGeneration"] = model.spec.effective_cache_generation
    ordered = tiers_ordered(_listed(world, model))
    judged = (tiers_bound, ordered, enforced, isolated, rolled_out)
    findings = applicable(world, model, (*kstatus(None, pending, ready), *judged))
    # The next leader must know which pods hold a policy, so a change is never delayed.
    same_witnesses = {witness["uid"] for witness in fields["witnesses"]} == {w.uid for w in model.status.witnesses}
    # The next leader fences reuse by a probe failure, so that is not delayed either.
    urgent = not same_witnesses or isolation(world, model, now).failed_now or former.urgent
    return write_status(model, now, findings, fields, can_wait=pending is not None and not urgent)


def _is_written(world: World, children: tuple[Mapping[str, Any], ...]) -> bool:
    wanted = next(child for child in children if child["kind"] == "Deployment")
    return missing(world.memo, world.children.get(("Deployment", wanted["metadata"]["name"])), wanted) is None


def _problem_of_a_pod(world: World, model: CachedModel) -> Decision | None:
    for pod in world.serving_pods(model.name):
        reported = world.states.get(pod.uid)
        if reported and reported.state.problem:
            return Decision(ModelReason.PODS_REPORT_PROBLEM, f"pod {pod.name}: {reported.state.problem}")
    return None


def _observed(world: World, model: CachedModel, now: datetime) -> tuple[Finding, ...]:
    findings = (_rolled_out(world, model), _enforced(world, model), isolation(world, model, now).finding)
    return applicable(world, model, findings)


def _rolled_out(world: World, model: CachedModel) -> Finding:
    kind = ConditionType.ROLLED_OUT
    deployment = world.children.get(("Deployment", names.model_child(model.name)))
    status: Mapping[str, Any] = (deployment or {}).get("status") or {}
    if deployment is None or (status.get("observedGeneration") or 0) < deployment["metadata"].get("generation", 0):
        return false(kind, ModelReason.ROLLING_OUT, "the Deployment is being written")
    wanted = model.spec.engine.replicas
    updated, ready = status.get("updatedReplicas") or 0, status.get("readyReplicas") or 0
    if wanted == 0:
        return true(kind, ModelReason.SCALED_TO_ZERO, "spec.engine.replicas is 0")
    stuck = next(
        (c for c in status.get("conditions") or () if c.get("type") == "Progressing" and c.get("status") == "False"),
        None,
    )
    if stuck:
        return false(kind, ModelReason.ROLLOUT_STUCK, f"the Deployment reports {stuck.get('reason')}: see its pods")
    if updated < wanted or (status.get("replicas") or 0) > updated:
        return false(kind, ModelReason.ROLLING_OUT, f"{updated} of {wanted} pods run the newest template")
    if ready < wanted:
        return false(kind, ModelReason.PODS_NOT_READY, f"{ready} of {wanted} pods are ready")
    return true(kind, ModelReason.ROLLED_OUT, "every pod runs the newest template")


def _enforced(world: World, model: CachedModel) -> Finding:
    kind = ConditionType.POLICY_ENFORCED
    committed = world.bundles.get(model.name)
    if committed is None or not rules_are_committed(world, model):
        return false(kind, ModelReason.NOT_COMMITTED, "the model's bundle is being written")
    total = coverage(world, model.name, committed.bundle.root.revision)
    if not total.live:
        return unknown(kind, ModelReason.NO_LIVE_PODS, "no pod serves: there is nothing to enforce")
    if total.complete:
        return true(kind, ModelReason.ALL_PODS_ACKNOWLEDGED, "every serving pod enforces the newest revision")
    return false(kind, ModelReason.AWAITING_ACKS, f"{total} enforce the newest revision")


def _tiers_bound(world: World, model: CachedModel) -> Finding:
    kind = ConditionType.TIERS_BOUND
    stalled = [tier.name for tier in _listed(world, model) if first(tier_chain.RULES, world, tier)]
    if stalled:
        return false(
            kind, ModelReason.TIER_STALLED, f"served without CacheTier {', '.join(stalled)}: see its conditions"
        )
    unchecked = [tier.name for tier in _listed(world, model) if in_force(tier) is None]
    if unchecked:
        return false(
            kind,
            ModelReason.TIER_NOT_READY,
            f"served without CacheTier {', '.join(unchecked)}, whose servers have not passed the checks yet: see its "
            "conditions",
        )
    for tier in _listed(world, model):
        if not tier.status.is_true(ConditionType.READY):
            return false(kind, ModelReason.TIER_NOT_READY, f"CacheTier {tier.name} is not ready: see its conditions")
    return true(kind, ModelReason.TIERS_BOUND, "every tier can be used")


def _next_fence_s(world: World, model: CachedModel, now: datetime) -> float | None:
    live = {pod.uid for pod in world.live_pods(model.name)}
    moments = [
        witness.fenced_by
        for witness in witnesses_of(world, model.name, now)
        if witness.fenced_by is not None and witness.uid not in live
    ]
    return max(1.0, (min(moments) - now).total_seconds()) if moments else None


def _counts(world: World, model: CachedModel, now: datetime) -> dict[str, Any]:
    committed = world.bundles.get(model.name)
    revision = committed.bundle.root.revision if committed else model.status.bundle_revision
    deployment = world.children.get(("Deployment", names.model_child(model.name)))
    status: Mapping[str, Any] = (deployment or {}).get("status") or {}
    total = coverage(world, model.name, revision or 0)
    # A vanished pod stays a witness until it is fenced: the next leader must wait for it too.
    witnesses = witnesses_of(world, model.name, now)[:MAX_WITNESSES]
    return {
        "replicas": status.get("replicas") or 0,
        "readyReplicas": status.get("readyReplicas") or 0,
        "bundleRevision": revision,
        "probe": isolation(world, model, now).status,
        "enforcedBy": total.shown,
        "podsAcked": total.acked,
        "podsLive": total.live,
        "witnesses": [
            {"name": witness.pod, "uid": witness.uid, **({"acked": witness.acked} if witness.acked else {})}
            for witness in witnesses
        ],
    }
