"""Enters into the index what happens in LMCache's memory: what its listener noted, and what that missed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from kvstrata_sidecar.adapter.index.scope_index import ScopeIndex
from kvstrata_sidecar.adapter.memory.arrivals import Arrivals
from kvstrata_sidecar.adapter.memory.lmcache_memory import Pool
from kvstrata_sidecar.adapter.memory.notes import Note, Notes

COMPARE_S = 60.0
"""How often the index is compared with LMCache's own tables."""

COMPARED_AT_ONCE = 2048
"""Blocks of which a turn sees whether both have them: the next event must not wait for all."""


class Intake:
    """Keeps `index` in step with `pool`; `gone` is told of every block that has left the memory, `promoted` of the
    keyspace and the bytes of every one that came from another tier to stay.

    `inherit_age` and `age_s` may be called from any thread, the rest from the governor's turns only.
    """

    def __init__(
        self,
        pool: Pool,
        index: ScopeIndex,
        notes: Notes,
        *,
        gone: Callable[[Hashable], None],
        promoted: Callable[[str, int], None],
        used: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._index = index
        self._notes = notes
        self._gone = gone
        self._promoted = promoted
        self._used = used
        self._clock = clock
        self._arrivals = Arrivals()
        self._to_compare: list[Hashable] = []
        self._compared_s = clock()

    @property
    def comparing(self) -> bool:
        """Whether a comparison has begun and not ended."""
        return bool(self._to_compare)

    def inherit_age(self, key: Hashable, age_s: float) -> None:
        """Say how long ago the tokens of a block were computed that is being loaded from another tier.

        Called before the load is answered; a block of which nothing was said counts as computed when it was written.
        """
        computed_s = self._clock() - max(0.0, age_s)
        self._arrivals.announce(key, computed_s)
        # In line with what happens: a block of this name may be leaving, and what comes next has this age.
        self._notes.add(Note.INHERITED, (key, computed_s))

    def age_s(self, key: Hashable) -> float:
        """Return how long ago a block's tokens were computed, 0 for one of which nothing is known."""
        kept = self._index.find(key)
        coming_s = self._arrivals.computed_s(key)
        # One that is being loaded again may go to another tier before its arrival has been entered.
        known = [
            moment_s for moment_s in (kept.computed_s if kept is not None else None, coming_s) if moment_s is not None
        ]
        return max(0.0, self._clock() - min(known)) if known else 0.0

    def read_notes(self, now_s: float) -> set[str]:
        """Enter what was noted; return the keyspaces in which blocks came, or may be let go."""
        changed: set[str] = set()
        index = self._index
        for what, keys in self._notes.take():
            if what is Note.INHERITED:
                self._arrivals.follow(*keys)
                continue
            if what is Note.DELETED:
                for key in keys:
                    index.remove(key)
                    self._left(key)
                continue
            if what is Note.USED:
                # As LMCache's own LRU: of a prompt's blocks the last are to go first, or the rest could not be found.
                for key in reversed(keys):
                    index.touch(key)
                    if (kept := index.find(key)) is not None:
                        self._used(now_s - kept.computed_s)
                continue
            if what is Note.ORDERED:
                for key in reversed(keys):
                    index.touch(key)
                continue
            changed.update(key.cache_salt for key in keys)
            if what in (Note.WRITTEN, Note.LOADED):
                for key in reversed(keys):
                    self._enter(key, now_s)
            if what is Note.LOADED:
                self._count_promoted(keys)
        return changed

    def compare(self, now_s: float) -> set[str]:
        """Make the index hold what LMCache holds, whatever was missed, a piece at a time; return what differed."""
        if self._notes.lost or now_s - self._compared_s >= COMPARE_S:
            self._compared_s, self._notes.lost = now_s, False
            self._to_compare = [*self._index, *(key for key, _ in self._pool.resident())]
        changed: set[str] = set()
        for key in self._to_compare[-COMPARED_AT_ONCE:]:
            known, there = self._index.find(key) is not None, self._pool.entry(key) is not None
            if known and not there:
                self._index.remove(key)
                self._left(key)
            elif there and not known:
                self._enter(key, now_s)
            if known is not there:
                changed.add(key.cache_salt)  # type: ignore[attr-defined]
        del self._to_compare[-COMPARED_AT_ONCE:]
        return changed

    def _enter(self, key: Any, now_s: float) -> None:
        computed_s = self._arrivals.enter(key, out_of_order=self.comparing)
        entry = self._pool.entry(key)
        if entry is not None:
            age_from_s = now_s if computed_s is None else computed_s
            self._index.add(key, key.cache_salt, self._pool.size(entry), age_from_s)

    def _count_promoted(self, keys: Sequence[Any]) -> None:
        for key in keys:
            entry = self._pool.entry(key)
            if entry is not None and not entry.is_temporary:
                self._promoted(key.cache_salt, self._pool.size(entry))

    def _left(self, key: Hashable) -> None:
        """Tell that a block left, unless another of its name has come since or is coming."""
        if self._pool.entry(key) is None and not self._pool.coming(key):
            self._gone(key)
