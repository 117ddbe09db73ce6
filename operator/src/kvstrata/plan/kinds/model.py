"""CachedModel: its pods and the objects around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from kvstrata.api.base import API_VERSION
from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachedmodel_status import MAX_WITNESSES
from kvstrata.api.cachetier import CacheTier, Medium
from kvstrata.api.common import TlsMode
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import ModelReason, SharedReason
from kvstrata.contract.messages.engine_identity import UNGOVERNED
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.objects import labels, names, sizing
from kvstrata.objects.children import model_children
from kvstrata.objects.context import BuildContext
from kvstrata.objects.mark import marked
from kvstrata.objects.pod.identity import cache_identity
from kvstrata.objects.quantities import binary
from kvstrata.plan.actions import Create, Decision, EnsureSecret, Material, Plan
from kvstrata.plan.bundle.compile import usable_tiers
from kvstrata.plan.bundle.enforcement import coverage, rules_are_committed, tiers_are_committed
from kvstrata.plan.conditions import Finding, false, kstatus, true, unknown, write_status
from kvstrata.plan.isolation import Isolation, isolation, probes_due
from kvstrata.plan.kinds.model_certificate import certificate_shown, is_usable
from kvstrata.plan.kinds.model_deletion import departure, finalizer_due
from kvstrata.plan.kinds.model_identity import fingerprints, resolution
from kvstrata.plan.kinds.model_pods import event_questions, not_running, why_not_up
from kvstrata.plan.kinds.model_rollback import FormerCaches, former_caches
from kvstrata.plan.ownership import foreign_wait_s, name_conflict, no_longer_wanted, read_foreign, secrets_to_take_back
from kvstrata.plan.paused import unwritten, without_children
from kvstrata.plan.redis.backend import in_force
from kvstrata.plan.rules import first
from kvstrata.plan.rules import model as chain
from kvstrata.plan.rules import tier as tier_chain
from kvstrata.plan.rules.model import tiers_ordered
from kvstrata.plan.rules.pool import pools_of
from kvstrata.plan.witnesses import witnesses_of


def plan_model(world: World, ctx: BuildContext, name: str, now: datetime) -> Plan:
    model = world.models.get(name)
    if model is None:
        return Plan()
    if model.metadata.deleting:
        # Its Deployment is still as with tiers that were deleted before it.
        then = replace(world, tiers={**world.ending.tiers, **world.tiers})
        children = () if first(chain.RULES, then, model) else _desired(then, ctx, model)
        return Plan(departure(world, model, children))
    if (held := finalizer_due(model)) is not None:
        return held
    made = without_children(model, _plan(world, ctx, model, now))
    questions, probe_in_s = probes_due(world, model, now)
    looks, look_in_s = event_questions(world, model, now)
    wakes = (made.wake_after_s, _next_fence_s(world, model, now), probe_in_s, look_in_s)
    return replace(
        made,
        actions=(*made.actions, *questions, *looks),
        wake_after_s=min((moment for moment in wakes if moment is not None), default=None),
    )


def _plan(world: World, ctx: BuildContext, model: CachedModel, now: datetime) -> Plan:
    if not world.domain_id or world.domain_key is None:
        waiting = Decision(SharedReason.WAITING_FOR_DOMAIN, world.domain_awaited)
        return Plan(statuses=write_status(model, now, kstatus(pending=waiting), {}, can_wait=True))
    if model.spec.tiers is None and model.name not in world.tiers:
        message = f"CacheTier {model.name} is being created: spec.tiers names none"
        ready = kstatus(pending=Decision(ModelReason.TIER_NOT_READY, message))
        made = _left_alone(world, model, now, ready, can_wait=True)
        return replace(made, actions=(Create(_default_tier(model)),))
    stalled = first(chain.RULES, world, model)
    if stalled:
        return _left_alone(world, model, now, kstatus(stalled))
    identity, children = _identity(world, model), _desired(world, ctx, model)
    if conflict := name_conflict(world, model, children):
        made = _left_alone(world, model, now, kstatus(conflict))
        again = read_foreign(world, model, children, (names.gate_tls(model.name), names.bundle_root(model.name)))
        return replace(made, actions=again, wake_after_s=foreign_wait_s(model, now))
    rolled_out = _rolled_out(world, model)
    if (late := unwritten(world, model, children)) is not None:
        rolled_out = false(ConditionType.ROLLED_OUT, *late)
    former = former_caches(world, model, identity, now, rolled_out=rolled_out.status == "True")
    secrets = (*secrets_to_take_back(world, model), *_certificate(world, ctx, model))
    return replace(
        _report(world, model, now, identity, rolled_out, former),
        actions=(*secrets, *no_longer_wanted(world, model, children), *former.actions),
        apply=children,
        enqueue=(Key(BUNDLE, world.namespace, model.name),) if model.name not in world.bundles else (),
        wake_after_s=former.wake_after_s,
    )


def _identity(world: World, model: CachedModel) -> str:
    return world.memo.get(cache_identity, model.name, (model.spec,), lambda: cache_identity(model))


def _left_alone(
    world: World, model: CachedModel, now: datetime, ready: tuple[Finding, ...], *, can_wait: bool = False
) -> Plan:
    """Return the plan that reports about the pods of a model and leaves its objects alone."""
    isolated = isolation(world, model, now)
    findings = (*ready, _rolled_out(world, model), *_judged(world, model, isolated, _enforced(world, model)))
    fields = _counts(world, model, isolated, now)
    return Plan(statuses=write_status(model, now, findings, fields, can_wait=can_wait))


def _default_tier(model: CachedModel) -> dict[str, Any]:
    """Return the CacheTier of a model that names none. It ends with the model; its settings are left to users."""
    size = binary(sizing.default_tier_bytes(model))
    return {
        "apiVersion": API_VERSION,
        "kind": CacheTier.INFO.kind,
        "metadata": {"name": model.name, "namespace": model.namespace, "ownerReferences": [model.owner_reference()]},
        "spec": {"medium": str(Medium.CPU), "capacityPerPod": size},
    }


def _desired(world: World, ctx: BuildContext, model: CachedModel) -> tuple[dict[str, Any], ...]:
    tiers, identity = usable_tiers(world, model), _identity(world, model)
    committed = world.bundles.get(model.name)
    shard_count = max(1, len(committed.bundle.root.shards)) if committed else 1
    has_pools = bool(pools_of(world, model) or (committed is not None and committed.bundle.root.pools))
    domain_id = world.domain_id or ""

    def render() -> tuple[dict[str, Any], ...]:
        counts: dict[str, Any] = {"shard_count": shard_count, "has_pools": has_pools}
        built = model_children(ctx, domain_id, model, tiers, identity, **counts)
        return tuple(marked(world.mark_key, child) for child in built)

    # Objects follow from specs: a status write rebuilds none.
    own = (model.spec, model.name, model.namespace, model.uid, model.metadata.labels)
    of_tiers = tuple((tier.name, tier.uid, tier.spec) for tier in tiers)
    inputs = (ctx, domain_id, world.mark_key, own, of_tiers, identity, shard_count, has_pools)
    return world.memo.get(CachedModel, model.name, inputs, render)


def _certificate(world: World, ctx: BuildContext, model: CachedModel) -> tuple[EnsureSecret, ...]:
    name = names.gate_tls(model.name)
    facts = world.secrets.get(name)
    subjects = names.gate_dns_names(model.name, model.namespace, ctx.cluster_domain)
    due = facts is not None and not is_usable(facts, subjects)
    if facts is not None and not due:
        return ()
    about = labels.of_model(model.name), model.owner_reference()
    return (EnsureSecret(name, Material.SERVER_CERTIFICATE, *about, dns_names=subjects, renew=due),)


def _report(
    world: World, model: CachedModel, now: datetime, identity: str, rolled_out: Finding, former: FormerCaches
) -> Plan:
    enforced, isolated = _enforced(world, model), isolation(world, model, now)
    refused = world.refused.get(Key(BUNDLE, world.namespace, model.name))
    problem = _problem_of_a_pod(world, model) or certificate_shown(world, model)
    failure = problem.failure if problem is not None else None
    pending = failure or rolled_out.failure or enforced.failure
    stalled = Decision(SharedReason.CHILD_REFUSED, refused) if refused else None
    if stalled is None and (rolled_out.lasting or (problem is not None and problem.lasting)):
        stalled = pending
    ready = Decision(ModelReason.READY, "the model serves, and its pods enforce the newest policy")
    if enforced.status == "Unknown":
        ready = enforced.cause
    scheme, port = ("http", 80) if model.spec.gate.tls.mode is TlsMode.DISABLED else ("https", 443)
    fields = {
        **_counts(world, model, isolated, now),
        "identity": identity,
        **former.fields,
        "selector": ",".join(f"{k}={v}" for k, v in labels.selector_of_model(model.name).items()),
        "endpoint": f"{scheme}://{names.model_child(model.name)}.{model.namespace}.svc:{port}/v1",
    }
    if rolled_out.status == "True":
        fields["cacheGeneration"] = model.spec.cache_generation
    listed = [world.tiers[name] for name in model.tier_names]
    findings = (
        *kstatus(stalled, pending, ready),
        _tiers_bound(world, listed),
        tiers_ordered(listed),
        *_judged(world, model, isolated, enforced),
        rolled_out,
    )
    # The next leader must know which pods hold a policy, so a change is never delayed.
    same_witnesses = {witness["uid"] for witness in fields["witnesses"]} == {w.uid for w in model.status.witnesses}
    # The next leader fences reuse by a probe failure, so that is not delayed either.
    urgent = not same_witnesses or isolated.failed_now or former.urgent
    can_wait = pending is not None and not urgent
    return Plan(statuses=write_status(model, now, findings, fields, can_wait=can_wait))


def _problem_of_a_pod(world: World, model: CachedModel) -> Finding | None:
    for pod in world.serving_pods(model.name):
        reported = world.states.get(pod.uid)
        if reported and reported.state.problem:
            message, lasting = f"pod {pod.name}: {reported.state.problem}", reported.state.lasting
            return false(ConditionType.READY, ModelReason.PODS_REPORT_PROBLEM, message, lasting=lasting)
        if reported and reported.state.withheld == UNGOVERNED:
            message = f"pod {pod.name} serves without reuse; {reported.state.unresolved}"
            return false(ConditionType.READY, ModelReason.VERSION_NOT_GOVERNED, message)
    return None


def _report_of_a_gate(world: World, model: CachedModel) -> str:
    """Return why a pod that has started is not ready, by its own report; empty if none gives a reason."""
    reports = ((pod.name, world.states.get(pod.uid)) for pod in world.live_pods(model.name) if not pod.ready)
    found = (f"pod {name}: {one.state.problem}" for name, one in reports if one is not None and one.state.problem)
    return next(found, "")


def _judged(world: World, model: CachedModel, isolated: Isolation, enforced: Finding) -> tuple[Finding | None, ...]:
    """Return the conditions of pods that serve."""
    serves = bool(world.serving_pods(model.name))
    return enforced if serves else None, isolated.finding, resolution(world, model), certificate_shown(world, model)


def _deployment(world: World, model: CachedModel) -> Mapping[str, Any] | None:
    return world.children.get(("Deployment", names.model_child(model.name)))


def _rolled_out(world: World, model: CachedModel) -> Finding:
    kind, deployment = ConditionType.ROLLED_OUT, _deployment(world, model)
    status: Mapping[str, Any] = (deployment or {}).get("status") or {}
    if deployment is None or (status.get("observedGeneration") or 0) < deployment["metadata"].get("generation", 0):
        return false(kind, SharedReason.ROLLING_OUT, "the Deployment is being written")
    wanted = model.spec.engine.replicas
    updated, ready = status.get("updatedReplicas") or 0, status.get("readyReplicas") or 0
    if wanted == 0:
        return true(kind, ModelReason.SCALED_TO_ZERO, "spec.engine.replicas is 0")
    rolling = updated < wanted or (status.get("replicas") or 0) > updated
    stuck = next(
        (c for c in status.get("conditions") or () if c.get("type") == "Progressing" and c.get("status") == "False"),
        None,
    )
    if (rolling or ready < wanted) and (why := why_not_up(world, model, deployment)) is not None:
        return false(kind, why.reason, why.message, lasting=why.lasting or stuck is not None)
    reported = _report_of_a_gate(world, model)
    if stuck:
        why_stuck = f"the Deployment reports {stuck.get('reason')}: {reported or 'see its pods'}"
        return false(kind, ModelReason.ROLLOUT_STUCK, why_stuck, lasting=True)
    if rolling:
        current, older = updated - not_running(world, model), (status.get("replicas") or 0) - updated
        message = f"{max(0, current)} of {wanted} pods run the newest template, {older} an older one"
        return false(kind, SharedReason.ROLLING_OUT, message)
    if ready < wanted:
        message = "; ".join(filter(None, (f"{ready} of {wanted} pods are ready", reported)))
        return false(kind, ModelReason.PODS_NOT_READY, message)
    return true(kind, ModelReason.ROLLED_OUT, "every pod runs the newest template")


def _enforced(world: World, model: CachedModel) -> Finding:
    kind = ConditionType.POLICY_ENFORCED
    committed = world.bundles.get(model.name)
    if committed is None or not (rules_are_committed(world, model) and tiers_are_committed(world, model)):
        return false(kind, SharedReason.NOT_COMMITTED, "the model's bundle is being written")
    total = coverage(world, model.name, committed.bundle.root.revision)
    if not total.live:
        return unknown(kind, SharedReason.NO_LIVE_PODS, "no pod serves: there is nothing to enforce")
    if total.complete:
        return true(kind, SharedReason.ALL_PODS_ACKNOWLEDGED, "every serving pod enforces the newest revision")
    return false(kind, SharedReason.AWAITING_ACKS, f"{total} enforce the newest revision")


def _tiers_bound(world: World, listed: Sequence[CacheTier]) -> Finding | None:
    kind = ConditionType.TIERS_BOUND
    if not listed:
        return None
    if stalled := [tier.name for tier in listed if first(tier_chain.RULES, world, tier)]:
        message = f"served without CacheTier {', '.join(stalled)}: see its conditions"
        return false(kind, ModelReason.TIER_STALLED, message)
    if unchecked := [tier.name for tier in listed if in_force(tier) is None]:
        message = (
            f"served without CacheTier {', '.join(unchecked)}, whose servers have not passed the checks yet: see its "
            "conditions"
        )
        return false(kind, ModelReason.TIER_NOT_READY, message)
    if unready := [tier.name for tier in listed if not tier.status.is_true(ConditionType.READY)]:
        return false(kind, ModelReason.TIER_NOT_READY, f"CacheTier {unready[0]} is not ready: see its conditions")
    return true(kind, ModelReason.TIERS_BOUND, "every tier can be used")


def _next_fence_s(world: World, model: CachedModel, now: datetime) -> float | None:
    live = {pod.uid for pod in world.live_pods(model.name)}
    moments = [
        witness.fenced_by
        for witness in witnesses_of(world, model.name, now)
        if witness.fenced_by is not None and witness.uid not in live
    ]
    return max(1.0, (min(moments) - now).total_seconds()) if moments else None


def _counts(world: World, model: CachedModel, isolated: Isolation, now: datetime) -> dict[str, Any]:
    committed = world.bundles.get(model.name)
    revision = committed.bundle.root.revision if committed else model.status.bundle_revision
    status: Mapping[str, Any] = (_deployment(world, model) or {}).get("status") or {}
    total = coverage(world, model.name, revision or 0)
    nodes = {one.uid: one.node for one in world.departures.get(model.name, ()) if one.node}
    nodes |= {pod.uid: pod.node for pod in world.live_pods(model.name) if pod.node}
    return {
        "effective": {
            "tiers": list(model.tier_names),
            "apiKeysSecret": model.api_keys_secret,
            "chunkSize": model.spec.cache_server.chunk_size,
            "cacheImage": model.spec.cache_image,
        },
        "replicas": status.get("replicas") or 0,
        "readyReplicas": status.get("readyReplicas") or 0,
        "bundleRevision": revision,
        "fingerprints": fingerprints(world, model),
        "probe": isolated.status,
        "enforcedBy": total.shown,
        "podsAcked": total.acked,
        "podsLive": total.live,
        # A vanished pod stays a witness until it is fenced: the next leader must wait for it too.
        "witnesses": [
            {"name": witness.pod, "uid": witness.uid}
            | ({"acked": witness.acked} if witness.acked else {})
            | ({"node": nodes[witness.uid]} if witness.uid in nodes else {})
            for witness in witnesses_of(world, model.name, now)[:MAX_WITNESSES]
        ],
    }
