"""Deletes keyspaces from a tier, in an order that is safe to interrupt after every command.

1. The keyspaces enter the domain's set of revoked ones: cache servers stop using them at their next check.
2. Every bucket gets a tombstone: from then on nothing can be reserved or committed there. A value that was reserved
   before and arrives later lives 30 s, or until its commit deletes it.
3. Blocks are deleted by the index, bucket by bucket, on several primaries at once.
4. After the 30 s all indexes are checked again, and the ledger of each keyspace is deleted.
5. Capacity granted to the keyspaces is returned.
6. Replicas confirm, and the slot map must be that of the beginning.

Tombstones record the time and all deletions for a week: a run after a killed one neither waits again nor reports less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstrata.contract.messages.erase_report import Erased, Line, PrimaryEnd, StopReason, keyspace_digest
from kvstrata.contract.receipt.facts import NOTHING, Amount
from kvstrata.contract.store.redis_keys import BUCKETS, capacity_key, claim_key, ledger_key, revoked_key
from kvstrata_sidecar.adapter.redis.budget.ledger import Ledgers
from kvstrata_sidecar.adapter.redis.client.commands import call, read_number, reads_numbers
from kvstrata_sidecar.adapter.redis.client.resp import Command
from kvstrata_sidecar.delete_job.run import LEAST_AT_ONCE, Run, parts, unlink
from kvstrata_sidecar.delete_job.servers import Bucket, Primary, StoppedError

TOMBSTONE_KEEP_MS = 7 * 86_400_000
"""How long a frozen writer finds the tombstone. Its later values are unreadable, as revoked, until they expire."""

KEYSPACES_AT_ONCE = 512
BUCKETS_AT_ONCE = 4
"""In one exchange: a server runs all its commands before it serves others; each starts nothing after 2 ms."""
NAMES_AT_ONCE = 8

IN_VAIN = 1_000
"""Commands in a row without a removal after which an index counts as impossible to empty."""


@dataclass(frozen=True, slots=True)
class BucketAnswer:
    """A bucket's answer at `answered_s`: blocks left, values deleted since its tombstone, and the tombstone's age."""

    removed: int
    left: Amount
    deleted: Amount
    since_ms: int
    answered_s: float


class Deletion(Run):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._strays = dict.fromkeys(self.servers.layout.primaries, 0)
        self._last: dict[Bucket, BucketAnswer] = {}
        self._buckets = self.servers.layout.buckets(self.order.domain, self.order.keyspaces)

    def _work(self) -> None:
        self._revoke()
        self._on_each(lambda primary: self._drop_all(primary, 0))
        self._on_each(self._empty)
        self._on_each(self._unlink_strays)
        self.sleep(max(0.0, self.order.window_ms - self._standing_ms()) / 1000)
        self._on_each(lambda primary: self._drop_all(primary, LEAST_AT_ONCE))
        self._on_each(self._empty)
        self._forget()
        self._on_each(self._await_replicas)
        self._require_same_map()

    def _revoke(self) -> None:
        key = revoked_key(self.order.domain).encode()
        for some in parts(self.order.keyspaces, KEYSPACES_AT_ONCE):
            names = [keyspace.encode() for keyspace in some]
            self.servers.ask([call("revoke", key, read_number, revision=self.order.revision, keyspaces=names)])

    def _drop_all(self, primary: Primary, count: int) -> None:
        """Run one step in each bucket of a primary; 0 deletes nothing, but sets tombstones."""
        for some in parts(self._buckets[primary], BUCKETS_AT_ONCE):
            self._drop(some, count)

    def _empty(self, primary: Primary) -> None:
        pace = self._paces[primary]
        for bucket in self._buckets[primary]:
            in_vain = 0
            while (left := self._last[bucket].left).keys:
                count = pace.count(left.bytes // left.keys)
                took_s = self._drop([bucket], count)
                removed = self._last[bucket].removed
                in_vain = 0 if removed or self._last[bucket].left.keys < left.keys else in_vain + 1
                if in_vain > IN_VAIN:
                    raise StoppedError(StopReason.NOT_EMPTIED, f"{primary.address}: an index does not become empty")
                self.sleep(pace.took(removed, took_s))

    def _drop(self, buckets: Sequence[Bucket], count: int) -> float:
        commands = [
            call("drop", one.state, reads_numbers(6), count=count, keep_ms=TOMBSTONE_KEEP_MS) for one in buckets
        ]
        began_s = self.clock()
        answers = self.servers.ask(commands)
        answered_s = self.clock()
        for bucket, (removed, left, left_bytes, values, size, since_ms) in zip(buckets, answers, strict=True):
            left_amount, deleted = Amount(left, left_bytes), Amount(values, size)
            self._last[bucket] = BucketAnswer(removed, left_amount, deleted, since_ms, answered_s)
        return answered_s - began_s

    def _unlink_strays(self, primary: Primary) -> None:
        pace = self._paces[primary]
        mine = [name.encode() for name in self.order.strays if self.servers.layout.of(name.encode()) == primary]
        for some in parts(mine, NAMES_AT_ONCE):
            began_s = self.clock()
            self._strays[primary] += sum(self.servers.ask([unlink(name) for name in some]))
            self.sleep(pace.took(len(some), self.clock() - began_s))

    def _forget(self) -> None:
        """Delete the keyspaces' ledgers, sweepers' claims and charges of the tier."""
        domain, servers = self.order.domain, self.servers
        ledgers, charged = Ledgers(domain, lambda *_: None, self.clock, 0), capacity_key(domain).encode()
        for keyspace in self.order.keyspaces:
            servers.ask([unlink(name(domain, keyspace).encode()) for name in (ledger_key, claim_key)])
            (entry,) = servers.ask([Command(charged, (b"HGET", charged, keyspace.encode()))])
            if entry is not None:
                ledgers.of(servers, keyspace).release()

    def _since_ms(self) -> int:
        """Return the age of the newest tombstone when last reported; 0 before all buckets have one."""
        if len(self._last) < len(self.order.keyspaces) * BUCKETS:
            return 0
        return min(one.since_ms for one in self._last.values())

    def _standing_ms(self) -> float:
        now_s = self.clock()
        return min(one.since_ms + 1000 * (now_s - one.answered_s) for one in self._last.values())

    def _lines(self) -> Iterator[Line]:
        for primary, buckets in self._buckets.items():
            by_row: dict[str | None, list[BucketAnswer | None]] = {}
            for bucket in buckets:
                row = None if self.order.sums else bucket.keyspace
                by_row.setdefault(row, []).append(self._last.get(bucket))
            for keyspace, answers in by_row.items():
                ones = [one for one in answers if one is not None]
                if len(ones) < len(answers):  # the totals are unknown
                    continue
                deleted = sum((one.deleted for one in ones), NOTHING)
                left = sum((one.left for one in ones), NOTHING)
                name = keyspace_digest(keyspace) if keyspace is not None else None
                yield Erased(name, primary.node, deleted + left, deleted, left)
            yield PrimaryEnd(primary.node, *self._replicas[primary], self._strays[primary])
