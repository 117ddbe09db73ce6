"""How the capacity of a tier is divided: what is guaranteed to a scope is its own, the rest is lent to who needs it.

The room of a scope bounds what its ledger leases out. It grows by loans from what is neither guaranteed to another nor
lent, and is given back when it is not used, or when a new guarantee leaves the tier overcommitted; then the scope
evicts: see reclaim. Growing, the tier is charged before the ledger hears of it; shrinking, the ledger hears first. Each
change takes a turn of its own, so that whatever was decided in an earlier one comes too late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

from kvstrata.contract.keys import ledger_key, rooms_key

from .protocol import Bounds, Transport, call, read_list, read_number, read_numbers, read_text
from .scope import Share
from .wire import Command, FramingError, Reply

ROOM_KEEP_MS = 7 * 86_400_000
"""How long the room of a scope stays charged that is in no policy any more; its blocks are expected to be gone then."""

STALE_MS = 900_000
"""How long the guarantee of a scope holds that no sweep renews: it is in no policy any more."""

SCOPES_PER_COMMAND = 512
SCOPES_PER_STEP = 256
LOAN_SHARE = 256
"""A loan is this part of the capacity more than what is needed."""

NO_SHARE = Share(0, 0, 0)


class Rooms:
    """Gets and gives back room in one tier."""

    def __init__(self, domain: str) -> None:
        self._domain = domain
        self._key = rooms_key(domain).encode()

    def grow(self, transport: Transport, keyspace: str, bounds: Bounds, share: Share, minimum: int) -> bool:
        """Ask for room of `minimum` bytes more than is leased out; whether the scope has it now."""
        needed = share.leased + minimum
        wanted = min(bounds.limit_bytes, needed + (bounds.capacity_bytes or 0) // LOAN_SHARE)
        room, turn, excess = self._ask(transport, b"grow", keyspace, bounds, wanted, share=share)
        if excess > 0 and room > bounds.guaranteed_bytes:
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
    ) -> int:
        """Give back what is lent and not used, and, of an overcommitted tier, up to `back` bytes of what is used.

        `settle(limit)` brings the ledger under a limit, by eviction, and returns what it leases out then. Return by how
        much the tier was overcommitted.
        """
        spare = (bounds.capacity_bytes or 0) // LOAN_SHARE
        leased = share.leased
        room, turn, excess = self._ask(transport, b"mark", keyspace, bounds, 0, share=share)
        owed = min(excess, back)
        target = max(min(room - owed, leased + spare, bounds.limit_bytes), kept_bytes(bounds))
        # A little more than needed is kept: it would be asked for again.
        if target >= room or (owed == 0 and room - target <= spare):
            return excess
        if self._tell(transport, keyspace, target, turn) and (leased <= target or settle(target) <= target):
            self._ask(transport, b"set", keyspace, bounds, target, turn)
        return excess

    def charge(self, transport: Transport, keyspace: str, bounds: Bounds, share: Share) -> None:
        """Have the tier know what is guaranteed to a scope now, and what it has."""
        self._ask(transport, b"mark", keyspace, bounds, 0, share=share)

    def excess(self, transport: Transport, capacity_bytes: int) -> int:
        """Return by how many bytes guarantees and loans exceed the capacity."""
        (charged,) = transport.ask([Command(self._key, (b"HGET", self._key, b"sum"), _read_optional)])
        return max(0, (charged or 0) - capacity_bytes)

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
    ) -> tuple[int, int, int]:
        capacity = bounds.capacity_bytes or 0
        asked = call(
            "room", self._key, operation, keyspace.encode(), kept_bytes(bounds), wanted, capacity, turn, ROOM_KEEP_MS,
            share.leased, share.given, share.turn,
            read=lambda reply: read_numbers(reply, 3),
        )  # fmt: skip
        room, last, excess = transport.ask([asked])[0]
        return room, last, excess

    def _tell(self, transport: Transport, keyspace: str, room: int, turn: int) -> bool:
        """Let the scope's ledger know its room; whether there is a ledger."""
        ledger = ledger_key(self._domain, keyspace).encode()
        ((status, _),) = transport.ask([call("share", ledger, room, turn, read=_read_share)])
        return bool(status == "ok")


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
    parts = read_text(reply).split(":")
    if len(parts) < 4 or not parts[1].isdigit():
        raise FramingError("the room of a scope is malformed")
    return int(parts[1])
