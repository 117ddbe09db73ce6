"""State of a scope in one tier: its ledger and its buckets, read in one pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.contract.store.redis_keys import BUCKETS, ledger_key
from kvstrata_sidecar.adapter.policy.limits import SharedBounds
from kvstrata_sidecar.adapter.redis.client import commands as protocol
from kvstrata_sidecar.adapter.redis.client.commands import FOR_EVER_MS, read_number, reads_fields, state_key
from kvstrata_sidecar.adapter.redis.client.resp import Command, Reply, Transport


@dataclass(frozen=True, slots=True)
class BucketView:
    """A bucket's accounting in bytes. `state` is its key, `oldest_ms` the last use of its least recently used block,
    None without any, `longest_ms` the longest life given to a block. If not `known`, its server is away and its charge
    counts as in use."""

    bucket: int
    state: bytes
    used: int
    held: int
    lease: int
    longest_ms: int
    oldest_ms: float | None
    blocks: int = 0
    known: bool = True

    @property
    def in_use(self) -> int:
        return self.used + self.held

    @property
    def slack(self) -> int:
        return max(0, self.lease - self.in_use)

    @property
    def unleased(self) -> int:
        """Bytes in use beyond the lease, for example after a limit was added."""
        return max(0, self.in_use - self.lease)


@dataclass(frozen=True, slots=True)
class Grant:
    """Bytes that a ledger leases out, bytes that the tier grants it, and the number of that change; 0 for none."""

    leased: int
    granted_bytes: int
    ledger_sequence: int


@dataclass(frozen=True, slots=True)
class LedgerView(Grant):
    """A ledger as stored; `version` 0 if there is none."""

    version: int
    void: bool
    by_bucket: tuple[int, ...]

    @property
    def lost(self) -> bool:
        return self.version == 0 or self.void

    def free(self, bounds: SharedBounds) -> int:
        """Return the bytes that the ledger can still lease out."""
        granted = min(bounds.limit_bytes, self.granted_bytes) if bounds.divided else bounds.limit_bytes
        return max(0, granted - self.leased)


@dataclass(frozen=True, slots=True)
class ScopeView:
    """A scope's ledger and buckets, read in one pipeline but not at one instant."""

    now_ms: int
    ledger: LedgerView
    buckets: tuple[BucketView, ...]

    @property
    def usage(self) -> tuple[int, int]:
        """Bytes and number of committed blocks."""
        return sum(bucket.used for bucket in self.buckets), sum(bucket.blocks for bucket in self.buckets)

    def leasing(self, exclude: int | None = None) -> list[BucketView]:
        """Return the buckets with a lease, without `exclude` and those on unreachable servers."""
        return [one for one in self.buckets if one.known and one.bucket != exclude and one.lease > 0]

    def above(self, limit_bytes: int) -> bool:
        """Whether more is leased than a limit allows, or a bucket holds more than its lease."""
        return self.ledger.leased > limit_bytes or any(bucket.unleased for bucket in self.buckets)

    @property
    def evict_before_ms(self) -> int:
        """The last use before which a block counts as one of the scope's least recently used."""
        oldest = min((b.oldest_ms for b in self.buckets if b.oldest_ms is not None), default=None)
        if oldest is None:
            return FOR_EVER_MS
        # An eighth of the whole span: a block of the own bucket is free to evict, another's costs four exchanges.
        return int(oldest + max(0.0, self.now_ms - oldest) / 8) + 1


ASKED_OF_A_BUCKET = 3
LEDGER_FIELDS = (b"leased", b"room", b"turn", b"v", b"void", *(b"b:%d" % bucket for bucket in range(BUCKETS)))


def view(transport: Transport, domain: str, keyspace: str) -> ScopeView:
    """Read a scope's ledger and buckets. Raises an error reply of the ledger's server."""
    key = ledger_key(domain, keyspace).encode()
    bases = [protocol.base_of(domain, keyspace, bucket) for bucket in range(BUCKETS)]
    commands = [
        protocol.time_at(key),
        Command(key, (b"HMGET", key, *LEDGER_FIELDS), reads_fields(len(LEDGER_FIELDS))),
        *(command for base in bases for command in _ask_bucket(base)),
    ]
    now_ms, ledger, *rest = transport.ask_each(commands)
    for answer in (now_ms, ledger):
        if isinstance(answer, Exception):
            raise answer
    leased, granted, sequence, version, void, *by_bucket = ledger
    buckets = []
    for bucket, (base, charged) in enumerate(zip(bases, by_bucket, strict=True)):
        answers = rest[ASKED_OF_A_BUCKET * bucket :][:ASKED_OF_A_BUCKET]
        if any(isinstance(answer, Exception) for answer in answers):
            buckets.append(BucketView(bucket, state_key(base), charged, 0, charged, 0, None, known=False))
        else:
            (used, held, lease, longest_ms), oldest_ms, blocks = answers
            buckets.append(BucketView(bucket, state_key(base), used, held, lease, longest_ms, oldest_ms, blocks))
    ledger = LedgerView(leased, granted, sequence, version, bool(void), tuple(by_bucket))
    return ScopeView(now_ms, ledger, tuple(buckets))


def _ask_bucket(base: bytes) -> Sequence[Command]:
    key = state_key(base)
    return (
        Command(key, (b"HMGET", key, b"used", b"held", b"lease", b"retention"), reads_fields(4)),
        Command(key, (b"ZRANGE", base + b":#a", b"0", b"0", b"WITHSCORES"), _read_oldest),
        Command(key, (b"HLEN", base + b":#m"), read_number),
    )


def _read_oldest(reply: Reply) -> float | None:
    words = protocol.read_list(reply, 0, 2)
    return float(read_number(words[1])) if words else None
