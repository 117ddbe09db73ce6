"""The thread that maintains a shared tier's index and accounting, on its own connection.

Every second it sends queued touches and abandoned reservations; changed bounds are applied at once. Once an interval,
with jitter, it sweeps the policy's scopes: it removes expired blocks and dead reservations, applies retentions and
limits, and rebuilds ledgers with lost leases. Some sweeps audit the scope and repair drift. A scope is swept by the pod
that claims it for the interval.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from kvstrata.contract.policy.cache_view import CacheView
from kvstrata.contract.store.redis_keys import BUCKETS, bucket_prefix, claim_key
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement
from kvstrata_sidecar.adapter.policy.limits import SharedBounds
from kvstrata_sidecar.adapter.redis.budget.expiry import clamp, expire
from kvstrata_sidecar.adapter.redis.budget.leases import Ledgers
from kvstrata_sidecar.adapter.redis.budget.reclaim import Departed, Leftovers, Reclaim
from kvstrata_sidecar.adapter.redis.budget.scope_state import ScopeView
from kvstrata_sidecar.adapter.redis.client.commands import Place, Transport, claim, state_key
from kvstrata_sidecar.adapter.redis.client.resp import Command, ReplyError, TransportError
from kvstrata_sidecar.adapter.redis.sweep.access import SweeperAccess, SweeperHooks
from kvstrata_sidecar.adapter.redis.sweep.audit import LeaseDrift, audit_bucket
from kvstrata_sidecar.adapter.redis.sweep.inbox import MAX_PENDING, Pending, Settling

logger = logging.getLogger(__name__)

TICK_S = 1.0
SLICE_S = 1.0
"""Time that a turn takes scopes before it returns to queued work."""

AUDIT_EVERY = 10
"""Of so many sweeps of a scope, on average, one compares its index with its values."""


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
        encrypts: bool = False,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._domain = domain
        self._enforcement = enforcement
        self._access = SweeperAccess(enforcement, hooks)
        self._ledgers = ledgers
        self._hooks = hooks
        self._token = token
        self._interval_s = interval_s
        self._clock = clock
        self._jitter = jitter
        self._encrypts = encrypts
        self._lock = threading.Lock()
        self._following = threading.Lock()
        self._at_work = threading.RLock()
        self._pending = Pending()
        self._wake = threading.Event()
        self._closed = False
        self._seen: CacheView | None = None
        self._followed: CacheView | None = None
        self._settling = Settling()
        self._usage: dict[str, tuple[float, int, int]] = {}
        self._sweep_at_s = 0.0
        self._until_s = 0.0
        self._to_settle: deque[str] = deque()
        self._to_sweep: deque[str] = deque()
        self._drift = LeaseDrift(clock)
        self._departed = Departed(ledgers, hooks.bounds)
        leftovers = Leftovers(
            domain, token, clock,
            current=self._access.current, each=self._access.each, count=self._count, interrupted=self._interrupted,
        )  # fmt: skip
        self._reclaim = Reclaim(
            domain, ledgers, token, clock, leftovers=leftovers,
            bounds=hooks.bounds, permitted=self._access.apart, count=self._count, interrupted=self._interrupted,
        )  # fmt: skip

    def touch(self, place: Place) -> None:
        """Record that a block was read; sent within about a second, once for all reads until then."""
        with self._lock:
            if len(self._pending.touches) < MAX_PENDING:
                self._pending.touches[place] = None

    def abandon(self, place: Place, token: bytes) -> None:
        """Record that the reservation of a failed store can be released."""
        with self._lock:
            self._pending.abandoned.append((place, token))

    def urge(self, keyspace: str) -> None:
        """Sweep a scope soon: it cannot be used as it is."""
        with self._lock:
            if keyspace not in self._pending.urgent and len(self._pending.urgent) < MAX_PENDING:
                self._pending.urgent[keyspace] = None

    @property
    def settling(self) -> int:
        """Number of scopes whose changed bounds are not applied yet."""
        return len(self._settling)

    def follow(self) -> None:
        """Record what the view in force changes, and apply it soon."""
        # A separate lock: thousands of scopes take a while, and workers record their touches meanwhile.
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
        self._closed = True
        self._wake.set()
        self._access.abort()

    def run(self) -> None:
        """Work until closed; failures are retried a tick later."""
        while not self._closed:
            more = False
            try:
                more = self._hooks.usable() and self.turn()
            except (TransportError, ReplyError) as error:
                self._hooks.count("sweep_errors", 1, "")
                logger.info("The sweep was interrupted: %s", error)
            except Exception:
                self._hooks.count("sweep_errors", 1, "")
                logger.exception("The sweep failed")
            if not more:
                self._wake.wait(TICK_S)
            if not self._closed:
                self._wake.clear()
        self._access.close()

    def turn(self) -> bool:
        """Do what is due now, for about a second; return whether there is more."""
        with self._at_work:
            return self._turn()

    def sweep(self, keyspace: str, *, claim: bool = False, audit: bool | None = None) -> None:
        """Sweep a scope if allowed and, with `claim`, if no other pod did; `audit` None leaves audits to chance."""
        with self._at_work:
            self._sweep(keyspace, claim, audit)

    def _turn(self) -> bool:
        with self._lock:
            pending, self._pending = self._pending, Pending()
        view = self._enforcement.view
        if view is None:
            return False
        before, self._seen = self._seen, view
        changed = view is not before
        self.follow()
        for keyspace, command in pending.commands():
            with self._access.each():
                self._ask_for(keyspace, command)
        self._until_s = self._clock() + SLICE_S
        if changed:
            self._forget_others(view)
            self._departed.follow(before.keyspaces if before is not None else (), view.keyspaces)
        self._put_through(changed=changed)
        due = self._clock() >= self._sweep_at_s
        if due or changed:
            if due:
                self._to_sweep = deque(dict.fromkeys((*self._to_sweep, *view.keyspaces)))
            self._sweep_at_s = self._clock() + self._interval_s * (0.8 + 0.4 * self._jitter())
            with self._access.each():
                self._hooks.learn(self._access.connected(), view.keyspaces)
            if self._settling.take_guarantees_changed():
                self._reclaim.begin()
        for keyspace in self._drift.due():
            with self._access.each():
                self._look_again(keyspace)
        again: list[str] = []
        for keyspace in pending.urgent:
            if self._late():
                self.urge(keyspace)
                continue
            again.append(keyspace)
            with self._access.each():
                self.sweep(keyspace)
                again.pop()
        with self._access.each():
            self._departed.turn(self._access.connected, self._interrupted)
        with self._access.each():
            self._reclaim.turn(self._access.connected, view.keyspaces, self._interval_s if due else None)
        while self._to_sweep and not self._interrupted():
            with self._access.each():
                self._sweep(self._to_sweep.popleft(), True, None)
        more = bool(self._to_settle or self._to_sweep or self._pending.urgent)
        for keyspace in again:  # with the next turn: a server that does not answer is not asked continuously
            self.urge(keyspace)
        return more

    def _put_through(self, *, changed: bool) -> None:
        """Apply changed bounds; failures are retried after all others."""
        if changed or not self._to_settle:
            self._to_settle = deque(keyspace for keyspace, _ in self._settling.pending())
        terms = dict(self._settling.pending())
        while self._to_settle and not self._interrupted():
            keyspace = self._to_settle.popleft()
            with self._access.each():
                if keyspace in terms and self._settle(keyspace, *terms[keyspace]):
                    self._settling.done(keyspace, terms[keyspace])

    def _late(self) -> bool:
        return self._closed or self._clock() >= self._until_s

    def _interrupted(self) -> bool:
        """Whether to leave the remaining scopes to another turn, because more urgent work waits."""
        return self._late() or bool(self._pending.urgent) or self._enforcement.view is not self._seen

    def _forget_others(self, view: CacheView) -> None:
        with self._lock:
            for gone in self._usage.keys() - view.keyspaces.keys():
                del self._usage[gone]
        self._drift.retain(view.keyspaces.keys())
        self._to_sweep = deque(keyspace for keyspace in self._to_sweep if keyspace in view.keyspaces)

    def _sweep(self, keyspace: str, claim: bool, audit: bool | None) -> None:
        with self._access.permitted(keyspace) as permitted:
            if not permitted:
                return
            transport = self._access.connected()
            if claim and not self._claim(transport, keyspace):
                return
            scope = self._ledgers.view(transport, keyspace)
            buckets = scope.buckets
            self._note_usage(keyspace, scope)
            # By chance, because pods take turns with a scope: none sees all of its sweeps.
            thorough = audit or (audit is None and self._jitter() * AUDIT_EVERY < 1)
            states = [self._state(keyspace, b.bucket) for b in buckets if b.known and (b.in_use or thorough)]
            expired, dead = expire(transport, states)
            self._count("expired", expired, keyspace)
            self._count("reservations_reaped", dead)
            life_ms, bounds = self._hooks.life_ms(keyspace), self._hooks.bounds(keyspace)
            if life_ms is not None:
                self._clamp(transport, keyspace, life_ms, scope)
            if thorough:
                self._count("orphan_scans", 1)
                count = partial(self._count, keyspace=keyspace)
                for bucket in range(BUCKETS):
                    audit_bucket(transport, self._state(keyspace, bucket), count, encrypts=self._encrypts)
            if bounds is not None:
                self._balance(transport, keyspace, bounds)

    def _settle(self, keyspace: str, bounds: SharedBounds | None, life_ms: int | None) -> bool:
        """Apply changed bounds of one scope; return whether they hold now."""
        with self._access.permitted(keyspace) as permitted:
            if not permitted:
                return False
            transport = self._access.connected()
            scope = self._ledgers.view(transport, keyspace)
            self._note_usage(keyspace, scope)
            if life_ms is not None:
                self._clamp(transport, keyspace, life_ms, scope)
            if bounds is not None and bounds.divided:
                self._ledgers.rooms.charge(transport, keyspace, bounds, scope.ledger.share)
            above = bounds is not None and scope.above(bounds.limit_bytes)
            settled = bounds is None or not above or self._ledgers.settle(transport, keyspace, bounds) == 0
            return settled and all(bucket.known for bucket in scope.buckets)

    def _clamp(self, transport: Transport, keyspace: str, life_ms: int, scope: ScopeView) -> None:
        clamp(transport, [self._state(keyspace, b.bucket) for b in scope.buckets if b.longest_ms > life_ms], life_ms)

    def _balance(self, transport: Transport, keyspace: str, bounds: SharedBounds) -> None:
        """Apply a lowered limit, and rebuild a ledger that charges for leases which no bucket has."""
        scope = self._ledgers.view(transport, keyspace)
        if scope.above(bounds.limit_bytes) and self._ledgers.settle(transport, keyspace, bounds) > 0:
            self.urge(keyspace)
        if bounds.divided and self._ledgers.give_back(transport, keyspace, bounds) > 0:
            self._reclaim.begin()
        self._compare_leases(transport, keyspace)

    def _compare_leases(self, transport: Transport, keyspace: str) -> None:
        scope = self._ledgers.view(transport, keyspace)
        if self._drift.found(keyspace, scope):
            self._count("drift_leases", 1, keyspace)
            # A bucket with more than its charge may have brought the scope above its limit: sweep it.
            self.urge(keyspace)
            self._ledgers.rebuild(transport, keyspace, scope.ledger.version)

    def _look_again(self, keyspace: str) -> None:
        with self._access.permitted(keyspace) as permitted:
            if permitted and self._hooks.bounds(keyspace) is not None:
                self._compare_leases(self._access.connected(), keyspace)

    def _claim(self, transport: Transport, keyspace: str) -> bool:
        key = claim_key(self._domain, keyspace).encode()
        return claim(transport, key, self._token, int(self._interval_s * 750))

    def _ask_for(self, keyspace: str, command: Command) -> None:
        with self._access.permitted(keyspace) as permitted:
            try:
                if permitted:
                    self._access.connected().ask([command])
            except ReplyError as error:
                if error.code != "OOM":
                    raise

    def _note_usage(self, keyspace: str, scope: ScopeView) -> None:
        with self._lock:
            used, blocks = sum(one.used for one in scope.buckets), sum(one.blocks for one in scope.buckets)
            self._usage[keyspace] = (self._clock(), used, blocks)

    def _count(self, name: str, amount: int, keyspace: str = "") -> None:
        if amount:
            self._hooks.count(name, amount, keyspace)

    def _state(self, keyspace: str, bucket: int) -> bytes:
        return state_key(bucket_prefix(self._domain, keyspace, bucket).encode())
