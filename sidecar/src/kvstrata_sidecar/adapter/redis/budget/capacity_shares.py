"""How the capacity of a tier is divided: what is guaranteed to a scope is its own, the rest is lent to who needs it.

The room of a scope bounds what its ledger leases out. It grows by loans from what is neither guaranteed to another nor
lent, and is given back when it is not used, or when a new guarantee leaves the tier overcommitted; then the scope
evicts: see reclaim. What keyspaces have that are in no policy goes first: see leftovers. Growing, the tier is charged
before the ledger hears of it; shrinking, the ledger hears first. Each change takes a turn of its own, so that whatever
was decided in an earlier one comes too late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

from kvstrata.contract.policy.keyspace import is_keyspace
from kvstrata.contract.store.redis_keys import ledger_key, rooms_key
from kvstrata_sidecar.adapter.redis.budget.scope_state import ScopeView, Share
from kvstrata_sidecar.adapter.redis.client.commands import (
    Bounds,
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
"""How long the room of a scope stays charged that is in no policy any more; its blocks are expected to be gone then."""

STALE_MS = 900_000
"""How long the guarantee of a scope holds that no sweep renews: it is in no policy any more."""

SCOPES_PER_COMMAND = 512
SCOPES_PER_STEP = 256
LOAN_SHARE = 256
LOAN_GROWTH_SHARE = 8
"""A loan is this part of what is leased out more than what is needed, and `LOAN_SHARE` of the capacity at most: small
scopes have small reserves, or else a tier of many would be full of them."""

TIGHT_SHARE = 8
"""A tier of which less than this part is free has its scopes give back all that they do not use."""

FREE_SHARE = 32
"""What part of a capacity is kept free to be lent, as long as there are keyspaces in no policy to take it from."""

LEFT_GRACE_MS = 150_000
"""How long after a keyspace left a pod's policy it may still turn out to be in that of another model: longer than two
sweeps are apart."""

NO_SHARE = Share(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Left:
    """A keyspace that no policy names: what it is charged, its last turn, and how long ago it was in a policy."""

    keyspace: str
    charged_bytes: int
    turn: int
    age_ms: int


class Rooms:
    """Gets and gives back room in one tier."""

    def __init__(self, domain: str) -> None:
        self._domain = domain
        self._key = rooms_key(domain).encode()
        self._short = False

    def grow(self, transport: Transport, keyspace: str, bounds: Bounds, share: Share, minimum: int) -> bool:
        """Ask for room of `minimum` bytes more than is leased out; whether the scope has it now."""
        needed = share.leased + minimum
        wanted = min(bounds.limit_bytes, needed + _reserve(bounds, max(share.leased, LOAN_GROWTH_SHARE * minimum)))
        room, turn, beyond = self._ask(transport, b"grow", keyspace, bounds, wanted, share=share)
        self._short = self._short or beyond + (bounds.capacity_bytes or 0) // FREE_SHARE > 0
        if beyond > 0 and room > bounds.guaranteed_bytes:
            # Charged, because it is in use, but not there to be leased out: the next sweeps bring it down.
            return False
        self._tell(transport, keyspace, room, turn)
        return room >= needed

    def shrink(
        self,
        transport: Transport,
        keyspace: str,
        bounds: Bounds,
        share: Share,
        settle: Callable[[int], int],
        back: int,
        *,
        tight: bool = False,
    ) -> int:
        """Give back what is lent and not used, and, of an overcommitted tier, up to `back` bytes of what is used.

        `settle(limit)` brings the ledger under a limit, by eviction, and returns what it leases out then. Nothing is
        kept in reserve of a `tight` tier. Return by how much the tier was overcommitted.
        """
        leased = share.leased
        spare = 0 if tight else _reserve(bounds, leased)
        room, turn, beyond = self._ask(transport, b"mark", keyspace, bounds, 0, share=share)
        excess = max(0, beyond)
        owed = min(excess, back)
        target = max(min(room - owed, leased + spare, bounds.limit_bytes), kept_bytes(bounds))
        # A little more than needed is kept: it would be asked for again.
        if target >= room or (owed == 0 and room - target <= spare):
            return excess
        if self._tell(transport, keyspace, target, turn) is not None and (leased <= target or settle(target) <= target):
            self._ask(transport, b"set", keyspace, bounds, target, turn)
        return excess

    def charge(self, transport: Transport, keyspace: str, bounds: Bounds, share: Share) -> None:
        """Have the tier know what is guaranteed to a scope now, and what it has."""
        self._ask(transport, b"mark", keyspace, bounds, 0, share=share)

    def leave(
        self,
        transport: Transport,
        keyspace: str,
        scope: ScopeView,
        empty: Callable[[], None],
        left: Left | None = None,
    ) -> None:
        """Charge a keyspace that is in no policy for no more than what it leases out once `empty` took some of it back.

        `left` is what was found of it, which nobody may have changed since; without it, it has only just left.
        """
        age_ms, seen = (STALE_MS - LEFT_GRACE_MS, 0) if left is None else (left.age_ms, left.turn)
        share, nothing = scope.ledger.share, Bounds(0, 0, 0)
        _, turn, _ = self._ask(transport, b"leave", keyspace, nothing, 0, seen, share, age_ms)
        if not turn:
            return
        empty()
        leased = self._tell(transport, keyspace, 0, turn)
        if leased is not None or not any(scope.leases):
            self._ask(transport, b"set", keyspace, nothing, leased or 0, turn, age_ms=age_ms)

    def left(self, transport: Transport, cursor: int) -> tuple[int, list[Left]]:
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
        """Return the bytes of all guarantees and loans."""
        (charged,) = transport.ask([Command(self._key, (b"HGET", self._key, b"sum"), _read_optional)])
        return charged or 0

    def excess(self, transport: Transport, capacity_bytes: int) -> int:
        """Return by how many bytes guarantees and loans exceed the capacity."""
        return max(0, self.charged(transport) - capacity_bytes)

    def tight(self, transport: Transport, bounds: Bounds) -> bool:
        """Whether little is left to lend."""
        capacity = bounds.capacity_bytes or 0
        return self.charged(transport) > capacity - capacity // TIGHT_SHARE

    def lent(self, transport: Transport, guaranteed: Mapping[str, int]) -> dict[str, int]:
        """Return how many bytes more room than is guaranteed to them those of these scopes have that have more."""
        names = iter(guaranteed)
        lent: dict[str, int] = {}
        while batch := list(islice(names, SCOPES_PER_COMMAND)):
            asked = (b"HMGET", self._key, *(name.encode() for name in batch))
            (entries,) = transport.ask([Command(self._key, asked, _reads_entries(len(batch)))])
            lent |= {name: room - guaranteed[name] for name, room in zip(batch, entries, strict=True)}
        return {name: size for name, size in lent.items() if size > 0}

    def tidy(self, transport: Transport) -> int:
        """Add the rooms of all scopes up anew, and end the guarantees of those in no policy; return what differed."""
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
        bounds: Bounds,
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
        """Let the scope's ledger know its room; return what it leases out, None if there is no ledger."""
        ledger = ledger_key(self._domain, keyspace).encode()
        ((status, leased),) = transport.ask([call("share", ledger, room, turn, read=_read_share)])
        return leased if status == "ok" else None


def _reserve(bounds: Bounds, leased: int) -> int:
    """Return how many bytes more than it leases out a scope may have."""
    return min((bounds.capacity_bytes or 0) // LOAN_SHARE, leased // LOAN_GROWTH_SHARE)


def kept_bytes(bounds: Bounds) -> int:
    """Return what nobody takes back from a scope."""
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


def _left(keyspace: str, entry: Reply, now_ms: int) -> Left:
    guaranteed, room, turn, moment_ms = _read_entry(entry)
    return Left(keyspace, max(guaranteed, room), turn, now_ms - moment_ms)


def _read_step(reply: Reply) -> tuple[int, list[Reply]]:
    cursor, words = read_list(reply, 2)
    if not isinstance(words, list) or len(words) % 2:
        raise FramingError("a step through the rooms is malformed")
    return read_number(cursor), words
