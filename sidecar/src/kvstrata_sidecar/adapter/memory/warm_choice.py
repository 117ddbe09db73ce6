"""Which chunks a memory that just started is warmed with. Pure.

Tiers tell when blocks were last used. A chunk is of use only with all its parts, so those that a tier has only in part
are left out. Scopes with a guarantee in memory come first, each up to its guarantee or, where the budget is less than
all guarantees, up to the same share of it; the rest goes to whoever used a chunk last.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstrata_sidecar.adapter.tier.hot import Hot


class Chunk(NamedTuple):
    """A chunk that a tier has; `last_use` as in Hot."""

    keyspace: str
    chunk_hash: bytes
    last_use: float


@dataclass(frozen=True, slots=True)
class Room:
    """What a scope may still take in memory: up to its limit (None without one), and of that what is its own."""

    left_bytes: int | None = None
    guaranteed_bytes: int = 0


def whole_chunks(hot: Iterable[Hot], needed: Collection[tuple[int, int]]) -> list[Chunk]:
    """Return the chunks of which a tier has each of the `needed` (rank, group), the hottest first.

    A chunk was last used when its part was that was not used for longest.
    """
    parts: dict[tuple[str, bytes], dict[tuple[int, int], float]] = defaultdict(dict)
    for one in hot:
        if (one.rank, one.group) in needed:
            parts[one.keyspace, one.chunk_hash][one.rank, one.group] = one.last_use
    whole = [
        Chunk(keyspace, chunk_hash, min(uses.values()))
        for (keyspace, chunk_hash), uses in parts.items()
        if len(uses) == len(needed)
    ]
    return sorted(whole, key=lambda chunk: chunk.last_use, reverse=True)


def share_out(chunks: Sequence[Chunk], chunk_bytes: int, budget_bytes: int, rooms: Mapping[str, Room]) -> list[Chunk]:
    """Return what to load of `chunks`, which are the hottest first; so is the answer.

    `chunk_bytes` is what each takes. Whoever has no room in `rooms` gets nothing. Of each scope the hottest are taken:
    once one has no room left, no colder one of it is tried.
    """
    known = [chunk for chunk in chunks if chunk.keyspace in rooms]
    promised_bytes = sum(rooms[keyspace].guaranteed_bytes for keyspace in {chunk.keyspace for chunk in known})
    share = min(1.0, budget_bytes / promised_bytes) if promised_bytes else 0.0
    taken_bytes: Counter[str] = Counter()
    taken: set[int] = set()
    left_bytes = budget_bytes

    def take(number: int, chunk: Chunk, most_bytes: float) -> bool:
        nonlocal left_bytes
        room = rooms[chunk.keyspace]
        after_bytes = taken_bytes[chunk.keyspace] + chunk_bytes
        fits = room.left_bytes is None or after_bytes <= room.left_bytes
        if not fits or after_bytes > most_bytes or chunk_bytes > left_bytes:
            return False
        taken_bytes[chunk.keyspace] = after_bytes
        left_bytes -= chunk_bytes
        taken.add(number)
        return True

    for number, chunk in enumerate(known):
        take(number, chunk, rooms[chunk.keyspace].guaranteed_bytes * share)
    full: set[str] = set()
    for number, chunk in enumerate(known):
        if left_bytes < chunk_bytes:
            break
        if number not in taken and chunk.keyspace not in full and not take(number, chunk, float("inf")):
            full.add(chunk.keyspace)
    return [known[number] for number in sorted(taken)]


def batches(chunks: Sequence[Chunk], chunk_bytes: int, batch_bytes: int) -> list[Sequence[Chunk]]:
    """Divide chunks, in their order, into batches of at most `batch_bytes`, but of one chunk at least."""
    size = max(1, batch_bytes // chunk_bytes)
    return [chunks[start : start + size] for start in range(0, len(chunks), size)]
