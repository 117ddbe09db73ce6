"""Files whose blocks had to make room, kept for a moment to be written over.

A file that is written over needs no space to be found, and none to be given back: a disk takes blocks into such files
twice as fast as into new ones. Whose block a spare held is of no account any more; it counts against the capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

SPARES = "."
"""Stands for a keyspace where a spare is meant: spares are beside the directories of keyspaces, where a start finds
them and removes them."""

SPARE_S = 1.0
"""For how long at least a spare waits to be written over. The keeper removes it at its next turn."""


class Spare(NamedTuple):
    """A file's name, its size, and when it became a spare."""

    name: str
    size_bytes: int
    since_s: float


class Spares:
    """The spares of one directory, and what they take. Not safe to share between threads."""

    def __init__(self) -> None:
        self.all_bytes = 0
        self._waiting: dict[str, Spare] = {}
        self._leaving: set[str] = set()

    @property
    def names(self) -> set[str]:
        """The names of those that wait or are being removed."""
        return self._leaving.union(self._waiting)

    def add(self, spare: Spare) -> None:
        """Keep a file, be it anew or because it could not be removed."""
        if spare.name in self._leaving:
            self._leaving.remove(spare.name)
        else:
            self.all_bytes += spare.size_bytes
        self._waiting[spare.name] = spare

    def take(self, size_bytes: int) -> Spare | None:
        """Return the eldest of this size, to be written over: it is on the account of whoever does that."""
        for spare in self._waiting.values():
            if spare.size_bytes == size_bytes:
                del self._waiting[spare.name]
                self.all_bytes -= size_bytes
                return spare
        return None

    def has(self, size_bytes: int) -> bool:
        """Whether one of this size waits."""
        return any(spare.size_bytes == size_bytes for spare in self._waiting.values())

    def has_other(self, size_bytes: int) -> bool:
        """Whether one of another size waits."""
        return any(spare.size_bytes != size_bytes for spare in self._waiting.values())

    def take_out(self, which: Callable[[Spare], bool]) -> list[Spare]:
        """Return those that `which` picks, to be removed; they count until `gone` or `add` is told of each."""
        taken = [spare for spare in self._waiting.values() if which(spare)]
        for spare in taken:
            del self._waiting[spare.name]
            self._leaving.add(spare.name)
        return taken

    def gone(self, spare: Spare) -> None:
        """Learn that one is removed."""
        if spare.name in self._leaving:
            self._leaving.remove(spare.name)
            self.all_bytes -= spare.size_bytes
