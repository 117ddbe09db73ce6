"""Runs managed clusters: look, do the next step, look again; one task for each tier while this process leads.

Observes: the pods of managed tiers, and their servers. Writes: commands to servers, evictions of pods, Events.
Runs again when: its tier is planned, something was done or is awaited, or `LOOK_EVERY_S` has passed.

Each step follows from one look alone (`plan.redis.topology`), so an interrupted task leaves no state behind. A process
that no longer leads sends no command.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvstrata.api.cachetier import CacheTier, SlotLoss
from kvstrata.api.reasons import SharedReason, TierReason
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.redis.nodes import REFUSED, RedisNodes, Sent
from kvstrata.clients.redis.probe import Access
from kvstrata.clients.redis.slot_mover import SlotMover
from kvstrata.clients.resources import POD
from kvstrata.contract.policy.tiers import password_in
from kvstrata.model.pods import BackendReport, ClusterReport
from kvstrata.model.redis.cluster import SLOTS, Cluster, ServerPod, SlotRange
from kvstrata.model.refs import Key
from kvstrata.plan.actions import ReconcileCluster
from kvstrata.plan.redis import topology
from kvstrata.plan.redis.topology import MoveOrder, Step, Verdict
from kvstrata.reconcile import metrics
from kvstrata.reconcile.background import Background, utc_now
from kvstrata.reconcile.events import Events
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.redis.topology_events import TopologyEvents
from kvstrata.reconcile.secrets import SecretMissingError, secret_value
from kvstrata.reconcile.store import Store

log = logging.getLogger(__name__)

LOOK_EVERY_S = 15.0
WAIT_S = 0.1
"""Between two looks while waiting: servers agree within a few of them."""
LONGEST_WAIT_S = 2.0
"""Limit of the growing wait: pulling an image takes long."""
RETRY_S = 1.0
REPORT_MOVES_S = 0.25
"""Delay of the tier's plan after slots have moved, to merge further moves."""

REPORT_WITHIN_S = 5.0
"""How long forming a cluster that lost everything waits for its status to report the loss: a new leader must know of
it, but an operator that cannot write must not block the tier."""

_ACCESS_REFUSED = {TierReason.WRONG_PASSWORD, TierReason.PASSWORD_REQUIRED, TierReason.CERTIFICATE_REFUSED}
"""Answers to credentials that are no longer, or not yet, valid."""


class Topologies(Background):
    def __init__(self, kube: Kube, store: Store, queue: WorkQueue, may_write: Callable[[], bool]) -> None:
        super().__init__(queue)
        self._kube, self._store, self._may_write = kube, store, may_write
        self._tended: dict[tuple[str, str], _Tending] = {}

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        for tending in self._tended.values():
            tending.events.leave()

    def tend(self, namespace: str, order: ReconcileCluster) -> None:
        slot = (namespace, order.tier)
        self._forget_predecessor(*slot)
        tending = self._tended.get(slot)
        if tending is None or tending not in self._tasks:
            tending = _Tending(self._kube, self._store, self._queue, self._may_write, namespace, order)
            self._tended[slot] = tending
            self._begin(tending, tending.run(), "a cluster is tended no more", Key("CacheTier", *slot))
        # A waiting task looks soon anyway; a look at every plan would find nothing new.
        if not tending.waited or order != tending.order or tending.pods_now() != tending.pods:
            tending.follow(order)

    def forget_untended(self, namespace: str, tier: str) -> None:
        found = self._store.domain(namespace).tiers.get(tier)
        if found is not None and found.spec.managed is not None and not found.metadata.deleting:
            self._forget_predecessor(namespace, tier)
            return
        self._forget(namespace, tier)

    def _forget_predecessor(self, namespace: str, tier: str) -> None:
        """Stop tending the cluster of a deleted tier with the same name."""
        tending = self._tended.get((namespace, tier))
        if tending is not None and (found := tending.tier()) is not None and found.uid != tending.tier_uid:
            self._forget(namespace, tier)

    def _forget(self, namespace: str, tier: str) -> None:
        tending = self._tended.pop((namespace, tier), None)
        if tending is not None:
            if (task := self._tasks.get(tending)) is not None:
                task.cancel()
            tending.events.forget()
        self._store.domain(namespace).clusters.pop(tier, None)


class _Tending:
    """One tended cluster: the newest order, and the reported losses.

    `pods` are those of the last look, `lost` is the last loss; `_reported_loss` is a loss of everything that the status
    should report until `_report_until_s`. `_failed` is the error of the last step, kept while looks lead to the same
    step; reporting it only at times would write the status twice per attempt.
    """

    def __init__(
        self,
        kube: Kube,
        store: Store,
        queue: WorkQueue,
        may_write: Callable[[], bool],
        namespace: str,
        order: ReconcileCluster,
    ) -> None:
        self._kube, self._store, self._queue, self._may_write = kube, store, queue, may_write
        self._namespace, self.order = namespace, order
        self._key = Key("CacheTier", namespace, order.tier)
        self.events = TopologyEvents(Events(kube), namespace, order.tier, self.tier)
        found = self.tier()
        self.tier_uid = found.uid if found is not None else ""
        self.lost: SlotLoss | None = None
        self.waited = 0
        self.pods: dict[str, ServerPod] = {}
        self._reported: object = None
        self._reported_loss: SlotLoss | None = None
        self._report_until_s = 0.0
        self._failed_step: Step | None = None
        self._failed = ""
        self._unclaimed: tuple[SlotRange, ...] = ()
        self._access_read: tuple[ReconcileCluster, float] | None = None
        self._woken = asyncio.Event()

    def tier(self) -> CacheTier | None:
        return self._store.domain(self._namespace).tiers.get(self.order.tier)

    def pods_now(self) -> dict[str, ServerPod]:
        return dict(self._store.domain(self._namespace).servers.get(self.order.tier, {}))

    def follow(self, order: ReconcileCluster) -> None:
        self.order = order
        self._woken.set()

    async def pause(self, at_most_s: float) -> None:
        if at_most_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(at_most_s):
                    await self._woken.wait()
            self._woken.clear()

    async def run(self) -> None:
        nodes: RedisNodes | None = None
        about = {"tier": f"{self._namespace}/{self.order.tier}"}
        try:
            while True:
                try:
                    nodes = await self._reached(nodes)
                    pause_s = await self._pass(nodes)
                except KubeError as error:
                    log.warning("a cluster cannot be tended", extra={**about, "error": str(error)})
                    pause_s = RETRY_S
                except SecretMissingError as error:
                    metrics.BACKEND_UP.labels(self._namespace, self.order.tier).set(0)
                    self._report(ClusterReport(None, utc_now(), SharedReason.SECRET_NOT_FOUND, str(error)))
                    pause_s = RETRY_S
                except Exception:
                    log.exception("tending a cluster failed; this is a defect", extra=about)
                    metrics.FAILURES.labels("CacheTier", "Bug").inc()
                    pause_s = LONGEST_WAIT_S
                await self.pause(pause_s)
        finally:
            if nodes is not None:
                await nodes.close()

    async def _reached(self, nodes: RedisNodes | None) -> RedisNodes:
        """Return connections for the order and its Secrets, which are reread periodically. Raises KubeError and
        SecretMissingError."""
        if nodes is not None and self._access_read is not None:
            read, at_s = self._access_read
            # The goal does not affect access.
            if replace(read, goal=self.order.goal) == self.order and time.monotonic() - at_s <= LOOK_EVERY_S:
                return nodes
        order, asked = self.order, self.order.access
        word = await secret_value(self._kube, self._namespace, asked.password)
        password = password_in(word).decode() if word is not None else None
        authority = await secret_value(self._kube, self._namespace, asked.authority)
        access = Access(password, authority, asked.username)
        self._access_read = (order, time.monotonic())
        if nodes is not None and nodes.access == access:
            return nodes
        if nodes is not None:
            await nodes.close()
        return RedisNodes(order.port, access, asked.server_name)

    async def _pass(self, nodes: RedisNodes) -> float:
        goal, pods = self.order.goal, self.pods_now()
        if pods != self.pods:
            # After a change of pods, the wait starts short again.
            self.pods, self.waited = pods, 0
        cluster = replace(await nodes.look(pods.values()), unclaimed_before=self._unclaimed)
        self._unclaimed = topology.View(cluster, goal).unowned
        if any(reason in _ACCESS_REFUSED for reason, _ in cluster.silent.values()):
            self._access_read = None
        step, verdict = topology.look(cluster, goal)
        if step != self._failed_step:
            self._failed_step, self._failed = None, ""
        self._report_look(cluster, verdict)
        await self.events.looked(cluster, goal, verdict)
        if step is None:
            self.waited = 0
            return LOOK_EVERY_S
        if step.waits or not (step.commands or step.moves or step.remove_pod):
            # Some steps, as removing a shard, wait for a plan.
            self.waited += 1
            return min(LONGEST_WAIT_S, WAIT_S * 1.2**self.waited)
        self.waited = 0
        if not self._may_write():
            return RETRY_S
        if self.events.forms_again(step) and not self._loss_is_reported(cluster, verdict):
            return WAIT_S
        tier = f"{self._namespace}/{self.order.tier}"
        log.info("a cluster's next step", extra={"tier": tier, "step": str(step.reason), "detail": step.message})
        failed = await self._do(nodes, cluster, step)
        # Must not be cut short: the same step taken twice would undo the first one.
        await asyncio.sleep(step.pause_s)
        if failed:
            self._failed_step, self._failed = step, failed
            # The plan that follows brings nothing new, so the step is not retried at once.
            self.waited = 1
            self._report_look(cluster, verdict)
            return RETRY_S
        return 0.0

    def _loss_is_reported(self, cluster: Cluster, verdict: Verdict) -> bool:
        """Whether the tier's status reports that everything was lost, or was waited for long enough."""
        loss = self._reported_loss
        if loss is None:
            loss = self._reported_loss = self.lost = SlotLoss(at=utc_now(), slots=SLOTS)
            self._report_until_s = cluster.at_s + REPORT_WITHIN_S
            self._report_look(cluster, verdict)
        tier = self.tier()
        known = tier.status.last_loss if tier is not None else None
        return (known is not None and known.at >= loss.at) or cluster.at_s >= self._report_until_s

    async def _do(self, nodes: RedisNodes, cluster: Cluster, step: Step) -> str:
        """Carry out a step; return why it failed, empty on success."""
        self.events.sent(step)
        sent = await nodes.send(step.commands, cluster.pods, self._may_write)
        self.events.not_done(sent)
        failed = "; ".join(_failure(one, cluster) for one in sent if one.failure)
        if not failed and step.moves:
            failed = await self._move(nodes, cluster, step)
        if not failed and step.remove_pod is not None:
            pod = cluster.pods[step.remove_pod]
            failed = await self._evict(pod) if self._may_write() else f"{pod.name} is another leader's"
        if not failed:
            self._reported_loss = None
            if lost := self.events.lost_with(step):
                self.lost = SlotLoss(at=utc_now(), slots=lost)
            await self.events.done(step)
        return failed

    async def _move(self, nodes: RedisNodes, cluster: Cluster, step: Step) -> str:
        """Carry out a step's orders in parallel; interrupted ones continue after the next look."""
        access = nodes.access
        mover = SlotMover(nodes.dial, lambda: (access.username or "default", access.password or ""), self._may_write)
        moves = (mover.carry_out(order, cluster, partial(self._note_moved, order)) for order in step.moves)
        return "; ".join(filter(None, await asyncio.gather(*moves)))

    def _note_moved(self, order: MoveOrder, slots: int, dropped: int) -> None:
        moved, clusters = self.events.moved(order, slots, dropped), self._store.domain(self._namespace).clusters
        if (known := clusters.get(self.order.tier)) is not None and moved > known.moved:
            clusters[self.order.tier] = replace(known, moved=moved)
            self._queue.add(self._key, REPORT_MOVES_S)

    async def _evict(self, pod: ServerPod) -> str:
        """Evict a pod; a PodDisruptionBudget may refuse for now."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": self._namespace},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }
        try:
            await self._kube.request("POST", POD.path(self._namespace, pod.name, "eviction"), body=body)
        except KubeError as error:
            return "" if error.is_not_found or error.is_conflict else f"{pod.name} may not go yet: {error.message}"
        return ""

    def _report_look(self, cluster: Cluster, verdict: Verdict) -> None:
        reason = TierReason.COMMAND_FAILED if self._failed else ""
        self._report(ClusterReport(cluster, utc_now(), reason, self._failed), verdict)

    def _report(self, report: ClusterReport, verdict: Verdict | None = None) -> None:
        domain, tier = self._store.domain(self._namespace), self.order.tier
        domain.clusters[tier] = replace(report, lost=self.lost)
        domain.backends[tier] = _backend(self.order, report)
        outcome = (report.reason, report.message, self.lost, verdict)
        if outcome != self._reported:
            self._reported = outcome
            self._queue.add(self._key)


def _backend(order: ReconcileCluster, report: ClusterReport) -> BackendReport:
    """Summarize a look as a tier's report; sizes are those of primaries."""
    cluster = report.cluster
    servers = list(cluster.servers.values()) if cluster is not None else []
    primaries = [server for server in servers if server.itself.slots]
    eldest = min(servers, key=lambda server: server.version, default=None)
    reason, message = report.reason, report.message
    if cluster is not None and not servers:
        none = (TierReason.PROGRESSING, "no pod of the cluster runs yet")
        reason, message = next(iter(cluster.silent.values()), none)
    return BackendReport(
        access=order.access,
        reachable=bool(servers),
        reason="" if servers else str(reason),
        message="" if servers else message,
        at=report.at,
        used_bytes=sum(server.used_bytes for server in primaries),
        max_bytes=sum(server.max_bytes for server in primaries),
        version=eldest.version if eldest is not None else "",
        software=eldest.software if eldest is not None else "Redis",
    )


def _failure(sent: Sent, cluster: Cluster) -> str:
    detail = f"{' '.join(sent.command.words[:2])}: {sent.answer or sent.failure}"
    return f"{cluster.pods[sent.command.pod_uid].name} refuses {detail}" if sent.failure == REFUSED else detail
