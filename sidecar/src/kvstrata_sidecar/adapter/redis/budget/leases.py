"""Leases of buckets, drawn from their scope's ledger, and eviction when the ledger is exhausted.

A scope's limit is divided into leases of its buckets, because a script sees one bucket only. For a larger lease the
ledger is charged first; for a smaller one the bucket yields first. A writer that dies in between strands bytes until a
rebuild, which gives the ledger a new version, has every bucket adopt it, and sums up their leases. Grants and yields of
an older version no longer count, so a frozen writer may continue at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvstrata.contract.store.redis_keys import BUCKETS, bucket_prefix, ledger_key
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.policy.limits import SharedBounds
from kvstrata_sidecar.adapter.redis.budget.capacity_shares import TierCapacity
from kvstrata_sidecar.adapter.redis.budget.scope_state import BucketView, Foresight, ScopeView, Share, view
from kvstrata_sidecar.adapter.redis.client.commands import (
    FOR_EVER_MS,
    Place,
    Reserved,
    Terms,
    Transport,
    call,
    read_ages,
    read_list,
    read_number,
    read_text,
    reserve,
    state_key,
)
from kvstrata_sidecar.adapter.redis.client.resp import (
    Command,
    FramingError,
    NodeAwayError,
    PeerClosedError,
    Reply,
    ReplyError,
    SlotMovingError,
)

ATTEMPTS = 6
"""Attempts of a store to get room that others take before it."""

LEASE_SHARE = 256
LEASE_GROWTH_SHARE, SPARE_SHARE = 4, 8
"""A lease grows by the first part of itself beyond the need; a sweep leaves the second part of what is in use. At most
`LEASE_SHARE` of the limit: reserves of 16 buckets are lost to all other scopes."""

EVICTIONS_PER_CALL = 256
REBUILD_PATIENCE_MS = 200
"""Time to wait for another's rebuild, which takes three exchanges."""

LEDGER_KEEP_MS = 7 * 86_400_000
"""Life of an unused ledger; a lost one is rebuilt from its buckets."""


REFUSALS = {"tombstone": Refusal.TOMBSTONE}


@dataclass(frozen=True, slots=True)
class Demand:
    """A block that needs room: `size` bytes at a place, under a token that identifies its writer."""

    place: Place
    size: int
    token: bytes
    terms: Terms

    @property
    def bounds(self) -> SharedBounds | None:
        """Bounds of its scope, None if it has none."""
        return self.terms.bounds


class Ledgers:
    """Makes room in the scopes of one tier. Thread-safe. `count` takes name, amount and keyspace, `aged` seconds."""

    def __init__(
        self,
        domain: str,
        count: Callable[[str, int, str], None],
        clock: Callable[[], float],
        window_ms: int,
        pause: Callable[[float], None] = time.sleep,
        *,
        aged: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._domain = domain
        self._count = count
        self._aged = aged
        self._clock = clock
        self._window_ms = window_ms
        self._pause = pause
        self.rooms = TierCapacity(domain)
        self._foresight = Foresight(clock)

    def admit_each(self, transport: Transport, demands: Sequence[Demand]) -> list[Refusal | bool | Exception]:
        """For each block, True if reserved, False if present, else the refusal or error. PeerClosedError: retry."""
        begun_s = self._clock()
        outcomes: list[Refusal | bool | Exception | None] = [
            Refusal.OVER_BUDGET if one.bounds is not None and one.size > one.bounds.limit_bytes else None
            for one in demands
        ]
        asked = [index for index, outcome in enumerate(outcomes) if outcome is None]
        answers = transport.ask_each([self._question(demands[index]) for index in asked]) if asked else []
        short: dict[int, int | None] = {}
        for index, answer in zip(asked, answers, strict=True):
            if isinstance(answer, PeerClosedError):
                raise answer
            outcomes[index] = self._judge(demands[index].place.keyspace, answer)
            if outcomes[index] is None:
                # Room made for the first may suffice for the others: those ask once more before they look.
                short[index] = None if short else answer.missing_bytes
        for index, missing_bytes in short.items():
            try:
                outcomes[index] = self._make_way(transport, demands[index], begun_s, missing_bytes)
            except (NodeAwayError, SlotMovingError, ReplyError) as error:
                outcomes[index] = error
        return [Refusal.OVER_BUDGET if outcome is None else outcome for outcome in outcomes]

    def _make_way(
        self, transport: Transport, demand: Demand, begun_s: float, missing_bytes: int | None
    ) -> Refusal | bool | Exception | None:
        """Return None if no room can be found."""
        bounds = demand.bounds
        if bounds is None:
            raise FramingError("a scope without a limit ran short of it")
        before_ms: int | None = None
        gather = True
        for _ in range(1, ATTEMPTS):
            if missing_bytes is not None:
                # Once only: competing stores would take it away again.
                before_ms = self._make_room(transport, demand.place, demand.size, missing_bytes, bounds, gather=gather)
                gather = False
                if before_ms is None:
                    return None
            passed_ms = int(1000 * (self._clock() - begun_s))
            (answer,) = transport.ask([self._question(demand, before_ms, passed_ms)])
            outcome = self._judge(demand.place.keyspace, answer)
            if outcome is not None:
                return outcome
            missing_bytes = answer.missing_bytes
        return None

    def _question(self, demand: Demand, before_ms: int | None = None, passed_ms: int = 0) -> Command:
        terms = replace(demand.terms, age_ms=demand.terms.age_ms + passed_ms) if passed_ms else demand.terms
        if before_ms is None:
            before_ms = 0 if demand.bounds is None else self._foresight.of(demand.place.keyspace)
        return reserve(demand.place, demand.size, demand.token, terms, before_ms, self._window_ms)

    def _judge(self, keyspace: str, answer: Reserved | Exception) -> Refusal | bool | Exception | None:
        """Return the meaning of a reservation's answer, None if the block needs more room."""
        if isinstance(answer, Exception):
            return answer
        if answer.evicted:
            self._count_evicted(keyspace, answer.evicted, answer.evicted_bytes, answer.evicted_ages_ms)
        if answer.status == "short":
            return None
        return REFUSALS.get(answer.status, answer.status == "ok")

    def view(self, transport: Transport, keyspace: str) -> ScopeView:
        return view(transport, self._domain, keyspace)

    def rebuild(self, transport: Transport, keyspace: str, seen_version: int) -> None:
        """Rebuild the ledger from its buckets, unless another process did since `seen_version` (0: none) was seen."""
        key = ledger_key(self._domain, keyspace).encode()
        at_least = 0
        for _ in range(ATTEMPTS):
            begin = call(
                "rebuild", key, b"begin", seen_version, at_least, REBUILD_PATIENCE_MS, read=_read_status_and_number
            )
            ((status, version),) = transport.ask([begin])
            if status == "live":
                return
            if status == "busy":
                self._pause(REBUILD_PATIENCE_MS / 1000 / (ATTEMPTS - 2))
                continue
            keys = [state_key(self._base(keyspace, bucket)) for bucket in range(BUCKETS)]
            adopted = transport.ask(
                [call("adopt", key, version, LEDGER_KEEP_MS, read=_read_status_and_number) for key in keys]
            )
            newer = [number for status, number in adopted if status != "ok"]
            if newer:
                at_least = max(newer) + 1
                continue
            leases = [lease for _, lease in adopted]
            finish = call("rebuild", key, b"finish", version, LEDGER_KEEP_MS, *leases, read=_read_status_and_number)
            ((status, _),) = transport.ask([finish])
            self._count("ledgers_rebuilt", 1, keyspace)
            if status == "live":
                return

    def take(self, transport: Transport, keyspace: str, bucket: int, amount: int, evict_before_ms: int) -> int:
        """Move up to `amount` leased bytes of a bucket back to the ledger, evicting if needed; return the bytes."""
        key = state_key(self._base(keyspace, bucket))
        yielding = call("yield", key, amount, evict_before_ms, EVICTIONS_PER_CALL, read=_read_yielded)
        ((taken, version, evicted_bytes, evicted, ages_ms),) = transport.ask([yielding])
        if evicted:
            self._count_evicted(keyspace, evicted, evicted_bytes, ages_ms)
        if taken:
            ledger = ledger_key(self._domain, keyspace).encode()
            transport.ask([call("return", ledger, bucket, taken, version, read=read_text)])
        return int(taken)

    def grant(
        self,
        transport: Transport,
        keyspace: str,
        bucket: int,
        wanted: int,
        minimum: int,
        bounds: SharedBounds,
        growth_share: int = 0,
    ) -> int:
        """Raise a bucket's lease by `minimum` to `wanted` bytes; return by how many, 0 if the ledger has less left.
        `growth_share` bounds what exceeds `minimum` to that part of the lease. A void ledger is rebuilt first.
        """
        ledger = ledger_key(self._domain, keyspace).encode()
        state = state_key(self._base(keyspace, bucket))
        for _ in range(ATTEMPTS):
            asked = call(
                "grant", ledger, bucket, wanted, minimum, bounds.limit_bytes, LEDGER_KEEP_MS, int(bounds.divided),
                growth_share, read=_read_grant,
            )  # fmt: skip
            status, amount, version, share = transport.ask([asked])[0]
            if status == "exhausted":
                return 0
            if share is not None:
                if self.rooms.grow(transport, keyspace, bounds, share, minimum):
                    continue
                return 0
            if status == "ok":
                (raised,) = transport.ask([call("raise", state, amount, version, read=read_text)])
                if raised == "ok":
                    granted: int = amount
                    return granted
            # The ledger is void, or the bucket never adopted this version: it was emptied, or its server fell back.
            self.rebuild(transport, keyspace, 0 if status == "void" else version)
        return 0

    def settle(self, transport: Transport, keyspace: str, bounds: SharedBounds) -> int:
        """Bring a scope under a limit that was lowered or is new; return the bytes that are still above it."""
        limit = bounds.limit_bytes
        scope = self.view(transport, keyspace)
        total = sum(bucket.in_use for bucket in scope.buckets)
        for bucket in scope.buckets:
            if bucket.unleased > 0:
                share = bucket.in_use if total <= limit else bucket.in_use * limit // total
                self._cover(transport, keyspace, bucket, max(0, share - bucket.lease), bounds)
        for _ in range(BUCKETS * ATTEMPTS):
            scope = self.view(transport, keyspace)
            excess = scope.ledger.leased - limit
            # In small steps, so that always the bucket with the oldest blocks yields.
            share = min(excess, max(excess // 8, limit // 64, 1))
            if excess <= 0 or not self._collect(transport, keyspace, scope, share, exclude=None):
                break
        above = scope.ledger.leased - limit
        return max(0, above) + sum(bucket.unleased for bucket in scope.buckets)

    def give_back(self, transport: Transport, keyspace: str, bounds: SharedBounds, back: int = 0) -> int:
        """Give back unneeded room and, if guarantees need it, up to `back` used bytes; return the tier's excess."""
        scope = self.view(transport, keyspace)
        if (scope.ledger.version == 0 or scope.ledger.void) and any(scope.leases):
            # The tier has to know the leases even of a scope without stores.
            self.rebuild(transport, keyspace, 0)
        tight = self.rooms.tight(transport, bounds)
        for bucket in scope.buckets:
            spare = 0 if tight else min(bounds.limit_bytes // LEASE_SHARE, bucket.in_use // SPARE_SHARE)
            if bucket.slack > 2 * spare:
                self.take(transport, keyspace, bucket.bucket, bucket.slack - spare, 0)

        def settle(limit: int) -> int:
            self.settle(transport, keyspace, replace(bounds, limit_bytes=limit))
            return self.view(transport, keyspace).ledger.leased

        share = self.view(transport, keyspace).ledger.share
        return self.rooms.shrink(transport, keyspace, bounds, share, settle, back, tight=tight)

    def _make_room(
        self, transport: Transport, place: Place, size: int, missing: int, bounds: SharedBounds, *, gather: bool
    ) -> int | None:
        """Return which own blocks a new one may evict, None without room; `gather` prefers others' unused leases."""
        keyspace, bucket = place.keyspace, place.bucket
        wanted = missing + bounds.limit_bytes // LEASE_SHARE
        if self.grant(transport, keyspace, bucket, wanted, missing, bounds, LEASE_GROWTH_SHARE) > 0:
            return 0
        scope = self.view(transport, keyspace)
        own = scope.buckets[bucket]
        room = max(0, min(bounds.limit_bytes, scope.ledger.room(bounds)) - scope.ledger.leased)
        if own.unleased > 0:
            # Stored before there was a limit: no other bucket yields for such blocks.
            self._cover(transport, keyspace, own, min(own.unleased, room), bounds)
            return 0
        left = missing - room
        others = scope.others(bucket)
        if gather and left <= sum(one.slack for one in others):
            left -= self.take_unused(transport, keyspace, others, left)
            if left <= 0:
                self.grant(transport, keyspace, bucket, missing, missing, bounds)
                return 0
        evict_before_ms = scope.evict_before_ms
        own_fits = own.held + size <= own.lease
        goes_first = own.oldest_ms is not None and own.oldest_ms < evict_before_ms
        if evict_before_ms < FOR_EVER_MS:
            self._foresight.note(keyspace, evict_before_ms)
        if own_fits and goes_first:
            return evict_before_ms
        if left <= 0 or self._collect(transport, keyspace, scope, left, exclude=bucket) >= left:
            self.grant(transport, keyspace, bucket, missing, missing, bounds)
            return 0
        return FOR_EVER_MS if own_fits else None

    def _cover(
        self, transport: Transport, keyspace: str, bucket: BucketView, amount: int, bounds: SharedBounds
    ) -> None:
        """Lease up to `amount` more to a bucket above its lease, and evict what is not covered."""
        if amount > 0:
            self.grant(transport, keyspace, bucket.bucket, amount, 1, bounds)
        self.take(transport, keyspace, bucket.bucket, 0, FOR_EVER_MS)

    def _collect(self, transport: Transport, keyspace: str, scope: ScopeView, amount: int, exclude: int | None) -> int:
        """Take back unused leases, then those of the buckets with the oldest blocks. Return the bytes."""
        others = scope.others(exclude)
        taken = self.take_unused(transport, keyspace, others, amount)

        def last_use_ms(bucket: BucketView) -> float:
            return bucket.oldest_ms if bucket.oldest_ms is not None else FOR_EVER_MS

        for bucket in sorted(others, key=last_use_ms):
            if taken < amount:
                taken += self.take(transport, keyspace, bucket.bucket, amount - taken, FOR_EVER_MS)
        return taken

    def take_unused(self, transport: Transport, keyspace: str, buckets: Sequence[BucketView], amount: int) -> int:
        """Take back up to `amount` bytes of unused leases; return how many."""
        taken = 0
        for bucket in sorted(buckets, key=lambda b: -b.slack):
            if bucket.slack > 0 and taken < amount:
                taken += self.take(transport, keyspace, bucket.bucket, min(amount - taken, bucket.slack), 0)
        return taken

    def _count_evicted(self, keyspace: str, number: int, size: int, ages_ms: Sequence[int]) -> None:
        self._count("evicted", number, keyspace)
        self._count("evicted_bytes", size, keyspace)
        for age_ms in ages_ms:
            self._aged(age_ms / 1000)

    def _base(self, keyspace: str, bucket: int) -> bytes:
        return bucket_prefix(self._domain, keyspace, bucket).encode()


def _read_yielded(reply: Reply) -> tuple[int, int, int, int, list[int]]:
    *numbers, ages = read_list(reply, 5)
    taken, version, evicted_bytes, evicted = map(read_number, numbers)
    return taken, version, evicted_bytes, evicted, read_ages(ages)


def _read_status_and_number(reply: Reply) -> tuple[str, int]:
    status, number = read_list(reply, 2)
    return read_text(status), read_number(number)


def _read_grant(reply: Reply) -> tuple[str, int, int, Share | None]:
    """Return status, bytes, version and the share of a ledger that needs room; a void one has a version only."""
    first, *rest = read_list(reply, 2, 3, 4)
    status, numbers = read_text(first), [read_number(one) for one in rest]
    if status == "unshared" and len(numbers) == 3:
        return status, 0, 0, Share(*numbers)
    if status == "ok" and len(numbers) == 2:
        return status, numbers[0], numbers[1], None
    return (status, 0, numbers[0], None) if status == "void" else (status, numbers[0], 0, None)
