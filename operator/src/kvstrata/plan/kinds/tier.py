"""CacheTier: the servers of a managed Redis tier, and whether a tier can be used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from kvstrata.api.cachetier import MAX_SHOWN_SHARDS, CacheTier, Medium
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import TierReason
from kvstrata.model.pods import BackendReport
from kvstrata.model.refs import Key
from kvstrata.model.world import World
from kvstrata.objects.children import redis_tier_children
from kvstrata.objects.context import BuildContext
from kvstrata.objects.quantities import binary
from kvstrata.objects.tier_link import redis_link
from kvstrata.plan.actions import Action, Decision, Plan, ProbeBackend, StatusWrite
from kvstrata.plan.budgets.admission import next_in_line
from kvstrata.plan.budgets.capacity import guaranteed_bytes
from kvstrata.plan.conditions import Finding, changes_only, false, kstatus, true, unknown, write_status
from kvstrata.plan.kinds.applicable import applicable
from kvstrata.plan.kinds.tier_promises import file_findings, most_used, promises, used_now
from kvstrata.plan.ownership import FOREIGN_S, left_by_predecessor, name_conflict, no_longer_wanted, read_foreign
from kvstrata.plan.redis import external
from kvstrata.plan.redis.backend import addresses, asked_as, in_force, is_external, previous_condition, report_of
from kvstrata.plan.redis.cluster import cluster_state, hindrance, stuck_pod
from kvstrata.plan.redis.credentials import (
    Tending,
    has_secrets,
    missing_secrets,
    predecessors_secret,
    restart_token,
    tend_credentials,
)
from kvstrata.plan.rules import first
from kvstrata.plan.rules import tier as chain

PROBE_EVERY_S = 15.0
PROBE_WHILE_DOWN_S = 3.0
PREDECESSOR_S = 2.0
FULL_PERCENT = 90
"""Above this use a pod's report of a refused block counts, because the server also counts memory for incoming writes.
Below it, the pod has not tried since space was freed."""

_UNKNOWN_USE: Mapping[str, Any] = {"shardsReady": None, "used": None, "guaranteed": None}
"""Status of a stalled tier, which is neither checked nor used."""


_PROGRESS = ("progress", "shardsReady", "replicas", "used")
"""Status fields of a cluster's progress; conditions report the results."""


def plan_tier(world: World, ctx: BuildContext, name: str, now: datetime) -> Plan:
    """Return the plan for one tier. A stalled tier keeps its servers. Objects with guarantees affected by it are
    planned next."""
    tier = world.tiers.get(name)
    if tier is None or tier.metadata.deleting:
        return Plan()
    made = _plan(world, ctx, tier, now)
    return replace(made, enqueue=(*made.enqueue, *next_in_line(world, name)))


def _plan(world: World, ctx: BuildContext, tier: CacheTier, now: datetime) -> Plan:
    stalled = first(chain.RULES, world, tier)
    fields = {"capacity": str(tier.spec.capacity or tier.spec.capacity_per_pod or "") or None}
    if stalled:
        fields |= _UNKNOWN_USE
        return Plan(
            statuses=_status(world, tier, now, (*kstatus(stalled, None, stalled), *promises(world, tier)), fields)
        )
    if tier.spec.medium is not Medium.REDIS:
        in_pod = Decision(TierReason.IN_POD, "the tier lives inside the pods of the models that list it")
        fields["guaranteed"] = binary(guaranteed_bytes(world, tier))
        reported: tuple[Finding, ...] = ()
        if tier.spec.medium is Medium.NVME:
            fields["used"] = most_used(world, tier)
            reported = file_findings(world, tier)
        findings = (*kstatus(None, None, in_pod), *reported, *promises(world, tier))
        return Plan(statuses=_status(world, tier, now, findings, fields))
    return _redis(world, ctx, tier, now, fields)


def _redis(world: World, ctx: BuildContext, tier: CacheTier, now: datetime, fields: dict[str, Any]) -> Plan:
    actions: tuple[Action, ...] = ()
    children: tuple[dict[str, Any], ...] = ()
    tended: Tending | None = None
    cluster = cluster_state(world, tier)
    if world.domain_id is None:
        waiting = Decision(TierReason.PROGRESSING, "the domain's identity is being drawn")
        findings = (*kstatus(None, waiting, waiting), *promises(world, tier))
        return Plan(statuses=_status(world, tier, now, findings, fields), wake_after_s=1)
    if conflict := name_conflict(world, tier):
        return _conflicting(world, tier, now, fields, conflict)
    if cluster is not None:
        if secret := predecessors_secret(world, tier):
            return _after_predecessor(world, tier, now, fields, secret)
        actions = missing_secrets(world, ctx, tier, world.domain_id)
        if not has_secrets(world, tier):
            waiting = Decision(TierReason.PROGRESSING, "the server's users and certificate are being made")
            findings = (*kstatus(None, waiting, waiting), *promises(world, tier))
            return Plan(actions=actions, statuses=_status(world, tier, now, findings, fields), wake_after_s=0.2)
        children = _children(world, ctx, tier, cluster.members)
        tended = tend_credentials(world, ctx, tier, world.domain_id, cluster.servers, now)
    if left := left_by_predecessor(world, tier, children):
        return _after_predecessor(world, tier, now, fields, left)
    if conflict := name_conflict(world, tier, children):
        return _conflicting(world, tier, now, fields, conflict)
    report, domain = report_of(world, tier), world.domain_id
    reachable, room = _reachable(world, tier), _room(world, tier)
    pending, ready = _readiness(tier, report, reachable, room, domain)
    shards, serving = _shards(world, tier, reachable, report)
    fields["guaranteed"] = binary(guaranteed_bytes(world, tier))
    fields |= {"shards": shards, "shardsReady": serving, "used": _used(world, tier)}
    if cluster is not None:
        if pending is None or pending.reason != TierReason.SERVERS_DO_NOT_START:
            pending = cluster.pending or pending
        fields |= cluster.fields
    if pending is not None and tended is not None:
        pending = tended.hindrance or pending
    fields["external"] = external.servers_to_use(tier, report, domain)
    # Conditions about pods follow from the servers in status.
    is_adopting = fields["external"] is not None and in_force(tier) is None
    away = _why_away(world, tier, report) if report is not None and not report.reachable else None
    findings = (
        *kstatus(None, pending, ready),
        reachable,
        *(cluster.findings if cluster is not None else ()),
        *(tended.findings if tended else ()),
        *external.suitability(tier, report, away, domain),
        room,
        *promises(world, tier, report),
    )
    interval_s = _interval_s(world, tier)
    return Plan(
        actions=(
            *actions,
            *(tended.actions if tended else ()),
            *(_probe(tier, now, world, domain) if cluster is None else (cluster.order,)),
            *no_longer_wanted(world, tier, children),
        ),
        apply=children,
        statuses=_paced(tier, _status(world, tier, now, findings, fields)),
        enqueue=(Key(tier.INFO.kind, tier.namespace, tier.name),) if is_adopting else (),
        wake_after_s=min(interval_s, tended.wake_after_s) if tended else interval_s,
    )


def _status(
    world: World, tier: CacheTier, now: datetime, findings: Iterable[Finding], fields: Mapping[str, Any]
) -> tuple[StatusWrite, ...]:
    return write_status(tier, now, applicable(world, tier, findings), fields)


def _children(
    world: World, ctx: BuildContext, tier: CacheTier, members: Mapping[int, int]
) -> tuple[dict[str, Any], ...]:
    token = restart_token(world, tier)
    return world.memo.get(
        redis_tier_children,
        tier.name,
        (ctx, tier.uid, tier.spec, token, members),
        lambda: redis_tier_children(ctx, tier, restart_token=token, members=members),
    )


def _after_predecessor(world: World, tier: CacheTier, now: datetime, fields: Mapping[str, Any], left: str) -> Plan:
    """Create nothing while objects of a deleted tier of this name remain."""
    waiting = Decision(
        TierReason.PREDECESSOR_REMAINS,
        f"{left} belongs to a CacheTier {tier.name} that was deleted: Kubernetes removes it, and then this one's is "
        "made. If it stays, delete it",
    )
    findings = (*kstatus(None, waiting, waiting), *promises(world, tier))
    statuses = _status(world, tier, now, findings, {**fields, **_UNKNOWN_USE})
    return Plan(statuses=statuses, wake_after_s=PREDECESSOR_S)


def _conflicting(world: World, tier: CacheTier, now: datetime, fields: Mapping[str, Any], conflict: Decision) -> Plan:
    findings = (*kstatus(conflict, None, conflict), *promises(world, tier))
    statuses = _status(world, tier, now, findings, {**fields, **_UNKNOWN_USE})
    return Plan(actions=read_foreign(world, tier), statuses=statuses, wake_after_s=FOREIGN_S)


def _paced(tier: CacheTier, writes: tuple[StatusWrite, ...]) -> tuple[StatusWrite, ...]:
    """Delay writes that only report a cluster's progress, except its beginning and end."""
    under_way = tier.status.progress is not None
    return tuple(
        replace(
            one, can_wait=under_way and bool(one.status.get("progress", True)) and changes_only(tier, one, _PROGRESS)
        )
        for one in writes
    )


def _readiness(
    tier: CacheTier, report: BackendReport | None, reachable: Finding, room: Finding, domain: str
) -> tuple[Decision | None, Decision]:
    pending = Decision(reachable.reason, reachable.message) if reachable.status != "True" else None
    before = previous_condition(tier, ConditionType.READY)
    if pending is None and report is None and is_external(tier) and before is not None and before.status == "False":
        pending = Decision(before.reason, before.message)  # until it was asked
    pending = pending or external.missing(tier, report, domain)
    warned = external.warning(tier, report, domain)
    if room.reason == TierReason.OUT_OF_MEMORY:
        warned = Decision(room.reason, room.message)
    return pending, warned or Decision(TierReason.READY, "the tier's server answers")


def _shards(
    world: World, tier: CacheTier, reachable: Finding, report: BackendReport | None
) -> tuple[int | None, int | None]:
    """Return the numbers of external servers and of answering ones; for clusters as reported by pods."""
    if tier.spec.managed is not None:
        return None, None  # The operator's own check is more precise.
    if not tier.spec.is_cluster:
        return 1, 1 if reachable.status == "True" else 0
    reported = [
        state
        for one in world.states.values()
        if one.in_contact
        for state in one.state.tiers
        if state.name == tier.name and state.medium == Medium.REDIS
    ]
    if not reported:
        checked = report.external if report is not None and report.reachable else None
        if checked is None or not checked.mapped:
            return None, None
        return min(MAX_SHOWN_SHARDS, len(checked.servers)), min(MAX_SHOWN_SHARDS, len(checked.answering))
    nodes = min(MAX_SHOWN_SHARDS, max(0, *(state.nodes for state in reported)))
    away = max(0, *(state.nodes_away for state in reported))
    return nodes, max(0, nodes - away)


def _order(world: World, tier: CacheTier, domain: str) -> ProbeBackend | None:
    """Return the probe of the tier's server, None if it has none; in a cluster the next one, if one is down."""
    link = redis_link(tier)
    if link is None:
        return None
    named = addresses(link)
    asked = world.backends.get(tier.name)
    number = named.index(asked.endpoint) if asked is not None and asked.endpoint in named else 0
    if asked is not None and not asked.reachable:
        number = (number + 1) % len(named)
    host, _ = link.endpoints[number]
    username, password, authority = asked_as(link)
    return ProbeBackend(
        tier=tier.name,
        endpoint=named[number],
        server_name=host,
        username=username,
        password_secret=password,
        authority_secret=authority,
        domain=domain,
        cluster=tier.spec.is_cluster,
    )


def _probe(tier: CacheTier, now: datetime, world: World, domain: str) -> tuple[ProbeBackend, ...]:
    """Probe when the last answer is older than the interval, not on every plan."""
    report, order = report_of(world, tier), _order(world, tier, domain)
    if order is None or (report and (now - report.at).total_seconds() < _interval_s(world, tier) - 0.5):
        return ()
    return (order,)


def _interval_s(world: World, tier: CacheTier) -> float:
    """Return how long an answer is valid: short if the server was down or others report problems. An outage may be
    shorter than the interval; reports from Kubernetes and pods reveal it."""
    report = report_of(world, tier)
    doubtful = bool(_pods_without(world, tier) or _pods_refused(world, tier))
    doubtful = doubtful or external.missing(tier, report, world.domain_id or "") is not None
    return PROBE_EVERY_S if report and report.reachable and not doubtful else PROBE_WHILE_DOWN_S


def _reachable(world: World, tier: CacheTier) -> Finding:
    report = report_of(world, tier)
    if report is None:
        before = previous_condition(tier)
        if before is not None:
            return Finding(before.type, before.status, before.reason, before.message)
        return unknown(ConditionType.BACKEND_REACHABLE, TierReason.PROGRESSING, "the server has not been asked yet")
    cut_off = _pods_without(world, tier)
    if report.reachable and cut_off:
        return false(
            ConditionType.BACKEND_REACHABLE,
            TierReason.PODS_DISCONNECTED,
            f"{len(cut_off)} pods do not reach the server, which answered when the operator last asked "
            f"(see their cache containers): {', '.join(cut_off[:3])}",
        )
    if report.reachable:
        return true(
            ConditionType.BACKEND_REACHABLE,
            TierReason.REACHABLE,
            f"{report.software} {report.version} answers"
            if report.version
            else "the server answers; its user may not ask for figures",
        )
    away = _why_away(world, tier, report)
    return false(ConditionType.BACKEND_REACHABLE, away.reason, away.message)


def _why_away(world: World, tier: CacheTier, report: BackendReport) -> Decision:
    """Return why no server answers; for managed servers first why their pods do not start.

    For an external cluster, asked in turn, it is the first server's reason, which stands until that one is asked again:
    reasons differ, and the status would otherwise change with every answer.
    """
    if why := hindrance(world, tier):
        return Decision(TierReason.SERVERS_DO_NOT_START, why)
    if stuck := stuck_pod(world, tier, report.at):
        return stuck
    link, before = redis_link(tier), previous_condition(tier)
    asked_first = link is None or report.endpoint == addresses(link)[0]
    if asked_first or before is None or before.status != "False" or before.reason == TierReason.PODS_DISCONNECTED:
        return Decision(report.reason, report.message)
    return Decision(before.reason, before.message)


def _pods_without(world: World, tier: CacheTier) -> list[str]:
    return sorted(
        reported.state.pod
        for reported in world.states.values()
        if reported.in_contact
        and any(state.name == tier.name and state.breaker == "open" for state in reported.state.tiers)
    )


def _pods_refused(world: World, tier: CacheTier) -> list[str]:
    return sorted(
        reported.state.pod
        for reported in world.states.values()
        if reported.in_contact and any(state.name == tier.name and state.full for state in reported.state.tiers)
    )


def _room(world: World, tier: CacheTier) -> Finding:
    """Return whether the server takes new blocks. A full one still serves its blocks."""
    report = report_of(world, tier)
    if report is None:
        before = previous_condition(tier, ConditionType.HAS_ROOM)
        if before is not None:
            return Finding(before.type, before.status, before.reason, before.message)
        return unknown(ConditionType.HAS_ROOM, TierReason.PROGRESSING, "the server has not been asked yet")
    if not report.reachable:
        away = _why_away(world, tier, report)
        return unknown(ConditionType.HAS_ROOM, away.reason, away.message)
    refused = _pods_refused(world, tier)
    # Memory of one server does not show that of the others.
    bounded = report.max_bytes > 0 and not tier.spec.has_several_primaries
    if bounded and not report.evicts:
        share = 100 * report.used_bytes / report.max_bytes
        full = share >= 100 or (bool(refused) and share >= FULL_PERCENT)
    else:
        full = bool(refused)
    if full:
        return false(
            ConditionType.HAS_ROOM,
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
    return true(ConditionType.HAS_ROOM, TierReason.ROOM_LEFT, sentence)


def _used(world: World, tier: CacheTier) -> str | None:
    report = report_of(world, tier)
    if report is None:
        return str(tier.status.used) if tier.status.used is not None and previous_condition(tier) else None
    return used_now(tier, report.used_bytes) if report.version else None
