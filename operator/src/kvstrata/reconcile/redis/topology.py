"""Runs managed clusters: look, do the next step, look again; one task for each tier while this process leads.

Observes: the pods of managed tiers, and their servers. Writes: commands to servers, evictions of pods, Events.
Runs again when: its tier is planned, something was done or is awaited, or `LOOK_EVERY_S` has passed.

Each step follows from one look alone (`plan.redis.topology`), so an interrupted task leaves no state behind. A process
that no longer leads sends no command.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

from kvstrata.api.cachetier import CacheTier
from kvstrata.api.reasons import TierReason
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.redis.move_report import MoveReport
from kvstrata.clients.redis.nodes import REFUSED, NodeAccess, RedisNodes, Sent
from kvstrata.clients.redis.probe import RedisReason
from kvstrata.clients.redis.slot_mover import SlotMover
from kvstrata.clients.resources import POD, SECRET
from kvstrata.model.pods import BackendReport, ClusterReport, Loss
from kvstrata.model.redis.cluster import SLOTS, Cluster, ServerPod, SlotRange
from kvstrata.model.refs import Key
from kvstrata.plan.actions import ReconcileCluster
from kvstrata.plan.redis import topology
from kvstrata.plan.redis.topology import MoveOrder, Step, Verdict
from kvstrata.reconcile import metrics
from kvstrata.reconcile.background import utc_now
from kvstrata.reconcile.events import Events
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.redis.topology_events import MoveCount, TopologyEvents
from kvstrata.reconcile.secrets import decode
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

_ACCESS_REFUSED = {RedisReason.WRONG_PASSWORD, RedisReason.PASSWORD_REQUIRED, RedisReason.CERTIFICATE_REFUSED}
"""Answers to credentials that are no longer, or not yet, valid."""


class Topologies:
    def __init__(self, kube: Kube, store: Store, queue: WorkQueue, may_write: Callable[[], bool]) -> None:
        self._kube, self._store, self._queue, self._may_write = kube, store, queue, may_write
        self._events = Events(kube)
        self._tended: dict[tuple[str, str], _Tending] = {}

    async def __aenter__(self) -> Topologies:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [tending.task for tending in self._tended.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for tending in self._tended.values():
            tending.events.leave()

    def tend(self, namespace: str, order: ReconcileCluster) -> None:
        slot = (namespace, order.tier)
        self._forget_predecessor(*slot)
        tending = self._tended.get(slot)
        if tending is None or tending.task.done():
            events = TopologyEvents(self._events, namespace, order.tier, lambda: self._tier(*slot))
            found = self._tier(*slot)
            tending = self._tended[slot] = _Tending(self, events, namespace, order, found.uid if found else "")
        # A waiting task looks soon anyway; a look at every plan would find nothing new.
        if not tending.waited or order != tending.order or self._pods(tending) != tending.pods:
            tending.follow(order)

    def forget_untended(self, namespace: str, tier: str) -> None:
        found = self._tier(namespace, tier)
        if found is not None and found.spec.managed is not None and not found.metadata.deleting:
            self._forget_predecessor(namespace, tier)
            return
        self._forget(namespace, tier)

    def _forget_predecessor(self, namespace: str, tier: str) -> None:
        """Stop tending the cluster of a deleted tier with the same name."""
        tending, found = self._tended.get((namespace, tier)), self._tier(namespace, tier)
        if tending is not None and found is not None and found.uid != tending.tier_uid:
            self._forget(namespace, tier)

    def _forget(self, namespace: str, tier: str) -> None:
        tending = self._tended.pop((namespace, tier), None)
        if tending is not None:
            tending.task.cancel()
            tending.events.forget()
        self._store.domain(namespace).clusters.pop(tier, None)

    async def tend_for_ever(self, tending: _Tending) -> None:
        nodes: RedisNodes | None = None
        try:
            while True:
                try:
                    nodes = await self._reached(tending, nodes)
                    pause_s = await self._pass(tending, nodes)
                except KubeError as error:
                    log.warning("a cluster cannot be tended", extra={"tier": tending.name, "error": str(error)})
                    pause_s = RETRY_S
                except _SecretMissingError as error:
                    tending.events.unasked()
                    self._report(tending, ClusterReport(None, utc_now(), TierReason.SECRET_NOT_FOUND, str(error)))
                    pause_s = RETRY_S
                except Exception:
                    log.exception("tending a cluster failed; this is a defect", extra={"tier": tending.name})
                    metrics.FAILURES.labels("CacheTier", "Bug").inc()
                    pause_s = LONGEST_WAIT_S
                await tending.pause(pause_s)
        finally:
            if nodes is not None:
                await nodes.close()

    async def _reached(self, tending: _Tending, nodes: RedisNodes | None) -> RedisNodes:
        """Return connections for the order and its Secrets, which are reread periodically. Raises
        _SecretMissingError if a Secret or its key is missing."""
        if nodes is not None and not tending.access_is_stale():
            return nodes
        access = await self._access(tending.namespace, tending.order)
        tending.access_was_read()
        if nodes is not None and nodes.access == access:
            return nodes
        if nodes is not None:
            await nodes.close()
        return RedisNodes(access)

    async def _pass(self, tending: _Tending, nodes: RedisNodes) -> float:
        order, pods = tending.order, self._pods(tending)
        if pods != tending.pods:
            # After a change of pods, the wait starts short again.
            tending.pods, tending.waited = pods, 0
        cluster = replace(await nodes.look(pods.values()), unclaimed_before=tending.unclaimed)
        tending.unclaimed = topology.View(cluster, order.goal).unowned
        if any(reason in _ACCESS_REFUSED for reason, _ in cluster.silent.values()):
            tending.access_refused()
        step, verdict = topology.look(cluster, order.goal)
        if step != tending.failed_step:
            tending.failed_step, tending.failed = None, ""
        self._report(tending, _looked(tending, cluster), verdict)
        await tending.events.looked(cluster, order.goal, verdict)
        if step is None:
            tending.waited = 0
            return LOOK_EVERY_S
        if step.waits or not (step.commands or step.moves or step.remove_pod):
            # Some steps, as removing a shard, wait for a plan.
            tending.waited += 1
            return min(LONGEST_WAIT_S, WAIT_S * 1.2**tending.waited)
        tending.waited = 0
        if not self._may_write():
            return RETRY_S
        if tending.events.forms_again(step) and not self._loss_is_reported(tending, cluster, verdict):
            return WAIT_S
        log.info(
            "a cluster's next step", extra={"tier": tending.name, "step": str(step.reason), "detail": step.message}
        )
        failed = await self._do(tending, nodes, cluster, step)
        # Must not be cut short: the same step taken twice would undo the first one.
        await asyncio.sleep(step.pause_s)
        if failed:
            tending.failed_step, tending.failed = step, failed
            # The plan that follows brings nothing new, so the step is not retried at once.
            tending.waited = 1
            self._report(tending, _looked(tending, cluster), verdict)
            return RETRY_S
        return 0.0

    def _loss_is_reported(self, tending: _Tending, cluster: Cluster, verdict: Verdict) -> bool:
        """Whether the tier's status reports that everything was lost, or was waited for long enough."""
        loss = tending.reported_loss
        if loss is None:
            now = utc_now()
            loss = tending.reported_loss = tending.lost = Loss(now.replace(microsecond=0), SLOTS)
            tending.report_until_s = cluster.at_s + REPORT_WITHIN_S
            self._report(tending, _looked(tending, cluster), verdict)
        tier = self._tier(tending.namespace, tending.order.tier)
        known = tier.status.last_loss if tier is not None else None
        return (known is not None and known.at >= loss.at) or cluster.at_s >= tending.report_until_s

    async def _do(self, tending: _Tending, nodes: RedisNodes, cluster: Cluster, step: Step) -> str:
        namespace, tier = tending.namespace, tending.order.tier
        metrics.TOPOLOGY_STEPS.labels(namespace, tier, str(step.reason)).inc()
        tending.events.sent(step)
        sent = await nodes.send(step.commands, cluster.pods, self._may_write)
        tending.events.not_done(sent)
        failed = "; ".join(_failure(one, cluster) for one in sent if one.failure)
        if not failed and step.moves:
            failed = await self._move(tending, nodes, cluster, step)
        if not failed and step.remove_pod is not None:
            pod = cluster.pods[step.remove_pod]
            failed = await self._evict(namespace, pod) if self._may_write() else f"{pod.name} is another leader's"
        if not failed:
            tending.reported_loss = None
            if lost := tending.events.lost_with(step):
                tending.lost = Loss(utc_now().replace(microsecond=0), lost)
            await tending.events.done(step)
        return failed

    async def _move(self, tending: _Tending, nodes: RedisNodes, cluster: Cluster, step: Step) -> str:
        """Carry out a step's orders in parallel; interrupted ones continue after the next look."""
        access = nodes.access
        mover = SlotMover(nodes.dial, lambda: (access.username or "default", access.password or ""), self._may_write)
        count = MoveCount((tending.namespace, tending.order.tier), lambda slots: self._note_moved(tending, slots))

        async def carry_out(order: MoveOrder) -> MoveReport:
            on_progress = count.of(order)
            report = await mover.carry_out(order, cluster, on_progress)
            on_progress(report.tally)
            return report

        reports = await asyncio.gather(*map(carry_out, step.moves))
        return "; ".join(report.message for report in reports if not report.done)

    def _note_moved(self, tending: _Tending, slots: int) -> None:
        namespace, tier = tending.namespace, tending.order.tier
        tending.events.moved(slots)
        clusters = self._store.domain(namespace).clusters
        if (known := clusters.get(tier)) is not None:
            clusters[tier] = replace(known, moved=slots)
            self._queue.add(Key("CacheTier", namespace, tier), REPORT_MOVES_S)

    async def _evict(self, namespace: str, pod: ServerPod) -> str:
        """Evict a pod; a PodDisruptionBudget may refuse for now."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }
        try:
            await self._kube.request("POST", POD.path(namespace, pod.name, "eviction"), body=body)
        except KubeError as error:
            return "" if error.is_not_found or error.is_conflict else f"{pod.name} may not go yet: {error.message}"
        return ""

    def _tier(self, namespace: str, name: str) -> CacheTier | None:
        return self._store.domain(namespace).objects["CacheTier"].get(name)

    def _report(self, tending: _Tending, report: ClusterReport, verdict: Verdict | None = None) -> None:
        namespace, tier = tending.namespace, tending.order.tier
        report = replace(report, lost=tending.lost)
        self._store.domain(namespace).clusters[tier] = report
        self._store.domain(namespace).backends[tier] = _backend(tending.order, report)
        outcome = (report.reason, report.message, report.lost, verdict)
        if outcome != tending.reported:
            tending.reported = outcome
            self._queue.add(Key("CacheTier", namespace, tier))

    def _pods(self, tending: _Tending) -> dict[str, ServerPod]:
        return dict(self._store.domain(tending.namespace).servers.get(tending.order.tier, {}))

    async def _access(self, namespace: str, order: ReconcileCluster) -> NodeAccess:
        password = await self._secret(namespace, order.password_secret)
        authority = await self._secret(namespace, order.authority_secret) if order.authority_secret else None
        return NodeAccess(order.port, order.username, password.decode(), authority, order.server_name)

    async def _secret(self, namespace: str, where: tuple[str, str]) -> bytes:
        raw = await self._kube.get(SECRET, namespace, where[0])
        value = decode(raw).get(where[1]) if raw else None
        if value is None:
            raise _SecretMissingError(f"Secret {where[0]} does not exist or has no key {where[1]}")
        return value


class _SecretMissingError(Exception):
    """A Secret with the servers' credentials is missing. Not a LookupError, which a defect in a rule may raise."""


class _Tending:
    """One tended cluster: the newest order, and the reported losses.

    `pods` are those of the last look, `lost` is the last loss; `loss_told` is a loss of everything that the status
    should report until `tell_until_s`. `failed` is the error of the last step, kept while looks lead to the same step;
    reporting it only at times would write the status twice per attempt.
    """

    def __init__(
        self, topologies: Topologies, events: TopologyEvents, namespace: str, order: ReconcileCluster, tier_uid: str
    ) -> None:
        self.namespace, self.order, self.events, self.tier_uid = namespace, order, events, tier_uid
        self.reported: object = None
        self.lost: Loss | None = None
        self.reported_loss: Loss | None = None
        self.report_until_s = 0.0
        self.failed_step: Step | None = None
        self.failed = ""
        self.waited = 0
        self.unclaimed: tuple[SlotRange, ...] = ()
        self.pods: dict[str, ServerPod] = {}
        self._access_read: tuple[ReconcileCluster, float] | None = None
        self._woken = asyncio.Event()
        self.task = asyncio.create_task(topologies.tend_for_ever(self), name=f"tend {self.name}")

    @property
    def name(self) -> str:
        return f"{self.namespace}/{self.order.tier}"

    def access_is_stale(self) -> bool:
        if self._access_read is None:
            return True
        order, at_s = self._access_read
        # The goal does not affect access.
        return replace(order, goal=self.order.goal) != self.order or time.monotonic() - at_s > LOOK_EVERY_S

    def access_was_read(self) -> None:
        self._access_read = (self.order, time.monotonic())

    def access_refused(self) -> None:
        self._access_read = None

    def follow(self, order: ReconcileCluster) -> None:
        self.order = order
        self._woken.set()

    async def pause(self, at_most_s: float) -> None:
        if at_most_s <= 0:
            return
        try:
            async with asyncio.timeout(at_most_s):
                await self._woken.wait()
        except TimeoutError:
            pass
        self._woken.clear()


def _looked(tending: _Tending, cluster: Cluster) -> ClusterReport:
    reason = TierReason.COMMAND_FAILED if tending.failed else ""
    return ClusterReport(cluster, utc_now(), reason, tending.failed)


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
        endpoint=order.endpoint,
        username=order.username,
        reachable=bool(servers),
        reason="" if servers else str(reason),
        message="" if servers else message,
        at=report.at,
        used_bytes=sum(server.used_bytes for server in primaries),
        max_bytes=sum(server.max_bytes for server in primaries),
        version=eldest.version if eldest is not None else "",
        software=eldest.software if eldest is not None else "Redis",
        password_secret=order.password_secret,
        authority_secret=order.authority_secret,
        cluster=True,
    )


def _failure(sent: Sent, cluster: Cluster) -> str:
    detail = f"{' '.join(sent.command.words[:2])}: {sent.answer or sent.failure}"
    return f"{cluster.pods[sent.command.pod_uid].name} refuses {detail}" if sent.failure == REFUSED else detail
