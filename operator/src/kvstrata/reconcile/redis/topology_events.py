"""Events and metrics of a managed cluster.

Steps are reported when they were executed, everything else by comparing looks: servers fail over by themselves, and a
migration ends when nothing is left to move. A new leader reports only later changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from kvstrata.api.cachetier import CacheTier
from kvstrata.clients.redis.nodes import IDENTITY_CHANGED, NOT_SENT, REFUSED, Sent
from kvstrata.model.redis.cluster import SLOTS, Cluster, Goal
from kvstrata.plan.redis.cluster import holds_anything, was_formed
from kvstrata.plan.redis.topology import MoveOrder, Step, StepReason, Verdict, failovers
from kvstrata.plan.redis.topology.view import count
from kvstrata.reconcile import metrics
from kvstrata.reconcile.events import Events

log = logging.getLogger(__name__)

OPERATOR, PLANNED, SERVERS = "operator", "planned", "servers"
"""Cause of a failover: the operator without a vote, the operator before a replacement, the servers."""

ORDER_HOLDS_S = 20.0
"""How long an order explains a failover: servers give it up after five seconds."""

_GAUGES = (
    metrics.BACKEND_UP,
    metrics.SLOTS_UNCOVERED,
    metrics.REPLICAS_MISSING,
    metrics.SLOTS_TO_MOVE,
    metrics.PODS_TO_REPLACE,
)
_COUNTERS = (metrics.SLOTS_LOST, metrics.SLOTS_MOVED, metrics.MOVE_DROPPED, metrics.FORMATIONS, metrics.REPLACEMENTS)


class TopologyEvents:
    """Reports on one cluster. `tier` returns the object of Events, None if it is gone."""

    def __init__(self, events: Events, namespace: str, name: str, tier: Callable[[], CacheTier | None]) -> None:
        self._events, self._where, self._tier = events, (namespace, name), tier
        self._before: Cluster | None = None
        self._to_move = self._moved = 0
        self._moving = self._replacing = self._served = self._is_being_formed = False
        self._ordered: dict[str, tuple[str, float]] = {}
        """By node id, the cause of an ordered failover, and when."""
        for counter in _COUNTERS:
            counter.labels(*self._where)  # A rate needs an initial zero.
        for by in (OPERATOR, PLANNED, SERVERS):
            metrics.FAILOVERS.labels(*self._where, by)

    async def looked(self, cluster: Cluster, goal: Goal, verdict: Verdict) -> None:
        metrics.BACKEND_UP.labels(*self._where).set(1 if cluster.servers else 0)
        metrics.SLOTS_UNCOVERED.labels(*self._where).set(verdict.uncovered)
        metrics.REPLICAS_MISSING.labels(*self._where).set(verdict.replicas_missing)
        metrics.PODS_TO_REPLACE.labels(*self._where).set(verdict.pods_to_replace)
        self._served, self._moved = self._served and not verdict.empty, 0
        if not cluster.servers:
            return
        before, self._before = self._before, cluster
        if before is not None:
            await self._publish_failovers(before, cluster, goal)
        if verdict.slots_covered:
            self._served = True
            if self._is_being_formed:
                await self._publish_formed("all slots are given out and served")
            # Otherwise the slots to move are unknown, or wait for a repair.
            self._to_move = verdict.slots_to_move
            metrics.SLOTS_TO_MOVE.labels(*self._where).set(self._to_move)
            await self._publish_work(verdict)

    def moved(self, order: MoveOrder, slots: int, dropped: int) -> int:
        """Count further slots and dropped values of an order; return how many slots have moved since the look."""
        metrics.MOVE_DROPPED.labels(*self._where).inc(dropped)
        # A slot with the same source and target was only closed.
        if order.source != order.target:
            metrics.SLOTS_MOVED.labels(*self._where).inc(slots)
            self._moved += slots
            metrics.SLOTS_TO_MOVE.labels(*self._where).set(max(0, self._to_move - self._moved))
        return self._moved

    async def done(self, step: Step) -> None:
        lost = SLOTS if self.forms_again(step) else self.lost_with(step)
        if step.reason in (StepReason.SLOTS_LOST, StepReason.FORMING) and not lost:
            self._is_being_formed = True
        if step.remove_pod is not None:
            metrics.REPLACEMENTS.labels(*self._where).inc()
        if lost:
            metrics.SLOTS_LOST.labels(*self._where).inc(lost)
        if step.reason is StepReason.FORMING and lost:
            await self._publish_formed("all servers lost their content: the cluster is formed again, empty", lost)
        elif lost:
            await self._publish("SlotsLost", step.message, lost)
        elif step.remove_pod is not None:
            await self._publish("Replaced", step.message)

    def lost_with(self, step: Step) -> int:
        """Return how many slots a step gives to a server without their data. Slots of a deleted pod are lost only if
        no server takes them over; they are given away then. Those that an interrupted formation had not assigned
        held no data."""
        tier = self._tier()
        held = self._served or (tier is not None and holds_anything(tier))
        return count(step.lost) if step.remove_pod is None and held else 0

    def sent(self, step: Step) -> None:
        """Record ordered failovers, so that they do not count as the servers' own."""
        by = PLANNED if step.reason is StepReason.FAILING_OVER else OPERATOR
        for command in step.commands:
            if command.words[:2] == ("CLUSTER", "FAILOVER"):
                self._ordered[command.node_id] = by, self._before.at_s if self._before is not None else 0.0

    def not_done(self, sent: Iterable[Sent]) -> None:
        """Forget orders that servers refused or never read."""
        for one in sent:
            not_done = one.failure in (REFUSED, IDENTITY_CHANGED, NOT_SENT)
            if not_done and one.command.words[:2] == ("CLUSTER", "FAILOVER"):
                self._ordered.pop(one.command.node_id, None)

    def forms_again(self, step: Step) -> bool:
        """Whether a step gives all slots to empty servers of a cluster that served before."""
        tier = self._tier()
        return step.reason is StepReason.FORMING and tier is not None and was_formed(tier)

    def leave(self) -> None:
        """Remove the gauges of a cluster that this process no longer watches."""
        for gauge in _GAUGES:
            gauge.remove(*self._where)

    def forget(self) -> None:
        """Remove all metrics of a cluster that is gone."""
        self.leave()
        for counter in (*_COUNTERS, metrics.FAILOVERS):
            counter.remove_by_labels({"namespace": self._where[0], "tier": self._where[1]})

    async def _publish_formed(self, message: str, lost: int = 0) -> None:
        self._is_being_formed = False
        metrics.FORMATIONS.labels(*self._where).inc()
        await self._publish("EverythingLost" if lost else "Formed", message, lost)

    async def _publish_failovers(self, before: Cluster, cluster: Cluster, goal: Goal) -> None:
        for node_id, message in failovers(before, cluster, goal).items():
            by, at_s = self._ordered.pop(node_id, (SERVERS, 0.0))
            if cluster.at_s - at_s > ORDER_HOLDS_S:
                by = SERVERS
            metrics.FAILOVERS.labels(*self._where, by).inc()
            await self._publish("FailedOver", message, warning=by != PLANNED)

    async def _publish_work(self, verdict: Verdict) -> None:
        slots, pods = verdict.slots_to_move, verdict.pods_to_replace
        if slots and not self._moving:
            await self._publish("MigrationStarted", f"{slots} slots are to go to another shard")
        if self._moving and not slots:
            await self._publish("MigrationEnded", "all slots are where they belong")
        if pods and not self._replacing:
            begun = f"{pods} pods are of a former template, and are replaced one by one"
            await self._publish("ReplacementStarted", begun)
        if self._replacing and not pods:
            await self._publish("ReplacementEnded", "all pods are of the newest template")
        self._moving, self._replacing = slots > 0, pods > 0

    async def _publish(self, reason: str, message: str, lost: int = 0, *, warning: bool = False) -> None:
        log.info("a cluster event", extra={"tier": "/".join(self._where), "event": reason, "detail": message})
        tier = self._tier()
        if tier is not None:
            await self._events.publish(tier, reason, message, warning=warning or lost > 0)
