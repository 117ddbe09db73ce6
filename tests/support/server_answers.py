"""Answers of servers in a simulation: to probes and looks, and to updates of their passwords and certificates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kvstrata.model.pods import BackendReport, ClusterReport
from kvstrata.model.redis.cluster import SLOTS, Cluster, ServerPod
from kvstrata.model.redis.credentials import CredentialLook, ServerCredentials
from kvstrata.model.redis.external import ExternalReport, ServerFacts
from kvstrata.model.refs import Key
from kvstrata.objects import names
from kvstrata.objects.redis.users import REPLICATION_USER
from kvstrata.plan.actions import Order, ProbeBackend, ReconcileCluster, TendServers
from kvstrata.reconcile.redis import topology
from tests.support.objects import NAMESPACE
from tests.topology import looks

if TYPE_CHECKING:
    from tests.support.worlds import Simulation


VERSION = "8.0.0"


NO_PODS = ClusterReport(Cluster({}, {}, {}, 0.0), datetime(2026, 1, 1, tzinfo=UTC))
"""Findings of a look while no server of a managed cluster runs."""


@dataclass(frozen=True)
class SimulatedServer:
    """State of a managed server: its line of passwords, the digests that admit its users, the marker of their rights,
    the password for its primary, its certificate."""

    made: str
    admitted: Mapping[str, frozenset[str]]
    marker: str
    master: str
    certificate: str | None


def answer_probe(simulation: Simulation, order: ProbeBackend) -> None:
    """Store the findings of a server's probe at once, and have its tier planned again."""
    endpoint = order.access.endpoint
    simulation.asked.append(endpoint)
    reason, sentence = ("", "") if simulation.backends_up else ("Unreachable", f"there is no route to {endpoint}")
    external = _check(simulation, order, reason, sentence)
    report = BackendReport(
        order.access, simulation.backends_up, reason, sentence, simulation.now, version=VERSION, external=external
    )
    simulation.store.domain(NAMESPACE).backends[order.tier] = report
    simulation.queue.add(Key("CacheTier", NAMESPACE, order.tier))


def _check(simulation: Simulation, order: ProbeBackend, reason: str, sentence: str) -> ExternalReport:
    """Answer of an external server: none, the test's, or that all is well."""
    if not simulation.backends_up:
        return ExternalReport((ServerFacts(order.access.endpoint, False, reason, sentence),))
    well = ServerFacts(
        order.access.endpoint, True, "", "", version=VERSION, in_cluster_mode=order.access.cluster, max_bytes=1 << 50,
        eviction="noeviction", slots=SLOTS if order.access.cluster else 0,
    )  # fmt: skip
    return simulation.external.get(order.tier, ExternalReport((well,), mapped=order.access.cluster))


def answer_look(simulation: Simulation, order: ReconcileCluster) -> None:
    """Store the findings of a look at a managed cluster: the test's, or servers that answer as they should."""
    store = simulation.store.domain(NAMESPACE)
    report = simulation.looks.get(order.tier)
    if report is None:
        found = _cluster(simulation, order)
        store.servers[order.tier] = {pod.name: pod for pod in found.pods.values()}
        report = ClusterReport(found, simulation.now)
    before, store.clusters[order.tier] = store.clusters.get(order.tier), report
    store.backends[order.tier] = topology._backend(order, report)
    if before is None or replace(before, at=report.at) != report:
        simulation.queue.add(Key("CacheTier", NAMESPACE, order.tier))


def _cluster(simulation: Simulation, order: ReconcileCluster) -> Cluster:
    """A server for each pod that there is to be. Pods are made up, unless a test made one."""
    goal = order.goal
    whole = looks.cluster(looks.even(goal.shards), replicas=goal.replicas)
    there = simulation.world.servers.get(order.tier, {})
    pods: dict[str, ServerPod] = {}
    for uid, one in whole.pods.items():
        name = f"{names.redis_shard(order.tier, one.shard)}-{one.ordinal}"
        made = there.get(name)
        if made is None or made.uid == uid:
            made = replace(one, name=name, revision=goal.revisions.get(one.shard, ""))
        pods[uid] = made
    own = {made.uid: made for made in pods.values()}
    if not simulation.backends_up:
        silent = {made.uid: ("Unreachable", f"there is no route to {made.name}") for made in pods.values()}
        return replace(whole, pods=own, servers={}, silent=silent)
    servers = {
        pods[uid].uid: replace(server, pod_uid=pods[uid].uid, version=VERSION, max_bytes=goal.max_bytes_each)
        for uid, server in whole.servers.items()
    }
    return replace(whole, pods=own, servers=servers)


def answer_tending(simulation: Simulation, order: TendServers) -> None:
    """Let servers carry out their orders and report their credentials. A new server has those of the Secrets."""
    if not simulation.backends_up:
        reported = {one.name: ServerCredentials(one.name, "Unreachable", "no route") for one in order.servers}
    else:
        reported = {one.name: _tended(simulation, one.name, order) for one in order.servers}
    look = CredentialLook(reported, simulation.now, updated=bool(order.orders))
    simulation.store.domain(NAMESPACE).credentials[order.tier] = look
    simulation.queue.add(Key("CacheTier", NAMESPACE, order.tier))


def _tended(simulation: Simulation, server: str, order: TendServers) -> ServerCredentials:
    users, tls = (simulation.world.secrets[name] if name else None for name in (order.users_secret, order.tls_secret))
    assert users is not None
    assert users.passwords is not None
    shown = tls.tls.fingerprint if tls is not None and tls.tls is not None else None
    master = users.passwords.current[REPLICATION_USER]
    has = simulation.servers.get(server)
    orders = order.orders.get(server, ())
    if has is None or has.made != users.passwords.made:
        has = SimulatedServer(users.passwords.made, users.passwords.admitted, users.passwords.marker, master, shown)
    if Order.SET_USERS in orders:
        has = replace(has, admitted=users.passwords.admitted, marker=users.passwords.marker)
    if Order.FOLLOW in orders:
        has = replace(has, master=master)
    if Order.LOAD_CERTIFICATE in orders:
        has = replace(has, certificate=shown)
    simulation.servers[server] = has
    marked = has.marker == users.passwords.marker
    return ServerCredentials(
        server, admitted=has.admitted, marked=marked, master=has.master, certificate=has.certificate
    )
