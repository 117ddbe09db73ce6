"""Deletes some chunks of keyspaces that stay, regardless of the identity that computed them.

The keyspaces are unused meanwhile: every pod released them, and the time in which a write could still arrive is over.
So nothing is revoked. Abandoned reservations of these chunks are deleted too: a writer frozen since then cannot commit.

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

from kvstrata.contract.messages.erase_report import Erased, Line, PrimaryEnd, StopReason
from kvstrata.contract.receipt.facts import NOTHING, Amount
from kvstrata.contract.store.redis_keys import bucket_of, bucket_prefix, parse_block_key, parse_member
from kvstrata_sidecar.adapter.redis.client.commands import call, read_list, read_number, reads_numbers, state_key
from kvstrata_sidecar.adapter.redis.client.resp import Command, FramingError, Reply
from kvstrata_sidecar.delete_job.run import Run, unlink
from kvstrata_sidecar.delete_job.servers import StoppedError


@dataclass(slots=True)
class Tally:
    deleted: Amount = NOTHING
    left: Amount = NOTHING
    strays: int = 0
    looked: bool = False


class ChunkDeletion(Run):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._chunks = frozenset(bytes.fromhex(chunk) for chunk in self.order.chunks)
        self._tallies = {primary: Tally() for primary in self.servers.layout.primaries}

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
        if any(tally.left.keys for tally in self._tallies.values()):
            raise StoppedError(StopReason.NOT_EMPTIED, "blocks were stored again meanwhile")

    def _lines(self) -> Iterator[Line]:
        for primary, tally in self._tallies.items():
            if tally.looked:
                yield Erased(None, primary.node, tally.deleted + tally.left, tally.deleted, tally.left)
            yield PrimaryEnd(primary.node, *self._replicas[primary], tally.strays)

    def _buckets(self) -> Iterator[bytes]:
        numbers = sorted({bucket_of(chunk) for chunk in self._chunks})
        for keyspace in self.order.keyspaces:
            for number in numbers:
                yield bucket_prefix(self.order.domain, keyspace, number).encode()

    def _empty(self, base: bytes) -> None:
        primary = self.servers.layout.of(state_key(base))
        tally, pace = self._tallies[primary], self._paces[primary]
        for member, record in self._walk(base, b":#m").items():
            began_s = self.clock()
            discard = call("discard", state_key(base), reads_numbers(1), members=[member])
            ((there,),) = self.servers.ask([discard])
            if there:
                tally.deleted += Amount(1, _size_of(record))
            self.sleep(pace.took(1, self.clock() - began_s))
        for member, record in self._walk(base, b":#r").items():
            written = base + b":" + member
            (length,) = self.servers.ask([Command(written, (b"STRLEN", written), read_number)])
            token = record.split(b":")[2]
            abandon = call("abandon", state_key(base), read_number, member=member, token=token)
            (was_reserved,) = self.servers.ask([abandon])
            if was_reserved and length:
                tally.deleted += Amount(1, _size_of(record))

    def _count_left(self, base: bytes) -> None:
        tally = self._tallies[self.servers.layout.of(state_key(base))]
        for part in (b":#m", b":#r"):
            for record in self._walk(base, part).values():
                tally.left += Amount(1, _size_of(record))

    def _walk(self, base: bytes, part: bytes) -> dict[bytes, bytes]:
        """Return a bucket's entries of the chunks, records by member, because a scan may return an entry twice."""
        found: dict[bytes, bytes] = {}
        cursor, key = b"0", base + part
        while True:
            question = Command(key, (b"HSCAN", key, cursor, b"COUNT", b"512"), _read_scan)
            ((cursor, rows),) = self.servers.ask([question])
            for member, record in rows:
                parts = parse_member(member.decode("ascii", "replace"))
                if parts is not None and parts[-1] in self._chunks:
                    found[member] = record
            if cursor == b"0":
                return found

    def _unlink_strays(self) -> None:
        for name in self.order.strays:
            key = parse_block_key(name)
            if key is None or key.chunk_hash not in self._chunks:
                continue
            command = unlink(name.encode())
            (gone,) = self.servers.ask([command])
            self._tallies[self.servers.layout.of(command.key)].strays += gone


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
