"""Sweeps of scopes: expired blocks and dead reservations go, retention and limit are applied, capacity given back. A
policy's changes are applied scope by scope, as soon as it is in force.

Some sweeps audit the scope: they compare a bucket's index with its values, and its sums with the index.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvstrata.contract.policy.cache_view import CacheView
from kvstrata.contract.store.redis_keys import claim_key
from kvstrata_sidecar.adapter.policy.limits import SharedBounds, bounds_of
from kvstrata_sidecar.adapter.redis.budget.scope_state import BucketView, ScopeView
from kvstrata_sidecar.adapter.redis.client.commands import call, claim, reads_numbers, reads_status
from kvstrata_sidecar.adapter.redis.client.resp import Transport
from kvstrata_sidecar.adapter.redis.deps import MAX_WAITING, TierDeps
from kvstrata_sidecar.adapter.redis.sweep.sweeper import Deadline, SweeperConnection

ENTRIES_PER_CALL = 256

Terms = tuple[SharedBounds | None, int | None]
"""A scope's bounds, and the life of its blocks in milliseconds."""

AUDIT_EVERY = 10
"""Of so many sweeps of a scope, on average, one is an audit."""

RECOUNT_STEP = 500
"""Entries that one script adds up: more would block the server for too long."""

LOOK_AGAIN_S = 2.0
"""Longer than a lease takes; a rebuild voids the lease of a writer that stalls longer."""


class PolicyChanges:
    """Policy changes that a tier has yet to apply. Thread-safe. `departed` are keyspaces that left the policy and still
    have capacity."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._terms: Mapping[str, Terms] = {}
        self._changed: dict[str, Terms] = {}
        self._guarantees_changed = False
        self.departed: dict[str, None] = {}

    def follow(self, terms: Mapping[str, Terms]) -> None:
        """Record the changes of the terms now in force; scopes that left the policy have nothing to apply."""
        with self._lock:
            before, self._terms = self._terms, terms
            self._guarantees_changed = self._guarantees_changed or _guarantees(terms) != _guarantees(before)
            changed = (name for name, one in terms.items() if one != before.get(name, (None, None)))
            self._changed = {name: terms[name] for name in (*self._changed, *changed) if name in terms}
            left = (name for name, (bounds, _) in before.items() if bounds is not None and bounds.divided)
            departed = [name for name in (*self.departed, *left) if name not in terms]
            self.departed = dict.fromkeys(departed[:MAX_WAITING])

    def apply_all_again(self) -> None:
        """Have everything applied again: the tier has other servers."""
        with self._lock:
            self._terms = {}

    def pending(self) -> list[tuple[str, Terms]]:
        with self._lock:
            return list(self._changed.items())

    def applied(self, keyspace: str, terms: Terms) -> None:
        """Record that these terms hold, unless others are in force by now."""
        with self._lock:
            if self._changed.get(keyspace) == terms:
                del self._changed[keyspace]

    def released(self, keyspace: str) -> None:
        """Record that a departed keyspace has no capacity any more but for its blocks."""
        with self._lock:
            self.departed.pop(keyspace, None)

    def take_guarantees_changed(self) -> bool:
        """Whether guarantees changed since the last call: a new one needs loans back."""
        with self._lock:
            changed, self._guarantees_changed = self._guarantees_changed, False
            return changed

    def __len__(self) -> int:
        return len(self._changed)


def _guarantees(terms: Mapping[str, Terms]) -> dict[str, int]:
    return {name: bounds.guaranteed_bytes for name, (bounds, _) in terms.items() if bounds and bounds.guaranteed_bytes}


class ApplyPolicy:
    """Applies changed bounds and retentions; scopes for which that fails are tried again after all others. Asks which
    keyspaces of a new policy the tier has revoked."""

    def __init__(self, deps: TierDeps) -> None:
        self._deps = deps
        self.changes = PolicyChanges()
        self._following = threading.Lock()
        self._followed: CacheView | None = None
        self._checked: CacheView | None = None
        self._waiting: deque[tuple[str, Terms]] = deque()

    def follow(self) -> None:
        """Record the changes of the view in force. Thread-safe."""
        # A lock of its own: thousands of scopes take a while.
        with self._following:
            view, terms = self._deps.enforcement.view, self._deps.terms
            if view is not None and view is not self._followed:
                self._followed, capacity_bytes = view, terms.capacity_bytes
                bounds = {n: terms.in_tier(b) for n, b in bounds_of(view, self._deps.tier.name).items()}
                self.changes.follow({n: (b.shared(capacity_bytes), b.retention_ms) for n, b in bounds.items()})

    def run(self, connection: SweeperConnection, deadline: Deadline) -> bool:
        self.follow()
        deps, view = self._deps, self._deps.enforcement.view
        if view is not self._checked:
            self._checked = view
            self._waiting.clear()
            with connection.isolated("The check of revoked keyspaces"):
                deps.revoked.learn(connection.transport(), deps.listed())
        self._waiting = self._waiting or deque(self.changes.pending())
        while self._waiting and not deadline.is_interrupted():
            keyspace, terms = self._waiting.popleft()
            connection.attempt(keyspace, partial(self._apply, terms=terms))
        return bool(self._waiting)

    def _apply(self, transport: Transport, keyspace: str, terms: Terms) -> None:
        bounds, life_ms = terms
        ledgers = self._deps.ledgers
        ledger = ledgers.of(transport, keyspace, bounds)
        scope = ledger.view()
        self._deps.usage.put(keyspace, scope.usage)
        clamp(transport, scope, life_ms)
        if bounds is not None and bounds.divided:
            ledgers.capacity.charge(transport, keyspace, bounds, scope.ledger)
        is_above = bounds is not None and scope.above(bounds.limit_bytes) and ledger.settle() > 0
        if not is_above and all(bucket.known for bucket in scope.buckets):
            self.changes.applied(keyspace, terms)


def clamp(transport: Transport, scope: ScopeView, life_ms: int | None) -> None:
    """Shorten lives in buckets with blocks that may live longer than `life_ms`, None for no bound."""
    steps = [(one.state, 0, 0) for one in scope.buckets if life_ms is not None and one.longest_ms > life_ms]
    while steps and life_ms is not None:
        commands = [
            call("clamp", state, reads_status(2), life_ms=life_ms, since=since, cursor=cursor, count=ENTRIES_PER_CALL)
            for state, cursor, since in steps
        ]
        answers = zip(steps, transport.ask(commands), strict=True)
        steps = [(step[0], cursor, since) for step, (status, (cursor, since)) in answers if status != "done"]


class AuditLeases:
    """Finds differences between a ledger's charges and its buckets' leases. A writer that dies during a lease, or a
    server that falls back to an older copy, leaves a constant difference; a lease under way differs for a moment only.
    So the same difference at a second look a little later is a loss."""

    def __init__(self, deps: TierDeps) -> None:
        self._deps = deps
        self._differed: dict[str, tuple[float, tuple[int, ...]]] = {}

    def run(self, connection: SweeperConnection, deadline: Deadline) -> bool:  # noqa: ARG002
        now_s = self._deps.clock()
        for keyspace, noted in [*self._differed.items()]:
            due = noted[0] <= now_s and not connection.attempt(keyspace, self.compare)
            if due and self._differed.get(keyspace) is noted:  # the policy does not allow the tier for it any more
                del self._differed[keyspace]
        return False

    def compare(self, transport: Transport, keyspace: str) -> None:
        """Rebuild a ledger that differs from a bucket by as much as at the look before."""
        ledger = self._deps.ledgers.of(transport, keyspace)
        scope = ledger.view()
        _, before = self._differed.pop(keyspace, (0.0, ()))
        if scope.ledger.lost:
            return
        differs = tuple(one.lease - charged for one, charged in zip(scope.buckets, scope.ledger.by_bucket, strict=True))
        if any(now != 0 and now == then for now, then in zip(differs, before, strict=False)):
            self._deps.counters.add("drift_leases", 1, keyspace)
            # A bucket with more than its charge may have brought the scope above its limit.
            self._deps.inbox.urge(keyspace)
            ledger.rebuild(scope.ledger.version)
        elif any(differs):
            self._differed[keyspace] = (self._deps.clock() + LOOK_AGAIN_S, differs)


class SweepScopes:
    """Sweeps scopes that cannot be used as they are, then once an interval, with jitter, all of the policy, each by the
    pod that claims it. `overcommitted` is called when guarantees exceed the tier's capacity."""

    def __init__(self, deps: TierDeps, leases: AuditLeases, overcommitted: Callable[[], None]) -> None:
        self._deps = deps
        self._leases = leases
        self._overcommitted = overcommitted
        self._again: list[str] = []
        self._waiting: deque[str] = deque()
        self.due_s = 0.0

    def run(self, connection: SweeperConnection, deadline: Deadline) -> bool:
        deps = self._deps
        # One that has to be swept again waits for the next turn: it must not hold up all others.
        urgent, self._again = dict.fromkeys((*self._again, *deps.inbox.take_urgent())), []
        for keyspace in urgent:
            if deadline.is_over():
                deps.inbox.urge(keyspace)
            elif connection.attempt(keyspace, self.sweep):
                self._again.append(keyspace)
        if deps.clock() >= self.due_s:
            self.due_s = deps.next_round_s()
            self._waiting = deque(dict.fromkeys((*self._waiting, *deps.listed())))
            with connection.isolated("The check of revoked keyspaces"):
                deps.revoked.learn(connection.transport(), deps.listed())
        while self._waiting and not deadline.is_interrupted():
            connection.attempt(self._waiting.popleft(), self._sweep_claimed)
        return bool(self._waiting) or deps.inbox.is_urgent

    def _sweep_claimed(self, transport: Transport, keyspace: str) -> None:
        deps = self._deps
        key = claim_key(deps.params.domain, keyspace).encode()
        if claim(transport, key, deps.token, deps.claim_ms) and self.sweep(transport, keyspace):
            deps.inbox.urge(keyspace)

    def sweep(self, transport: Transport, keyspace: str, *, audit: bool | None = None) -> bool:
        """Sweep a scope; return whether it is still above its limit. `audit` None leaves audits to chance."""
        deps = self._deps
        if audit is None:
            # Pods take turns with a scope: none sees all of its sweeps.
            audit = deps.jitter() * AUDIT_EVERY < 1
        bounds, life_ms = deps.terms.bounds(keyspace), deps.terms.retention_ms(keyspace)
        ledger = deps.ledgers.of(transport, keyspace, bounds)
        scope = ledger.view()
        deps.usage.put(keyspace, scope.usage)
        expired, dead = expire(transport, [one for one in scope.buckets if one.known and (one.in_use or audit)])
        deps.counters.add("expired", expired, keyspace)
        deps.counters.add("reservations_reaped", dead)
        clamp(transport, scope, life_ms)
        if audit:
            deps.counters.add("orphan_scans", 1)
            for bucket in scope.buckets:
                self._audit(transport, keyspace, bucket.state)
        if bounds is None:
            return False
        is_above = ledger.view().above(bounds.limit_bytes) and ledger.settle() > 0
        if bounds.divided and ledger.give_back() > 0:
            self._overcommitted()
        self._leases.compare(transport, keyspace)
        return is_above

    def _audit(self, transport: Transport, keyspace: str, state: bytes) -> None:
        """Remove entries without their value, and correct accounting that differs from the index. A large bucket is
        recounted in steps; an unfinished recount continues with the next audit."""
        cursor, encrypts = 0, self._deps.tier.encrypts
        while True:
            step = call("audit", state, reads_numbers(4), cursor=cursor, count=ENTRIES_PER_CALL, encrypts=encrypts)
            ((cursor, lost, lost_bytes, plain),) = transport.ask([step])
            self._deps.counters.add("drift_entries", lost, keyspace)
            self._deps.counters.add("drift_bytes", lost_bytes, keyspace)
            self._deps.counters.add("plaintext_removed", plain, keyspace)
            if not cursor:
                break
        for index in (b"x", b"a"):
            position = 0
            while position >= 0:
                step = call("strays", state, reads_numbers(2), index=index, first=position, count=ENTRIES_PER_CALL)
                ((position, strays),) = transport.ask([step])
                self._deps.counters.add("drift_entries", strays, keyspace)
        status = "more"
        while status == "more":
            step = call("recount", state, reads_status(3), step=RECOUNT_STEP)
            ((status, (used, held, strays)),) = transport.ask([step])
            self._deps.counters.add("drift_entries", strays, keyspace)
            self._deps.counters.add("drift_bytes", abs(used) + abs(held), keyspace)
        self._deps.counters.add("recounts_repeated", status == "again", keyspace)


def expire(transport: Transport, buckets: Sequence[BucketView]) -> tuple[int, int]:
    """Remove expired blocks and dead writers' reservations; return how many of each."""
    all_expired = all_dead = 0
    steps = [(bucket.state, 0) for bucket in buckets]
    while steps:
        commands = [
            call("sweep", state, reads_numbers(4), count=ENTRIES_PER_CALL, cursor=cursor) for state, cursor in steps
        ]
        answers = transport.ask(commands)
        all_expired += sum(expired for expired, *_ in answers)
        all_dead += sum(dead for _, dead, *_ in answers)
        done = zip(steps, answers, strict=True)
        steps = [(state, cursor) for (state, _), (_, _, more, cursor) in done if more or cursor]
    return all_expired, all_dead
