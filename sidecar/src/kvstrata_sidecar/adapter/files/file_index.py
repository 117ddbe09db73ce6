"""What is in a tier's directory, and what may come: the index, its budgets, and who uses which block now.

All of it is in memory and nothing here touches the disk. Whoever stores is admitted first: room is made for the block
by naming others that have to go, and only when their files are gone may its own be written. So what is on the disk of a
scope is within its limit, and all together within the capacity, at every instant. Which blocks make room is chosen as
in the server's own memory (`adapter/index/victims.py`).
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable

from kvstrata.contract.policy.cache_view import CacheView
from kvstrata.contract.store.block_file import keyspace_of
from kvstrata_sidecar.adapter.files.bounds_in_force import LOOK_S, Policy
from kvstrata_sidecar.adapter.files.space import Reservation, Space, Spare, Victim
from kvstrata_sidecar.adapter.index.bounds import Bounds
from kvstrata_sidecar.adapter.index.scope_index import Kept, ScopeIndex
from kvstrata_sidecar.adapter.index.victims import Choice
from kvstrata_sidecar.adapter.policy.enforcement import Refusal

MAX_TOUCHED = 65_536
"""Blocks that were used and whose files do not tell yet."""


class FileIndex:
    """The index of one directory. Safe to share between threads.

    `capacity_bytes` is what all blocks together may take on the disk, `max_blocks` how many there may be. `clock`
    returns seconds of the clock on which ages are counted.
    """

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

    # What is there.

    def present(self, keys: Iterable[bytes], unused: Collection[bytes] = ()) -> list[bool]:
        """Return of each block whether it may be read now. Being asked for is a use of it, but of `unused`."""
        now_s, unused, asked = self._clock(), frozenset(unused), list(keys)
        with self._changed:
            # Of a prompt's blocks the last are to go first, or the rest could not be found.
            found = [
                self._readable(key, now_s) is not None if key in unused else self._is_present(key, now_s)
                for key in reversed(asked)
            ]
        return found[::-1]

    def readable(self, key: bytes) -> bool:
        """Whether a block may be read now; asking is no use of it, and waits for nobody."""
        return self._readable(key, self._clock()) is not None

    def size(self, key: bytes) -> int:
        """Return how many bytes a block takes that may be read now, 0 for others; asking is no use of it."""
        kept = self._readable(key, self._clock())
        return kept.size_bytes if kept is not None else 0

    def hottest(self, keyspace: str, most: int) -> list[tuple[bytes, int, float]]:
        """Return the blocks of a scope that were used last and may be read, as (key, use, age in seconds), where a
        later use has a larger number; asking is no use of them, and waits for nobody.
        """
        scope, now_s = self._index.scope(keyspace), self._clock()
        kept = list(scope.blocks.items()) if scope is not None else []
        there = ((key, one) for key, one in kept if self._policy.alive(keyspace, one.computed_s, now_s))
        last = heapq.nlargest(most, there, key=lambda found: found[1].used)
        return [(key, one.used, max(0.0, now_s - one.computed_s)) for key, one in last]  # type: ignore[misc]

    def begin_read(self, key: bytes) -> Kept | None:
        """Keep a block from making room while it is read; None if it may not be read. `end_read` has to follow."""
        with self._changed:
            kept = self._readable(key, self._clock())
            if kept is not None:
                self._readers[key] += 1
            return kept

    def end_read(self, key: bytes) -> None:
        """Let a block go that was read."""
        with self._changed:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key]
                self._changed.notify_all()

    def drop(self, key: bytes) -> bool:
        """Take out a block that turned out to be none; whether its file is to be removed, and `gone` told then."""
        with self._changed:
            return self._take_out(key) is not None

    # What comes.

    def admit(self, key: bytes, size_bytes: int, age_s: float) -> Reservation | Refusal | None:
        """Reserve room for a block's file; None for one that is there or on its way, or why there is no room.

        The file may be written once the victims are removed, `gone` was told of them, and `claim` says so; `commit` or
        `cancel` has to follow.
        """
        keyspace, now_s = keyspace_of(key), self._clock()
        with self._changed:
            if (
                self._is_present(key, now_s)
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
            self._space.reserve(reservation)
            choice = self._space.choose([keyspace], self._readers, now_s)
            refusal = self._space.unfit(choice, keyspace, bound)
            if refusal is not None:
                self._end(reservation)
                return refusal
            reservation.victims = self._take(choice)
            return reservation

    def claim(self, reservation: Reservation, timeout_s: float) -> bool:
        """Wait until the disk has room for the file within all bounds; whether that came true in time.

        It is False at once if there are spares of other sizes, which have to be removed first.
        """
        room, size_bytes, spares = self._space, reservation.size_bytes, self._space.spares
        with self._changed:
            self._changed.wait_for(lambda: room.fits_on_disk(reservation) or spares.has_other(size_bytes), timeout_s)
            if not room.fits_on_disk(reservation):
                return False
            room.begin_write(reservation)
            return True

    def commit(self, reservation: Reservation) -> None:
        """Enter a block whose file is there now."""
        with self._changed:
            self._end(reservation)
            self._enter(reservation.key, reservation.size_bytes, reservation.computed_s)

    def cancel(self, reservation: Reservation) -> None:
        """Give the room back: nothing was written, or it was removed again."""
        with self._changed:
            self._end(reservation)

    def found(self, blocks: Iterable[tuple[bytes, int, float]]) -> None:
        """Enter blocks, as (key, bytes, moment computed), that a scan found; those that are known are left alone."""
        with self._changed:
            for key, size_bytes, computed_s in blocks:
                if not self._knows(key):
                    self._enter(key, size_bytes, computed_s)

    def put_in_order(self, keys: Iterable[bytes]) -> None:
        """Let the order of eviction follow that of `keys`, the one used last at the end."""
        with self._changed:
            for key in keys:
                self._index.touch(key)

    # What goes.

    def gone(self, key: bytes) -> None:
        """Learn that the file of a block that had to go is removed."""
        with self._changed:
            size_bytes = self._leaving.pop(key, None)
            if size_bytes is not None:
                self._space.left.add(keyspace_of(key), -size_bytes)
                self._changed.notify_all()

    def spared(self, key: bytes, name: str) -> None:
        """Learn that the file of a block that had to go is kept under another name, to be written over."""
        with self._changed:
            size_bytes = self._leaving.pop(key, None)
            if size_bytes is not None:
                self._space.left.add(keyspace_of(key), -size_bytes)
                self._space.spares.add(Spare(name, size_bytes, self._clock()))
                self._changed.notify_all()

    def take_spares(self, *, but_bytes: int = 0, idle_s: float = 0.0) -> list[Spare]:
        """Return spares that are not of `but_bytes` and that nobody wrote over for `idle_s`: they are to be removed."""
        latest_s = self._clock() - idle_s
        with self._changed:
            return self._space.spares.take_out(lambda one: one.size_bytes != but_bytes and one.since_s <= latest_s)

    def spare_gone(self, spare: Spare, *, removed: bool = True) -> None:
        """Learn that a spare is removed, or that it could not be."""
        with self._changed:
            if removed:
                self._space.spares.gone(spare)
            else:
                self._space.spares.add(spare)
            self._changed.notify_all()

    def stranded(self, key: bytes) -> None:
        """Learn that the file of a block that had to go could not be removed: it counts until it is gone."""
        with self._changed:
            if key in self._leaving:
                self._stranded.add(key)

    def take_stranded(self, count: int) -> list[bytes]:
        """Return some blocks whose files have yet to be removed, for another attempt."""
        with self._changed:
            return [self._stranded.pop() for _ in range(min(count, len(self._stranded)))]

    def due(self, count: int) -> dict[bytes, Victim]:
        """Return what the policy says has to go now, of `count` scopes at a time; the files are to be removed."""
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
                # More than may be chosen at once: lookups come in between.
                again_s = now_s if choice.unfinished and victims else again_s
                self._policy.plan(keyspace, self._index.scope(keyspace), now_s, again_s=again_s)
            return victims

    def next_due_in_s(self) -> float | None:
        """Return in how many seconds something is due, None if nothing ever is as things are."""
        with self._changed:
            moment_s = self._policy.next_s()
            return None if moment_s is None else max(0.0, moment_s - self._clock())

    def follow(self, view: CacheView | None) -> None:
        """Put another view's bounds in force."""
        with self._changed:
            self._policy.follow(view, self._index.scopes(), self._clock())
            self._changed.notify_all()

    def set_room(self, room_bytes: float) -> None:
        """Let all blocks together take this much, however large the capacity."""
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
        """Return the blocks of keyspaces, with their bytes, that are there, being written or on their way out."""
        with self._changed:
            found = {key: one.size_bytes for key, one in self._space.reserved.items() if one.keyspace in keyspaces}
            found |= {key: size_bytes for key, size_bytes in self._leaving.items() if keyspace_of(key) in keyspaces}
            for keyspace in keyspaces:
                if (scope := self._index.scope(keyspace)) is not None:
                    found |= {key: kept.size_bytes for key, kept in scope.blocks.items()}  # type: ignore[misc]
            return found

    def take_unused(self, keys: Iterable[bytes]) -> list[bytes]:
        """Take out those of these blocks that nobody reads or writes now; their files are to be removed."""
        with self._changed:
            return [key for key in keys if key not in self._readers and self._take_out(key)]

    def uses(self, keys: Collection[bytes]) -> tuple[int, int]:
        """Return how many of these blocks are being read, and how many written."""
        with self._changed:
            return sum(key in self._readers for key in keys), sum(key in self._space.reserved for key in keys)

    def spare_names(self) -> set[str]:
        """Return the names of spares, of those too that are being removed or written over."""
        with self._changed:
            return self._space.spare_names

    def known(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return those of these blocks of which a file may rightly be there, or be being removed."""
        with self._changed:
            return [key for key in keys if self._knows(key)]

    def wait(self, timeout_s: float) -> None:
        """Wait until something was let go."""
        with self._changed:
            self._changed.wait(timeout_s)

    # What it all comes to.

    @property
    def used_bytes(self) -> int:
        """What blocks take on the disk, those included that are being removed, and spares."""
        return self._space.taken_bytes

    @property
    def crowded(self) -> bool:
        """Whether about as many blocks are there as may be, so that room is made for each that comes."""
        return self._space.crowded

    def usage(self) -> list[tuple[str, int, int]]:
        """Return what scopes hold, as (keyspace, bytes, blocks); those of no policy together under an empty name."""
        with self._changed:
            rows, outside_bytes, outside_blocks = list[tuple[str, int, int]](), 0, 0
            for keyspace, scope in self._index.scopes():
                if keyspace in self._policy.bounds:
                    rows.append((keyspace, scope.used_bytes, len(scope.blocks)))
                else:
                    outside_bytes, outside_blocks = outside_bytes + scope.used_bytes, outside_blocks + len(scope.blocks)
            return [*rows, ("", outside_bytes, outside_blocks)] if outside_blocks else rows

    def bounds(self, keyspace: str) -> Bounds | None:
        """Return a scope's bounds in the policy in force, None for one outside of it."""
        return self._policy.bounds.get(keyspace)

    def take_touched(self) -> list[tuple[bytes, float]]:
        """Return, once, the blocks that were used since the last call, and when they were computed."""
        with self._changed:
            touched, self._touched = self._touched, {}
            return [(key, kept.computed_s) for key in touched if (kept := self._index.find(key)) is not None]

    def __len__(self) -> int:
        return len(self._index)

    def _readable(self, key: bytes, now_s: float) -> Kept | None:
        kept = self._index.find(key)
        return kept if kept is not None and self._policy.alive(kept.keyspace, kept.computed_s, now_s) else None

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
        self._space.used_bytes += size_bytes
        self._policy.note(keyspace, now_s)
        scope = self._index.scope(keyspace)
        if scope is not None and scope.eldest_s() == computed_s:
            # What became too old while it was written goes at once.
            over = not self._policy.alive(keyspace, computed_s, now_s)
            self._policy.plan(keyspace, scope, now_s, again_s=now_s if over else None)

    def _end(self, reservation: Reservation) -> None:
        self._space.end(reservation)
        self._changed.notify_all()

    def _take(self, choice: Choice) -> dict[bytes, Victim]:
        taken = ((key, cause, self._take_out(key)) for key, cause in choice.victims.items())  # type: ignore[arg-type]
        return {key: Victim(cause, kept.size_bytes, kept.computed_s) for key, cause, kept in taken if kept is not None}  # type: ignore[misc]

    def _take_out(self, key: bytes) -> Kept | None:
        kept = self._index.remove(key)
        if kept is None:
            return None
        self._space.used_bytes -= kept.size_bytes
        self._touched.pop(key, None)
        self._leaving[key] = kept.size_bytes
        self._space.left.add(kept.keyspace, kept.size_bytes)
        return kept
