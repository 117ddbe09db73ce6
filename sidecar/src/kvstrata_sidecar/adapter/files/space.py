"""Space of one directory: bounds of its scopes under the policy in force, bytes of its blocks and reservations, and the
victims for them.

Files being removed and spares count until they are gone. Not thread-safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvstrata.contract.policy.cache_view import CacheView
from kvstrata_sidecar.adapter.index import Cause, Choice, Deadlines, Scope, ScopeIndex, Situation, choose, next_expiry_s
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.policy.limits import Bounds, bounds_of, scaled_guarantees

LOOK_S = 1.0
"""Delay until blocks are checked again that must go and are being read."""

OUTSIDE_LIFE_S = 24 * 3600.0
"""How long blocks of a keyspace are kept after it left the policy: a suspended policy may come back."""

MARGIN_PERCENT = 1
"""Extra room beyond a block's need, so that not every store to a full tier has to choose."""

MARGIN_BLOCKS = 128
"""Upper bound of the margin in blocks of average size: lookups wait during a choice."""

MOST_AT_ONCE = 512
"""Blocks chosen at once."""

SPARE_S = 1.0
"""How long a spare waits at least to be written over; the housekeeper removes it at its next turn."""


class Spare(NamedTuple):
    """A file kept to be written over; `since_s` is when it became a spare."""

    name: str
    size_bytes: int
    since_s: float


class Spares:
    """Files of evicted blocks, kept briefly to be written over. Overwriting a file needs no allocation: a disk takes
    blocks into such files twice as fast as into new ones. A spare counts against the capacity, and for no scope."""

    def __init__(self) -> None:
        self.all_bytes = 0
        self._waiting: dict[str, Spare] = {}
        self._leaving: set[str] = set()

    @property
    def names(self) -> set[str]:
        return self._leaving.union(self._waiting)

    def add(self, spare: Spare) -> None:
        if spare.name in self._leaving:
            self._leaving.remove(spare.name)
        else:
            self.all_bytes += spare.size_bytes
        self._waiting[spare.name] = spare

    def take(self, size_bytes: int) -> Spare | None:
        """Return the eldest of this size, no longer counted here."""
        for spare in self._waiting.values():
            if spare.size_bytes == size_bytes:
                del self._waiting[spare.name]
                self.all_bytes -= size_bytes
                return spare
        return None

    def sizes(self) -> set[int]:
        return {spare.size_bytes for spare in self._waiting.values()}

    def take_out(self, which: Callable[[Spare], bool]) -> list[Spare]:
        """Return spares that `which` picks, for removal; they count until `gone` or `add` is called for each."""
        taken = [spare for spare in self._waiting.values() if which(spare)]
        for spare in taken:
            del self._waiting[spare.name]
            self._leaving.add(spare.name)
        return taken

    def gone(self, spare: Spare) -> None:
        if spare.name in self._leaving:
            self._leaving.remove(spare.name)
            self.all_bytes -= spare.size_bytes


class Victim(NamedTuple):
    cause: Cause
    size_bytes: int
    computed_s: float


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for a block to be written. The holder removes `victims` first. `spare` is the file to overwrite, None for a
    new one."""

    key: bytes
    keyspace: str
    size_bytes: int
    computed_s: float
    victims: dict[bytes, Victim] = field(default_factory=dict)
    writing: bool = False
    spare: Spare | None = None


class Policy:
    """Bounds of the scopes of `tier`. Without a retention of their own `default_ttl_s` applies, None for no end."""

    def __init__(self, tier: str, default_ttl_s: int | None) -> None:
        self._tier = tier
        self._default_ttl_s = default_ttl_s
        self._view: CacheView | None = None
        self._outside_since_s: dict[str, float] = {}
        self._deadlines = Deadlines()
        self.next_s = self._deadlines.next_s
        self._room_bytes = 0.0
        self.bounds: Mapping[str, Bounds] = {}
        self.guarantees: Mapping[str, float] = {}

    def follow(self, view: CacheView | None, scopes: Iterable[tuple[str, Scope]], now_s: float) -> None:
        """Put another view in force, and plan to check the `scopes` whose bounds changed."""
        if view is self._view:
            return
        self._view, before = view, self.bounds
        default = self._default_ttl_s
        self.bounds = {
            name: replace(bound, retention_s=default) if bound.retention_s is None else bound
            for name, bound in bounds_of(view, self._tier).items()
        }
        self.guarantees = scaled_guarantees(self.bounds, self._room_bytes)
        for keyspace, scope in scopes:
            self.note(keyspace, now_s)
            if before.get(keyspace) != self.bounds.get(keyspace):
                self.plan(keyspace, scope, now_s, again_s=now_s if keyspace in self.bounds else None)

    def set_room(self, room_bytes: float) -> None:
        if room_bytes != self._room_bytes:
            self._room_bytes = room_bytes
            self.guarantees = scaled_guarantees(self.bounds, room_bytes)

    def alive(self, keyspace: str, computed_s: float, now_s: float) -> bool:
        bound = self.bounds.get(keyspace)
        return bound is not None and (bound.retention_s is None or now_s - computed_s < bound.retention_s)

    def note(self, keyspace: str, now_s: float) -> None:
        if keyspace in self.bounds:
            self._outside_since_s.pop(keyspace, None)
        else:
            self._outside_since_s.setdefault(keyspace, now_s)

    def is_kept_outside(self, keyspace: str, now_s: float) -> bool:
        """Whether blocks of a keyspace outside of the policy may stay while there is room."""
        since_s = self._outside_since_s.get(keyspace)
        return keyspace not in self.bounds and since_s is not None and now_s - since_s < OUTSIDE_LIFE_S

    def plan(self, keyspace: str, scope: Scope | None, now_s: float, *, again_s: float | None = None) -> None:
        """Plan the next check of a scope: at `again_s` if given, otherwise when something in it expires."""
        if scope is None:
            self._outside_since_s.pop(keyspace, None)
            self._deadlines.plan(keyspace, None)
        elif again_s is not None:
            self._deadlines.plan(keyspace, again_s)
        elif (bound := self.bounds.get(keyspace)) is None:
            end_s = self._outside_since_s.get(keyspace, now_s) + OUTSIDE_LIFE_S
            self._deadlines.plan(keyspace, max(now_s + LOOK_S, end_s))
        else:
            self._deadlines.plan(keyspace, next_expiry_s(scope, bound, now_s, now_s + LOOK_S))

    def due(self, now_s: float, count: int) -> list[str]:
        due = sorted(self._deadlines.due(now_s))
        for keyspace in due[count:]:
            self._deadlines.plan(keyspace, now_s)
        return due[:count]


class Space:
    """Accounts for the blocks of `index`, under `policy`. `reserved` are blocks to come: about as many as there are
    workers. `leaving_bytes` counts files being removed, by keyspace."""

    def __init__(self, policy: Policy, index: ScopeIndex, *, capacity_bytes: int, max_blocks: int) -> None:
        self._policy = policy
        self._index = index
        self._capacity_bytes = capacity_bytes
        self.max_blocks = max_blocks
        self._room_bytes = float(capacity_bytes)
        self.reserved: dict[bytes, Reservation] = {}
        self.leaving_bytes: Counter[str] = Counter()
        self.spares = Spares()
        policy.set_room(self._room_bytes)

    @property
    def taken_bytes(self) -> int:
        """Bytes on the disk, including files being removed and spares."""
        return self._index.used_bytes + self.leaving_bytes.total() + self.spares.all_bytes

    def set_bytes(self, room_bytes: float) -> None:
        self._room_bytes = max(0.0, min(float(self._capacity_bytes), room_bytes))
        self._policy.set_room(self._room_bytes)

    def empty(self) -> None:
        self.leaving_bytes, self.spares = Counter(), Spares()

    def leave(self, keyspace: str, size_bytes: int) -> None:
        """Count a file that is being removed, or one that is gone by negative bytes."""
        self.leaving_bytes[keyspace] += size_bytes
        if not self.leaving_bytes[keyspace]:
            del self.leaving_bytes[keyspace]

    def staged_bytes(self) -> Counter[str]:
        """Return the bytes of reservations by keyspace."""
        staged_bytes: Counter[str] = Counter()
        for one in self.reserved.values():
            staged_bytes[one.keyspace] += one.size_bytes
        return staged_bytes

    def need_bytes(self) -> float:
        """Return the bytes above the room, including reservations."""
        need_bytes = self._index.used_bytes + self.staged_bytes().total() - self._room_bytes
        crowd = len(self._index) + len(self.reserved) - self.max_blocks
        return max(need_bytes, 1.0) if crowd > 0 else need_bytes

    def choose(self, keyspaces: list[str], readers: Container[Hashable], now_s: float) -> Choice:
        """Choose victims in these keyspaces, and in all if room is short; blocks in `readers` are in use."""
        need_bytes = self.need_bytes()
        if need_bytes > 0:
            share_bytes = min(self._index.used_bytes, self._room_bytes) * MARGIN_PERCENT / 100
            need_bytes += min(share_bytes, MARGIN_BLOCKS * self._index.mean_bytes())
            # Keyspaces outside of the policy go first.
            freed_bytes = 0
            for keyspace, scope in self._index.scopes():
                if freed_bytes < need_bytes and keyspace not in self._policy.bounds and keyspace not in keyspaces:
                    keyspaces = [*keyspaces, keyspace]
                    freed_bytes += scope.used_bytes
        bounds, guarantees, locked = self._policy.bounds, self._policy.guarantees, readers.__contains__
        situation = Situation(bounds, guarantees, self.staged_bytes(), locked, now_s, need_bytes, most=MOST_AT_ONCE)
        return choose(self._index, situation, keyspaces)

    def unfit(self, choice: Choice, keyspace: str, bound: Bounds) -> Refusal | None:
        """Return why the newest reservation does not fit even without the victims."""
        own = [kept for key in choice.victims if (kept := self._index.find(key)) and kept.keyspace == keyspace]
        scope = self._index.scope(keyspace)
        held_bytes = (scope.used_bytes if scope else 0) - sum(kept.size_bytes for kept in own)
        staged_bytes = self.staged_bytes()
        if bound.limit_bytes is not None and held_bytes + staged_bytes[keyspace] > bound.limit_bytes:
            return Refusal.OVER_BUDGET
        left_bytes = self._index.used_bytes - choice.victim_bytes + staged_bytes.total()
        left_blocks = len(self._index) - len(choice.victims) + len(self.reserved)
        return Refusal.TIER_FULL if left_bytes > self._room_bytes or left_blocks > self.max_blocks else None

    def fits_on_disk(self, reservation: Reservation) -> bool:
        """Whether the file may be written now: all bounds hold, counting files still to be removed."""
        keyspace, size_bytes = reservation.keyspace, reservation.size_bytes
        written = [one for one in self.reserved.values() if one.writing]
        more_bytes = 0 if size_bytes in self.spares.sizes() else size_bytes
        if self.taken_bytes + sum(one.size_bytes for one in written) + more_bytes > self._capacity_bytes:
            return False
        bound = self._policy.bounds.get(keyspace)
        if bound is None or bound.limit_bytes is None:
            return True
        scope = self._index.scope(keyspace)
        own_bytes = (scope.used_bytes if scope else 0) + self.leaving_bytes[keyspace]
        own_bytes += sum(one.size_bytes for one in written if one.keyspace == keyspace)
        return own_bytes + size_bytes <= bound.limit_bytes
