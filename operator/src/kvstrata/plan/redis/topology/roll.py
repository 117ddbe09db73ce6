"""Replacement of pods with a former template: replicas first, then primaries after a failover. Also memory changes.

One pod at a time for the whole tier, when nothing is missing; a repeated call names the same pod.
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
"""A repeated failover starts again; it takes a tenth of this on servers that answer."""


def replace_broken(view: View) -> Step | None:
    """Delete an outdated pod that does not serve: only a new one can help. One that may still have slots waits until
    the others agree that it failed, and for its replicas."""
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
    """Delete an outdated pod with a server that was never in step with its primary: it has nothing to lose. Its image
    may be unable to load the others' data; then everything waits for the new template."""
    for pod in view.pods:
        server = view.cluster.servers.get(pod.uid)
        if server is None or not outdated(view, pod) or server.itself.is_primary or server.ever_synced:
            continue
        if all((other.ready or other is pod) and not other.deleting for other in view.pods):
            return Step(StepReason.REPLACING, f"{pod.name} was never in step with its primary", remove_pod=pod.uid)
    return None


def replace_locked_out(view: View) -> Step | None:
    """Delete the next pod with a server that admits no known password, after the loss of their Secret. Such a server
    accepts no command, so its data is lost. One goes at a time, so that connected clients keep the other servers. Only
    an outdated pod, or one with a server that restarted on former files, is replaced: others would be refused again."""
    refused = [pod for pod in view.pods if _is_locked_out(view, pod)]
    if any(pod.deleting or not pod.ready for pod in view.pods):
        return None
    helped = (pod for pod in refused if outdated(view, pod) or pod.started > 0)
    pod = min(helped, key=lambda one: (one.shard, -one.ordinal), default=None)
    if pod is None:
        return None
    held = [owner for owner in _held(view, pod) if not view.replicas(owner)]
    message = f"{pod.name} is replaced: its server admits no known password; {len(refused)} to go"
    return Step(StepReason.REPLACING, message, remove_pod=pod.uid, lost=_pieces(view, held))


def _is_locked_out(view: View, pod: ServerPod) -> bool:
    reason, _ = view.cluster.silent.get(pod.uid, ("", ""))
    return pod.uid in view.goal.locked_out and reason == TierReason.WRONG_PASSWORD


def _held(view: View, pod: ServerPod) -> list[str]:
    return [owner for owner, where in view.away.items() if where is pod and owner in view.slots]


def _pieces(view: View, owners: Iterable[str]) -> tuple[SlotRange, ...]:
    return tuple(piece for owner in owners for piece in view.slots[owner])


def hand_over(view: View) -> Step | None:
    """Fail over from a primary in a surplus pod to a replica that stays. Not to an outdated one, which would have to
    fail over again."""
    surplus = [pod for pod in view.pods if not view.stays(pod) and pod.shard in view.shards]
    return _fail_over(view, surplus, lambda heir: view.stays(heir) and not outdated(view, heir), "one too many")


def roll(view: View) -> Step | None:
    """Delete the next outdated pod, or first fail over from its primary. Surplus pods go anyway; until then they may
    keep the slots of a replaced one."""
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
        message = f"{due[0].name} is replaced, with the content of {count(lost)} slots; {len(due)} to go"
        return Step(StepReason.ROLLING, message, remove_pod=due[0].uid, lost=lost)
    return None


def _fail_over(view: View, pods: Iterable[ServerPod], accepted: Callable[[ServerPod], bool], why: str) -> Step | None:
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
    wanted = view.goal.revisions.get(pod.shard)
    return wanted is not None and pod.revision != wanted


SPARE_PERCENT = 20
"""Allowed growth beyond a pod's original memory: containers have a quarter more, for fragmentation."""


def resize(view: View) -> Step | None:
    """Set `maxmemory` of servers that differ. An increase beyond its container's memory waits for the new pod, or the
    kernel would kill the server."""
    wanted = view.goal.max_bytes_each
    commands = tuple(
        to(server, "CONFIG", "SET", "maxmemory", wanted)
        for server in view.servers.values()
        if server.max_bytes != wanted and _has_room(view, server)
    )
    message = f"{len(commands)} servers get {wanted} bytes each"
    return Step(StepReason.CHANGING_CAPACITY, message, commands) if commands else None


def _has_room(view: View, server: Server) -> bool:
    """Whether a container has room for its server's part. It is judged by the memory that its pod was made for: the
    server's present value may have grown, and the newest template is unknown until Kubernetes has observed it."""
    pod = view.pod(server)
    made_for_bytes = pod.made_for_bytes or server.max_bytes
    within = view.goal.max_bytes_each * 100 <= made_for_bytes * (100 + SPARE_PERCENT)
    return within or not (pod.made_for_bytes or outdated(view, pod))
