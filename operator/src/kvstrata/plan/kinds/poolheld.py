"""Holdings of a pool's version in pods, and which pods to ask when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from kvstrata.api.prefixpool import PrefixPool
from kvstrata.contract.messages.pools import PoolTierState, PoolVersionState
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata.contract.policy.pools import PoolVersion
from kvstrata.model.pods import Pod
from kvstrata.model.pools import WarmReport
from kvstrata.model.world import World
from kvstrata.plan.questions import InspectPool, WarmPool

LOOK_AGAIN_S = 300.0
"""Interval of inspections of a warm pool."""

WATCH_S = 10.0
"""The same while chunks are missing."""

RETRY_S = 5.0
"""Pause of a pod that did not answer, or after its first failure."""


@dataclass(frozen=True, slots=True)
class Held:
    rows: Mapping[str, PoolTierState | None]
    words: Mapping[str, PoolVersionState]

    @property
    def known(self) -> bool:
        return all(row is not None for row in self.rows.values())

    @property
    def complete(self) -> bool:
        return bool(self.rows) and all(is_whole(row) for row in self.rows.values())


def held_of(world: World, pods: Sequence[Pod], pool: PrefixPool, version: PoolVersion) -> Held:
    """Return the holdings: the best report of a shared tier, the lowest of a per-pod tier."""
    words = {pod.uid: word for pod in pods if (word := _word(world, pod, pool, version)) is not None}
    rows: dict[str, PoolTierState | None] = {}
    for name in version.tiers:
        told = [row for word in words.values() for row in word.tiers if row.name == name]
        if not told or (is_per_pod(world, name) and len(told) < len(pods)):
            rows[name] = None
        elif is_per_pod(world, name):
            rows[name] = min(told, key=lambda row: (row.stored, -row.expected))
        else:
            rows[name] = max(told, key=lambda row: (row.stored, -row.expected))
    return Held(rows, words)


def _word(world: World, pod: Pod, pool: PrefixPool, version: PoolVersion) -> PoolVersionState | None:
    said = world.holdings.get(pod.uid, {}).get(pool.uid)
    state = world.states[pod.uid].state
    if said is None or said.report is None:
        return None
    if (said.report.gate_boot, said.report.cache_boot) != (state.gate_boot, state.cache_boot):
        return None
    scope = version.keyspace[:SCOPE_DIGITS]
    return next((one for one in said.report.versions if one.scope == scope and one.known), None)


def inspections(
    world: World, pods: Sequence[Pod], pool: PrefixPool, version: PoolVersion, held: Held, now: datetime
) -> tuple[tuple[InspectPool | WarmPool, ...], float]:
    every_s = LOOK_AGAIN_S if held.complete else WATCH_S
    per_pod = any(is_per_pod(world, name) for name in version.tiers)
    concerned = pods if per_pod else by_merit(world, pods, version, held)[:1]
    ages = {pod.uid: _age_s(world, pod, pool, held, now) for pod in concerned}
    due = [pod for pod in concerned if (age := ages[pod.uid]) is None or age >= every_s]
    left_s = min((every_s - age for age in ages.values() if age is not None and age < every_s), default=every_s)
    return tuple(InspectPool(pool.name, pool.uid, pod) for pod in due), left_s


def _age_s(world: World, pod: Pod, pool: PrefixPool, held: Held, now: datetime) -> float | None:
    """Return the seconds since a pod was asked; None to ask now."""
    said = world.holdings.get(pod.uid, {}).get(pool.uid)
    if said is None:
        return None
    age_s = (now - said.at).total_seconds()
    return None if pod.uid not in held.words and age_s >= RETRY_S else age_s


def warmed(world: World, pod: Pod, version: PoolVersion) -> dict[str, WarmReport]:
    scope = version.keyspace[:SCOPE_DIGITS]
    return {digest: told for (of, digest), told in world.warmed.get(pod.uid, {}).items() if of == scope}


def by_merit(world: World, pods: Iterable[Pod], version: PoolVersion, held: Held) -> list[Pod]:
    """Sort pods: fewest failures first, then by chunks held."""

    def rank(pod: Pod) -> tuple[int, int, str]:
        word = held.words.get(pod.uid)
        failures = max((one.failures for one in warmed(world, pod, version).values()), default=0)
        return failures, -sum(row.stored for row in word.tiers) if word is not None else 0, pod.name

    return sorted(pods, key=rank)


def is_per_pod(world: World, tier: str) -> bool:
    return tier in world.tiers and world.tiers[tier].spec.per_pod


def is_whole(row: PoolTierState | None) -> bool:
    return row is not None and 0 < row.expected <= row.stored
