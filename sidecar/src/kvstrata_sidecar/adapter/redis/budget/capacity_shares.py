"""Division of a tier's capacity: guarantees belong to their scope, the rest is lent on demand.

A scope's room bounds what its ledger leases out. It grows by loans of free bytes, and shrinks when it is unused or when
a new guarantee overcommits the tier (`reclaim`). A growing room is charged to the tier before the ledger is
informed; for a shrinking one the ledger comes first. Each change takes a turn, which invalidates earlier decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

from kvstrata.contract.policy.keyspace import is_keyspace
from kvstrata.contract.store.redis_keys import ledger_key, rooms_key
from kvstrata_sidecar.adapter.policy.limits import SharedBounds
from kvstrata_sidecar.adapter.redis.budget.scope_state import ScopeView, Share
from kvstrata_sidecar.adapter.redis.client.commands import (
    Transport,
    call,
    read_list,
    read_moment_ms,
    read_number,
    read_numbers,
    read_text,
)
from kvstrata_sidecar.adapter.redis.client.resp import Command, FramingError, Reply

ROOM_KEEP_MS = 7 * 86_400_000
"""Time that the room of a scope in no policy stays charged; its blocks have expired by then."""

STALE_MS = 900_000
"""Time that a guarantee holds without renewal by a sweep; then its scope is in no policy."""

SCOPES_PER_COMMAND = 512
SCOPES_PER_STEP = 256
LOAN_SHARE = 256
LOAN_GROWTH_SHARE = 8
"""Reserve in a loan: this part of the leased bytes, at most `LOAN_SHARE` of the capacity."""

TIGHT_SHARE = 8
"""With less than this part of a tier free, its scopes give back all that they do not use."""

FREE_SHARE = 32
"""Part of a capacity kept free for loans, as long as keyspaces in no policy hold room."""

LEFT_GRACE_MS = 150_000
"""Time for which another model's policy may still have a keyspace that left a pod's; exceeds two sweep intervals."""

NO_SHARE = Share(0, 0, 0)


@dataclass(frozen=True, slots=True)
class UnlistedScope:
    """A keyspace that no policy names: its charge, its last turn, and the time since a policy had it."""

    keyspace: str
    charged_bytes: int
    turn: int
    age_ms: int


class TierCapacity:
    def __init__(self, domain: str) -> None:
        self._domain = domain
        self._key = rooms_key(domain).encode()
        self._short = False

    def grow(self, transport: Transport, keyspace: str, bounds: SharedBounds, share: Share, minimum: int) -> bool:
        """Request room of `minimum` bytes beyond what is leased out; return whether the scope has it now."""
        needed = share.leased + minimum
        wanted = min(bounds.limit_bytes, needed + _reserve(bounds, max(share.leased, LOAN_GROWTH_SHARE * minimum)))
        room, turn, beyond = self._ask(transport, b"grow", keyspace, bounds, wanted, share=share)
        self._short = self._short or beyond + (bounds.capacity_bytes or 0) // FREE_SHARE > 0
        if beyond > 0 and room > bounds.guaranteed_bytes:
            # Charged, because it is in use, but not available for leases: the next sweeps reduce it.
            return False
        self._tell(transport, keyspace, room, turn)
        return room >= needed

    def shrink(
        self,
        transport: Transport,
        keyspace: str,
        bounds: SharedBounds,
        share: Share,
        settle: Callable[[int], int],
        back: int,
        *,
        tight: bool = False,
    ) -> int:
        """Give back unused loans and, of an overcommitted tier, up to `back` used bytes; return by how much it was.

        `settle(limit)` evicts until the ledger is under a limit and returns its leases. If `tight`, no reserve is kept.
        """
        leased = share.leased
        spare = 0 if tight else _reserve(bounds, leased)
        room, turn, beyond = self._ask(transport, b"mark", keyspace, bounds, 0, share=share)
        excess = max(0, beyond)
        owed = min(excess, back)
        target = max(min(room - owed, leased + spare, bounds.limit_bytes), kept_bytes(bounds))
        # Keep a little more than needed: it would be requested again.
        if target >= room or (owed == 0 and room - target <= spare):
            return excess
        if self._tell(transport, keyspace, target, turn) is not None and (leased <= target or settle(target) <= target):
            self._ask(transport, b"set", keyspace, bounds, target, turn)
        return excess

    def charge(self, transport: Transport, keyspace: str, bounds: SharedBounds, share: Share) -> None:
        """Record a scope's present guarantee and leases with the tier."""
        self._ask(transport, b"mark", keyspace, bounds, 0, share=share)

    def leave(
        self,
        transport: Transport,
        keyspace: str,
        scope: ScopeView,
        empty: Callable[[], None],
        left: UnlistedScope | None = None,
    ) -> None:
        """Reduce the charge of a keyspace in no policy to its leases after `empty`. `left` is the entry found, which
        must be unchanged; None if the keyspace has only just left.
        """
        age_ms, seen = (STALE_MS - LEFT_GRACE_MS, 0) if left is None else (left.age_ms, left.turn)
        share, nothing = scope.ledger.share, SharedBounds(0, 0, 0)
        _, turn, _ = self._ask(transport, b"leave", keyspace, nothing, 0, seen, share, age_ms)
        if not turn:
            return
        empty()
        leased = self._tell(transport, keyspace, 0, turn)
        if leased is not None or not any(scope.leases):
            self._ask(transport, b"set", keyspace, nothing, leased or 0, turn, age_ms=age_ms)

    def left(self, transport: Transport, cursor: int) -> tuple[int, list[UnlistedScope]]:
        """Take one step of a walk over all scopes; return the next cursor, 0 at the end, and those in no policy."""
        now = Command(self._key, (b"TIME",), read_moment_ms)
        step = (b"HSCAN", self._key, b"%d" % cursor, b"COUNT", b"%d" % SCOPES_PER_STEP)
        now_ms, (following, words) = transport.ask([now, Command(self._key, step, _read_step)])
        entries = ((read_text(name), entry) for name, entry in zip(words[::2], words[1::2], strict=True))
        scopes = (_left(name, entry, now_ms) for name, entry in entries if is_keyspace(name))
        return following, [one for one in scopes if one.age_ms >= STALE_MS]

    def take_short(self) -> bool:
        """Whether a scope that needed room found little left since the last call."""
        short, self._short = self._short, False
        return short

    def charged(self, transport: Transport) -> int:
        (charged,) = transport.ask([Command(self._key, (b"HGET", self._key, b"sum"), _read_optional)])
        return charged or 0

    def excess(self, transport: Transport, capacity_bytes: int) -> int:
        return max(0, self.charged(transport) - capacity_bytes)

    def tight(self, transport: Transport, bounds: SharedBounds) -> bool:
        capacity = bounds.capacity_bytes or 0
        return self.charged(transport) > capacity - capacity // TIGHT_SHARE

    def lent(self, transport: Transport, guaranteed: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes that scopes have beyond their guarantees, without those that have none."""
        names = iter(guaranteed)
        lent: dict[str, int] = {}
        while batch := list(islice(names, SCOPES_PER_COMMAND)):
            asked = (b"HMGET", self._key, *(name.encode() for name in batch))
            (entries,) = transport.ask([Command(self._key, asked, _reads_entries(len(batch)))])
            lent |= {name: room - guaranteed[name] for name, room in zip(batch, entries, strict=True)}
        return {name: size for name, size in lent.items() if size > 0}

    def tidy(self, transport: Transport) -> int:
        """Recompute the sum of all rooms and end guarantees of scopes in no policy; return the difference found."""
        cursor, walk, begun = 0, 0, False
        while cursor or not begun:
            step = call(
                "tidy", self._key, cursor, walk, SCOPES_PER_STEP, STALE_MS, ROOM_KEEP_MS,
                read=lambda reply: read_numbers(reply, 3),
            )  # fmt: skip
            ((cursor, walk, drift),) = transport.ask([step])
            begun = True
        return int(drift)

    def _ask(
        self,
        transport: Transport,
        operation: bytes,
        keyspace: str,
        bounds: SharedBounds,
        wanted: int,
        turn: int = 0,
        share: Share = NO_SHARE,
        age_ms: int = 0,
    ) -> tuple[int, int, int]:
        capacity = bounds.capacity_bytes or 0
        asked = call(
            "room", self._key, operation, keyspace.encode(), kept_bytes(bounds), wanted, capacity, turn, ROOM_KEEP_MS,
            share.leased, share.given, share.turn, age_ms,
            read=lambda reply: read_numbers(reply, 3),
        )  # fmt: skip
        room, last, beyond = transport.ask([asked])[0]
        return room, last, beyond

    def _tell(self, transport: Transport, keyspace: str, room: int, turn: int) -> int | None:
        """Report a scope's room to its ledger; return what it leases out, None if there is no ledger."""
        ledger = ledger_key(self._domain, keyspace).encode()
        ((status, leased),) = transport.ask([call("share", ledger, room, turn, read=_read_share)])
        return leased if status == "ok" else None


def _reserve(bounds: SharedBounds, leased: int) -> int:
    """Return how many bytes a scope may have beyond what it leases out."""
    return min((bounds.capacity_bytes or 0) // LOAN_SHARE, leased // LOAN_GROWTH_SHARE)


def kept_bytes(bounds: SharedBounds) -> int:
    """Return the bytes that are never taken back from a scope."""
    return min(bounds.guaranteed_bytes, bounds.limit_bytes)


def _read_share(reply: Reply) -> tuple[str, int]:
    status, number = read_list(reply, 2)
    return read_text(status), read_number(number)


def _read_optional(reply: Reply) -> int | None:
    return None if reply is None else read_number(reply)


def _reads_entries(count: int) -> Callable[[Reply], list[int]]:
    return lambda reply: [0 if one is None else _read_room(one) for one in read_list(reply, count)]


def _read_room(reply: Reply) -> int:
    return _read_entry(reply)[1]


def _read_entry(reply: Reply) -> tuple[int, int, int, int]:
    """Return guarantee, room, turn and moment of a scope's entry."""
    parts = read_text(reply).split(":")
    if len(parts) < 4 or not all(part.isdigit() for part in parts[:4]):
        raise FramingError("the room of a scope is malformed")
    guaranteed, room, turn, moment_ms = map(int, parts[:4])
    return guaranteed, room, turn, moment_ms


def _left(keyspace: str, entry: Reply, now_ms: int) -> UnlistedScope:
    guaranteed, room, turn, moment_ms = _read_entry(entry)
    return UnlistedScope(keyspace, max(guaranteed, room), turn, now_ms - moment_ms)


def _read_step(reply: Reply) -> tuple[int, list[Reply]]:
    cursor, words = read_list(reply, 2)
    if not isinstance(words, list) or len(words) % 2:
        raise FramingError("a step through the rooms is malformed")
    return read_number(cursor), words
