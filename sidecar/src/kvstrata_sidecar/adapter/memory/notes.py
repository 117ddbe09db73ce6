"""What the listener was told and the governor has not read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Any

MAX_NOTES = 1_000_000
"""Events that may wait; beyond, the index is compared with LMCache's tables."""


class Note(Enum):
    """What happened."""

    WRITTEN = auto()
    LOADED = auto()
    USED = auto()
    RELEASED = auto()
    DELETED = auto()
    RESERVED = auto()
    INHERITED = auto()
    ORDERED = auto()


class Notes:
    """Events in the order in which they happened. `lost` is whether some did not fit; who made up for them resets it.

    `add` may be called from any thread and never waits.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Note, Sequence[Any]]] = deque()
        self.lost = False

    def add(self, what: Note, about: Sequence[Any]) -> None:
        """Keep an event: what happened to which keys, or of INHERITED a key and its moment."""
        if len(self._waiting) < MAX_NOTES:
            self._waiting.append((what, about))
        else:
            self.lost = True

    def take(self) -> Iterator[tuple[Note, Sequence[Any]]]:
        """Return, once, what is there now."""
        for _ in range(len(self._waiting)):
            yield self._waiting.popleft()
