"""Which blocks will have to go next, so that what no slower tier has of them can be copied before. Pure.

The next to make room are named by `choose` itself, which is asked for more than there is need for; those whose time in
memory ends soon by a shorter retention.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

from kvstrata_sidecar.adapter.index.bounds import Bounds
from kvstrata_sidecar.adapter.index.scope_index import Book
from kvstrata_sidecar.adapter.index.victims import Cause, Situation, choose

NEAR_SHARE = 0.05
"""How close to its mark, or to its limit, a memory or scope is that will soon evict, and how far it is looked ahead."""

AHEAD_BYTES = 64 << 20
"""How far it is looked ahead at least; but through half of a scope at most."""

SOON_S = 10.0
"""How long before its retention in memory ends a block is looked at."""

MOST = 2048
"""Blocks that are named at once for want of room, and as many for other reasons: naming them takes time."""


class Fill(NamedTuple):
    """How full the memory is: bytes in use, up to its mark, in all."""

    used_bytes: int
    room_bytes: float
    total_bytes: int


def next_victims(
    book: Book,
    bounds: Mapping[str, Bounds],
    guarantees: Mapping[str, float],
    fill: Fill,
    leaving: Mapping[str, int],
    spared: Callable[[Hashable], bool],
    now_s: float,
) -> dict[Hashable, Cause]:
    """Return the blocks that go next, the first of each cause first.

    `leaving` are the bytes, by keyspace, of blocks that are being copied already; `spared` tells them and whatever else
    is in use.
    """
    tight = {
        keyspace: bound
        for keyspace, scope in book.scopes()
        if keyspace in bounds
        and (bound := _tightened(bounds[keyspace], scope.used_bytes, scope.eldest_s(), leaving.get(keyspace, 0), now_s))
    }
    named: dict[Hashable, Cause] = {}
    if tight:
        named |= choose(book, Situation(tight, {}, {}, spared, now_s, 0.0, most=MOST), tight).victims
    if fill.used_bytes > fill.room_bytes - NEAR_SHARE * fill.total_bytes:
        ahead_bytes = max(AHEAD_BYTES, NEAR_SHARE * fill.total_bytes) - sum(leaving.values())
        need_bytes = max(0.0, fill.used_bytes - fill.room_bytes) + ahead_bytes
        room = choose(book, Situation(bounds, guarantees, {}, spared, now_s, need_bytes, most=MOST), ())
        named |= {key: cause for key, cause in room.victims.items() if key not in named}
    return named


def _tightened(
    bound: Bounds, used_bytes: int, eldest_s: float | None, leaving_bytes: int, now_s: float
) -> Bounds | None:
    """Return bounds under which a scope's next victims would have to go now, None if none is near."""
    limit_bytes = retention_s = None
    # What may keep nothing at all is taken up for the slower tiers as it comes.
    if bound.limit_bytes and used_bytes > (1 - NEAR_SHARE) * bound.limit_bytes:
        most_bytes = max(1, bound.limit_bytes // 2)
        ahead_bytes = min(most_bytes, max(AHEAD_BYTES, int(NEAR_SHARE * bound.limit_bytes))) - leaving_bytes
        limit_bytes = used_bytes - ahead_bytes if ahead_bytes > 0 else None
    if bound.retention_s is not None and eldest_s is not None and eldest_s + bound.retention_s - SOON_S <= now_s:
        retention_s = max(0, bound.retention_s - int(SOON_S))
    return None if limit_bytes is None and retention_s is None else Bounds(limit_bytes, 0, retention_s)
