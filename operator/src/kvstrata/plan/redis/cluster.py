"""The managed cluster of a CacheTier: its goal, and the state at the last look.

`topology` decides the next step of the servers; this module connects it to the world.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from kvstrata.api.cachetier import CacheTier, SlotLoss
from kvstrata.api.cachetier_managed import Rebalance, RedisManaged
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import TierReason
from kvstrata.api.scalars import format_timestamp
from kvstrata.model.pods import ClusterReport, Trouble
from kvstrata.model.redis.cluster import SLOTS, Cluster, Goal, ServerPod
from kvstrata.model.world import World
from kvstrata.objects import names, paths, sizing
from kvstrata.plan.actions import Decision, ManagedServer, ReconcileCluster
from kvstrata.plan.conditions import Finding, false, true, unknown
from kvstrata.plan.pod_trouble import of_events, requested
from kvstrata.plan.redis import topology
from kvstrata.plan.redis.backend import accesses, address, in_force, not_asked, previous_condition
from kvstrata.plan.redis.topology import Step, Verdict

STUCK_AFTER_S = 60.0
"""Delay after its deadline before a pod is stuck: a live kubelet reports its end within seconds."""


def server_pods(world: World, tier: CacheTier) -> list[ServerPod]:
    return sorted(world.servers.get(tier.name, {}).values(), key=lambda pod: pod.name)


def stuck_pod(world: World, tier: CacheTier, at: datetime) -> Decision | None:
    """Return the decision about a pod that should have ended long before `at`, and the remedy for a person. On a lost
    node nothing confirms the end of its server, so no other pod may take its name. The operator does not force the
    deletion: a person must vouch for it."""
    pods = server_pods(world, tier)
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


def hindrance(world: World, tier: CacheTier) -> Trouble | None:
    """Return which server's pod does not start, why, and how many more; None if none is known. A lasting one is
    first."""
    hindered = [pod for pod in server_pods(world, tier) if pod.trouble]
    if not hindered:
        looks = ((child, world.event_looks.get(child["metadata"]["uid"])) for child in without_pods(world, tier))
        refused = ((child["metadata"]["name"], of_events(look.warnings)) for child, look in looks if look is not None)
        return next((_about(name, one.message, one.lasting) for name, one in refused if one is not None), None)
    first = min(hindered, key=lambda pod: not pod.lasting)
    shard = world.children.get(("StatefulSet", names.redis_shard(tier.name, first.shard)))
    asked = requested(shard["spec"]["template"], first.trouble) if shard is not None else ""
    size = f". {asked}: lower spec.capacity, raise redis.managed.shards, or add a node" if asked else ""
    more = f" ({len(hindered) - 1} more do not come up)" if len(hindered) > 1 else ""
    since = min((pod.down_since for pod in hindered if pod.down_since is not None), default=None)
    return _about(first.name, f"{first.trouble}{size}{more}", first.lasting, since)


def _about(name: str, message: str, lasting: bool, since: datetime | None = None) -> Trouble:
    return Trouble(TierReason.SERVERS_DO_NOT_START, f"{name}: {message}", lasting, since)


def without_pods(world: World, tier: CacheTier) -> list[Mapping[str, Any]]:
    """Return the StatefulSets of a tier that lack pods; only events show the cause."""
    owned = sorted(world.owned.get(tier.uid, ()))
    shards = [world.children[slot] for slot in owned if slot[0] == "StatefulSet"]
    seen = [child for child in shards if (child.get("status") or {}).get("observedGeneration")]
    return [child for child in seen if (child["status"].get("replicas") or 0) < child["spec"]["replicas"]]


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


@dataclass(frozen=True, slots=True)
class _Case:
    """A tier after the last look at its cluster. `locked` is why servers cannot be asked, `stuck` why a pod stays."""

    tier: CacheTier
    goal: Goal
    report: ClusterReport | None
    verdict: Verdict | None
    locked: Decision | None
    stuck: Decision | None

    @property
    def loss(self) -> SlotLoss | None:
        """The newest known loss."""
        known = (self.tier.status.last_loss, self.report.lost if self.report else None)
        return max((loss for loss in known if loss), key=lambda loss: loss.at, default=None)

    @property
    def formed_again(self) -> bool:
        return _lost_everything(self.tier, self.loss)


def cluster_state(world: World, tier: CacheTier) -> ClusterState | None:
    managed = tier.spec.managed
    if managed is None:
        return None
    goal = _goal(world, tier, managed)
    report = world.clusters.get(tier.name)
    pods = server_pods(world, tier)
    step, judged = _judged(world, tier.name, report, goal)
    stuck = stuck_pod(world, tier, report.at) if report is not None else None
    trouble = hindrance(world, tier)
    verdict = _hindered(judged, trouble.message if trouble else "", stuck) if judged is not None else None
    case = _Case(tier, goal, report, verdict, _why_locked(goal, len(pods)), stuck)
    return ClusterState(
        members=_members(goal, pods, step, is_settled=judged is not None and step is None),
        findings=(_slots(case), _replication(case)),
        fields={**_fields(case), **_history(case)},
        pending=_pending(case),
        servers=_servers(tier, pods),
        order=ReconcileCluster(tier.name, goal, paths.REDIS_PORT, accesses(tier)[0]),
    )


def _judged(world: World, tier: str, report: ClusterReport | None, goal: Goal) -> tuple[Step | None, Verdict | None]:
    """Return the result of the last look, memoized because a tier is planned more often."""
    if report is None or report.cluster is None:
        return None, None
    cluster, moved = report.cluster, report.moved
    return world.memo.get(Cluster, tier, (cluster, goal, moved), lambda: topology.look(cluster, goal, moved))


def _goal(world: World, tier: CacheTier, managed: RedisManaged) -> Goal:
    erasures = world.erasures.values()
    shards = managed.shards
    return Goal(
        shards=shards,
        replicas=managed.replicas_per_shard,
        max_bytes_each=sizing.redis_maxmemory_bytes(tier.spec),
        revisions={shard: revision for shard in range(shards) if (revision := _revision(world, tier, shard))},
        drops=managed.rebalance is Rebalance.DROP,
        movable_bytes=managed.migrate_max_bytes.in_bytes,
        locked_out=_locked_out(world, tier),
        doomed=_doomed(world, tier),
        erased_by=tuple(sorted(one.record.invalidation for one in erasures if tier.name in one.pinned_tiers)),
    )


def _doomed(world: World, tier: CacheTier) -> frozenset[str]:
    """Return the pods to be deleted because their StatefulSet is gone, even if a new one has its name."""

    def is_there(pod: ServerPod) -> bool:
        live = world.children.get(("StatefulSet", names.redis_shard(tier.name, pod.shard)))
        return live is not None and live["metadata"]["uid"] == pod.controller

    return frozenset(pod.uid for pod in server_pods(world, tier) if pod.controller and not is_there(pod))


def _locked_out(world: World, tier: CacheTier) -> frozenset[str]:
    look = world.credentials.get(tier.name)
    servers = look.servers if look is not None else {}
    refused = {name for name, seen in servers.items() if seen.reason == TierReason.WRONG_PASSWORD}
    return frozenset(pod.uid for pod in server_pods(world, tier) if known_as(pod) in refused)


def _revision(world: World, tier: CacheTier, shard: int) -> str | None:
    """Return the template in force for a shard's pods; None until Kubernetes has observed the newest."""
    live = world.children.get(("StatefulSet", names.redis_shard(tier.name, shard)))
    status = (live.get("status") or {}) if live is not None else {}
    if live is None or status.get("observedGeneration") != live["metadata"].get("generation"):
        return None
    return status.get("updateRevision")


def _members(goal: Goal, pods: Collection[ServerPod], step: Step | None, *, is_settled: bool) -> Mapping[int, int]:
    """Return the number of servers for each shard. Kubernetes removes the highest ordinals, regardless of their
    content: so nothing shrinks before all steps are done, and an unwanted shard goes when its servers report no
    slots."""
    members = dict.fromkeys(range(goal.shards), 1 + goal.replicas)
    drained = step.drained if step is not None else ()
    for pod in pods:
        if pod.shard in drained or (is_settled and pod.shard < goal.shards):
            continue
        members[pod.shard] = max(members.get(pod.shard, 0), 1 + pod.ordinal)
    return members


def _servers(tier: CacheTier, pods: Collection[ServerPod]) -> tuple[ManagedServer, ...]:
    host = names.redis_host(tier.name, tier.namespace)
    return tuple(
        ManagedServer(known_as(pod), address(pod.ip, paths.REDIS_PORT), host)
        for pod in pods
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


def _slots(case: _Case) -> Finding:
    kind, verdict, loss = ConditionType.SLOTS_COVERED, case.verdict, case.loss
    if verdict is None:
        return not_asked(case.tier, kind, "the servers have not been asked yet")
    if verdict.slots_covered:
        since = f"; the content of {loss.slots} slots was lost at {format_timestamp(loss.at)}" if loss else ""
        return true(kind, TierReason.SLOTS_COVERED, f"every slot has a primary that answers{since}")
    if case.locked is not None:
        return unknown(kind, case.locked.reason, case.locked.message)
    why = _everything_lost(case, verdict) or _why(case, verdict, verdict.slots_message)
    return false(kind, why.reason, why.message)


def _why(case: _Case, verdict: Verdict, message: str) -> Decision:
    if case.stuck is not None:
        return Decision(case.stuck.reason, message)
    cluster = case.report.cluster if case.report is not None else None
    if cluster is not None and cluster.silent and not case.tier.spec.has_several_primaries and not cluster.servers:
        return Decision(*next(iter(cluster.silent.values())))
    forming = verdict.empty or (verdict.uncovered == SLOTS and not was_formed(case.tier))
    return Decision(TierReason.PROGRESSING if forming or not verdict.uncovered else TierReason.SLOTS_UNCOVERED, message)


def was_formed(tier: CacheTier) -> bool:
    """Whether the tier's cluster has ever served all slots; otherwise forming it loses nothing."""
    return tier.status.formed_at is not None


def never_used(world: World, tier: CacheTier) -> bool:
    """Whether no pod can have stored a block in a Redis tier: no report shows that a server of a managed one ran, or no
    pod did since it was created; or no server of an external one ever passed the checks, so that no bundle names it."""
    reports = [one for answer in world.states.values() for one in answer.state.tiers if one.name == tier.name]
    if tier.spec.managed is not None:
        ran = any(pod.ever_ran for pod in server_pods(world, tier)) or world.lost_servers.get(tier.name)
        answered = was_formed(tier) or tier.status.is_true(ConditionType.BACKEND_REACHABLE) or tier.status.shards_ready
        used = any(one.stored or one.loaded for one in reports)
        return not (ran or answered or used) or tier.uid in world.ending.untouched
    return in_force(tier) is None and not reports


def holds_anything(tier: CacheTier) -> bool:
    """Whether the tier's cluster has served since it last lost everything, so that its slots may hold blocks."""
    return was_formed(tier) and not _lost_everything(tier, tier.status.last_loss)


def _lost_everything(tier: CacheTier, loss: SlotLoss | None) -> bool:
    """Whether this loss is one of everything, after the tier's cluster was formed."""
    formed = tier.status.formed_at
    return formed is not None and loss is not None and loss.slots == SLOTS and loss.at > formed


def _everything_lost(case: _Case, verdict: Verdict) -> Decision | None:
    formed = case.tier.status.formed_at
    if formed is None or not (verdict.empty or case.formed_again):
        return None
    return Decision(
        TierReason.EVERYTHING_LOST,
        f"every server lost the blocks stored since {format_timestamp(formed)}: blocks are misses until they "
        f"are stored again, and the cluster is formed again. {verdict.progress}",
    )


def _history(case: _Case) -> Mapping[str, Any]:
    """Return the status fields of formations and losses, which no look can know."""
    fields: dict[str, Any] = {}
    if case.loss is not None:
        fields["lastLoss"] = {"at": format_timestamp(case.loss.at), "slots": case.loss.slots}
    serves = case.verdict is not None and case.verdict.slots_covered
    if case.report is not None and serves and (not was_formed(case.tier) or case.formed_again):
        fields["formedAt"] = format_timestamp(case.report.at)
    return fields


def _replication(case: _Case) -> Finding:
    kind, verdict = ConditionType.REPLICATION_HEALTHY, case.verdict
    if verdict is None:
        return not_asked(case.tier, kind, "the servers have not been asked yet")
    if not verdict.replication_healthy:
        why = _lacking(case, verdict.replication_message)
        return false(kind, why.reason, why.message)
    return true(kind, TierReason.REPLICAS_IN_STEP, "every primary has all its replicas in step")


def _lacking(case: _Case, message: str) -> Decision:
    """Return why replicas are not in step."""
    return case.locked or Decision(case.stuck.reason if case.stuck else TierReason.REPLICAS_MISSING, message)


def _pending(case: _Case) -> Decision | None:
    report, verdict = case.report, case.verdict
    if report is None or verdict is None:
        before = previous_condition(case.tier, ConditionType.READY)
        own = before is not None and before.reason == TierReason.SERVERS_DO_NOT_START
        is_current = own or not case.tier.status.is_true(ConditionType.STALLED)
        if report is None and before is not None and is_current:
            # An operator that has just started repeats the last condition until it has an answer.
            return None if before.status == "True" else Decision(before.reason, before.message)
        if report is not None and report.reason:
            return Decision(report.reason, report.message)
        return Decision(TierReason.PROGRESSING, "the servers are being started")
    if not verdict.slots_covered:
        return case.locked or _everything_lost(case, verdict) or _why(case, verdict, verdict.progress)
    return None if verdict.replication_healthy else _lacking(case, verdict.progress)


def _fields(case: _Case) -> Mapping[str, Any]:
    report, verdict, shards, known = case.report, case.verdict, case.goal.shards, case.tier.status
    if report is None and previous_condition(case.tier) is not None:
        recorded = {"shardsReady": known.shards_ready, "replicas": known.replicas, "progress": known.progress}
        return {"shards": shards, **recorded}
    if verdict is None or report is None or report.cluster is None:
        return {"shards": shards, "progress": None}
    in_step = sum(not server.is_primary and server.link_up for server in report.cluster.servers.values())
    progress = verdict.progress + (f"; {report.message}" if report.reason else "")
    return {
        "shards": shards,
        "shardsReady": verdict.shards_ready,
        "replicas": in_step,
        "progress": None if verdict.settled else progress,
    }
