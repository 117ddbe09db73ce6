"""Deletes a tier's blocks of identities that no pod has any more. The keyspaces stay in use.

A bucket's index covers all identities. So each is walked, a few entries per command, and blocks of the given ones are
deleted with their entries atomically. It is not urgent, so pauses are much longer than commands.

Safe to kill after every command. The next run walks again, and counts its own deletions.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvstrata.contract.messages.erase_report import Erased, Line
from kvstrata.contract.receipt.facts import NOTHING, Amount
from kvstrata_sidecar.adapter.redis.client.commands import call, reads_numbers
from kvstrata_sidecar.adapter.redis.client.resp import Command
from kvstrata_sidecar.delete_job.run import LONGEST_PAUSE_S, Run, parts
from kvstrata_sidecar.delete_job.servers import Primary

BUCKETS_AT_ONCE = 8
"""Buckets whose sizes are read in one exchange: a server runs all its commands before it serves others."""

MOST_AT_ONCE = 128
"""Entries of one command: deleting one takes much longer than checking it."""

PAUSE = 4.0
"""Pause as a multiple of the command's time."""


class Reclaim(Run):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._identities = tuple(identity.encode() for identity in self.order.identities)
        self._removed = dict.fromkeys(self.servers.layout.primaries, NOTHING)
        self._buckets = self.servers.layout.buckets(self.order.domain, self.order.keyspaces)

    def _work(self) -> None:
        self._on_each(self._walk_all)
        self._require_same_map()

    def _walk_all(self, primary: Primary) -> None:
        for some in parts(self._buckets[primary], BUCKETS_AT_ONCE):
            sizes = self.servers.ask([self._command(bucket.state, 0, 0) for bucket in some])
            for bucket, (_, _, _, entries, used_bytes, _) in zip(some, sizes, strict=True):
                if entries:
                    self._walk(primary, bucket.state, used_bytes // entries)

    def _walk(self, primary: Primary, state: bytes, mean_bytes: int) -> None:
        cursor, pace = 0, self._paces[primary]
        while True:
            count = min(MOST_AT_ONCE, pace.count(mean_bytes))
            began_s = self.clock()
            (answer,) = self.servers.ask([self._command(state, cursor, count)])
            took_s = self.clock() - began_s
            cursor, removed, freed_bytes, entries, used_bytes, again = answer
            self._removed[primary] += Amount(removed, freed_bytes)
            pace.took(removed if again else count, took_s)
            self.sleep(min(LONGEST_PAUSE_S, PAUSE * took_s))
            if not cursor and not again:
                return
            mean_bytes = used_bytes // entries if entries else mean_bytes

    def _command(self, state: bytes, cursor: int, count: int) -> Command:
        return call("cull", state, reads_numbers(6), cursor=cursor, count=count, identities=self._identities)

    def _lines(self) -> Iterator[Line]:
        for primary, amount in self._removed.items():
            yield Erased(None, primary.node, amount, amount, NOTHING)
