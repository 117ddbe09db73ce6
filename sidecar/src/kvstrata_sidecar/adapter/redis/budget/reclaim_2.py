"""Makes room at the cost of keyspaces that are in no policy: no reader can use their blocks.

When a tier has little left to lend, one pod walks over the rooms of all scopes, finds those that no sweep has renewed,
and takes back room until enough is free: expired and unused bytes first, then each bucket's least recently used blocks.
A keyspace that returned to a policy meanwhile has a later turn and is left alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from contextlib import AbstractContextManager

from kvstrata.contract.store.redis_keys import bucket_prefix, rooms_claim_key
from kvstrata_sidecar.adapter.redis.budget.capacity_shares import FREE_SHARE, LEFT_GRACE_MS, Left
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
        self._found: deque[Left] = deque()

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

    def _take(self, transport: Transport, left: Left, missing: int) -> None:
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
