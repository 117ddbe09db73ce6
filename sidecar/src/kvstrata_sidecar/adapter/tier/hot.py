"""What a tier tells of the blocks in it that were used last: with these a memory that just started is warmed."""

from __future__ import annotations

from typing import NamedTuple

MAX_HOT = 65_536
"""Blocks that a tier names at most."""


class Hot(NamedTuple):
    """A block that a tier has.

    `last_use` is comparable within one tier, the larger the later; `age_s` is how long ago its tokens were computed.
    """

    keyspace: str
    rank: int
    group: int
    chunk_hash: bytes
    last_use: float
    age_s: float


def most_of_each(scopes: int) -> int:
    """Return how many blocks are named of each of so many scopes."""
    return max(1, MAX_HOT // max(1, scopes))
