"""The thread that keeps a shared tier's books in order, on a connection of its own.

Every second it passes on what others left to it: touches of blocks that were read, reservations of stores that failed.
When a policy changes what scopes may use, it puts that through at once, scope by scope, and tells how many are left.
Once an interval, with jitter, it sweeps the scopes of the policy: what expired and what dead writers reserved leaves
index and accounting, a shortened retention and a lowered limit are put through, ledgers whose leases are lost are
rebuilt. Now and then it compares the index with the values and the accounting with the index; a difference is a drift,
which is repaired and counted. Pods share the work: a scope is swept by whoever claims it for the interval.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvstrata.contract.cacheview import CacheView
from kvstrata.contract.keys import BUCKETS, bucket_prefix, claim_key

from .audit import audit_bucket
from .drift import LeaseDrift
from .enforcement import Enforcement, Permit
from .ledger import Ledgers
from .plaintext import Plaintext
from .protocol import Bounds, Place, Transport, call, claim, read_list, read_number, read_numbers, read_text, state_key
from .reclaim import Reclaim
from .scope import ScopeView
from .settling import Settling
from .wire import Command, Reply, ReplyError, TransportError

logger = logging.getLogger(__name__)

TICK_S = 1.0
MAX_PENDING = 65_536
MEMBERS_PER_TOUCH = 500
ENTRIES_PER_CALL = 256
LOOK_S = 0.5
"""How long a turn looks for plaintext before it does what else is due."""

AUDIT_EVERY = 10
"""Sweeps of a scope between two comparisons of its index with its values."""


@dataclass(frozen=True, slots=True)
class SweeperHooks:
    """What a sweeper needs of its tier. `life_ms` and `bounds` are a keyspace's under the policy.

    `learn` asks which of the policy's keyspaces the tier knows as revoked.
    """

    connect: Callable[[], SweeperConnection]
    usable: Callable[[], bool]
    life_ms: Callable[[str], int | None]
    bounds: Callable[[str], Bounds | None]
    count: Callable[[str, int, str], None]
    learn: Callable[[Transport, Collection[str]], None]


class SweeperConnection(Transport, Protocol):
    """A transport that can be cut off and closed."""

    @property
    def usable(self) -> bool:
        """Whether it is open and in step as far as is known."""

    def abort(self) -> None:
        """Make whatever uses this connection fail at once."""

    def close(self) -> None:
        """Close it."""


@dataclass(slots=True)
class _Pending:
    touches: dict[Place, None] = field(default_factory=dict)
    abandoned: deque[tuple[Place, bytes]] = field(default_factory=lambda: deque(maxlen=MAX_PENDING))
    urgent: dict[str, None] = field(default_factory=dict)


class Sweeper(threading.Thread):
    """Sweeps one tier until it is closed. `jitter` returns a number from 0 to 1, `token` names this process."""

    def __init__(
        self,
        name: str,
        domain: str,
        enforcement: Enforcement,
        ledgers: Ledgers,
        hooks: SweeperHooks,
        *,
        token: bytes,
        interval_s: float,
        clock: Callable[[], float],
        jitter: Callable[[], float],
        arc: bool = False,
        plaintext: Plaintext | None = None,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._domain = domain
        self._enforcement = enforcement
        self._ledgers = ledgers
        self._hooks = hooks
        self._token = token
        self._interval_s = interval_s
        self._clock = clock
        self._jitter = jitter
        self._arc = arc
        self._plaintext = plaintext
        self._lock = threading.Lock()
        self._following = threading.Lock()
        self._at_work = threading.RLock()
        self._pending = _Pending()
        self._wake = threading.Event()
        self._closed = False
        self._connection: SweeperConnection | None = None
        self._seen: CacheView | None = None
        self._followed: CacheView | None = None
        self._settling = Settling()
        self._usage: dict[str, tuple[float, int, int]] = {}
        self._sweep_at_s = 0.0
        self._sweeps: dict[str, int] = {}
        self._drift = LeaseDrift(clock)
        self._reclaim = Reclaim(domain, ledgers.rooms, token, clock)

    def touch(self, place: Place) -> None:
        """Note that a block was read; passed on within about a second, once for all reads until then."""
        with self._lock:
            if len(self._pending.touches) < MAX_PENDING:
                self._pending.touches[place] = None

    def abandon(self, place: Place, token: bytes) -> None:
        """Note that the reservation of a store that failed can be given up."""
        with self._lock:
            self._pending.abandoned.append((place, token))

    def urge(self, keyspace: str) -> None:
        """Sweep a scope soon: it cannot be used as it is."""
        with self._lock:
            if keyspace not in self._pending.urgent and len(self._pending.urgent) < MAX_PENDING:
                self._pending.urgent[keyspace] = None

    @property
    def settling(self) -> int:
        """How many scopes' bounds were changed by the policy and are not put through yet."""
        return len(self._settling)

    def follow(self) -> None:
        """Note what the view in force changes for whom, and have it put through soon."""
        # A lock of its own: thousands of scopes take a while, and workers note their touches meanwhile.
        with self._following:
            view = self._enforcement.view
            if view is None or view is self._followed:
                return
            self._followed = view
            bounds, life_ms = self._hooks.bounds, self._hooks.life_ms
            self._settling.follow({keyspace: (bounds(keyspace), life_ms(keyspace)) for keyspace in view.keyspaces})
        self._wake.set()

    def usage(self) -> list[tuple[str, int, int]]:
        """Return keyspace, bytes and blocks of the scopes that this process has seen within the last two intervals."""
        since_s = self._clock() - 2 * self._interval_s
        with self._lock:
            seen = list(self._usage.items())
        return [(keyspace, used, blocks) for keyspace, (at_s, used, blocks) in seen if at_s >= since_s and blocks]

    def close(self) -> None:
        """End the thread soon."""
        self._closed = True
        self._wake.set()
        connection = self._connection
        if connection is not None:
            connection.abort()

    def run(self) -> None:
        """Work until closed; whatever fails is tried again a tick later."""
        while not self._closed:
            try:
                if self._hooks.usable():
                    self.turn()
            except (TransportError, ReplyError) as error:
                self._hooks.count("sweep_errors", 1, "")
                logger.info("The sweep was interrupted: %s", error)
            except Exception:
                self._hooks.count("sweep_errors", 1, "")
                logger.exception("The sweep failed")
            self._wake.wait(TICK_S)
            if not self._closed:
                self._wake.clear()
        self._drop_connection()

    def turn(self) -> None:
        """Do what is due now."""
        with self._at_work:
            self._turn()

    def sweep(self, keyspace: str, *, claim: bool = False, audit: bool | None = None) -> None:
        """Put one scope in order if the policy allows it, and, with `claim`, unless another pod did this interval.

        `audit` None leaves the comparison of index and values to the schedule.
        """
        with self._at_work:
            self._sweep(keyspace, claim, audit)

    def _turn(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, _Pending()
        view = self._enforcement.view
        if view is None:
            return
        changed, self._seen = view is not self._seen, view
        self.follow()
        self._pass_on(pending)
        for keyspace, terms in self._settling.pending():
            with self._each():
                if not self._closed and self._settle(keyspace, *terms):
                    self._settling.done(keyspace, terms)
        if self._plaintext is not None:
            self._look_for_plaintext(self._plaintext, view)
        due = self._clock() >= self._sweep_at_s
        if due or changed:
            self._sweep_at_s = self._clock() + self._interval_s * (0.8 + 0.4 * self._jitter())
            with self._each():
                self._hooks.learn(self._connected(), view.keyspaces)
            if self._settling.take_guarantees_changed():
                self._reclaim.begin()
        with self._each():
            self._take_back(view, due=due)
        if changed:
            with self._lock:
                for book in (self._sweeps, self._usage):
                    for gone in book.keys() - view.keyspaces.keys():
                        del book[gone]
                self._drift.retain(view.keyspaces.keys())
        for keyspace in self._drift.due():
            with self._each():
                self._look_again(keyspace)
        for keyspace in pending.urgent:
            with self._each():
                self.sweep(keyspace)
        if due:
            for keyspace in view.keyspaces:
                if keyspace not in pending.urgent and not self._closed:
                    with self._each():
                        self.sweep(keyspace, claim=True)

    def _sweep(self, keyspace: str, claim: bool, audit: bool | None) -> None:
        permit = self._enforcement.enter(keyspace, self._abort)
        if not isinstance(permit, Permit):
            return
        try:
            transport = self._connected()
            if claim and not self._claim(transport, keyspace):
                return
            turns = self._sweeps.get(keyspace, 0)
            self._sweeps[keyspace] = turns + 1
            scope = self._ledgers.view(transport, keyspace)
            buckets = scope.buckets
            self._note_usage(keyspace, scope)
            thorough = audit or (audit is None and turns % AUDIT_EVERY == AUDIT_EVERY - 1)
            # A bucket without blocks may still hold names of evicted ones.
            all_of_them = thorough or self._arc
            self._expire(transport, keyspace, [b.bucket for b in buckets if b.known and (b.in_use or all_of_them)])
            if self._plaintext is not None:
                self._plaintext.look(transport, keyspace)
            life_ms, bounds = self._hooks.life_ms(keyspace), self._hooks.bounds(keyspace)
            if life_ms is not None:
                self._clamp(transport, keyspace, life_ms, [b.bucket for b in buckets if b.longest_ms > life_ms])
            if thorough:
                for bucket in range(BUCKETS):
                    audit_bucket(transport, self._state(keyspace, bucket), partial(self._count, keyspace=keyspace))
            if bounds is not None:
                self._balance(transport, keyspace, bounds)
        finally:
            permit.release()

    def _take_back(self, view: CacheView, *, due: bool) -> None:
        """Of a tier whose capacity is divided, take back what new guarantees need, and keep its sum right."""
        any_scope = next(iter(view.keyspaces), None)
        whole = self._hooks.bounds(any_scope) if any_scope is not None else None
        if whole is None or whole.capacity_bytes is None:
            return
        transport = self._connected()

        def guaranteed() -> dict[str, int]:
            bounds = ((keyspace, self._hooks.bounds(keyspace)) for keyspace in view.keyspaces)
            return {keyspace: min(one.guaranteed_bytes, one.limit_bytes) for keyspace, one in bounds if one}

        def give_back(keyspace: str) -> None:
            bounds = self._hooks.bounds(keyspace)
            permit = self._enforcement.enter(keyspace, self._abort)
            if isinstance(permit, Permit):
                try:
                    with self._each():
                        if bounds is not None:
                            self._ledgers.give_back(transport, keyspace, bounds)
                finally:
                    permit.release()

        if due:
            self._count("drift_rooms", self._reclaim.tidy(transport, self._interval_s))
        self._reclaim.run(transport, whole.capacity_bytes, guaranteed, give_back, lambda: self._closed)

    def _look_for_plaintext(self, plaintext: Plaintext, view: CacheView) -> None:
        plaintext.follow(view.keyspaces.keys())
        until_s = self._clock() + LOOK_S
        for keyspace in plaintext.todo():
            if self._closed or self._clock() > until_s:
                break
            permit = self._enforcement.enter(keyspace, self._abort)
            if isinstance(permit, Permit):
                try:
                    with self._each():
                        plaintext.look(self._connected(), keyspace)
                finally:
                    permit.release()

    def _settle(self, keyspace: str, bounds: Bounds | None, life_ms: int | None) -> bool:
        """Put changed bounds of one scope through; whether they hold now."""
        permit = self._enforcement.enter(keyspace, self._abort)
        if not isinstance(permit, Permit):
            return False
        try:
            transport = self._connected()
            scope = self._ledgers.view(transport, keyspace)
            self._note_usage(keyspace, scope)
            if life_ms is not None:
                self._clamp(transport, keyspace, life_ms, [b.bucket for b in scope.buckets if b.longest_ms > life_ms])
            if bounds is not None and bounds.divided:
                self._ledgers.rooms.charge(transport, keyspace, bounds, scope.ledger.share)
            above = bounds is not None and scope.above(bounds.limit_bytes)
            settled = bounds is None or not above or self._ledgers.settle(transport, keyspace, bounds) == 0
            return settled and all(bucket.known for bucket in scope.buckets)
        finally:
            permit.release()

    def _expire(self, transport: Transport, keyspace: str, buckets: Sequence[int]) -> None:
        """Take out what expired and what dead writers reserved."""
        while buckets:
            answers = transport.ask(
                [
                    call(
                        "sweep",
                        self._state(keyspace, bucket),
                        ENTRIES_PER_CALL,
                        int(self._arc),
                        read=lambda reply: read_numbers(reply, 3),
                    )
                    for bucket in buckets
                ]
            )
            self._count("expired", sum(expired for expired, _, _ in answers), keyspace)
            self._count("reservations_reaped", sum(dead for _, dead, _ in answers))
            buckets = [bucket for bucket, (_, _, more) in zip(buckets, answers, strict=True) if more]

    def _clamp(self, transport: Transport, keyspace: str, life_ms: int, buckets: Sequence[int]) -> None:
        """Shorten the lives of a scope's blocks to what the policy allows now."""
        steps = [(bucket, 0, 0) for bucket in buckets]
        while steps:
            commands = [
                call("clamp", self._state(keyspace, bucket), life_ms, since, cursor, ENTRIES_PER_CALL, read=_read_clamp)
                for bucket, cursor, since in steps
            ]
            answers = zip(steps, transport.ask(commands), strict=True)
            steps = [(step[0], cursor, since) for step, (status, cursor, since) in answers if status != "done"]

    def _balance(self, transport: Transport, keyspace: str, bounds: Bounds) -> None:
        """Put a lowered limit through, and rebuild a ledger that charges for leases which no bucket has."""
        scope = self._ledgers.view(transport, keyspace)
        if scope.above(bounds.limit_bytes) and self._ledgers.settle(transport, keyspace, bounds) > 0:
            self.urge(keyspace)
        if bounds.divided:
            self._ledgers.give_back(transport, keyspace, bounds)
        self._compare_leases(transport, keyspace, bounds)

    def _compare_leases(self, transport: Transport, keyspace: str, bounds: Bounds) -> None:
        scope = self._ledgers.view(transport, keyspace)
        if self._drift.found(keyspace, scope):
            self._count("drift_leases", 1, keyspace)
            self._ledgers.rebuild(transport, keyspace, scope.ledger.version)
            # A bucket that had more than it was charged for may have brought the scope above its limit.
            above = self._ledgers.view(transport, keyspace).above(bounds.limit_bytes)
            if above and self._ledgers.settle(transport, keyspace, bounds) > 0:
                self.urge(keyspace)

    def _look_again(self, keyspace: str) -> None:
        bounds = self._hooks.bounds(keyspace)
        permit = self._enforcement.enter(keyspace, self._abort)
        if isinstance(permit, Permit):
            try:
                if bounds is not None:
                    self._compare_leases(self._connected(), keyspace, bounds)
            finally:
                permit.release()

    def _claim(self, transport: Transport, keyspace: str) -> bool:
        """Whether this scope is this process' to sweep in this interval."""
        key = claim_key(self._domain, keyspace).encode()
        return claim(transport, key, self._token, int(self._interval_s * 750))

    @contextmanager
    def _each(self) -> Iterator[None]:
        """Do one of several things that do not depend on one another: one node's failure is not the others'."""
        try:
            yield
        except (TransportError, ReplyError) as error:
            self._hooks.count("sweep_errors", 1, "")
            logger.info("The sweep was interrupted: %s", error)

    def _pass_on(self, pending: _Pending) -> None:
        by_bucket: dict[tuple[str, bytes], list[bytes]] = {}
        for place in pending.touches:
            by_bucket.setdefault((place.keyspace, place.base), []).append(place.member)
        for (keyspace, base), members in by_bucket.items():
            for start in range(0, len(members), MEMBERS_PER_TOUCH):
                batch = members[start : start + MEMBERS_PER_TOUCH]
                with self._each():
                    self._ask_for(keyspace, call("touch", state_key(base), int(self._arc), *batch, read=read_number))
        for place, token in pending.abandoned:
            key = state_key(place.base)
            with self._each():
                self._ask_for(place.keyspace, call("abandon", key, place.member, token, read=read_number))

    def _ask_for(self, keyspace: str, command: Command) -> None:
        permit = self._enforcement.enter(keyspace, self._abort)
        if isinstance(permit, Permit):
            try:
                self._connected().ask([command])
            except ReplyError as error:
                if error.code != "OOM":
                    raise
            finally:
                permit.release()

    def _note_usage(self, keyspace: str, scope: ScopeView) -> None:
        with self._lock:
            used, blocks = sum(one.used for one in scope.buckets), sum(one.blocks for one in scope.buckets)
            self._usage[keyspace] = (self._clock(), used, blocks)

    def _count(self, name: str, amount: int, keyspace: str = "") -> None:
        if amount:
            self._hooks.count(name, amount, keyspace)

    def _state(self, keyspace: str, bucket: int) -> bytes:
        return state_key(bucket_prefix(self._domain, keyspace, bucket).encode())

    def _abort(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.abort()

    def _connected(self) -> SweeperConnection:
        if self._connection is None or not self._connection.usable:
            self._drop_connection()
            self._connection = self._hooks.connect()
        return self._connection

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _read_clamp(reply: Reply) -> tuple[str, int, int]:
    status, cursor, since = read_list(reply, 3)
    return read_text(status), read_number(cursor), read_number(since)
