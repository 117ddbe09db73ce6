"""Deletes some chunks of keyspaces that stay, regardless of the identity that computed them.

The keyspaces are unused meanwhile: every pod released them, and the time in which a write could still arrive is over.
So there is no tombstone, and nothing is revoked. Abandoned reservations of these chunks are deleted too: a writer
frozen since then finds none, and cannot commit.

1. Walk the indexes of the chunks' buckets; delete committed blocks with their index entries.
2. Abandon reservations of the chunks, with values written for them.
3. Delete values without an index whose names a verification found.
4. Walk the indexes again, and report remaining chunks.
5. Wait for replicas, and require the slot map of the beginning.

A run counts its own deletions: a killed run loses its count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstrata.contract.messages.erase_report import Erased, Line, PrimaryEnd, StopReason
from kvstrata.contract.receipt.facts import Amount
from kvstrata.contract.store.redis_keys import bucket_of, bucket_prefix, parse_block_key, parse_member
from kvstrata_sidecar.adapter.redis.client.commands import call, read_list, read_number, reads_numbers, state_key
from kvstrata_sidecar.adapter.redis.client.resp import Command, FramingError, Reply
from kvstrata_sidecar.delete_job.pace import Pace
from kvstrata_sidecar.delete_job.run import Run
from kvstrata_sidecar.delete_job.servers import StoppedError

WALK_COUNT = 512


class Found(NamedTuple):
    """A block that an index or a reservation names: its bucket, its member name, its record."""

    base: bytes
    member: bytes
    record: bytes


@dataclass(slots=True)
class Tally:
    deleted_keys: int = 0
    deleted_bytes: int = 0
    left_keys: int = 0
    left_bytes: int = 0
    strays: int = 0
    looked: bool = False

    def line(self, node: str) -> Erased:
        deleted, left = Amount(self.deleted_keys, self.deleted_bytes), Amount(self.left_keys, self.left_bytes)
        return Erased(None, node, deleted + left, deleted, left)


class ChunkDeletion(Run):
    """Deletes chunks of keyspaces."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._chunks = frozenset(bytes.fromhex(chunk) for chunk in self.order.chunks)
        self._tallies = {primary: Tally() for primary in self.servers.layout.primaries}
        self._paces = {primary: Pace() for primary in self.servers.layout.primaries}

    def _work(self) -> None:
        for base in self._buckets():
            self._empty(base)
        self._unlink_strays()
        for base in self._buckets():
            self._count_left(base)
        for primary, tally in self._tallies.items():
            tally.looked = True
            self._await_replicas(primary)
        self._require_same_map()
        if any(tally.left_keys for tally in self._tallies.values()):
            raise StoppedError(StopReason.NOT_EMPTIED, "blocks were stored again meanwhile")

    def _lines(self) -> Iterator[Line]:
        for primary, tally in self._tallies.items():
            if tally.looked:
                yield tally.line(primary.node)
            yield PrimaryEnd(primary.node, *self._replicas[primary], tally.strays)

    def _buckets(self) -> Iterator[bytes]:
        numbers = sorted({bucket_of(chunk) for chunk in self._chunks})
        for keyspace in self.order.keyspaces:
            for number in numbers:
                yield bucket_prefix(self.order.domain, keyspace, number).encode()

    def _empty(self, base: bytes) -> None:
        primary = self.servers.layout.of(state_key(base))
        tally, pace = self._tallies[primary], self._paces[primary]
        for found in self._walk(base, b":#m"):
            began_s = self.clock()
            ((there,),) = self.servers.ask([_discard(found)])
            if there:
                tally.deleted_keys += 1
                tally.deleted_bytes += _size_of(found.record)
            self.sleep(pace.took(1, self.clock() - began_s))
        for found in self._walk(base, b":#r"):
            size, written = _size_of(found.record), found.base + b":" + found.member
            (length,) = self.servers.ask([Command(written, (b"STRLEN", written), read_number)])
            (was_reserved,) = self.servers.ask([_abandon(found)])
            if was_reserved and length:
                tally.deleted_keys += 1
                tally.deleted_bytes += size

    def _count_left(self, base: bytes) -> None:
        tally = self._tallies[self.servers.layout.of(state_key(base))]
        for part in (b":#m", b":#r"):
            for found in self._walk(base, part):
                tally.left_keys += 1
                tally.left_bytes += _size_of(found.record)

    def _walk(self, base: bytes, part: bytes) -> list[Found]:
        """Return a bucket's index entries of the chunks; deduplicated, because a scan may return an entry twice."""
        found: dict[bytes, Found] = {}
        cursor, key = b"0", base + part
        while True:
            question = Command(key, (b"HSCAN", key, cursor, b"COUNT", b"%d" % WALK_COUNT), _read_scan)
            ((cursor, rows),) = self.servers.ask([question])
            for member, record in rows:
                parts = parse_member(member.decode("ascii", "replace"))
                if parts is not None and parts[-1] in self._chunks:
                    found[member] = Found(base, member, record)
            if cursor == b"0":
                return list(found.values())

    def _unlink_strays(self) -> None:
        for name in self.order.strays:
            key = parse_block_key(name)
            if key is None or key.chunk_hash not in self._chunks:
                continue
            key_name = name.encode()
            (gone,) = self.servers.ask([Command(key_name, (b"UNLINK", key_name), read_number)])
            self._tallies[self.servers.layout.of(key_name)].strays += gone


def _discard(found: Found) -> Command:
    return call("discard", state_key(found.base), reads_numbers(1), members=[found.member])


def _abandon(found: Found) -> Command:
    token = found.record.split(b":")[2]
    return call("abandon", state_key(found.base), read_number, member=found.member, token=token)


def _size_of(record: bytes) -> int:
    size = record.split(b":", 1)[0]
    return int(size) if size.isdigit() else 0


def _read_scan(reply: Reply) -> tuple[bytes, Sequence[tuple[bytes, bytes]]]:
    cursor, rows = read_list(reply, 2)
    if not isinstance(cursor, bytes) or not isinstance(rows, list) or len(rows) % 2:
        raise FramingError("a walk through an index was not answered as it can be")
    words = [row for row in rows if isinstance(row, bytes)]
    if len(words) != len(rows):
        raise FramingError("an index has something that is no name")
    return cursor, list(zip(words[::2], words[1::2], strict=True))
