"""The most recently used blocks of a tier, which warm the memory of a starting server."""

from __future__ import annotations

from typing import NamedTuple

MAX_HOT = 65_536
"""Upper bound on the blocks that a tier reports."""


class Hot(NamedTuple):
    """`last_use` is comparable within one tier, larger is later; `age_s` is the time since computation."""

    keyspace: str
    rank: int
    group: int
    chunk_hash: bytes
    last_use: float
    age_s: float


def most_of_each(scopes: int) -> int:
    """Return how many blocks are reported per scope."""
    return max(1, MAX_HOT // max(1, scopes))
