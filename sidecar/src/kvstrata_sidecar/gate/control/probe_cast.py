"""Roles in an isolation probe: a scope that stores, and others that must not find it. Pure; randomness is passed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from kvstrata.contract.policy.bundle import Bundle
from kvstrata.contract.policy.keyspace import Scope


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader that must not find the chunk: a scope by one of its tenants, or a pool, which sends no requests."""

    scope: str
    tenant: str | None = None
    keyspace: str = ""


@dataclass(frozen=True, slots=True)
class Cast:
    """`writer` stores; `second`, of the same scope, must find it. `clashes`: the first reader has its keyspace."""

    scopes: int
    scope: str
    writer: str
    second: str
    readers: tuple[Reader, ...]
    clashes: bool = False


def cast(bundle: Bundle, readers: int, below: Callable[[int], int]) -> Cast | None:
    """Return a cast with at most `readers` tenants' scopes, None if no scope reuses anything.

    `below` returns a random number below its argument. Two scopes with one keyspace are always chosen; otherwise scopes
    are drawn uniformly, and the one with the lowest cost writes. Pools that the writer may read are left out.
    """
    tenants: dict[Scope, list[str]] = {}
    owners: dict[str, Scope] = {}
    clash: tuple[Scope, Scope] | None = None
    if bundle.root.rules.reuse == "Disabled":
        return None
    for entry in bundle.entries.values():
        if entry.suspended:
            continue
        tenants.setdefault(entry.scope, []).append(entry.tenant)
        if (owner := owners.setdefault(entry.keyspace, entry.scope)) != entry.scope:
            clash = owner, entry.scope
    if not tenants:
        return None
    scopes = list(tenants)
    drawn = _drawn(scopes, readers + 1, below)
    if clash is not None:
        drawn = [*clash, *(scope for scope in drawn if scope not in clash)][: max(2, readers + 1)]
    own = min(drawn[: 2 if clash else None], key=lambda scope: _cost(bundle, tenants[scope]))
    others = [scope for scope in drawn if scope is not own]
    writer = tenants[own][below(len(tenants[own]))]
    members = [tenant for tenant in tenants[own] if tenant != writer] or [writer]
    beyond = [shard for name, shard in bundle.pools.items() if name not in bundle.entries[writer].pools]
    kept = islice(((shard.pool, version.keyspace) for shard in beyond for version in shard.versions), 2)
    pools = (Reader(f"Pool/{name}", keyspace=keyspace) for name, keyspace in kept)
    looking = [Reader(str(scope), tenants[scope][below(len(tenants[scope]))]) for scope in others]
    second = members[below(len(members))]
    return Cast(len(scopes), str(own), writer, second, (*looking, *pools), clash is not None)


def _drawn(scopes: list[Scope], most: int, below: Callable[[int], int]) -> list[Scope]:
    """Return different scopes in random order, without shuffling all."""
    left = list(scopes)
    count = min(most, len(left))
    for at in range(count):
        other = at + below(len(left) - at)
        left[at], left[other] = left[other], left[at]
    return left[:count]


def _cost(bundle: Bundle, tenants: list[str]) -> tuple[int, float]:
    """Return the cost of a scope as the writer: the number of tiers it is denied, where nothing would be shown, then
    the tightness of its tightest limit, because the chunk may evict one of its blocks."""
    budgets = [budget for tenant in tenants for budget in bundle.entries[tenant].budgets]
    limits = [budget.limit_bytes for budget in budgets if budget.limit_bytes]
    return sum(budget.limit_bytes == 0 for budget in budgets), 1 / min(limits) if limits else 0.0
