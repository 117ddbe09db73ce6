"""Ledgers of scopes: reservations of blocks, leases of buckets, and the scope's part in the tier's capacity.

A scope's limit is divided into leases of its buckets, because a script sees one bucket only. For a larger lease the
ledger is charged first; for a smaller one the bucket yields first. A writer that dies in between strands bytes until a
rebuild, which gives the ledger a new version, has every bucket adopt it, and sums up their leases. Leases and yields of
an older version no longer count, so a frozen writer may continue at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvstrata.contract.store.redis_keys import BUCKETS, ledger_key
from kvstrata_sidecar.adapter.policy.limits import SharedBounds
from kvstrata_sidecar.adapter.policy.refusal import Refusal
from kvstrata_sidecar.adapter.redis.budget.capacity import DEPARTED_GRACE_MS, STALE_MS, TierCapacity, UnlistedScope
from kvstrata_sidecar.adapter.redis.budget.scope_state import BucketView, Grant, ScopeView, view
from kvstrata_sidecar.adapter.redis.client import commands as protocol
from kvstrata_sidecar.adapter.redis.client import resp
from kvstrata_sidecar.adapter.redis.client.commands import FOR_EVER_MS, Demand, Outcome, call, reads_status, reservation
from kvstrata_sidecar.adapter.redis.recent import Recent

ATTEMPTS = 6
"""Attempts of a store to get bytes that others take before it."""

LEASE_SHARE = 256
LEASE_GROWTH_SHARE, SPARE_SHARE = 4, 8
"""Reserve in a lease: it grows beyond the need by the first part of itself, and a sweep leaves the second part of the
bytes in use. At most `LEASE_SHARE` of the limit: reserves of 16 buckets are lost to all other scopes."""

LOAN_SHARE = 256
LOAN_GROWTH_SHARE = 8
"""Reserve in a grant: this part of the leased bytes, at most `LOAN_SHARE` of the capacity."""

TIGHT_SHARE = 8
"""With less than this part of a tier free, its scopes give back all that they do not use."""

EVICTIONS_PER_CALL = 256
REBUILD_PATIENCE_MS = 200
"""Time to wait for another's rebuild, which takes three exchanges."""

LEDGER_KEEP_MS = 7 * 86_400_000
"""Life of an unused ledger; a lost one is rebuilt from its buckets."""

HORIZON_S = 1.0
"""Time that a store relies on the last look at the scope's buckets, once the ledger is exhausted."""

UNLIMITED = SharedBounds(FOR_EVER_MS)
NOTHING = SharedBounds(0, 0, 0)


@dataclass(eq=False)
class Ledgers:
    """Ledgers of one tier's scopes. Thread-safe. `count` takes name, amount and keyspace, `aged` seconds."""

    domain: str
    count: Callable[[str, int, str], None]
    clock: Callable[[], float]
    window_ms: int
    aged: Callable[[float], None] = lambda _: None

    def __post_init__(self) -> None:
        self.capacity = TierCapacity(self.domain)
        self.horizons: Recent[str, int] = Recent(self.clock, HORIZON_S)

    def of(self, transport: resp.Transport, keyspace: str, bounds: SharedBounds | None = None) -> ScopeLedger:
        """Return a scope's ledger; `bounds` may be None where they do not matter."""
        return ScopeLedger(self, transport, keyspace, bounds or UNLIMITED)


class ScopeLedger:
    """One scope's ledger over one connection. All methods raise as the transport does."""

    def __init__(self, tier: Ledgers, transport: resp.Transport, keyspace: str, bounds: SharedBounds) -> None:
        self._tier = tier
        self._transport = transport
        self._keyspace = keyspace
        self._bounds = bounds
        self._key = ledger_key(tier.domain, keyspace).encode()

    def view(self) -> ScopeView:
        return view(self._transport, self._tier.domain, self._keyspace)

    def reserve(self, demands: Sequence[Demand]) -> list[Outcome]:
        """Reserve bytes for blocks; return the outcome of each. Raises PeerClosedError: then all can be tried again."""
        begun_s, limit = self._tier.clock(), self._bounds.limit_bytes
        outcomes: list[Outcome | None] = [None] * len(demands)
        fitting = [index for index, one in enumerate(demands) if one.size <= limit]
        before_ms = self._tier.horizons.get(self._keyspace) or 0
        questions = [reservation(demands[index], self._tier.window_ms, before_ms) for index in fitting]
        short: dict[int, int | None] = {}
        for index, answer in zip(fitting, self._transport.ask_each(questions), strict=True):
            if isinstance(answer, resp.PeerClosedError):
                raise answer
            outcomes[index] = self._outcome(answer)
            if outcomes[index] is None:
                # Room made for the first may suffice for the others: those ask again before they look.
                short[index] = None if short else answer.missing_bytes
        for index, missing_bytes in short.items():
            try:
                outcomes[index] = self._make_way(demands[index], begun_s, missing_bytes)
            except (resp.NodeAwayError, resp.SlotMovingError, resp.ReplyError) as error:
                outcomes[index] = error
        return [Refusal.OVER_BUDGET if outcome is None else outcome for outcome in outcomes]

    def lease(self, bucket: int, wanted: int, minimum: int, growth_share: int = 0) -> int:
        """Raise a bucket's lease by `minimum` to `wanted` bytes; return by how many, 0 if the ledger has less left.
        `growth_share` bounds the excess over `minimum` to that part of the lease. A void ledger is rebuilt first."""
        for _ in range(ATTEMPTS):
            status, (amount, version, *grant) = self._ask(
                "lease", self._key, reads_status(5), bucket=bucket, wanted=wanted, minimum=minimum,
                limit=self._bounds.limit_bytes, keep_ms=LEDGER_KEEP_MS, divided=self._bounds.divided,
                growth_share=growth_share,
            )  # fmt: skip
            if status == "exhausted":
                return 0
            if status == "ungranted":
                if not self._grow(Grant(*grant), minimum):
                    return 0
                continue
            if status == "ok":
                raised = self._ask("raise", self._state(bucket), protocol.read_text, bytes=amount, of_version=version)
                if raised == "ok":
                    return int(amount)
            # The ledger is void, or the bucket never adopted this version: it was emptied, or its server fell back.
            self.rebuild(0 if status == "void" else version)
        return 0

    def take(self, bucket: int, amount: int, evict_before_ms: int = 0) -> int:
        """Move up to `amount` leased bytes of a bucket back to the ledger, evicting if needed; return the bytes."""
        taken, version, evicted_bytes, evicted, ages_ms = self._ask(
            "yield", self._state(bucket), _read_yielded,
            bytes=amount, evict_before_ms=evict_before_ms, count=EVICTIONS_PER_CALL,
        )  # fmt: skip
        self._count_evicted(evicted, evicted_bytes, ages_ms)
        if taken:
            self._ask("return", self._key, protocol.read_text, bucket=bucket, bytes=taken, of_version=version)
        return int(taken)

    def settle(self) -> int:
        """Bring the scope under a limit that was lowered or is new; return the bytes that are still above it."""
        limit = self._bounds.limit_bytes
        scope = self.view()
        total = sum(bucket.in_use for bucket in scope.buckets)
        for bucket in scope.buckets:
            if bucket.unleased > 0:
                share = bucket.in_use if total <= limit else bucket.in_use * limit // total
                self._cover(bucket, max(0, share - bucket.lease))
        for _ in range(BUCKETS * ATTEMPTS):
            scope = self.view()
            excess = scope.ledger.leased - limit
            # In small steps, so that always the bucket with the oldest blocks yields.
            share = min(excess, max(excess // 8, limit // 64, 1))
            if excess <= 0 or not self._collect(scope.leasing(), share):
                break
        return max(0, scope.ledger.leased - limit) + sum(bucket.unleased for bucket in scope.buckets)

    def rebuild(self, seen_version: int) -> None:
        """Rebuild the ledger from its buckets, unless another process did since `seen_version` (0: none) was seen."""
        at_least = 0
        for _ in range(ATTEMPTS):
            status, (version,) = self._ask(
                "begin_rebuild", self._key, reads_status(1),
                seen=seen_version, at_least=at_least, patience_ms=REBUILD_PATIENCE_MS,
            )  # fmt: skip
            if status == "live":
                return
            if status == "busy":
                time.sleep(REBUILD_PATIENCE_MS / 1000 / (ATTEMPTS - 2))
                continue
            adoptions = [
                call("adopt", self._state(bucket), reads_status(1), of_version=version, keep_ms=LEDGER_KEEP_MS)
                for bucket in range(BUCKETS)
            ]
            adopted = self._transport.ask(adoptions)
            newer = [number for status, (number,) in adopted if status != "ok"]
            if newer:
                at_least = max(newer) + 1
                continue
            leases = [lease for _, (lease,) in adopted]
            status, _ = self._ask(
                "finish_rebuild", self._key, reads_status(1), of_version=version, keep_ms=LEDGER_KEEP_MS, leases=leases
            )
            self._tier.count("ledgers_rebuilt", 1, self._keyspace)
            if status == "live":
                return

    def give_back(self, reclaimable_bytes: int = 0) -> int:
        """Return unneeded capacity to the tier and, if guarantees need it, up to `reclaimable_bytes` in use; return the
        bytes by which the tier is overcommitted."""
        capacity, bounds = self._tier.capacity, self._bounds
        scope = self._with_ledger()
        whole = bounds.capacity_bytes or 0
        tight = capacity.free(self._transport, whole) < whole // TIGHT_SHARE
        for bucket in scope.buckets:
            spare = 0 if tight else min(bounds.limit_bytes // LEASE_SHARE, bucket.in_use // SPARE_SHARE)
            if bucket.slack > 2 * spare:
                self.take(bucket.bucket, bucket.slack - spare)
        ledger = self.view().ledger
        spare = 0 if tight else self._loan_reserve(ledger.leased)
        granted, sequence, overcommitted_bytes = capacity.charge(self._transport, self._keyspace, bounds, ledger)
        reclaimed_bytes = min(max(0, overcommitted_bytes), reclaimable_bytes)
        target = max(min(granted - reclaimed_bytes, ledger.leased + spare, bounds.limit_bytes), bounds.kept_bytes)
        # A little more than needed is kept: it would be requested again.
        worthwhile = granted - target > spare or (reclaimed_bytes > 0 and granted > target)
        if worthwhile and self._accept(target, sequence) is not None:
            if ledger.leased > target:
                self._tier.of(self._transport, self._keyspace, replace(bounds, limit_bytes=target)).settle()
                ledger = self.view().ledger
            if ledger.leased <= target:
                capacity.shrink(self._transport, self._keyspace, bounds, target, sequence)
        return max(0, overcommitted_bytes)

    def release(self, unlisted: UnlistedScope | None = None, missing: int = 0) -> None:
        """Return the capacity of a scope in no policy, but for its blocks; and that of blocks, for `missing` bytes.
        `unlisted` is the entry found, which must be unchanged; None if the scope has only just left the policy."""
        capacity, scope = self._tier.capacity, self._with_ledger()
        age_ms, found = (STALE_MS - DEPARTED_GRACE_MS, 0) if unlisted is None else (unlisted.age_ms, unlisted.sequence)
        sequence = capacity.release(self._transport, self._keyspace, scope.ledger, found, age_ms)
        if not sequence:
            return
        buckets = scope.leasing()
        freed = (unlisted.charged_bytes if unlisted else 0) - scope.ledger.leased
        freed += sum([self.take(bucket.bucket, bucket.lease) for bucket in buckets])
        for bucket in buckets if missing else ():
            size = 1
            while size and freed < missing:
                size = self.take(bucket.bucket, missing - freed, FOR_EVER_MS)
                freed += size
        leased = self._accept(0, sequence)
        if leased is not None or not any(one.lease for one in scope.buckets):
            capacity.shrink(self._transport, self._keyspace, NOTHING, leased or 0, sequence, age_ms)

    def _make_way(self, demand: Demand, begun_s: float, missing_bytes: int | None) -> Outcome | None:
        """Make room for a block and reserve it; return None if no room can be found."""
        if self._bounds is UNLIMITED:
            raise resp.FramingError("a scope without a limit ran short of it")
        before_ms, gather = self._tier.horizons.get(self._keyspace) or 0, True
        for _ in range(1, ATTEMPTS):
            if missing_bytes is not None:
                # Once only: competing stores would take it away again.
                evictable_ms = self._make_room(demand.place.bucket, demand.size, missing_bytes, gather=gather)
                if evictable_ms is None:
                    return None
                before_ms, gather = evictable_ms, False
            passed_ms = int(1000 * (self._tier.clock() - begun_s))
            (answer,) = self._transport.ask([reservation(demand, self._tier.window_ms, before_ms, passed_ms)])
            outcome = self._outcome(answer)
            if outcome is not None:
                return outcome
            missing_bytes = answer.missing_bytes
        return None

    def _make_room(self, bucket: int, size: int, missing: int, *, gather: bool) -> int | None:
        """Return which own blocks a new one may evict, None without room; `gather` prefers others' unused leases."""
        wanted = missing + self._bounds.limit_bytes // LEASE_SHARE
        if self.lease(bucket, wanted, missing, LEASE_GROWTH_SHARE) > 0:
            return 0
        scope = self.view()
        own, free = scope.buckets[bucket], scope.ledger.free(self._bounds)
        if own.unleased > 0:
            # Stored before there was a limit: no other bucket yields for such blocks.
            self._cover(own, min(own.unleased, free))
            return 0
        left = missing - free
        others = scope.leasing(exclude=bucket)
        if gather and left <= sum(one.slack for one in others):
            left -= self._take_unused(others, left)
            if left <= 0:
                self.lease(bucket, missing, missing)
                return 0
        evict_before_ms = scope.evict_before_ms
        own_fits = own.held + size <= own.lease
        goes_first = own.oldest_ms is not None and own.oldest_ms < evict_before_ms
        if evict_before_ms < FOR_EVER_MS:
            self._tier.horizons.put(self._keyspace, evict_before_ms)
        if own_fits and goes_first:
            return evict_before_ms
        if left <= 0 or self._collect(others, left) >= left:
            self.lease(bucket, missing, missing)
            return 0
        return FOR_EVER_MS if own_fits else None

    def _cover(self, bucket: BucketView, amount: int) -> None:
        """Lease up to `amount` more to a bucket above its lease, and evict blocks that the lease does not cover."""
        if amount > 0:
            self.lease(bucket.bucket, amount, 1)
        self.take(bucket.bucket, 0, FOR_EVER_MS)

    def _collect(self, buckets: Sequence[BucketView], amount: int) -> int:
        """Take back unused leases, then those of the buckets with the oldest blocks. Return the bytes."""
        taken = self._take_unused(buckets, amount)
        for bucket in sorted(buckets, key=lambda one: FOR_EVER_MS if one.oldest_ms is None else one.oldest_ms):
            if taken < amount:
                taken += self.take(bucket.bucket, amount - taken, FOR_EVER_MS)
        return taken

    def _take_unused(self, buckets: Sequence[BucketView], amount: int) -> int:
        """Take back up to `amount` bytes of unused leases; return how many."""
        taken = 0
        for bucket in sorted(buckets, key=lambda one: -one.slack):
            if bucket.slack > 0 and taken < amount:
                taken += self.take(bucket.bucket, min(amount - taken, bucket.slack))
        return taken

    def _grow(self, ledger: Grant, minimum: int) -> bool:
        """Have the tier grant `minimum` bytes beyond the leased ones; return whether it does."""
        bounds, needed = self._bounds, ledger.leased + minimum
        reserve = self._loan_reserve(max(ledger.leased, LOAN_GROWTH_SHARE * minimum))
        wanted = min(bounds.limit_bytes, needed + reserve)
        change = self._tier.capacity.grow(self._transport, self._keyspace, bounds, ledger, wanted)
        if change.overcommitted_bytes > 0 and change.granted_bytes > bounds.guaranteed_bytes:
            # Charged, because it is in use, but not available for leases: the next sweeps reduce it.
            return False
        self._accept(change.granted_bytes, change.sequence)
        return change.granted_bytes >= needed

    def _loan_reserve(self, leased: int) -> int:
        """Return the bytes that the scope may be granted beyond its leases."""
        return min((self._bounds.capacity_bytes or 0) // LOAN_SHARE, leased // LOAN_GROWTH_SHARE)

    def _accept(self, granted: int, sequence: int) -> int | None:
        """Report a grant to the ledger; return the bytes that it leases out, None if it is void."""
        status, (leased,) = self._ask("grant", self._key, reads_status(1), granted=granted, sequence=sequence)
        return leased if status == "ok" else None

    def _with_ledger(self) -> ScopeView:
        """Return the scope's state, with a rebuilt ledger if that is lost and buckets have leases."""
        scope = self.view()
        if scope.ledger.lost and any(one.lease for one in scope.buckets):
            self.rebuild(0)
            scope = self.view()
        return scope

    def _outcome(self, answer: protocol.Reserved | Exception) -> Outcome | None:
        """Return the outcome of a reservation, None if the block needs more room."""
        if isinstance(answer, Exception):
            return answer
        self._count_evicted(answer.evicted, answer.evicted_bytes, answer.ages_ms)
        return answer.outcome

    def _count_evicted(self, number: int, size: int, ages_ms: Sequence[int]) -> None:
        if number:
            self._tier.count("evicted", number, self._keyspace)
            self._tier.count("evicted_bytes", size, self._keyspace)
        for age_ms in ages_ms:
            self._tier.aged(age_ms / 1000)

    def _ask(self, script: str, key: bytes, read: Callable[[resp.Reply], Any], **arguments: Any) -> Any:
        return self._transport.ask([call(script, key, read, **arguments)])[0]

    def _state(self, bucket: int) -> bytes:
        return protocol.state_key(protocol.base_of(self._tier.domain, self._keyspace, bucket))


def _read_yielded(reply: resp.Reply) -> tuple[int, int, int, int, list[int]]:
    *numbers, ages = protocol.read_list(reply, 5)
    taken, version, evicted_bytes, evicted = map(protocol.read_number, numbers)
    return taken, version, evicted_bytes, evicted, protocol.read_ages(ages)
