"""Slots of a server that is lost: a replica of it takes them over.

Servers promote a replica by themselves when a majority of the primaries agrees that its primary failed. They do not
when that majority is lost too, or when another server answers at the old one's address; and where the old identity is
gone for certain, there is no reason to wait for their time-out.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstrata.model.redis.cluster import Server
from kvstrata.plan.redis.topology.steps import Step, StepReason
from kvstrata.plan.redis.topology.view import View, count, to


def take_over(view: View) -> Step | None:
    """Have the best replica of each lost primary take its slots, those of certain losses first."""
    lost = [owner for owner in view.slots if owner not in view.servers and view.replicas(owner)]
    return _promote(view, (owner for owner in lost if owner in view.gone)) or _promote(
        view, (owner for owner in lost if _cut_off(view, owner))
    )


def _promote(view: View, owners: Iterable[str]) -> Step | None:
    chosen = {owner: best_replica(view, view.replicas(owner)) for owner in owners}
    if not chosen:
        return None
    taken = ", ".join(
        f"{view.name(best.node_id)} takes {count(view.slots[owner])} slots of {view.name(owner)}"
        for owner, best in chosen.items()
    )
    commands = tuple(to(best, "CLUSTER", "FAILOVER", "TAKEOVER") for best in chosen.values())
    lost = tuple(piece for owner, best in chosen.items() if not best.ever_synced for piece in view.slots[owner])
    return Step(StepReason.TAKING_OVER, taken, commands, lost=lost)


def best_replica(view: View, replicas: Iterable[Server]) -> Server:
    """The replica that read furthest, rather one whose pod stays; among equals the same one each time."""

    def merit(server: Server) -> tuple[bool, bool, int, str]:
        return server.ever_synced, not view.leaves(view.pod(server)), server.offset, server.node_id

    return max(replicas, key=merit)


def _cut_off(view: View, owner: str) -> bool:
    """Whether a primary that may still live can be replaced by nobody else.

    Neither its replicas nor the kubelet reach it, and most of the primaries, whose votes a promotion needs, do not
    answer.
    """
    pod = view.away.get(owner)
    if pod is None or pod.ready:
        return False
    voters = sum(other in view.servers for other in view.slots)
    sights = (view.sight(replica, owner) for replica in view.replicas(owner))
    unreachable = all(sight is None or sight.suspected or sight.failed for sight in sights)
    return voters * 2 <= len(view.slots) and unreachable
