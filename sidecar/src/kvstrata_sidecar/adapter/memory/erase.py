"""Blocks that were told to go: deleted at once where nobody uses them, and the moment they are let go where somebody
does. Counts what is gone, for as long as somebody may ask.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

MAX_TALLIES = 65_536
"""Keyspaces whose sums are kept; the oldest are forgotten first."""


class Blocks(Protocol):
    """What is asked of the memory."""

    def resident(self) -> list[tuple[Any, Any]]:
        """Return all blocks that can be read, as (key, entry)."""

    def staged(self) -> list[tuple[Any, Any]]:
        """Return all blocks that are being written."""

    def holds(self, key: Hashable, entry: Any) -> bool:
        """Whether this very entry is still there."""

    def size(self, entry: Any) -> int:
        """Return an entry's bytes."""

    def delete(self, keys: list[Hashable]) -> tuple[set[Hashable], set[Hashable]]:
        """Delete what nobody uses; return (deleted, locked)."""


@dataclass(slots=True)
class Tally:
    """What is gone of one keyspace, and by key what has to go but is in use, as (entry, bytes)."""

    gone_bytes: int = 0
    gone_blocks: int = 0
    doomed: dict[Hashable, list[tuple[Any, int]]] = field(default_factory=dict)

    def went(self, size_bytes: int) -> None:
        """Count a block that is gone."""
        self.gone_bytes += size_bytes
        self.gone_blocks += 1


class Purges:
    """Keeps at deleting what was doomed. Safe to share between threads."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._tallies: dict[str, Tally] = {}
        self._waiting: dict[str, Tally] = {}
        self._lock = threading.Lock()

    def doom(self, keyspaces: Collection[str]) -> None:
        """Everything that these keyspaces hold now has to go, also what is being written or read."""
        with self._lock:
            tallies = {keyspace: self._tally(keyspace) for keyspace in keyspaces}
            # First what is being written: a block on its way from one table to the other is seen in one or in both.
            for key, entry in [*self._blocks.staged(), *self._blocks.resident()]:
                tally = tallies.get(key.cache_salt)
                if tally is not None:
                    entries = tally.doomed.setdefault(key, [])
                    if not any(known is entry for known, _ in entries):
                        entries.append((entry, self._blocks.size(entry)))
                    self._waiting[key.cache_salt] = tally

    def watch(self, keyspaces: Iterable[str]) -> None:
        """Count from now on what goes of these keyspaces, which have left the policy."""
        with self._lock:
            for keyspace in keyspaces:
                self._tally(keyspace)

    def forget(self, keyspaces: Iterable[str]) -> None:
        """Count no more what goes of these keyspaces, which are in the policy again."""
        with self._lock:
            for keyspace in keyspaces:
                tally = self._tallies.get(keyspace)
                if tally is not None and not tally.doomed:
                    del self._tallies[keyspace]

    def delete(self, blocks: Mapping[Hashable, tuple[str, int]]) -> set[Hashable]:
        """Delete blocks, (keyspace, bytes) by key, whose keyspaces have left the policy; return what was deleted.

        What is doomed is left to `advance`, so that no block counts twice.
        """
        with self._lock:
            keys = [
                key
                for key, (keyspace, _) in blocks.items()
                if (tally := self._tallies.get(keyspace)) is None or key not in tally.doomed
            ]
            deleted, _ = self._blocks.delete(keys)
            for key in deleted:
                keyspace, size_bytes = blocks[key]
                if keyspace in self._tallies:
                    self._tallies[keyspace].went(size_bytes)
            return deleted

    def is_doomed(self, key: Any) -> bool:
        """Whether a block of this name has to go."""
        tally = self._waiting.get(key.cache_salt)
        return tally is not None and key in tally.doomed

    def advance(self) -> None:
        """Delete what can be deleted of what is doomed."""
        with self._lock:
            doomed = [(tally, key) for tally in self._waiting.values() for key in tally.doomed]
            if doomed:
                self._blocks.delete([key for _, key in doomed])
            for tally, key in doomed:
                held = []
                for entry, size_bytes in tally.doomed.pop(key):
                    if self._blocks.holds(key, entry):
                        held.append((entry, size_bytes))
                    else:
                        tally.went(size_bytes)
                if held:
                    tally.doomed[key] = held
            self._waiting = {keyspace: tally for keyspace, tally in self._waiting.items() if tally.doomed}

    def gone(self, keyspaces: Iterable[str]) -> tuple[int, int]:
        """Return how many bytes and blocks of these keyspaces together are gone."""
        with self._lock:
            tallies = [self._tallies[keyspace] for keyspace in set(keyspaces) if keyspace in self._tallies]
            return sum(tally.gone_bytes for tally in tallies), sum(tally.gone_blocks for tally in tallies)

    def _tally(self, keyspace: str) -> Tally:
        tally = self._tallies.get(keyspace)
        if tally is None:
            if len(self._tallies) >= MAX_TALLIES:
                settled = next((name for name, one in self._tallies.items() if not one.doomed), None)
                if settled is not None:
                    del self._tallies[settled]
            tally = self._tallies[keyspace] = Tally()
        return tally
