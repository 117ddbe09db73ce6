"""Who may still hold a revoked keyspace: every pod that lived when it was revoked, until it said otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from kvstrata.model.world import World


@dataclass(frozen=True, slots=True)
class Witness:
    """A pod whose word is needed."""

    model: str
    pod: str
    uid: str


@dataclass(frozen=True, slots=True)
class Account:
    """How the witnesses stand. `open` names those that neither acknowledged nor are fenced or gone for certain."""

    acked: int
    live: int
    fenced: int
    open: frozenset[str]


def witnesses_now(world: World, fence_s: float, now: datetime) -> tuple[Witness, ...]:
    """Return every pod that may serve with a policy that is revoked now.

    Live ones, and those that vanished without having ended less than `fence_s` seconds ago: their nodes may be cut off,
    and they need that long to fence themselves off. Departures from before the operator's start are not known.
    """
    live = [Witness(pod.model, pod.name, pod.uid) for model in sorted(world.models) for pod in world.live_pods(model)]
    vanished = [
        Witness(model, gone.name, gone.uid)
        for model in sorted(world.models)
        for gone in world.departures.get(model, ())
        if not gone.clean and (now - gone.at).total_seconds() < fence_s
    ]
    return (*live, *vanished)


def account_for(
    world: World,
    witnesses: tuple[Witness, ...],
    revisions: Mapping[str, int],
    fenced_by: datetime | None,
    now: datetime,
) -> Account:
    """Return how far the witnesses, and pods that came since, enforce `revisions` (by model).

    A pod is settled when it acknowledged, when the kubelet reported all of its containers as ended, or when `fenced_by`
    has passed: by then a pod that cannot be reached refuses reuse by itself. A pod that merely vanished from the API
    server may still run on a node that is cut off, so it is settled by time only.
    """
    seen = {pod.uid: pod for model in revisions for pod in world.live_pods(model)}
    finished = {pod.uid for model in revisions for pod in (world.pods.get(model) or {}).values() if pod.finished}
    clean = {gone.uid for model in revisions for gone in world.departures.get(model, ()) if gone.clean}
    everyone = {witness.uid: witness for witness in witnesses}
    for pod in seen.values():
        everyone.setdefault(pod.uid, Witness(pod.model, pod.name, pod.uid))
    acked, fenced, still_open = 0, 0, set()
    for uid, witness in everyone.items():
        known = seen.get(uid)
        if known and world.acked_revision(known) >= revisions.get(witness.model, 0):
            acked += 1
        elif uid in clean or uid in finished:
            continue
        elif fenced_by is not None and now >= fenced_by:
            fenced += 1
        else:
            still_open.add(witness.pod)
    return Account(acked, len(seen), fenced, frozenset(still_open))
