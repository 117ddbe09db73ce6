"""CacheTier: the servers of a managed Redis tier, and whether a tier can be used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from kvstrata.api.cachetier import MAX_SERVERS, MAX_SHOWN_SHARDS, CacheTier, Medium, TierServer
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import TierReason
from kvstrata.contract.messages.adapter import TierState
from kvstrata.model.pods import BackendReport
from kvstrata.model.world import World
from kvstrata.objects.children import redis_tier_children
from kvstrata.objects.context import BuildContext
from kvstrata.objects.mark import marked
from kvstrata.objects.quantities import binary
from kvstrata.plan.actions import Action, Decision, Plan, ProbeBackend, StatusWrite, key_of
from kvstrata.plan.budgets.admission import next_in_line
from kvstrata.plan.budgets.capacity import guaranteed_bytes
from kvstrata.plan.conditions import (
    Finding,
    changes_only,
    false,
    is_paused,
    kstatus,
    repeated,
    true,
    unknown,
    write_status,
)
from kvstrata.plan.kinds.model_deletion import departure, finalizer_due
from kvstrata.plan.kinds.tier_promises import file_findings, most_used, promises, restores, used_now
from kvstrata.plan.ownership import (
    foreign_wait_s,
    left_by_predecessor,
    name_conflict,
    no_longer_wanted,
    read_foreign,
    secrets_to_take_back,
)
from kvstrata.plan.paused import unwritten, without_children
from kvstrata.plan.pod_trouble import looks_due
from kvstrata.plan.redis import credentials, external
from kvstrata.plan.redis.backend import accesses, in_force, is_external, not_asked, previous_condition, report_of
from kvstrata.plan.redis.cluster import ClusterState, cluster_state, hindrance, server_pods, stuck_pod, without_pods
from kvstrata.plan.rules import first
from kvstrata.plan.rules import tier as chain

PROBE_EVERY_S = 15.0
PROBE_WHILE_DOWN_S = 3.0
PREDECESSOR_S = 2.0
STALLED_AFTER_S = 600.0
FULL_PERCENT = 90
"""Above this use a pod's report of a refused block counts, because the server also counts memory for incoming writes.
Below it, the pod has not tried since space was freed."""

_UNKNOWN_USE: Mapping[str, Any] = {"shardsReady": None, "used": None, "guaranteed": None, "restores": None}
"""Status of a stalled tier, which is neither checked nor used."""


_PROGRESS = ("progress", "shardsReady", "replicas", "used")
"""Status fields of a cluster's progress; conditions report the results."""


def plan_tier(world: World, ctx: BuildContext, name: str, now: datetime) -> Plan:
    """Return the plan for one tier. A stalled tier keeps its servers. Objects with guarantees affected by it are
    planned next."""
    tier = world.tiers.get(name)
    if tier is None:
        return Plan()
    if tier.metadata.deleting:
        cluster = cluster_state(world, tier) if world.domain_id is not None else None
        return Plan(departure(world, tier, _children(world, ctx, tier, cluster.members) if cluster is not None else ()))
    if tier.spec.managed is not None and (held := finalizer_due(tier)) is not None:
        return held
    made = without_children(tier, _plan(world, ctx, tier, now))
    return replace(made, enqueue=(*made.enqueue, *next_in_line(world, name)))


def _plan(world: World, ctx: BuildContext, tier: CacheTier, now: datetime) -> Plan:
    stalled = first(chain.RULES, world, tier)
    fields: dict[str, Any] = {
        "capacity": str(tier.spec.capacity or tier.spec.capacity_per_pod or "") or None,
        "restores": restores(world, tier),
        "servers": _servers(world, tier),
    }
    if stalled:
        return Plan(statuses=_status(world, tier, now, kstatus(stalled), {**fields, **_UNKNOWN_USE}))
    if tier.spec.medium is Medium.REDIS:
        return _redis(world, ctx, tier, now, fields)
    in_pod = Decision(TierReason.IN_POD, "the tier lives inside the pods of the models that list it")
    fields["guaranteed"] = binary(guaranteed_bytes(world, tier))
    reported: tuple[Finding, ...] = ()
    if tier.spec.medium is Medium.NVME:
        fields["used"] = most_used(world, tier)
        reported = file_findings(world, tier)
    return Plan(statuses=_status(world, tier, now, (*kstatus(ready=in_pod), *reported), fields))


def _servers(world: World, tier: CacheTier) -> list[dict[str, Any]]:
    """Return the servers that a new leader has to know. An end that is not on record yet counts as a loss then."""
    lost = (TierServer(name=one.name, uid=one.uid, lost_at=one.at) for one in world.lost_servers.get(tier.name, ()))
    here = (TierServer(name=pod.name, uid=pod.uid) for pod in server_pods(world, tier) if pod.ever_ran)
    return [one.to_kubernetes() for one in (*lost, *here)[-MAX_SERVERS:]]


def _redis(world: World, ctx: BuildContext, tier: CacheTier, now: datetime, fields: dict[str, Any]) -> Plan:
    actions: tuple[Action, ...] = ()
    children: tuple[dict[str, Any], ...] = ()
    tended: credentials.Tending | None = None
    domain = world.domain_id
    if domain is None:
        waiting = Decision(TierReason.PROGRESSING, world.domain_awaited)
        return Plan(statuses=_status(world, tier, now, kstatus(pending=waiting), fields), wake_after_s=1)
    cluster = cluster_state(world, tier)
    if cluster is not None:
        children = _children(world, ctx, tier, cluster.members)
        left = credentials.predecessors_secret(world, tier) or left_by_predecessor(world, tier, children)
        if left is not None:
            return _after_predecessor(world, tier, now, fields, left)
    if conflict := name_conflict(world, tier, children):
        statuses = _status(world, tier, now, kstatus(conflict), {**fields, **_UNKNOWN_USE})
        again = read_foreign(world, tier, children, credentials.own_secrets(tier) if cluster is not None else ())
        return Plan(actions=again, statuses=statuses, wake_after_s=foreign_wait_s(tier, now))
    if cluster is not None:
        actions = (*secrets_to_take_back(world, tier), *credentials.missing_secrets(world, ctx, tier, domain))
        if not credentials.has_secrets(world, tier):
            waiting = Decision(TierReason.PROGRESSING, "the server's users and certificate are being made")
            statuses = _status(world, tier, now, kstatus(pending=waiting), fields)
            return Plan(actions=actions, statuses=statuses, wake_after_s=0.2, needs=children)
        tended = credentials.tend_credentials(world, ctx, tier, domain, cluster.servers, now)
    report, states = report_of(world, tier), _states(world, tier)
    away = _why_away(world, tier, report) if report is not None and not report.reachable else None
    cut_off = sorted({pod for pod, state in states if state.breaker == "open"})
    refused = sorted({pod for pod, state in states if state.full})
    reachable, room = _reachable(tier, report, away, cut_off), _room(tier, report, away, refused)
    pending, ready = _readiness(tier, report, reachable, room, domain)
    shards, serving = _shards(tier, report, reachable, [state for _, state in states])
    fields["guaranteed"] = binary(guaranteed_bytes(world, tier))
    fields |= {"shards": shards, "shardsReady": serving, "used": _used(tier, report)}
    if cluster is not None:
        if pending is None or pending.reason != TierReason.SERVERS_DO_NOT_START:
            pending = cluster.pending or pending
        fields |= cluster.fields
    if pending is not None and tended is not None:
        pending = tended.hindrance or pending
    fields["external"] = external.servers_to_use(tier, report, domain)
    late = unwritten(world, tier, children) if is_paused(tier) else None
    # Conditions about pods follow from the servers in status.
    is_adopting = fields["external"] is not None and in_force(tier) is None
    findings = (
        *kstatus(_stalled(world, tier, pending, now), pending or late, ready),
        reachable,
        *(_of_cluster(tier, cluster) if cluster is not None else ()),
        *(tended.findings if tended else ()),
        *external.suitability(tier, report, away, domain),
        room,
    )
    # An outage may be shorter than the interval; reports from Kubernetes and pods reveal it.
    doubtful = bool(cut_off or refused) or external.missing(tier, report, domain) is not None
    interval_s = PROBE_EVERY_S if report and report.reachable and not doubtful else PROBE_WHILE_DOWN_S
    lacking = {child["metadata"]["uid"]: None for child in without_pods(world, tier)}
    looks, look_in_s = looks_due(world, lacking, key_of(tier), now)
    asking: tuple[Action, ...] = (cluster.order,) if cluster is not None else ()
    # An answer is valid for the interval: not every plan asks.
    if cluster is None and (report is None or (now - report.at).total_seconds() >= interval_s - 0.5):
        asking = _probe(world, tier, domain)
    ours = tended.actions if tended else ()
    return Plan(
        actions=(*actions, *looks, *ours, *asking, *no_longer_wanted(world, tier, children)),
        apply=children,
        statuses=_paced(tier, _status(world, tier, now, findings, fields, report)),
        enqueue=(key_of(tier),) if is_adopting else (),
        wake_after_s=min(interval_s, tended.wake_after_s if tended else interval_s, look_in_s or interval_s),
    )


def _status(
    world: World,
    tier: CacheTier,
    now: datetime,
    findings: Iterable[Finding | None],
    fields: Mapping[str, Any],
    report: BackendReport | None = None,
) -> tuple[StatusWrite, ...]:
    return write_status(tier, now, (*findings, *promises(world, tier, report)), fields)


def _children(
    world: World, ctx: BuildContext, tier: CacheTier, members: Mapping[int, int]
) -> tuple[dict[str, Any], ...]:
    token = credentials.restart_token(world, tier)
    models = tuple(sorted(name for name, model in world.models.items() if tier.name in model.tier_names))
    return world.memo.get(
        redis_tier_children,
        tier.name,
        (ctx, world.mark_key, tier.uid, tier.spec, token, members, models),
        lambda: tuple(
            marked(world.mark_key, child)
            for child in redis_tier_children(ctx, tier, models, restart_token=token, members=members)
        ),
    )


def _after_predecessor(world: World, tier: CacheTier, now: datetime, fields: Mapping[str, Any], left: str) -> Plan:
    """Create nothing while objects of a deleted tier of this name remain."""
    waiting = Decision(
        TierReason.PREDECESSOR_REMAINS,
        f"{left} belongs to a CacheTier {tier.name} that was deleted: Kubernetes removes it, and then this one's is "
        "made. If it stays, delete it",
    )
    statuses = _status(world, tier, now, kstatus(pending=waiting), {**fields, **_UNKNOWN_USE})
    return Plan(statuses=statuses, wake_after_s=PREDECESSOR_S)


def _paced(tier: CacheTier, writes: tuple[StatusWrite, ...]) -> tuple[StatusWrite, ...]:
    """Delay writes that only report a cluster's progress, except its beginning and end."""
    if tier.status.progress is None:
        return writes
    goes_on = ((one, bool(one.status.get("progress", True))) for one in writes)
    return tuple(replace(one, can_wait=on and changes_only(tier, one, _PROGRESS)) for one, on in goes_on)


def _of_cluster(tier: CacheTier, cluster: ClusterState) -> tuple[Finding | None, Finding | None]:
    """Return the conditions of a cluster that apply: with several primaries, now or until now, and with replicas."""
    slots, replication = cluster.findings
    is_spread = tier.spec.has_several_primaries or (tier.status.shards or 0) > 1
    is_replicated = tier.spec.managed is not None and tier.spec.managed.replicas_per_shard > 0
    return slots if is_spread else None, replication if is_replicated else None


def _readiness(
    tier: CacheTier, report: BackendReport | None, reachable: Finding, room: Finding, domain: str
) -> tuple[Decision | None, Decision]:
    pending = reachable.cause if reachable.status != "True" else None
    before = previous_condition(tier, ConditionType.READY)
    if pending is None and report is None and is_external(tier) and before is not None and before.status == "False":
        pending = repeated(before).cause  # until it was asked
    pending = pending or external.missing(tier, report, domain)
    warned = external.warning(tier, report, domain)
    if room.reason == TierReason.OUT_OF_MEMORY:
        warned = room.cause
    return pending, warned or Decision(TierReason.READY, "the tier's server answers")


def _stalled(world: World, tier: CacheTier, pending: Decision | None, now: datetime) -> Decision | None:
    """Return the decision about servers that do not start by themselves: for a lasting cause at once, for any other
    after ten minutes of not running. Before events were read again, a new leader repeats the last one."""
    trouble, ready = hindrance(world, tier), tier.status.condition(ConditionType.READY)
    if pending is None or tier.spec.managed is None or ready is None:
        return None
    unread = any(child["metadata"]["uid"] not in world.event_looks for child in without_pods(world, tier))
    if trouble is None:
        repeats = unread and tier.status.is_true(ConditionType.STALLED) and ready.reason == pending.reason
        return pending if repeats and pending.reason == TierReason.SERVERS_DO_NOT_START else None
    since = max(ready.last_transition_time, trouble.since or ready.last_transition_time)
    waited_s = (now - since).total_seconds() if ready.status == "False" else 0.0
    if trouble.lasting or waited_s >= STALLED_AFTER_S:
        return Decision(trouble.reason, pending.message)
    return None


def _shards(
    tier: CacheTier, report: BackendReport | None, reachable: Finding, states: Iterable[TierState]
) -> tuple[int | None, int | None]:
    """Return the numbers of external servers and of answering ones; for clusters as reported by pods."""
    if tier.spec.managed is not None:
        return None, None  # The operator's own check is more precise.
    if not tier.spec.is_cluster:
        return 1, 1 if reachable.status == "True" else 0
    reported = [state for state in states if state.medium == Medium.REDIS]
    if not reported:
        checked = report.external if report is not None and report.reachable else None
        if checked is None or not checked.mapped:
            return None, None
        return min(MAX_SHOWN_SHARDS, len(checked.servers)), min(MAX_SHOWN_SHARDS, len(checked.answering))
    nodes = min(MAX_SHOWN_SHARDS, max(0, *(state.nodes for state in reported)))
    away = max(0, *(state.nodes_away for state in reported))
    return nodes, max(0, nodes - away)


def _probe(world: World, tier: CacheTier, domain: str) -> tuple[ProbeBackend, ...]:
    """Return the probe of the tier's server, empty if it has none; in a cluster of the next one, if one is down."""
    every, asked = accesses(tier), world.backends.get(tier.name)
    if not every:
        return ()
    named = [access.endpoint for access in every]
    number = named.index(asked.access.endpoint) if asked is not None and asked.access.endpoint in named else 0
    if asked is not None and not asked.reachable:
        number = (number + 1) % len(named)
    return (ProbeBackend(tier.name, every[number], domain),)


def _states(world: World, tier: CacheTier) -> list[tuple[str, TierState]]:
    """Return the reports of pods about the tier, with the name of the pod."""
    reports = (reported.state for reported in world.states.values() if reported.in_contact)
    return [(report.pod, state) for report in reports for state in report.tiers if state.name == tier.name]


def _reachable(tier: CacheTier, report: BackendReport | None, away: Decision | None, cut_off: list[str]) -> Finding:
    kind = ConditionType.BACKEND_REACHABLE
    if report is None:
        return not_asked(tier, kind)
    if away is not None:
        return false(kind, *away)
    if cut_off:
        message = (
            f"{len(cut_off)} pods do not reach the server, which answered when the operator last asked "
            f"(see their cache containers): {', '.join(cut_off[:3])}"
        )
        return false(kind, TierReason.PODS_DISCONNECTED, message)
    silent = "the server answers; its user may not ask for figures"
    message = f"{report.software} {report.version} answers" if report.version else silent
    return true(kind, TierReason.REACHABLE, message)


def _why_away(world: World, tier: CacheTier, report: BackendReport) -> Decision:
    """Return why no server answers; for managed servers first why their pods do not start.

    For an external cluster, asked in turn, it is the first server's reason, which stands until that one is asked again:
    reasons differ, and the status would otherwise change with every answer.
    """
    if trouble := hindrance(world, tier):
        return Decision(trouble.reason, trouble.message)
    if stuck := stuck_pod(world, tier, report.at):
        return stuck
    every, before = accesses(tier), previous_condition(tier)
    asked_first = not every or report.access.endpoint == every[0].endpoint
    if asked_first or before is None or before.status != "False" or before.reason == TierReason.PODS_DISCONNECTED:
        return Decision(report.reason, report.message)
    return repeated(before).cause


def _room(tier: CacheTier, report: BackendReport | None, away: Decision | None, refused: list[str]) -> Finding:
    """Return whether the server takes new blocks. A full one still serves its blocks. `refused`: pods of which it
    refused a block."""
    kind = ConditionType.HAS_ROOM
    if report is None:
        return not_asked(tier, kind)
    if away is not None:
        return unknown(kind, *away)
    # Memory of one server does not show that of the others.
    bounded = report.max_bytes > 0 and not tier.spec.has_several_primaries
    full = bool(refused)
    if bounded and not report.evicts:
        share = 100 * report.used_bytes / report.max_bytes
        full = share >= 100 or (full and share >= FULL_PERCENT)
    if full:
        return false(
            kind,
            TierReason.OUT_OF_MEMORY,
            "the server refuses new blocks: it is full, and still serves its blocks; EvictsWhenFull and "
            "CapacityCommitted explain why scopes do not make room in time. Raise the tier's capacity or lower its "
            "eviction.highWatermarkPercent",
        )
    if tier.spec.has_several_primaries:
        sentence = "no pod was refused a block"
    elif not report.version:
        sentence = "no pod was refused a block; the server's user may not ask for figures"
    elif not bounded:
        sentence = "the server sets no bound to its memory"
    else:
        sentence = "the server evicts when it is full" if report.evicts else "the server takes new blocks"
    return true(kind, TierReason.ROOM_LEFT, sentence)


def _used(tier: CacheTier, report: BackendReport | None) -> str | None:
    if report is None:
        return str(tier.status.used) if tier.status.used is not None and previous_condition(tier) else None
    return used_now(tier, report.used_bytes) if report.version else None
