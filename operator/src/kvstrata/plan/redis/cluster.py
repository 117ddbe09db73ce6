"""The managed cluster of a CacheTier: its goal, and the state at the last look.

`topology` decides the next step of the servers; this module connects it to the world.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from kvstrata.api.cachetier import CacheTier
from kvstrata.api.cachetier_managed import RedisManaged
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import TierReason
from kvstrata.api.scalars import format_timestamp
from kvstrata.model.pods import ClusterReport, Loss
from kvstrata.model.redis.cluster import SLOTS, Cluster, Goal, ServerPod
from kvstrata.model.world import World
from kvstrata.objects import names, paths, sizing
from kvstrata.objects.tier_link import redis_link
from kvstrata.plan.actions import Decision, ManagedServer, ReconcileCluster
from kvstrata.plan.conditions import Finding, false, true, unknown
from kvstrata.plan.redis import topology
from kvstrata.plan.redis.backend import addresses, asked_as, previous_condition
from kvstrata.plan.redis.topology import Step, Verdict

STUCK_AFTER_S = 60.0
"""Delay after its deadline before a pod is stuck: a live kubelet reports its end within seconds."""


def server_pods(world: World, tier: CacheTier) -> Collection[ServerPod]:
    return world.servers.get(tier.name, {}).values()


def stuck_pod(world: World, tier: CacheTier, at: datetime) -> Decision | None:
    """Return the decision about a pod that should have ended long before `at`, and the remedy for a person.

    On a lost node nothing confirms the end of its server, so no other pod may take its name. The operator does not
    force the deletion: a person must vouch for it.
    """
    pods = sorted(server_pods(world, tier), key=lambda pod: pod.name)
    stuck = [pod for pod in pods if pod.ends_by and (at - pod.ends_by).total_seconds() > STUCK_AFTER_S]
    if not stuck:
        return None
    first, more = stuck[0], f" ({len(stuck) - 1} more pods are stuck)" if len(stuck) > 1 else ""
    node = f"node {first.node}" if first.node else "its node"
    return Decision(
        TierReason.POD_STUCK,
        f"{first.name} should have ended by {format_timestamp(first.ends_by or at)}, and {node} does not report its end"
        f"{more}: no other takes its place until then. If the node is lost, run `kubectl -n {tier.namespace} "
        f"delete pod {first.name} --force --grace-period=0`, or taint the node with "
        "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
    )


def hindrance(world: World, tier: CacheTier) -> str:
    """Return which server's pod does not start, why, and how many more; empty if none is known."""
    hindered = sorted((pod for pod in server_pods(world, tier) if pod.trouble), key=lambda pod: pod.name)
    if not hindered:
        return ""
    more = f" ({len(hindered) - 1} more do not come up)" if len(hindered) > 1 else ""
    return f"{hindered[0].name}: {hindered[0].trouble}{more}"


@dataclass(frozen=True, slots=True)
class ClusterState:
    """State of a tier's cluster. `members` counts the servers of each shard, more than in spec while one must hand
    over. `pending` is why the tier is not Ready; moving slots or a roll do not affect that."""

    members: Mapping[int, int]
    findings: tuple[Finding, ...]
    fields: Mapping[str, Any]
    pending: Decision | None
    servers: tuple[ManagedServer, ...]
    order: ReconcileCluster


def cluster_state(world: World, tier: CacheTier) -> ClusterState | None:
    managed = tier.spec.managed
    if managed is None:
        return None
    goal = _goal(world, tier, managed)
    report = world.clusters.get(tier.name)
    cluster = report.cluster if report is not None else None
    pods = server_pods(world, tier)
    step, judged = _judged(world, tier.name, report, goal)
    stuck = stuck_pod(world, tier, report.at) if report is not None else None
    verdict = _hindered(judged, hindrance(world, tier), stuck) if judged is not None else None
    locked = _why_locked(goal, len(pods))
    return ClusterState(
        members=_members(goal, pods, step, cluster),
        findings=(_slots(tier, report, verdict, locked, stuck), _replication(tier, verdict, locked, stuck)),
        fields={**_fields(tier, goal, verdict, report), **_history(tier, report, verdict)},
        pending=_pending(tier, report, verdict, locked, stuck),
        servers=_servers(tier, pods),
        order=_order(tier, goal),
    )


def _judged(world: World, tier: str, report: ClusterReport | None, goal: Goal) -> tuple[Step | None, Verdict | None]:
    """Return the result of the last look, memoized because a tier is planned more often."""
    if report is None or report.cluster is None:
        return None, None
    cluster, moved = report.cluster, report.moved
    return world.memo.get(Cluster, tier, (cluster, goal, moved), lambda: topology.look(cluster, goal, moved))


def _goal(world: World, tier: CacheTier, managed: RedisManaged) -> Goal:
    shards = managed.effective_shards
    return Goal(
        shards=shards,
        replicas=managed.effective_replicas_per_shard,
        max_bytes_each=sizing.redis_maxmemory_bytes(tier.spec),
        revisions={shard: revision for shard in range(shards) if (revision := _revision(world, tier, shard))},
        drops=managed.drops_moved_blocks,
        movable_bytes=managed.movable_bytes,
        locked_out=_locked_out(world, tier),
        doomed=_doomed(world, tier),
        erased_by=tuple(
            sorted(one.record.invalidation for one in world.erasures.values() if tier.name in one.pinned_tiers)
        ),
    )


def _doomed(world: World, tier: CacheTier) -> frozenset[str]:
    """Return the pods to be deleted because their StatefulSet is gone, even if a new one has its name."""

    def is_there(pod: ServerPod) -> bool:
        live = world.children.get(("StatefulSet", names.redis_shard(tier.name, pod.shard)))
        return live is not None and live["metadata"]["uid"] == pod.controller

    return frozenset(pod.uid for pod in server_pods(world, tier) if pod.controller and not is_there(pod))


def _locked_out(world: World, tier: CacheTier) -> frozenset[str]:
    look = world.credentials.get(tier.name)
    refused = (
        {name for name, seen in look.servers.items() if seen.reason == TierReason.WRONG_PASSWORD} if look else set()
    )
    return frozenset(pod.uid for pod in server_pods(world, tier) if known_as(pod) in refused)


def _revision(world: World, tier: CacheTier, shard: int) -> str | None:
    """Return the template in force for a shard's pods; None until Kubernetes has observed the newest."""
    live = world.children.get(("StatefulSet", names.redis_shard(tier.name, shard)))
    status = (live.get("status") or {}) if live is not None else {}
    if live is None or status.get("observedGeneration") != live["metadata"].get("generation"):
        return None
    return status.get("updateRevision")


def _members(goal: Goal, pods: Collection[ServerPod], step: Step | None, cluster: Cluster | None) -> Mapping[int, int]:
    """Return the number of servers for each shard. Kubernetes removes the highest ordinals, regardless of their
    content: so nothing shrinks before all steps are done, and an unwanted shard goes when its servers report no
    slots."""
    members = dict.fromkeys(range(goal.shards), 1 + goal.replicas)
    settled = cluster is not None and step is None
    drained = step.drained if step is not None else ()
    for pod in pods:
        if pod.shard in drained or (settled and pod.shard < goal.shards):
            continue
        members[pod.shard] = max(members.get(pod.shard, 0), 1 + pod.ordinal)
    return members


def _order(tier: CacheTier, goal: Goal) -> ReconcileCluster:
    link = redis_link(tier)
    if link is None or link.operator_username is None or link.operator_password is None:
        raise ValueError(f"CacheTier {tier.name} has no servers that the operator runs")
    username, password, authority = asked_as(link)
    return ReconcileCluster(
        tier=tier.name,
        goal=goal,
        port=paths.REDIS_PORT,
        username=username or "",
        password_secret=password or link.operator_password,
        authority_secret=authority,
        server_name=names.redis_host(tier.name, tier.namespace),
        endpoint=addresses(link)[0],
    )


def _servers(tier: CacheTier, pods: Collection[ServerPod]) -> tuple[ManagedServer, ...]:
    host = names.redis_host(tier.name, tier.namespace)
    return tuple(
        ManagedServer(
            known_as(pod), f"[{pod.ip}]:{paths.REDIS_PORT}" if ":" in pod.ip else f"{pod.ip}:{paths.REDIS_PORT}", host
        )
        for pod in sorted(pods, key=lambda pod: pod.name)
        if pod.ip and not pod.deleting
    )


def known_as(pod: ServerPod) -> str:
    """Return a unique name for people: the next pod of a shard has the same name."""
    return f"{pod.name} ({pod.uid[:8]})"


def _hindered(verdict: Verdict, why: str, stuck: Decision | None) -> Verdict:
    reported = ("" if verdict.replication_healthy else why, stuck.message if stuck is not None else "")
    why = "; ".join(filter(None, reported))
    if not why or verdict.settled:
        return verdict
    return replace(
        verdict,
        slots_message="; ".join(filter(None, (verdict.slots_message, why))),
        replication_message=f"{verdict.replication_message}; {why}",
        progress=f"{verdict.progress}; {why}",
    )


def _why_locked(goal: Goal, pods: int) -> Decision | None:
    if not goal.locked_out:
        return None
    return Decision(
        TierReason.PASSWORDS_LOST,
        f"{len(goal.locked_out)} of {pods} servers admit no password in a Secret, so they cannot be asked: "
        "their pods are replaced one by one, and their blocks are lost, as misses",
    )


def _slots(
    tier: CacheTier,
    report: ClusterReport | None,
    verdict: Verdict | None,
    locked: Decision | None,
    stuck: Decision | None,
) -> Finding:
    kind = ConditionType.SLOTS_COVERED
    if verdict is None:
        return _unasked(tier, kind)
    if verdict.slots_covered:
        loss = _newest_loss(tier, report)
        since = f"; the content of {loss.slots} slots was lost at {format_timestamp(loss.at)}" if loss else ""
        return true(kind, TierReason.SLOTS_COVERED, f"every slot has a primary that answers{since}")
    if locked is not None:
        return unknown(kind, locked.reason, locked.message)
    lost = _everything_lost(tier, report, verdict)
    why = lost or _why(tier, report, verdict, stuck, verdict.slots_message)
    return false(kind, why.reason, why.message)


def _why(
    tier: CacheTier, report: ClusterReport | None, verdict: Verdict, stuck: Decision | None, message: str
) -> Decision:
    if stuck is not None:
        return Decision(stuck.reason, message)
    cluster = report.cluster if report is not None else None
    if cluster is not None and cluster.silent and not tier.spec.has_several_primaries and not cluster.servers:
        return Decision(*next(iter(cluster.silent.values())))
    forming = verdict.empty or (verdict.uncovered == SLOTS and not was_formed(tier))
    return Decision(TierReason.PROGRESSING if forming or not verdict.uncovered else TierReason.SLOTS_UNCOVERED, message)


def was_formed(tier: CacheTier) -> bool:
    """Whether the tier's cluster has ever served all slots; otherwise forming it loses nothing."""
    return tier.status.formed_at is not None


def holds_anything(tier: CacheTier) -> bool:
    """Whether the tier's cluster has served since it last lost everything, so that its slots may hold blocks."""
    formed, loss = tier.status.formed_at, tier.status.last_loss
    return formed is not None and not (loss is not None and loss.slots == SLOTS and loss.at > formed)


def _newest_loss(tier: CacheTier, report: ClusterReport | None) -> Loss | None:
    reported = tier.status.last_loss
    known = [Loss(reported.at, reported.slots)] if reported is not None else []
    known += [report.lost] if report is not None and report.lost is not None else []
    return max(known, key=lambda loss: loss.at, default=None)


def _formed_again(tier: CacheTier, report: ClusterReport | None) -> bool:
    formed, loss = tier.status.formed_at, _newest_loss(tier, report)
    return formed is not None and loss is not None and loss.slots == SLOTS and loss.at > formed


def _everything_lost(tier: CacheTier, report: ClusterReport | None, verdict: Verdict) -> Decision | None:
    formed = tier.status.formed_at
    if formed is None or not (verdict.empty or _formed_again(tier, report)):
        return None
    return Decision(
        TierReason.EVERYTHING_LOST,
        f"every server lost the blocks stored since {format_timestamp(formed)}: blocks are misses until they "
        f"are stored again, and the cluster is formed again. {verdict.progress}",
    )


def _history(tier: CacheTier, report: ClusterReport | None, verdict: Verdict | None) -> Mapping[str, Any]:
    """Return the status fields of formations and losses, which no look can know."""
    fields: dict[str, Any] = {}
    if (loss := _newest_loss(tier, report)) is not None:
        fields["lastLoss"] = {"at": format_timestamp(loss.at), "slots": loss.slots}
    serves = report is not None and verdict is not None and verdict.slots_covered
    if report is not None and serves and (not was_formed(tier) or _formed_again(tier, report)):
        fields["formedAt"] = format_timestamp(report.at)
    return fields


def _replication(tier: CacheTier, verdict: Verdict | None, locked: Decision | None, stuck: Decision | None) -> Finding:
    kind = ConditionType.REPLICATION_HEALTHY
    if verdict is None:
        return _unasked(tier, kind)
    if not verdict.replication_healthy:
        why = locked or Decision(stuck.reason if stuck else TierReason.REPLICAS_MISSING, verdict.replication_message)
        return false(kind, why.reason, why.message)
    return true(kind, TierReason.REPLICAS_IN_STEP, "every primary has all its replicas in step")


def _unasked(tier: CacheTier, kind: ConditionType) -> Finding:
    before = previous_condition(tier, kind)
    if before is not None:
        return Finding(before.type, before.status, before.reason, before.message)
    return unknown(kind, TierReason.PROGRESSING, "the servers have not been asked yet")


def _pending(
    tier: CacheTier,
    report: ClusterReport | None,
    verdict: Verdict | None,
    locked: Decision | None,
    stuck: Decision | None,
) -> Decision | None:
    if report is None or verdict is None:
        before = previous_condition(tier, ConditionType.READY)
        if report is None and before is not None and not tier.status.is_true(ConditionType.STALLED):
            # An operator that has just started repeats the last condition until it has an answer.
            return None if before.status == "True" else Decision(before.reason, before.message)
        if report is not None and report.reason:
            return Decision(report.reason, report.message)
        return Decision(TierReason.PROGRESSING, "the servers are being started")
    if not verdict.slots_covered:
        lost = _everything_lost(tier, report, verdict)
        return locked or lost or _why(tier, report, verdict, stuck, verdict.progress)
    if not verdict.replication_healthy:
        return locked or Decision(stuck.reason if stuck else TierReason.REPLICAS_MISSING, verdict.progress)
    return None


def _fields(tier: CacheTier, goal: Goal, verdict: Verdict | None, report: ClusterReport | None) -> Mapping[str, Any]:
    if report is None and previous_condition(tier) is not None:
        known = tier.status
        return {
            "shards": goal.shards,
            "shardsReady": known.shards_ready,
            "replicas": known.replicas,
            "progress": known.progress,
        }
    if verdict is None or report is None or report.cluster is None:
        return {"shards": goal.shards, "progress": None}
    in_step = sum(not server.is_primary and server.link_up for server in report.cluster.servers.values())
    hindered = f"; {report.message}" if report.reason else ""
    return {
        "shards": goal.shards,
        "shardsReady": verdict.shards_ready,
        "replicas": in_step,
        "progress": None if verdict.settled else verdict.progress + hindered,
    }
