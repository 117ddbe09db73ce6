"""Space of one directory: what its blocks take, what those to come will take, and which have to go for them.

Some of what is on the disk is no block any more: files that are being removed, and spares. It counts until it is gone.
Not safe to share between threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstrata_sidecar.adapter.files.bounds_in_force import Policy
from kvstrata_sidecar.adapter.index.bounds import Bounds
from kvstrata_sidecar.adapter.index.scope_index import ScopeIndex
from kvstrata_sidecar.adapter.index.victims import Cause, Choice, Situation, choose
from kvstrata_sidecar.adapter.policy.enforcement import Refusal

MARGIN_PERCENT = 1
"""How much more room is made than a block needs, so that not every store to a full tier has to choose."""

MARGIN_BLOCKS = 128
"""In how many blocks of the usual size, at most: lookups wait while they are chosen."""

MOST_AT_ONCE = 512
"""Blocks that are chosen at once, however many have to go."""

SPARE_S = 1.0
"""For how long at least a spare waits to be written over. The housekeeper removes it at its next turn."""


class Spare(NamedTuple):
    """A file's name, its size, and when it became a spare."""

    name: str
    size_bytes: int
    since_s: float


class Spares:
    """Files whose blocks had to make room, kept for a moment to be written over, and what they take.

    A file that is written over needs no space to be found, and none to be given back: a disk takes blocks into such
    files twice as fast as into new ones. Whose block a spare held is of no account any more; it counts against the
    capacity.
    """

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


class Space:
    """Counts for the blocks of `index`, under `policy`.

    Attributes:
        used_bytes: what all blocks take.
        reserved: blocks that come, by key.
        staged: what these will take.
        written: what those of them take that are being written.
        left: what files take that are being removed.
        spares: files to be written over.
    """

    def __init__(self, policy: Policy, index: ScopeIndex, *, capacity_bytes: int, max_blocks: int) -> None:
        self._policy = policy
        self._index = index
        self._capacity_bytes = capacity_bytes
        self._max_blocks = max_blocks
        self._room_bytes = float(capacity_bytes)
        self.used_bytes = 0
        self.reserved: dict[bytes, Reservation] = {}
        self.staged = Tally()
        self.written = Tally()
        self.left = Tally()
        self.spares = Spares()
        policy.set_room(self._room_bytes)

    @property
    def taken_bytes(self) -> int:
        """What blocks take on the disk, those included that are being removed, and spares."""
        return self.used_bytes + self.left.all_bytes + self.spares.all_bytes

    @property
    def crowded(self) -> bool:
        """Whether about as many blocks are there as may be, so that room is made for each that comes."""
        return len(self._index) >= self._max_blocks * (1 - 2 * MARGIN_PERCENT / 100)

    @property
    def spare_names(self) -> set[str]:
        """The names of spares, of those too that are being written over."""
        return self.spares.names.union(one.spare.name for one in self.reserved.values() if one.spare is not None)

    def set_bytes(self, room_bytes: float) -> None:
        """Let all blocks together take this much, however large the capacity."""
        self._room_bytes = max(0.0, min(float(self._capacity_bytes), room_bytes))
        self._policy.set_room(self._room_bytes)

    def empty(self) -> None:
        """Learn that nothing is on the disk any more."""
        self.used_bytes, self.left, self.spares = 0, Tally(), Spares()

    def reserve(self, reservation: Reservation) -> None:
        """Count a block that comes."""
        self.reserved[reservation.key] = reservation
        self.staged.add(reservation.keyspace, reservation.size_bytes)

    def begin_write(self, reservation: Reservation) -> None:
        """Count a block that is being written, over a spare if there is one of its size."""
        reservation.writing = True
        reservation.spare = self.spares.take(reservation.size_bytes)
        self.written.add(reservation.keyspace, reservation.size_bytes)

    def end(self, reservation: Reservation) -> None:
        """Count a block no more among those that come."""
        del self.reserved[reservation.key]
        self.staged.add(reservation.keyspace, -reservation.size_bytes)
        if reservation.writing:
            self.written.add(reservation.keyspace, -reservation.size_bytes)

    def need_bytes(self) -> float:
        """Return how much is above the room with what is about to be written."""
        need_bytes = self.used_bytes + self.staged.all_bytes - self._room_bytes
        crowd = len(self._index) + len(self.reserved) - self._max_blocks
        return max(need_bytes, 1.0) if crowd > 0 else need_bytes

    def choose(self, keyspaces: list[str], readers: Container[Hashable], now_s: float) -> Choice:
        """Choose what has to go of these keyspaces, and of all for want of room; `readers` has the blocks in use."""
        need_bytes = self.need_bytes()
        if need_bytes > 0:
            share_bytes = min(self.used_bytes, self._room_bytes) * MARGIN_PERCENT / 100
            need_bytes += min(share_bytes, MARGIN_BLOCKS * self.used_bytes / max(1, len(self._index)))
            # First whoever is in no policy.
            freed_bytes = 0
            for keyspace, scope in self._index.scopes():
                if freed_bytes < need_bytes and keyspace not in self._policy.bounds and keyspace not in keyspaces:
                    keyspaces = [*keyspaces, keyspace]
                    freed_bytes += scope.used_bytes
        bounds, guarantees, staged = self._policy.bounds, self._policy.guarantees, self.staged.by_keyspace
        locked = readers.__contains__
        situation = Situation(bounds, guarantees, staged, locked, now_s, need_bytes, most=MOST_AT_ONCE)
        return choose(self._index, situation, keyspaces)

    def unfit(self, choice: Choice, keyspace: str, bound: Bounds) -> Refusal | None:
        """Return why what was reserved last does not fit even when all that was chosen is gone."""
        own = [kept for key in choice.victims if (kept := self._index.find(key)) and kept.keyspace == keyspace]
        scope = self._index.scope(keyspace)
        held_bytes = (scope.used_bytes if scope else 0) - sum(kept.size_bytes for kept in own)
        if bound.limit_bytes is not None and held_bytes + self.staged.by_keyspace[keyspace] > bound.limit_bytes:
            return Refusal.OVER_BUDGET
        left_bytes = self.used_bytes - choice.victim_bytes + self.staged.all_bytes
        left_blocks = len(self._index) - len(choice.victims) + len(self.reserved)
        return Refusal.TIER_FULL if left_bytes > self._room_bytes or left_blocks > self._max_blocks else None

    def fits_on_disk(self, reservation: Reservation) -> bool:
        """Whether its file may be written now: all bounds hold with it and with what has yet to be removed."""
        keyspace, size_bytes = reservation.keyspace, reservation.size_bytes
        more_bytes = 0 if self.spares.has(size_bytes) else size_bytes
        if self.taken_bytes + self.written.all_bytes + more_bytes > self._capacity_bytes:
            return False
        bound = self._policy.bounds.get(keyspace)
        if bound is None or bound.limit_bytes is None:
            return True
        scope = self._index.scope(keyspace)
        own_bytes = (scope.used_bytes if scope else 0) + self.left.by_keyspace[keyspace]
        return own_bytes + self.written.by_keyspace[keyspace] + size_bytes <= bound.limit_bytes
