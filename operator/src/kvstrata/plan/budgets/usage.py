"""Usage of scopes on each tier, as reported by pods, and rarely updated.

Pods report every minute or so, but a status is written only when a figure differs by `OFF_PERCENT` from the last one,
or is within its limit again, and `REPORTED_EVERY_S` after it. The first report about a tier is written at once: usage
of memory is known before that of Redis and would delay it for minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from datetime import datetime
from itertools import chain
from math import inf
from typing import Any

from kvstrata.api.cachedomain import CacheDomain
from kvstrata.api.common import Budget
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import SharedReason
from kvstrata.api.scalars import Quantity, format_timestamp
from kvstrata.api.status import Usage
from kvstrata.contract.messages.adapter import ScopeUsage
from kvstrata.contract.messages.pod_state import PodState
from kvstrata.contract.policy.bundle import Bundle, EnforcedBudget
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS, ScopeKind
from kvstrata.model.refs import Key
from kvstrata.model.world import World
from kvstrata.objects.quantities import binary
from kvstrata.plan.actions import key_of

REPORTED_EVERY_S = 300.0
FORGOTTEN_AFTER_S = 3600.0
"""A figure this old is dropped if all pods report and none mentions it."""

OFF_PERCENT = 25
SMALLEST_BYTES = 1 << 16
MOST_TIERS = 64

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
    held = _of_scope([_of_model(world, model) for model in concerned], keyspace)
    held |= _emptied(world, concerned, shown_bytes.keys() - held.keys())
    age_s = _age_s(shown, now)
    gone: Set[str] = frozenset()
    if FORGOTTEN_AFTER_S < age_s < inf and _all_speak(world, concerned):
        gone = shown_bytes.keys() - held.keys()
    due = age_s >= REPORTED_EVERY_S or _is_first(shown_bytes, held)
    if not due or not (gone or _is_off(shown, held)):
        held = {}
    known = {
        name: held.get(name, None if name in gone else shown_bytes.get(name))
        for name in {*held, *shown_bytes, *(budget.tier for budget in budgets)}
    }
    by_tier = {budget.tier: budget for budget in budgets}
    rows = [_row(name, known[name], by_tier.get(name)) for name in sorted(known)[:MOST_TIERS]]
    rows = [row for row in rows if len(row) > 1]
    if not rows:
        return None
    used = [size for size in known.values() if size is not None]
    observed_at = now if held else (shown.observed_at if shown and used else None)
    return {
        "used": binary(sum(used)) if used else None,
        "limit": _total(budget.limit_bytes for budget in budgets),
        "guaranteed": _total(budget.guaranteed_bytes for budget in budgets),
        "observedAt": format_timestamp(observed_at) if observed_at is not None else None,
        "tiers": rows,
    }


def above_limit(
    world: World, keyspace: str | None, budgets: Iterable[Budget], models: Iterable[str]
) -> list[tuple[str, int, int]]:
    """Return (tier, used bytes, limit bytes) of each limit that the newest report of a serving pod exceeds. `keyspace`
    and `models` as in `usage_status`."""
    held = _of_scope([_of_model(world, model) for model in models], keyspace)
    return [
        (budget.tier, held[budget.tier], limit_bytes)
        for budget in budgets
        if (limit_bytes := budget.limit_bytes) is not None and held.get(budget.tier, 0) > limit_bytes
    ]


def holders_of_news(world: World, model: str, now: datetime) -> frozenset[Key]:
    """Return the objects whose status is off: its usage, or whether usage is above a limit."""
    committed = world.bundles.get(model)
    if committed is None:
        return frozenset()
    shown_now, by_model = _of_model(world, model), [_of_model(world, name) for name in world.models]
    found = set()
    for keyspace, holder in _holders(world, committed.bundle):
        if holder is None:
            continue
        is_news = _excess_changed(world, keyspace, holder)
        if not is_news and keyspace[:SCOPE_DIGITS] in shown_now:
            # Status shows the highest report of all models.
            sizes, shown = _of_scope(by_model, keyspace), holder.status.usage
            due = _age_s(shown, now) >= REPORTED_EVERY_S or _is_first(_bytes_shown(shown), sizes)
            is_news = due and _is_off(shown, sizes)
        if is_news:
            found.add(key_of(holder))
    return frozenset(found)


def _excess_changed(world: World, keyspace: str, holder: Any) -> bool:
    reported = holder.status.condition(ConditionType.WITHIN_BUDGET)
    is_shown = reported is not None and reported.reason == SharedReason.USED_ABOVE_LIMIT
    budgets = holder.spec.public_budgets if isinstance(holder, CacheDomain) else getattr(holder.spec, "budgets", ())
    return is_shown != bool(above_limit(world, keyspace, budgets, world.models))


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


def _of_scope(reports: Iterable[Held], keyspace: str | None) -> dict[str, int]:
    """Return the bytes of a scope by tier: the highest report of any pod. Pods read scopes on Redis in turns, so a
    report may be some minutes old."""
    scope = (keyspace or "")[:SCOPE_DIGITS]
    return highest(held[scope] for held in reports if scope in held)


def highest(sizes: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the largest size under each name."""
    found: dict[str, int] = {}
    for by_name in sizes:
        for name, size in by_name.items():
            found[name] = max(size, found.get(name, 0))
    return found


def _of_model(world: World, model: str) -> Held:
    reported = tuple(rows for state in _states(world, model) for rows in (state.usage, state.tier_usage))
    tiers = frozenset(world.models[model].tier_names) if model in world.models else frozenset()

    def add_up() -> Held:
        most: dict[str, dict[str, int]] = {}
        for row in chain.from_iterable(reported):
            if row.scope and row.tier in tiers:  # a pod's word is shown
                by_tier = most.setdefault(row.scope, {})
                by_tier[row.tier] = max(row.used_bytes, by_tier.get(row.tier, 0))
        return most

    return world.memo.get(ScopeUsage, model, (tiers, *reported), add_up)


def _states(world: World, model: str) -> list[PodState]:
    return [world.states[pod.uid].state for pod in world.serving_pods(model) if pod.uid in world.states]


def _emptied(world: World, models: Sequence[str], tiers: Iterable[str]) -> dict[str, int]:
    """Return 0 for per-pod tiers, of which a pod reports all scopes at once, if whole reports do not mention them."""
    own = [name for name in tiers if name in world.tiers and world.tiers[name].spec.per_pod]
    states = list(chain.from_iterable(_states(world, model) for model in models)) if own else []
    whole = bool(states) and not any(state.usage_left_out for state in states) and _all_speak(world, models)
    return dict.fromkeys(own, 0) if whole else {}


def _all_speak(world: World, models: Iterable[str]) -> bool:
    return all(
        (answer := world.states.get(pod.uid)) is not None and answer.state.cache_boot
        for model in models
        for pod in world.serving_pods(model)
    )


def _age_s(shown: Usage | None, now: datetime) -> float:
    at = shown.observed_at if shown is not None else None
    return (now - at).total_seconds() if at is not None else inf


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
