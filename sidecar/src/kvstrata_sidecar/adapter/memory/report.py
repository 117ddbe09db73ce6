"""Scopes' use of the memory, as reported to the gate."""

from __future__ import annotations

from collections.abc import Mapping

from kvstrata.contract.messages.adapter import MAX_USAGE_ROWS, ScopeUsage
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata_sidecar.adapter.index.scope_index import ScopeIndex
from kvstrata_sidecar.adapter.memory.lmcache_memory import Pool
from kvstrata_sidecar.adapter.policy.limits import Bounds
from kvstrata_sidecar.adapter.tier.counts import Counters


def by_scope(counters: Counters) -> dict[tuple[str, str], int]:
    return {(scope, name): count for scope, own in counters.by_scope().items() for name, count in own.items()}


def drift_bytes(pool: Pool, index: ScopeIndex) -> int:
    """Return LMCache's bytes in use beyond the counted and staged blocks; negative if less."""
    counted = sum(scope.used_bytes for _, scope in index.scopes())
    return pool.usage()[0] - counted - sum(pool.staged_bytes().values())


def usage_rows(index: ScopeIndex, bounds: Mapping[str, Bounds], tier: str) -> tuple[tuple[ScopeUsage, ...], int]:
    rows: list[ScopeUsage] = []
    unknown_bytes = unknown_blocks = 0
    for keyspace, scope in index.scopes():
        bound = bounds.get(keyspace)
        if bound is None:
            unknown_bytes += scope.used_bytes
            unknown_blocks += len(scope.blocks)
            continue
        name, guaranteed_bytes = keyspace[:SCOPE_DIGITS], bound.guaranteed_bytes or None
        row = ScopeUsage(name, tier, scope.used_bytes, len(scope.blocks), bound.limit_bytes, guaranteed_bytes)
        rows.append(row)
    if unknown_blocks:
        rows.append(ScopeUsage("", tier, unknown_bytes, unknown_blocks, limit_bytes=0))
    rows.sort(key=lambda row: -row.used_bytes)
    return tuple(rows[:MAX_USAGE_ROWS]), max(0, len(rows) - MAX_USAGE_ROWS)
