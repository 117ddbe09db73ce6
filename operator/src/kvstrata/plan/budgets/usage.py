"""Usage of scopes on each tier, as reported by pods, and rarely updated.

Pods report every minute or so, but a status is written only when a figure differs by `OFF_PERCENT` from the last one,
or is within its limit again, and `REPORTED_EVERY_S` after it. The first report about a tier is written at once: usage
of memory is known before that of Redis and would delay it for minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any

from kvstrata.api.cachetier import Medium
from kvstrata.api.common import Usage
from kvstrata.api.scalars import Quantity, format_timestamp
from kvstrata.contract.messages.adapter import ScopeUsage
from kvstrata.contract.messages.pod_state import PodState
from kvstrata.contract.policy.bundle import Bundle, EnforcedBudget
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS, ScopeKind
from kvstrata.model.refs import Key
from kvstrata.model.world import World
from kvstrata.objects.quantities import binary

REPORTED_EVERY_S = 300.0
FORGOTTEN_AFTER_S = 3600.0
"""A figure this old is dropped if all pods report and none mentions it."""

OFF_PERCENT = 25
SMALLEST_BYTES = 1 << 16
MOST_TIERS = 64

_PER_POD = (Medium.CPU, Medium.NVME)
"""Media for which a pod reports all scopes at once."""

Held = Mapping[str, Mapping[str, int]]
"""Bytes by scope digits and tier."""


def usage_status(
    world: World,
    keyspace: str | None,
    budgets: Sequence[EnforcedBudget],
    models: Iterable[str],
    shown: Usage | None,
    now: datetime,
) -> dict[str, Any] | None:
    """Return the new usage in a scope's status: the shown one, unless it is off. `keyspace` is None while the scope has
    none; `models` are those with pods that may hold its blocks."""
    concerned = tuple(models)
    shown_bytes = _bytes_shown(shown)
    held: Mapping[str, int] = _held(world, concerned).get(keyspace[:SCOPE_DIGITS], {}) if keyspace else {}
    held = {**_emptied(world, concerned, shown_bytes.keys() - held.keys()), **held}
    seen_at = shown.observed_at if shown else None
    age_s = (now - seen_at).total_seconds() if seen_at is not None else None
    gone: frozenset[str] = frozenset()
    if age_s is not None and age_s > FORGOTTEN_AFTER_S and _all_speak(world, concerned):
        gone = frozenset(shown_bytes.keys() - held.keys())
    due = age_s is None or age_s >= REPORTED_EVERY_S or _is_first(shown_bytes, held)
    if not due or not (gone or _is_off(shown, held)):
        held = {}
    known = {
        name: held.get(name, None if name in gone else shown_bytes.get(name))
        for name in {*held, *shown_bytes, *(budget.tier for budget in budgets)}
    }
    by_tier = {budget.tier: budget for budget in budgets}
    rows = [
        _row(name, known[name], by_tier.get(name))
        for name in sorted(known)[:MOST_TIERS]
        if known[name] is not None or name in by_tier
    ]
    rows = [row for row in rows if len(row) > 1]
    if not rows:
        return None
    used = [size for size in known.values() if size is not None]
    observed_at = now if held else (seen_at if used else None)
    return {
        "used": binary(sum(used)) if used else None,
        "limit": _total(budget.limit_bytes for budget in budgets),
        "guaranteed": _total(budget.guaranteed_bytes for budget in budgets),
        "observedAt": format_timestamp(observed_at) if observed_at is not None else None,
        "tiers": rows,
    }


def holders_of_news(world: World, model: str, now: datetime) -> frozenset[Key]:
    committed = world.bundles.get(model)
    if committed is None:
        return frozenset()
    shown_now, by_model = _of_model(world, model), [_of_model(world, name) for name in world.models]
    found = set()
    for keyspace, holder in _holders(world, committed.bundle):
        scope = keyspace[:SCOPE_DIGITS]
        if scope not in shown_now:
            continue
        # Status shows the highest report of all models.
        sizes = _highest(held[scope] for held in by_model if scope in held)
        shown: Usage | None = holder.status.usage if holder is not None else None
        at = shown.observed_at if shown else None
        shown_bytes = _bytes_shown(shown)
        due = at is None or (now - at).total_seconds() >= REPORTED_EVERY_S or _is_first(shown_bytes, sizes)
        if holder is not None and due and _is_off(shown, sizes):
            found.add(Key(holder.INFO.kind, world.namespace, holder.name))
    return frozenset(found)


def _holders(world: World, bundle: Bundle) -> Iterator[tuple[str, Any]]:
    """Yield each keyspace of a bundle and the object that shows its usage, None if there is none."""
    for entry in bundle.entries.values():
        match entry.scope.kind:
            case ScopeKind.TENANT:
                yield entry.keyspace, world.policies.get(world.policy_names.get(entry.policy, ""))
            case ScopeKind.GROUP:
                yield entry.keyspace, world.groups.get(entry.scope.name)
            case _:
                yield entry.keyspace, world.domain
    for name, shard in bundle.pools.items():
        # While content is replaced, status shows the version that readers have.
        for version in shard.versions[:1]:
            yield version.keyspace, world.pools.get(name)


def _held(world: World, models: Iterable[str]) -> Held:
    """Return the usage of scopes: the highest report of any pod. Pods read scopes on Redis in turns, so a report may be
    some minutes old."""
    by_scope: dict[str, list[Mapping[str, int]]] = {}
    for model in models:
        for scope, by_tier in _of_model(world, model).items():
            by_scope.setdefault(scope, []).append(by_tier)
    return {scope: _highest(words) for scope, words in by_scope.items()}


def _highest(words: Iterable[Mapping[str, int]]) -> dict[str, int]:
    highest: dict[str, int] = {}
    for by_tier in words:
        for tier, size in by_tier.items():
            highest[tier] = max(size, highest.get(tier, 0))
    return highest


def _of_model(world: World, model: str) -> Held:
    shown_bytes = tuple(rows for state in _states(world, model) for rows in (state.usage, state.tier_usage))

    tiers = frozenset(world.models[model].spec.tier_names) if model in world.models else frozenset()

    def add_up() -> Held:
        most: dict[str, dict[str, int]] = {}
        for row in chain.from_iterable(shown_bytes):
            if row.scope and row.tier in tiers:  # a pod's word is shown
                by_tier = most.setdefault(row.scope, {})
                by_tier[row.tier] = max(row.used_bytes, by_tier.get(row.tier, 0))
        return most

    return world.memo.get(ScopeUsage, model, (tiers, *shown_bytes), add_up)


def _states(world: World, model: str) -> list[PodState]:
    return [world.states[pod.uid].state for pod in world.serving_pods(model) if pod.uid in world.states]


def _emptied(world: World, models: Sequence[str], tiers: Iterable[str]) -> dict[str, int]:
    """Return 0 for per-pod tiers that complete reports do not mention."""
    own = [name for name in tiers if name in world.tiers and world.tiers[name].spec.medium in _PER_POD]
    states = list(chain.from_iterable(_states(world, model) for model in models)) if own else []
    whole = bool(states) and not any(state.usage_left_out for state in states) and _all_speak(world, models)
    return dict.fromkeys(own, 0) if whole else {}


def _all_speak(world: World, models: Iterable[str]) -> bool:
    return all(
        (answer := world.states.get(pod.uid)) is not None and answer.state.cache_boot
        for model in models
        for pod in world.serving_pods(model)
    )


def _bytes_shown(shown: Usage | None) -> dict[str, int]:
    rows = shown.tiers if shown is not None else ()
    return {row.tier: row.used.in_bytes for row in rows if row.used is not None}


def _is_first(shown_bytes: Mapping[str, int], held: Mapping[str, int]) -> bool:
    return len(shown_bytes) < MOST_TIERS and any(size > 0 and tier not in shown_bytes for tier, size in held.items())


def _is_off(shown: Usage | None, held: Mapping[str, int]) -> bool:
    """Whether usage differs enough from status; tiers without reports are unchanged, and 0 bytes are no first
    report."""
    rows = {row.tier: row for row in (shown.tiers if shown is not None else ())}
    return any(
        size > 0 if (row := rows.get(tier)) is None or row.used is None else _differ(row.used, size, row.limit)
        for tier, size in held.items()
    )


def _differ(shown: Quantity, size: int, limit: Quantity | None) -> bool:
    """Whether a size differs enough from the shown one. A new block is there for a moment beside those that go for it,
    and status does not keep showing that."""
    before = shown.in_bytes
    is_within_again = limit is not None and before > limit.in_bytes >= size
    return is_within_again or abs(size - before) * 100 > max(before, SMALLEST_BYTES) * OFF_PERCENT


def _row(tier: str, used: int | None, budget: EnforcedBudget | None) -> dict[str, Any]:
    fields = {
        "used": binary(used) if used is not None else None,
        "limit": binary(budget.limit_bytes) if budget and budget.limit_bytes is not None else None,
        "guaranteed": binary(budget.guaranteed_bytes) if budget and budget.guaranteed_bytes else None,
    }
    return {"tier": tier} | {name: value for name, value in fields.items() if value is not None}


def _total(amounts: Iterable[int | None]) -> str | None:
    known = [amount for amount in amounts if amount is not None]
    return binary(sum(known)) if known else None
