"""Conditions that the rules wait for, and the health of a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations

from kvstrata.model.redis.cluster import Server, ServerPod, SlotRange
from kvstrata.plan.redis.topology.steps import Step, StepReason
from kvstrata.plan.redis.topology.view import View, count


def covered(view: View) -> Step | None:
    """Wait until every slot has an answering server and all servers agree on every slot."""
    if owners := [owner for owner in view.slots if owner not in view.servers]:
        names = ", ".join(view.name(owner) for owner in owners)
        reason = StepReason.WAITING_FOR_FAILOVER if any(map(view.replicas, owners)) else StepReason.WAITING_FOR_SERVERS
        return Step(reason, f"{count(uncovered(view))} slots are those of servers that do not answer: {names}")
    if view.unowned:
        lacking = ", ".join(str(shard) for shard in view.shards if view.primary(shard) is None)
        message = f"{count(view.unowned)} slots wait for a server of shard {lacking or 0}"
        return Step(StepReason.WAITING_FOR_PODS, message)
    strangers = [one for one, other in permutations(view.servers.values(), 2) if not view.knows(one, other)]
    if strangers:
        return Step(StepReason.WAITING_FOR_GOSSIP, f"{_names(view, strangers)} do not know all servers yet")
    # A server redirects clients by name: to "?" while it knows none.
    unnamed = [one for one, other in permutations(view.servers.values(), 2) if not view.can_redirect(one, other)]
    if unnamed:
        return Step(StepReason.WAITING_FOR_GOSSIP, f"{_names(view, unnamed)} do not know the names of others yet")
    behind = [server for server in view.servers.values() if not _agrees(view, server)]
    if behind:
        return Step(StepReason.WAITING_FOR_GOSSIP, f"{_names(view, behind)} do not know the owners of all slots yet")
    refusing = [view.servers[owner] for owner in view.slots if not view.servers[owner].cluster_ok]
    if refusing:
        return Step(StepReason.WAITING_FOR_SERVERS, f"{_names(view, refusing)} do not serve yet")
    return None


def whole(view: View) -> Step | None:
    """Wait until every shard has all its pods, all answer and are ready, and all replicas are in step. A surplus pod is
    not needed; it may have never started."""
    silent = [pod.name for pod in view.pods if pod.uid not in view.cluster.servers and not _is_idle_surplus(view, pod)]
    if silent:
        return Step(StepReason.WAITING_FOR_SERVERS, f"no answer from {', '.join(silent)}")
    wanted = 1 + view.goal.replicas
    # A surplus server does not replace a missing one: it is about to go.
    staying = {shard: [one for one in view.in_shard(shard) if view.stays(view.pod(one))] for shard in view.shards}
    short = [shard for shard in view.shards if len(staying[shard]) < wanted]
    if short:
        shards = ", ".join(map(str, short))
        return Step(StepReason.WAITING_FOR_PODS, f"shards {shards} have fewer than {wanted} servers")
    unready = [pod.name for pod in view.pods if (view.leaves(pod) or not pod.ready) and not _is_idle_surplus(view, pod)]
    if unready:
        return Step(StepReason.WAITING_FOR_PODS, f"not ready: {', '.join(unready)}")
    behind = [server for server in view.servers.values() if not _follows(view, server)]
    if behind:
        return Step(StepReason.WAITING_FOR_REPLICAS, f"not in step with their primary: {_names(view, behind)}")
    return None


def _is_idle_surplus(view: View, pod: ServerPod) -> bool:
    if view.stays(pod) or pod.shard not in view.shards or pod.uid in view.cluster.servers:
        return False
    return not any(where is pod and owner in view.slots for owner, where in view.away.items())


def uncovered(view: View) -> tuple[SlotRange, ...]:
    away = (piece for owner, pieces in view.slots.items() if owner not in view.servers for piece in pieces)
    return tuple(sorted((*view.unowned, *away)))


def shards_ready(view: View) -> int:
    return sum(_is_ready(view, shard) for shard in view.shards)


def replicas_missing(view: View) -> int:
    """Number of replicas that are missing or out of step; all of those without a primary."""
    primaries = (view.primary(shard) for shard in view.shards)
    there = (len(in_step(view, primary)) if primary is not None else 0 for primary in primaries)
    return sum(max(0, view.goal.replicas - found) for found in there)


def in_step(view: View, primary: Server) -> list[Server]:
    """A primary's replicas that have read all its data."""
    return [server for server in view.replicas(primary.node_id) if server.link_up and not server.syncing]


def _is_ready(view: View, shard: int) -> bool:
    primary = view.primary(shard)
    return primary is not None and primary.cluster_ok and len(in_step(view, primary)) >= view.goal.replicas


def _follows(view: View, server: Server) -> bool:
    if server.node_id in view.slots:
        return True
    primary = view.primary(view.pod(server).shard)
    return primary is not None and server in in_step(view, primary)


def _agrees(view: View, server: Server) -> bool:
    return all(peer.slots == view.slots.get(peer.node_id, ()) for peer in server.peers if not peer.handshake)


def _names(view: View, servers: Iterable[Server]) -> str:
    return ", ".join(dict.fromkeys(view.name(server.node_id) for server in servers))
