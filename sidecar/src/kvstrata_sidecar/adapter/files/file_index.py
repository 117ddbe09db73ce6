"""In-memory index of a tier's directory: its blocks, reservations, budgets and readers. Nothing here touches the disk.

A store is admitted first: victims are named to make room, and its file may be written only after theirs are gone. So at
every instant a scope's files are within its limit, and all files within the capacity. Victims are chosen as in the
server's own memory (`adapter/index.py`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

from kvstrata.contract.messages.adapter import ScopeUsage
from kvstrata.contract.policy.cache_view import CacheView
from kvstrata.contract.store.block_file import keyspace_of
from kvstrata_sidecar.adapter.files.space import LOOK_S, MARGIN_PERCENT, Policy, Reservation, Space, Spare, Victim
from kvstrata_sidecar.adapter.index import Choice, Kept, ScopeIndex, usage_rows
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.policy.limits import Bounds

MAX_TOUCHED = 65_536
"""Blocks with a use that is not recorded in their file yet."""

SLICE = 500
"""Blocks entered, moved or taken out at once: lookups wait meanwhile."""


class FileIndex:
    """The index of one directory. Thread-safe. `capacity_bytes` and `max_blocks` bound all blocks together. `clock`
    returns seconds of the clock for ages."""

    def __init__(self, policy: Policy, *, capacity_bytes: int, max_blocks: int, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self._index = ScopeIndex()
        self._space = Space(policy, self._index, capacity_bytes=capacity_bytes, max_blocks=max_blocks)
        self._leaving: dict[bytes, int] = {}
        self._stranded: set[bytes] = set()
        self._readers: Counter[Hashable] = Counter()
        self._touched: dict[bytes, None] = {}
        self._changed = threading.Condition()

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each block whether it may be read now. Counts as a use."""
        now_s = self._clock()
        with self._changed:
            # The last blocks of a prompt must be evicted first: without the first ones the rest cannot be found.
            return [self._is_present(key, now_s) for key in reversed(keys)][::-1]

    def readable(self, key: bytes) -> bool:
        """Whether a block may be read now; lock-free, and no use of it."""
        return self._readable(key, self._clock()) is not None

    def size(self, key: bytes) -> int:
        """Return a readable block's bytes, 0 for others; no use of it."""
        kept = self._readable(key, self._clock())
        return kept.size_bytes if kept is not None else 0

    def begin_read(self, key: bytes) -> Kept | None:
        """Pin a block while it is read; None if it may not be read. Followed by `end_read`."""
        with self._changed:
            kept = self._readable(key, self._clock())
            if kept is not None:
                self._readers[key] += 1
            return kept

    def end_read(self, key: bytes) -> None:
        with self._changed:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key]
                self._changed.notify_all()

    def leave(self, key: bytes) -> None:
        """Find a block no more that only later versions can read. It keeps its file and its place in the accounts."""
        with self._changed:
            if (kept := self._index.find(key)) is not None:
                kept.is_unreadable = True

    def drop(self, key: bytes) -> bool:
        """Take out an invalid block; return whether the caller must remove its file, then call `gone`."""
        with self._changed:
            return self._take_out(key) is not None

    def admit(self, key: bytes, size_bytes: int, age_s: float) -> Reservation | Refusal | None:
        """Reserve room for a block's file; None if it exists or is on its way, else the refusal. The file may be
        written once the victims are removed (`gone`) and `claim` succeeds; then call `end`."""
        keyspace, now_s = keyspace_of(key), self._clock()
        with self._changed:
            if (
                self._is_present(key, now_s)
                or ((kept := self._index.find(key)) is not None and kept.is_unreadable)
                or key in self._space.reserved
                or key in self._leaving
                or key in self._readers
            ):
                return None
            bound = self._policy.bounds.get(keyspace)
            if bound is None:
                return Refusal.UNKNOWN_KEYSPACE
            if not self._policy.alive(keyspace, now_s - age_s, now_s):
                return Refusal.RETENTION
            if bound.limit_bytes is not None and size_bytes > bound.limit_bytes:
                return Refusal.OVER_BUDGET
            reservation = Reservation(key, keyspace, size_bytes, now_s - age_s)
            self._space.reserved[key] = reservation
            choice = self._space.choose([keyspace], self._readers, now_s)
            refusal = self._space.unfit(choice, keyspace, bound)
            if refusal is not None:
                self._end(reservation)
                return refusal
            reservation.victims = self._take(choice)
            return reservation

    def claim(self, reservation: Reservation, timeout_s: float) -> bool:
        """Wait until the file fits on the disk within all bounds; return whether it does. False at once if spares of
        other sizes must be removed first."""
        space, own = self._space, {reservation.size_bytes}
        with self._changed:
            self._changed.wait_for(lambda: space.fits_on_disk(reservation) or space.spares.sizes() - own, timeout_s)
            if not space.fits_on_disk(reservation):
                return False
            reservation.writing, reservation.spare = True, space.spares.take(reservation.size_bytes)
            return True

    def end(self, reservation: Reservation, *, stored: bool) -> None:
        """Give a reservation up; if the block is `stored`, it is present from now on."""
        with self._changed:
            self._end(reservation)
            if stored:
                self._enter(reservation.key, reservation.size_bytes, reservation.computed_s)

    def found(self, blocks: Iterable[tuple[bytes, int, float]]) -> None:
        """Enter (key, bytes, moment computed) from a scan; known blocks are left unchanged."""
        with self._changed:
            for key, size_bytes, computed_s in blocks:
                if not self._knows(key):
                    self._enter(key, size_bytes, computed_s)

    def put_in_order(self, keys: Iterable[bytes]) -> None:
        with self._changed:
            for key in keys:
                self._index.touch(key)

    def gone(self, key: bytes, spare: str | None = None) -> None:
        """Record that an evicted block's file is removed, or kept under the name `spare` to be written over."""
        with self._changed:
            size_bytes = self._leaving.pop(key, None)
            if size_bytes is not None:
                self._space.leave(keyspace_of(key), -size_bytes)
                if spare is not None:
                    self._space.spares.add(Spare(spare, size_bytes, self._clock()))
                self._changed.notify_all()

    def take_spares(self, *, but_bytes: int = 0, idle_s: float = 0.0) -> list[Spare]:
        """Return spares to be removed: not of `but_bytes`, and unused for `idle_s`."""
        latest_s = self._clock() - idle_s
        with self._changed:
            return self._space.spares.take_out(lambda one: one.size_bytes != but_bytes and one.since_s <= latest_s)

    def spare_gone(self, spare: Spare, *, removed: bool = True) -> None:
        with self._changed:
            if removed:
                self._space.spares.gone(spare)
            else:
                self._space.spares.add(spare)
            self._changed.notify_all()

    def stranded(self, key: bytes) -> None:
        """Record that an evicted block's file could not be removed: it counts until it is gone."""
        with self._changed:
            if key in self._leaving:
                self._stranded.add(key)

    def take_stranded(self, count: int) -> list[bytes]:
        with self._changed:
            return [self._stranded.pop() for _ in range(min(count, len(self._stranded)))]

    def due(self, count: int) -> dict[bytes, Victim]:
        """Return blocks that must go now, of at most `count` scopes; the caller removes their files."""
        now_s = self._clock()
        with self._changed:
            due = self._policy.due(now_s, count)
            if not due and self._space.need_bytes() <= 0:
                return {}
            now_due = [one for one in due if not self._policy.is_kept_outside(one, now_s)]
            choice = self._space.choose(now_due, self._readers, now_s)
            victims = self._take(choice)
            for keyspace in due:
                again_s = now_s + LOOK_S if keyspace in choice.locked else None
                # More victims than one choice allows: lookups get the lock in between.
                again_s = now_s if choice.unfinished and victims else again_s
                self._policy.plan(keyspace, self._index.scope(keyspace), now_s, again_s=again_s)
            return victims

    def next_due_in_s(self) -> float | None:
        """Return the seconds until something is due, None if nothing is planned."""
        with self._changed:
            moment_s = self._policy.next_s()
            return None if moment_s is None else max(0.0, moment_s - self._clock())

    def follow(self, view: CacheView | None) -> None:
        with self._changed:
            self._policy.follow(view, self._index.scopes(), self._clock())
            self._changed.notify_all()

    def set_room(self, room_bytes: float) -> None:
        """Set the room of all blocks together, at most the capacity."""
        with self._changed:
            self._space.set_bytes(room_bytes)

    def empty(self) -> None:
        """Forget all blocks: their directory is gone."""
        with self._changed:
            for key in list(self._index):
                self._index.remove(key)
            self._space.empty()
            for known in (self._leaving, self._stranded, self._touched):
                known.clear()
            self._changed.notify_all()

    def condemned(self, keyspaces: Collection[str]) -> dict[bytes, int]:
        """Return bytes by block of keyspaces: present, being written or being removed."""
        with self._changed:
            found = {key: one.size_bytes for key, one in self._space.reserved.items() if one.keyspace in keyspaces}
            found |= {key: size_bytes for key, size_bytes in self._leaving.items() if keyspace_of(key) in keyspaces}
            for keyspace in keyspaces:
                if (scope := self._index.scope(keyspace)) is not None:
                    found |= {key: kept.size_bytes for key, kept in scope.blocks.items()}  # type: ignore[misc]
            return found

    def take_unused(self, keys: Iterable[bytes]) -> list[bytes]:
        """Take out those blocks that have no reader or writer; the caller removes their files."""
        with self._changed:
            return [key for key in keys if key not in self._readers and self._take_out(key)]

    def uses(self, keys: Collection[bytes]) -> tuple[int, int]:
        """Return how many of these blocks are being read, and how many written."""
        with self._changed:
            return sum(key in self._readers for key in keys), sum(key in self._space.reserved for key in keys)

    def spare_names(self) -> set[str]:
        """Return the names of spares, including those being removed or written over."""
        with self._changed:
            taken = (one.spare.name for one in self._space.reserved.values() if one.spare is not None)
            return self._space.spares.names.union(taken)

    def known(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return those blocks that may have a file, even one being removed."""
        with self._changed:
            return [key for key in keys if self._knows(key)]

    def wait(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait(timeout_s)

    @property
    def used_bytes(self) -> int:
        """Bytes on the disk, including files being removed and spares."""
        with self._changed:
            return self._space.taken_bytes

    @property
    def crowded(self) -> bool:
        """Whether the block count is near its maximum, so that each new block evicts one."""
        return len(self._index) >= self._space.max_blocks * (1 - 2 * MARGIN_PERCENT / 100)

    def usage(self, tier: str) -> list[ScopeUsage]:
        with self._changed:
            return usage_rows(self._index, self._policy.bounds, tier)

    def bounds(self, keyspace: str) -> Bounds | None:
        """Return a scope's bounds, None for one outside of the policy."""
        return self._policy.bounds.get(keyspace)

    def take_touched(self) -> list[tuple[bytes, float]]:
        """Return, once, blocks used since the last call, and when they were computed."""
        with self._changed:
            touched, self._touched = self._touched, {}
            return [(key, kept.computed_s) for key in touched if (kept := self._index.find(key)) is not None]

    def __len__(self) -> int:
        return len(self._index)

    def _readable(self, key: bytes, now_s: float) -> Kept | None:
        kept = self._index.find(key)
        if kept is None or kept.is_unreadable or not self._policy.alive(kept.keyspace, kept.computed_s, now_s):
            return None
        return kept

    def _is_present(self, key: bytes, now_s: float) -> bool:
        if self._readable(key, now_s) is None:
            return False
        self._index.touch(key)
        self._touched.pop(key, None)
        self._touched[key] = None
        if len(self._touched) > MAX_TOUCHED:
            del self._touched[next(iter(self._touched))]
        return True

    def _knows(self, key: bytes) -> bool:
        return self._index.find(key) is not None or key in self._space.reserved or key in self._leaving

    def _enter(self, key: bytes, size_bytes: int, computed_s: float) -> None:
        keyspace, now_s = keyspace_of(key), self._clock()
        self._index.add(key, keyspace, size_bytes, computed_s)
        self._policy.note(keyspace, now_s)
        scope = self._index.scope(keyspace)
        if scope is not None and scope.eldest_s() == computed_s:
            # A block that expired while it was written goes at once.
            over = not self._policy.alive(keyspace, computed_s, now_s)
            self._policy.plan(keyspace, scope, now_s, again_s=now_s if over else None)

    def _end(self, reservation: Reservation) -> None:
        del self._space.reserved[reservation.key]
        self._changed.notify_all()

    def _take(self, choice: Choice) -> dict[bytes, Victim]:
        taken = ((key, cause, self._take_out(key)) for key, cause in choice.victims.items())  # type: ignore[arg-type]
        return {key: Victim(cause, kept.size_bytes, kept.computed_s) for key, cause, kept in taken if kept is not None}  # type: ignore[misc]

    def _take_out(self, key: bytes) -> Kept | None:
        kept = self._index.remove(key)
        if kept is None:
            return None
        self._touched.pop(key, None)
        self._leaving[key] = kept.size_bytes
        self._space.leave(kept.keyspace, kept.size_bytes)
        return kept


def in_slices(keys: list[bytes]) -> Iterator[list[bytes]]:
    for start in range(0, len(keys), SLICE):
        yield keys[start : start + SLICE]
