"""Usage of scopes in a tier, as reported to the gate."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstrata.contract.messages.adapter import ScopeUsage
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata_sidecar.adapter.redis.client.commands import Bounds


def usage_rows(
    tier: str, held: Iterable[tuple[str, int, int]], bounds_of: Callable[[str], Bounds | None]
) -> list[ScopeUsage]:
    """Return a row for each (keyspace, bytes, blocks) in `held`."""
    rows = []
    for keyspace, used_bytes, blocks in held:
        bounds = bounds_of(keyspace)
        limit_bytes, guaranteed_bytes = (bounds.limit_bytes, bounds.guaranteed_bytes) if bounds else (None, 0)
        rows.append(
            ScopeUsage(keyspace[:SCOPE_DIGITS], tier, used_bytes, blocks, limit_bytes, guaranteed_bytes or None)
        )
    return rows
