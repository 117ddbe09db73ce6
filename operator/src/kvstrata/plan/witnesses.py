"""Pods that may still hold a revoked keyspace: all that existed at its revocation, until they report otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from kvstrata.model.pods import Departure, Pod
from kvstrata.model.world import World

FENCE_MARGIN_S = 1
"""A gate checks the age of its policy ten times a second, and aborts late requests a moment after."""

TOKEN_CACHE_S = 10
"""How long API servers accept a token that they reviewed before its pod was deleted."""


@dataclass(frozen=True, slots=True)
class Witness:
    """A pod with a required acknowledgement. `fenced_by` is the latest time at which it refuses all reuse by itself,
    None for never; `acked` the last revision known to be enforced."""

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


def witnesses_now(world: World, now: datetime) -> tuple[Witness, ...]:
    """Return every pod that may serve with a policy that is revoked now, also of deleted models. Vanished pods count
    until they ended or had time to fence themselves off: their nodes may be partitioned."""
    models = sorted({*world.pods, *world.departures})
    return tuple(witness for model in models for witness in witnesses_of(world, model, now))


def witnesses_of(world: World, model: str, now: datetime) -> tuple[Witness, ...]:
    # The token of a vanished pod ended with its object, except for API servers' caches.
    vanished = (
        _witness(world, model, gone, gone.acked, gone.at + timedelta(seconds=TOKEN_CACHE_S))
        for gone in world.departures.get(model, ())
        if not gone.clean
    )
    return (
        *(_witness(world, model, pod, world.acked_revision(pod), now) for pod in world.live_pods(model)),
        *(gone for gone in vanished if gone.fenced_by is None or gone.fenced_by > now),
    )


def account_for(world: World, witnesses: tuple[Witness, ...], revisions: Mapping[str, int], now: datetime) -> Account:
    """Return how far the witnesses, and later pods, enforce `revisions` (by model).

    A pod is settled when it acknowledged, when the kubelet reported all of its containers as ended, or when its
    `fenced_by` has passed. A vanished pod may still run on a partitioned node, so only time settles it; one of a
    deleted model has no bundle to acknowledge, so it must end.
    """
    seen = {pod.uid: pod for model in world.pods for pod in world.live_pods(model)}
    ended = {pod.uid for pods in world.pods.values() for pod in pods.values() if pod.finished}
    ended |= {gone.uid for departures in world.departures.values() for gone in departures if gone.clean}
    everyone = {witness.uid: witness for witness in witnesses}
    for pod in seen.values():
        if pod.model in revisions:
            everyone.setdefault(pod.uid, Witness(pod.model, pod.name, pod.uid, None))
    acked, fenced, still_open = 0, 0, []
    for uid, witness in everyone.items():
        known = seen.get(uid)
        needed = revisions.get(witness.model)
        if known and needed is not None and world.acked_revision(known) >= needed:
            acked += 1
        elif uid in ended:
            continue
        elif is_fenced(world, witness, known, now):
            fenced += 1
        else:
            still_open.append(witness)
    return Account(acked, len(seen), fenced, tuple(still_open))


def is_fenced(world: World, witness: Witness, known: Pod | None, now: datetime) -> bool:
    """Whether a witness has refused all reuse by itself by now; `known` is its live pod, if any."""
    return witness.fenced_by is not None and now >= witness.fenced_by and not _speaks(world, known, now)


def _speaks(world: World, pod: Pod | None, now: datetime) -> bool:
    """Whether a live pod reports a fresh policy: then it is stuck, and not fenced. The last report of an unreachable
    pod counts for as long as it could read under its own rules; after that it has fenced itself off."""
    reported = world.states.get(pod.uid) if pod else None
    if pod is None or reported is None or not reported.state.fresh:
        return False
    if reported.in_contact:
        return True
    until = _fenced_by(world, pod.model, reported.state.acked, reported.at)
    return until is None or now < until


def _witness(world: World, model: str, pod: Pod | Departure, acked: int, reads_until: datetime) -> Witness:
    """Return a pod as a witness. Another leader may have received its last acknowledgement, in the model's status."""
    found = world.models.get(model)
    recorded = [one.acked or 0 for one in found.status.witnesses if one.uid == pod.uid] if found else []
    latest = max([acked, *recorded])
    return Witness(model, pod.name, pod.uid, _fenced_by(world, model, latest, reads_until), latest)


def _fenced_by(world: World, model: str, acked: int, since: datetime) -> datetime | None:
    """Return when a pod that enforces revision `acked` and reads nothing after `since` refuses all reuse. It follows
    the rules that it acknowledged last, not newer ones."""
    committed = world.bundles.get(model)
    if committed is None or not committed.whole or acked < committed.bundle.root.rules_since:
        return None
    rules = committed.bundle.root.rules
    if rules.on_stale != "Fence":
        return None
    return since + timedelta(seconds=rules.stale_after_s + rules.drain_timeout_s + FENCE_MARGIN_S)
