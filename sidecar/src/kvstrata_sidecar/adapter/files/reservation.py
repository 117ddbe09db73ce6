"""Room that was given to a block, and what had to go for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstrata_sidecar.adapter.index.victims import Cause

from .spares import Spare


class Victim(NamedTuple):
    """A block whose file has to be removed: why, how much that frees, and when its tokens were computed."""

    cause: Cause
    size_bytes: int
    computed_s: float


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for a block that is about to be written. `victims` are to be removed first, by whoever holds this.

    `spare` is the file to write it over, None for a new one.
    """

    key: bytes
    keyspace: str
    size_bytes: int
    computed_s: float
    victims: dict[bytes, Victim] = field(default_factory=dict)
    writing: bool = False
    spare: Spare | None = None


class Tally:
    """Bytes in all and by keyspace."""

    def __init__(self) -> None:
        self.all_bytes = 0
        self.by_keyspace: Counter[str] = Counter()

    def add(self, keyspace: str, size_bytes: int) -> None:
        """Count a block, or one less if its size is negative."""
        self.all_bytes += size_bytes
        self.by_keyspace[keyspace] += size_bytes
        if not self.by_keyspace[keyspace]:
            del self.by_keyspace[keyspace]
