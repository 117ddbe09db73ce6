"""Pods of a former template are replaced: replicas first, then primaries after they handed over; and memory is set
to what the capacity asks for.

One at a time for the whole tier, and only when nothing else is missing; whoever asks twice names the same pod.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstrata.api.reasons import TierReason
from kvstrata.model.redis.cluster import Server, ServerPod, SlotRange
from kvstrata.plan.redis.topology.health import in_step
from kvstrata.plan.redis.topology.servers import best_replica
from kvstrata.plan.redis.topology.steps import Step, StepReason
from kvstrata.plan.redis.topology.view import View, count, to

FAILOVER_PAUSE_S = 1.0
"""A failover that is asked for again begins anew; it takes a tenth of this on servers that answer."""


def replace_broken(view: View) -> Step | None:
    """Delete a pod of a former template that does not serve: nothing is disrupted, and only the new one can help.

    One that may still have slots waits until the others agree that it failed, and a replica had its chance.
    """
    for pod in view.pods:
        if not outdated(view, pod) or pod.deleting or pod.ready or pod.uid in view.cluster.servers:
            continue
        held = _held(view, pod)
        if all(any(word.failed for word in view.known[owner]) and not view.replicas(owner) for owner in held):
            return Step(
                StepReason.REPLACING, f"{pod.name} does not serve", remove_pod=pod.uid, lost=_pieces(view, held)
            )
    return None


def replace_useless(view: View) -> Step | None:
    """Delete a pod of a former template whose server was never in step with its primary: it has nothing to lose.

    It may never come to be, as when its image cannot load what the others' image sends: then only another template
    helps, and everything waits for it. One at a time, when all others are ready.
    """
    for pod in view.pods:
        server = view.cluster.servers.get(pod.uid)
        if server is None or not outdated(view, pod) or server.itself.is_primary or server.ever_synced:
            continue
        if all((other.ready or other is pod) and not other.deleting for other in view.pods):
            return Step(StepReason.REPLACING, f"{pod.name} was never in step with its primary", remove_pod=pod.uid)
    return None


def replace_locked_out(view: View) -> Step | None:
    """Delete the next pod whose server admits no password that anybody has, which is so after their Secret was lost.

    Nobody can ask such a server for anything, not even for a failover, so what it holds is lost. But one goes at a
    time, the next when all others are ready again, so that clients that are still connected keep what they can. Only
    one of a former template, or whose server was started anew from files that were there before: any other would be
    refused again.
    """
    refused = [pod for pod in view.pods if _is_locked_out(view, pod)]
    if any(pod.deleting or not pod.ready for pod in view.pods):
        return None
    helped = (pod for pod in refused if outdated(view, pod) or pod.started > 0)
    pod = min(helped, key=lambda one: (one.shard, -one.ordinal), default=None)
    if pod is None:
        return None
    held = [owner for owner in _held(view, pod) if not view.replicas(owner)]
    message = f"{pod.name} is replaced: its server admits no password that anybody has; {len(refused)} to go"
    return Step(StepReason.REPLACING, message, remove_pod=pod.uid, lost=_pieces(view, held))


def _is_locked_out(view: View, pod: ServerPod) -> bool:
    """Whether a server refused the password, and every other that there is when it was last told of them."""
    reason, _ = view.cluster.silent.get(pod.uid, ("", ""))
    return pod.uid in view.goal.locked_out and reason == TierReason.WRONG_PASSWORD


def _held(view: View, pod: ServerPod) -> list[str]:
    """Return the identities with slots that the silent server of a pod may still be."""
    return [owner for owner, where in view.away.items() if where is pod and owner in view.slots]


def _pieces(view: View, owners: Iterable[str]) -> tuple[SlotRange, ...]:
    return tuple(piece for owner in owners for piece in view.slots[owner])


def hand_over(view: View) -> Step | None:
    """Have a primary whose pod is one too many hand over to a replica that is to stay.

    Not to one that is to be replaced: it would have to hand over at once again, and to nobody else.
    """
    surplus = [pod for pod in view.pods if not view.stays(pod) and pod.shard in view.shards]
    return _fail_over(view, surplus, lambda heir: view.stays(heir) and not outdated(view, heir), "one too many")


def roll(view: View) -> Step | None:
    """Delete the next pod of a former template, or have its primary hand over first.

    Pods that are one too many go anyway; until then they may keep the slots of one that is replaced.
    """
    due = [pod for pod in view.pods if outdated(view, pod) and view.stays(pod)]
    for pod in due:
        server = view.cluster.servers[pod.uid]
        if server.node_id not in view.slots:
            return Step(StepReason.ROLLING, f"{pod.name} is replaced; {len(due)} to go", remove_pod=pod.uid)
    for accepted in (view.stays, lambda _: True):
        if handed := _fail_over(view, due, accepted, "to be replaced"):
            return handed
    if due:
        lost = view.slots[view.cluster.servers[due[0].uid].node_id]
        message = f"{due[0].name} is replaced, with what {count(lost)} slots hold; {len(due)} to go"
        return Step(StepReason.ROLLING, message, remove_pod=due[0].uid, lost=lost)
    return None


def _fail_over(view: View, pods: Iterable[ServerPod], accepted: Callable[[ServerPod], bool], why: str) -> Step | None:
    """Have the first of these primaries hand over that has somebody to hand over to in an accepted pod."""
    for pod in pods:
        server = view.cluster.servers.get(pod.uid)
        if server is None:
            continue  # A pod that is one too many need not answer.
        heirs = [heir for heir in in_step(view, server) if accepted(view.pod(heir))]
        if server.node_id in view.slots and heirs:
            heir = best_replica(view, heirs)
            command = to(heir, "CLUSTER", "FAILOVER")
            message = f"{view.name(heir.node_id)} takes over from {pod.name}, which is {why}"
            return Step(StepReason.FAILING_OVER, message, (command,), pause_s=FAILOVER_PAUSE_S)
    return None


def outdated(view: View, pod: ServerPod) -> bool:
    """Whether a pod is of a former template."""
    wanted = view.goal.revisions.get(pod.shard)
    return wanted is not None and pod.revision != wanted


SPARE_PERCENT = 20
"""By how much a server may have more than its pod was made for: containers have a quarter more, for fragmentation."""


def resize(view: View) -> Step | None:
    """Set the memory of servers that have another.

    What is more than its container has room for, a server gets with its new pod: else the kernel would end it.
    """
    wanted = view.goal.max_bytes_each
    commands = tuple(
        to(server, "CONFIG", "SET", "maxmemory", wanted)
        for server in view.servers.values()
        if server.max_bytes != wanted and _has_room(view, server)
    )
    if not commands:
        return None
    return Step(StepReason.CHANGING_CAPACITY, f"{len(commands)} servers get {wanted} bytes each", commands)


def _has_room(view: View, server: Server) -> bool:
    """Whether a container has room for its server's part, by what its pod was made for.

    Not by what the server has: that may have grown since. Nor by its template alone: which one is in force is not known
    until Kubernetes has seen the newest, and a capacity counts from the moment at which it is declared.
    """
    pod = view.pod(server)
    made_for_bytes = pod.made_for_bytes or server.max_bytes
    within = view.goal.max_bytes_each * 100 <= made_for_bytes * (100 + SPARE_PERCENT)
    return within or not (pod.made_for_bytes or outdated(view, pod))
