"""Takes room back: from keyspaces in no policy first, then from borrowers when guarantees need it.

`Reclaim`: a tier is overcommitted when a policy guarantees more than is left, or a lost division is charged again. The
holder of the claim has the largest borrowers give back, down to one level, until every guarantee is covered. Two
holders at once cost cached blocks, no more. It also corrects the sum of the tier's division.

`Leftovers`: no reader can use blocks of a keyspace in no policy. When a tier has little left to lend, one pod walks
over the rooms of all scopes, finds those that no sweep has renewed, and takes back room until enough is free: expired
and unused bytes first, then each bucket's least recently used blocks. A keyspace that returned to a policy meanwhile
has a later turn and is left alone.

`Departed`: a keyspace leaves the policy whenever its tenant's epoch changes. Its guarantee ends at once, and so does
room without blocks: otherwise frequent epoch changes would hold a whole tier for a quarter of an hour. Room of its
blocks stays charged until `Leftovers` needs it. The last pod to see the new policy decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Mapping
from contextlib import AbstractContextManager

from kvstrata.contract.store.redis_keys import bucket_prefix, rooms_claim_key
from kvstrata_sidecar.adapter.policy.limits import SharedBounds
from kvstrata_sidecar.adapter.redis.budget.capacity_shares import FREE_SHARE, LEFT_GRACE_MS, UnlistedScope, kept_bytes
from kvstrata_sidecar.adapter.redis.budget.expiry import expire
from kvstrata_sidecar.adapter.redis.budget.leases import Ledgers
from kvstrata_sidecar.adapter.redis.client.commands import (
    FOR_EVER_MS,
    WRITE_WINDOW_MS,
    Transport,
    claim,
    read_number,
    read_text,
    state_key,
)
from kvstrata_sidecar.adapter.redis.client.resp import Command, Reply

WALK_CLAIM_S = 5.0
IN_VAIN_S = 15.0
"""Pause of all pods after a walk that did not find enough."""

IN_VAIN = b"-"

COUNTERS = {"evicted": "departed_evicted", "evicted_bytes": "departed_evicted_bytes"}


class Leftovers:
    """Works on one tier, when asked to. For one thread. `each()` isolates a keyspace's failure; `current()` is whether
    this process' policy is in force: if not, those of others may not be either, and no pod renews their scopes.
    """

    def __init__(
        self,
        domain: str,
        token: bytes,
        clock: Callable[[], float],
        *,
        current: Callable[[], bool],
        each: Callable[[], AbstractContextManager[None]],
        count: Callable[[str, int], None],
        interrupted: Callable[[], bool],
    ) -> None:
        self._domain = domain
        self._token = token
        self._clock = clock
        self._current = current
        self._each = each
        self._count = count
        self._interrupted = interrupted
        # Separate: evictions of keyspaces in no policy count for no scope.
        self._ledgers = Ledgers(domain, self._count_evicted, clock, WRITE_WINDOW_MS)
        self._key = rooms_claim_key(domain, "d").encode()
        self._wanted = False
        self._walking = False
        self._rest_until_s = 0.0
        self._cursor: int | None = None
        self._found: deque[UnlistedScope] = deque()

    def begin(self) -> None:
        """Record that room may be short."""
        self._wanted = self._wanted or self._clock() >= self._rest_until_s

    def turn(self, connect: Callable[[], Transport], own: Container[str], capacity_bytes: int) -> bool:
        """Make room if it is short, sparing the policy's `own`; return whether no more can be made for now."""
        if self._wanted and not self._current():
            self._rest(LEFT_GRACE_MS / 1000)
        while self._wanted and not self._interrupted():
            missing = self._ledgers.rooms.charged(connect()) + capacity_bytes // FREE_SHARE - capacity_bytes
            if missing <= 0:
                self._end(connect())
            elif not self._walking:
                if not self._begin_walk(connect()):
                    break
            elif self._found:
                with self._each():
                    self._take(connect(), self._found.popleft(), missing)
            elif self._cursor is not None:
                following, found = self._ledgers.rooms.left(connect(), self._cursor)
                self._cursor = following or None
                self._found.extend(one for one in found if one.keyspace not in own)
            else:
                self._end(connect())
                claim(connect(), self._key, IN_VAIN, int(IN_VAIN_S * 1000))
                self._rest(IN_VAIN_S)
        return not self._wanted

    def _take(self, transport: Transport, left: UnlistedScope, missing: int) -> None:
        """Take back all of a keyspace that is not in use, then blocks for the `missing` bytes."""
        keyspace = left.keyspace
        scope = self._ledgers.view(transport, keyspace)
        if (scope.ledger.version == 0 or scope.ledger.void) and any(scope.leases):
            self._ledgers.rebuild(transport, keyspace, 0)
            scope = self._ledgers.view(transport, keyspace)
        buckets = scope.others(None)

        def empty() -> None:
            states = [state_key(bucket_prefix(self._domain, keyspace, one.bucket).encode()) for one in buckets]
            self._count("expired", expire(transport, states)[0])
            taken = left.charged_bytes - scope.ledger.leased
            for bucket in buckets:
                taken += self._ledgers.take(transport, keyspace, bucket.bucket, bucket.lease, 0)
            for bucket in buckets:
                size = 1
                while size and taken < missing:
                    size = self._ledgers.take(transport, keyspace, bucket.bucket, missing - taken, FOR_EVER_MS)
                    taken += size

        self._ledgers.rooms.leave(transport, keyspace, scope, empty, left)

    def _begin_walk(self, transport: Transport) -> bool:
        """Claim the walk; rest if another's just found too little. Return whether this process has the claim."""
        if claim(transport, self._key, self._token, int(WALK_CLAIM_S * 1000)):
            self._walking, self._cursor = True, 0
            return True
        (whose,) = transport.ask([Command(self._key, (b"GET", self._key), _read_token)])
        if whose == IN_VAIN:
            self._rest(IN_VAIN_S)
        return False

    def _rest(self, seconds: float) -> None:
        self._wanted, self._rest_until_s = False, self._clock() + seconds

    def _end(self, transport: Transport) -> None:
        """Stop, and release the claim."""
        if self._walking:
            transport.ask([Command(self._key, (b"UNLINK", self._key), read_number)])
        self._wanted = self._walking = False
        self._cursor = None
        self._found.clear()

    def _count_evicted(self, name: str, amount: int, _: str) -> None:
        self._count(COUNTERS.get(name, name), amount)


def _read_token(reply: Reply) -> bytes | None:
    return None if reply is None else read_text(reply).encode()


RECLAIM_CLAIM_S = 5.0
HELD_S = 4.0
"""Time that a process relies on its claim; what it has begun by then ends within the rest."""

PATIENCE_S = 60.0
"""Time that loans are taken back after an excess was seen."""


class Reclaim:
    """Takes room back from the scopes of this process' policy. `clock` returns seconds. `permitted(keyspace)` yields
    whether the tier may be used for it and isolates its failure; `interrupted` is whether urgent work waits.
    """

    def __init__(
        self,
        domain: str,
        ledgers: Ledgers,
        token: bytes,
        clock: Callable[[], float],
        *,
        leftovers: Leftovers,
        bounds: Callable[[str], SharedBounds | None],
        permitted: Callable[[str], AbstractContextManager[bool]],
        count: Callable[[str, int], None],
        interrupted: Callable[[], bool],
    ) -> None:
        self._ledgers = ledgers
        self._rooms = ledgers.rooms
        self._leftovers = leftovers
        self._token = token
        self._clock = clock
        self._bounds = bounds
        self._permitted = permitted
        self._count = count
        self._interrupted = interrupted
        self._tidy_key = rooms_claim_key(domain, "w").encode()
        self._key = rooms_claim_key(domain, "g").encode()
        self._until_s = self._look_at_s = self._held_until_s = 0.0
        self._in_vain: set[str] = set()

    def begin(self) -> None:
        """Record that guarantees changed, or that a tier is overcommitted."""
        self._until_s = self._clock() + PATIENCE_S
        self._in_vain.clear()
        self._leftovers.begin()

    def turn(self, connect: Callable[[], Transport], keyspaces: Collection[str], tidy_every_s: float | None) -> None:
        """Do what is due if the capacity is divided; recompute its sum every `tidy_every_s`, None for not now."""
        first = next(iter(keyspaces), None)
        whole = self._bounds(first) if first is not None else None
        if whole is None or whole.capacity_bytes is None:
            return
        if tidy_every_s is not None and claim(connect(), self._tidy_key, self._token, int(tidy_every_s * 750)):
            self._count("drift_rooms", abs(self._rooms.tidy(connect())))
        if self._rooms.take_short() or tidy_every_s is not None:
            self._leftovers.begin()
        if not self._leftovers.turn(connect, keyspaces, whole.capacity_bytes):
            return
        if self._look_at_s <= self._clock() < self._until_s:
            self._take_back(connect, keyspaces, whole.capacity_bytes)

    def _take_back(self, connect: Callable[[], Transport], keyspaces: Collection[str], capacity_bytes: int) -> None:
        excess = self._rooms.excess(connect(), capacity_bytes)
        bounds = ((keyspace, self._bounds(keyspace)) for keyspace in keyspaces if excess)
        kept = {keyspace: kept_bytes(one) for keyspace, one in bounds if one and keyspace not in self._in_vain}
        lent = self._rooms.lent(connect(), kept)
        if not lent:
            self._until_s = 0.0
            return
        if not self._claimed(connect()):
            self._look_at_s = self._clock() + RECLAIM_CLAIM_S
            return
        for keyspace, amount in parts(lent, excess):
            if self._interrupted() or excess == 0:
                break
            with self._permitted(keyspace) as permitted:
                own = self._bounds(keyspace)
                if permitted and own is not None:
                    self._ledgers.give_back(connect(), keyspace, own, amount)
            before, excess = excess, self._rooms.excess(connect(), capacity_bytes)
            if excess >= before:
                # For example, its server is unreachable: others have to give more.
                self._in_vain.add(keyspace)

    def _claimed(self, transport: Transport) -> bool:
        now_s = self._clock()
        if now_s >= self._held_until_s and claim(transport, self._key, self._token, int(RECLAIM_CLAIM_S * 1000)):
            self._held_until_s = now_s + HELD_S
        return now_s < self._held_until_s


def parts(lent: Mapping[str, int], excess: int) -> list[tuple[str, int]]:
    """Return the bytes that each borrower gives back, largest first: all are cut down to one level."""
    ordered = sorted(lent.items(), key=lambda one: -one[1])
    total = 0
    for number, (_, size) in enumerate(ordered, 1):
        total += size
        following = ordered[number][1] if number < len(ordered) else 0
        if total - number * following >= excess:
            level = (total - excess) // number
            return [(keyspace, one - level) for keyspace, one in ordered[:number] if one > level]
    return ordered


MAX_DEPARTED = 65_536


class Departed:
    """Keyspaces of one tier that left the policy and have yet to give their room back. For one thread."""

    def __init__(self, ledgers: Ledgers, bounds: Callable[[str], SharedBounds | None]) -> None:
        self._ledgers = ledgers
        self._bounds = bounds
        self._left: dict[str, None] = {}

    def follow(self, before: Collection[str], now: Collection[str]) -> None:
        for keyspace in now:
            self._left.pop(keyspace, None)
        for keyspace in before:
            if keyspace not in now and len(self._left) < MAX_DEPARTED:
                self._left[keyspace] = None

    def turn(self, transport: Callable[[], Transport], interrupted: Callable[[], bool]) -> None:
        """Give room back until interrupted. Raises as the transport does; what is left is tried again."""
        while self._left and not interrupted():
            keyspace = next(iter(self._left))
            bounds = self._bounds(keyspace)
            if bounds is not None and bounds.divided:
                self._give_back(transport(), keyspace)
            self._left.pop(keyspace, None)

    def _give_back(self, transport: Transport, keyspace: str) -> None:
        scope = self._ledgers.view(transport, keyspace)

        def empty() -> None:
            self._ledgers.take_unused(transport, keyspace, scope.others(None), sum(scope.leases))

        self._ledgers.rooms.leave(transport, keyspace, scope, empty)
