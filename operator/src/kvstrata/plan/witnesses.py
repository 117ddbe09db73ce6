"""Pods that may still hold a revoked keyspace: all that existed at its revocation, until they report otherwise."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.contract.policy.bundle import Rules
from kvstrata.model.pods import Departure, Pod
from kvstrata.model.world import World

FENCE_MARGIN_S = 1
"""A gate checks the age of its policy ten times a second, and aborts late requests a moment after."""

FOR_EVER = datetime.max.replace(tzinfo=UTC)

REPORTED_WITHIN = timedelta(seconds=10)
"""Far longer than a kubelet takes to report a container that started, and a watch to show it."""

TOKEN_CACHE_S = 10
"""How long API servers accept a token that they reviewed before its pod was deleted."""


@dataclass(frozen=True, slots=True)
class Witness:
    """A pod with a required acknowledgement. `fenced_by` is the latest time at which it refuses all reuse by itself,
    and unless only new requests matter has no request with reuse either; None for never. `acked` is the last revision
    known to be enforced."""

    model: str
    pod: str
    uid: str
    fenced_by: datetime | None
    acked: int = 0


@dataclass(frozen=True, slots=True)
class Account:
    """`open` are the witnesses that neither acknowledged nor are fenced or certainly gone."""

    acked: int
    live: int
    fenced: int
    open: tuple[Witness, ...]


def witnesses_now(
    world: World, now: datetime, *, models: Collection[str] | None = None, new_only: bool = False
) -> tuple[Witness, ...]:
    """Return every pod that may serve with a policy that is revoked now, also of deleted models; `models` are those
    that may have had it, None means all. Vanished pods count until they ended or had time to fence themselves off:
    their nodes may be partitioned. Pods that are reported as waiting may have started just now. `new_only`: only
    requests that begin from now on matter."""
    models = sorted({*world.pods, *world.departures} if models is None else models)
    here = (pod for model in models for _, pod in sorted(world.pods.get(model, {}).items()))
    waiting = (pod for pod in here if pod.scheduled and not (pod.live or pod.finished))
    return (
        *(witness for model in models for witness in witnesses_of(world, model, now, new_only=new_only)),
        *(_witness(world, pod.model, pod, 0, now, new_only=new_only) for pod in waiting),
    )


def witnesses_of(world: World, model: str, now: datetime, *, new_only: bool = False) -> tuple[Witness, ...]:
    """Return the witnesses of one model, vanished pods first: a list that is cut short keeps those that no one else
    would find again."""
    live = world.live_pods(model)
    return (
        *_vanished(world, model, now, new_only=new_only),
        *(_witness(world, model, pod, world.acked_revision(pod), now, new_only=new_only) for pod in live),
    )


def awaited(world: World, invalidation: CacheInvalidation) -> tuple[Witness, ...]:
    """Return the witnesses in an invalidation's status. The leader that recorded them may have had another clock, so
    this process waits as long by its own, from when it first knew of them."""
    awaiting, rolled = invalidation.status.awaiting, invalidation.status.rolled_time
    late = world.rolled_since.get(invalidation.uid, rolled) - rolled if rolled is not None else timedelta()
    return tuple(Witness(pod.model, pod.pod, pod.uid, pod.fenced_by and pod.fenced_by + late) for pod in awaiting)


def longest_fence(world: World, model: str, rules: Rules, now: datetime) -> tuple[int | None, int | None]:
    """Return `fence_s` and `end_s` of the bundle's root once `rules` are committed. Earlier rules count until every pod
    that may have them has acknowledged others, or has fenced itself off."""
    committed = world.bundles.get(model)
    if committed is None:
        lost = any(one.acked for one in witnesses_of(world, model, now))
        return (None, None) if lost else (rules.fence_s, rules.end_s)
    root = committed.bundle.root
    settled = committed.whole and all(one.acked >= root.rules_since for one in witnesses_of(world, model, now))
    before = root.rules if settled else root
    return _longer(before.fence_s, rules.fence_s), _longer(before.end_s, rules.end_s)


def _longer(one_s: int | None, other_s: int | None) -> int | None:
    return None if one_s is None or other_s is None else max(one_s, other_s)


def _vanished(world: World, model: str, now: datetime, *, new_only: bool) -> Iterator[Witness]:
    """Yield the vanished pods that may still reuse blocks, the last to fence itself off first."""
    # The token of a vanished pod ended with its object, except for API servers' caches.
    gone = [
        _witness(world, model, one, one.acked, one.at + timedelta(seconds=TOKEN_CACHE_S), new_only=new_only)
        for one in world.departures.get(model, ())
        if not one.clean
    ]
    held = [one for one in gone if one.fenced_by is None or one.fenced_by > now]
    yield from sorted(held, key=lambda one: one.fenced_by or FOR_EVER, reverse=True)


def account_for(
    world: World,
    witnesses: tuple[Witness, ...],
    revisions: Mapping[str, int],
    now: datetime,
    *,
    new_only: bool = False,
    waited: bool = True,
) -> Account:
    """Return how far the witnesses, and later pods, enforce `revisions` (by model).

    A pod is settled when it acknowledged, when it is among `ended_pods`, or when its `fenced_by` has passed. A vanished
    pod may still run on a partitioned node, so only time settles it; one of a deleted model has no bundle to
    acknowledge, so it must end.
    """
    seen = {pod.uid: pod for model in world.pods for pod in world.live_pods(model)}
    ended = ended_pods(world, waited=waited)
    everyone = {witness.uid: witness for witness in witnesses}
    for pod in seen.values():
        # One that was bound later and has not started yet will read the newest bundle.
        if pod.model in revisions and pod.ever_ran:
            everyone.setdefault(pod.uid, Witness(pod.model, pod.name, pod.uid, None))
    for model, revision in revisions.items():
        for gone in _vanished(world, model, now, new_only=new_only):
            if gone.acked < revision:
                everyone.setdefault(gone.uid, gone)
    acked, fenced, still_open = 0, 0, []
    for uid, witness in everyone.items():
        known = seen.get(uid)
        needed = revisions.get(witness.model)
        if known and needed is not None and world.acked_revision(known) >= needed:
            acked += 1
        elif uid in ended:
            continue
        elif is_fenced(world, witness, known, now, new_only=new_only):
            fenced += 1
        else:
            still_open.append(witness)
    live = sum(pod.model in revisions or uid in everyone for uid, pod in seen.items())
    return Account(acked, live, fenced, tuple(still_open))


def ended_pods(world: World, *, waited: bool = True) -> set[str]:
    """Return the UIDs of pods that ended by the kubelet's reports, or have nothing of a revocation because no container
    of theirs had started: the pod is gone, or is still reported as waiting once the reports were `waited` for. It may
    start later, and then reads the newest bundle, so a pod that never starts, as with a wrong image, delays nothing.
    A node that loses the API server seconds after a start hides it: the pod fences itself off, but for ServeStale."""
    bound = (pod for pods in world.pods.values() for pod in pods.values() if pod.scheduled)
    here = {pod.uid for pod in bound if pod.finished or (waited and not pod.live)}
    return here | {gone.uid for departures in world.departures.values() for gone in departures if gone.clean}


def has_waited(world: World, since: datetime, now: datetime) -> bool:
    """Whether starts before `since`, a revocation, would have been reported, to this leader too."""
    return now >= max(since, world.led_since or since) + REPORTED_WITHIN


def not_started(world: World) -> set[str]:
    """Return the UIDs of pods that hold no blocks: no node has them, or the kubelet reported that no container has
    started. An unreported pod on a node may have started."""
    every = (pod for pods in world.pods.values() for pod in pods.values())
    return {pod.uid for pod in every if not pod.ever_ran and (pod.reported or not pod.scheduled)}


def is_fenced(world: World, witness: Witness, known: Pod | None, now: datetime, *, new_only: bool = False) -> bool:
    """Whether a witness has refused all reuse by itself by now; `known` is its live pod, if any."""
    waited = witness.fenced_by is not None and now >= witness.fenced_by
    return waited and not _speaks(world, known, now, new_only=new_only)


def _speaks(world: World, pod: Pod | None, now: datetime, *, new_only: bool) -> bool:
    """Whether a live pod reports a fresh policy: then it is stuck, and not fenced. The last report of an unreachable
    pod counts for as long as it could read under its own rules; after that it has fenced itself off."""
    reported = world.states.get(pod.uid) if pod else None
    if pod is None or reported is None or not reported.state.fresh:
        return False
    if reported.in_contact:
        return True
    until = _fenced_by(world, pod.model, reported.state.acked, reported.at, new_only=new_only)
    return until is None or now < until


def _witness(
    world: World, model: str, pod: Pod | Departure, acked: int, reads_until: datetime, *, new_only: bool
) -> Witness:
    """Return a pod as a witness. Another leader may have received its last acknowledgement, in the model's status."""
    found = world.models.get(model)
    recorded = [one.acked or 0 for one in found.status.witnesses if one.uid == pod.uid] if found else []
    latest = max([acked, *recorded])
    fenced_by = _fenced_by(world, model, latest, reads_until, new_only=new_only)
    return Witness(model, pod.name, pod.uid, fenced_by, latest)


def _fenced_by(world: World, model: str, acked: int, since: datetime, *, new_only: bool) -> datetime | None:
    """Return when a pod that enforces revision `acked` and reads nothing after `since` refuses all reuse. It follows
    the rules that it acknowledged last, not newer ones: of a pod without that revision any that it may still have."""
    committed = world.bundles.get(model)
    if committed is None or not committed.whole:
        return None
    root = committed.bundle.root
    rules = root.rules if acked >= root.rules_since else root
    fence_s = rules.fence_s if new_only else rules.end_s
    return since + timedelta(seconds=fence_s + FENCE_MARGIN_S) if fence_s is not None else None
