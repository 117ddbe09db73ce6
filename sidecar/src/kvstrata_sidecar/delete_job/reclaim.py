"""Deletes a tier's blocks of identities that no pod has any more. The keyspaces stay in use.

Every name holds the identity that computed its block, and a bucket's index covers all identities. So each index is
walked, a few entries per command, and blocks of the given identities are deleted with their entries atomically. Blocks
of other identities are read and stored meanwhile. It is not urgent, so pauses are much longer than commands.

Safe to kill after every command. The next run walks again, and counts its own deletions.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvstrata.contract.messages.erase_report import Erased, Line
from kvstrata.contract.receipt.facts import NOTHING, Amount
from kvstrata_sidecar.adapter.redis.client.commands import call, reads_numbers
from kvstrata_sidecar.adapter.redis.client.resp import Command
from kvstrata_sidecar.delete_job.pace import LONGEST_PAUSE_S, Pace
from kvstrata_sidecar.delete_job.run import Run
from kvstrata_sidecar.delete_job.servers import Primary

BUCKETS_AT_ONCE = 8
"""Buckets whose sizes are read in one exchange: a server runs all its commands before it serves others."""

MOST_AT_ONCE = 128
"""Entries of one command: deleting one takes much longer than checking it."""

PAUSE = 4.0
"""Pause as a multiple of the command's time."""


class Reclaim(Run):
    """Deletes blocks of former identities."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._identities = tuple(identity.encode() for identity in self.order.identities)
        self._removed = dict.fromkeys(self.servers.layout.primaries, NOTHING)
        buckets = self.servers.layout.buckets(self.order.domain, self.order.keyspaces)
        self._states = {primary: [state for _, state in some] for primary, some in buckets.items()}

    def _work(self) -> None:
        self._on_each(self._walk_all)
        self._require_same_map()

    def _walk_all(self, primary: Primary) -> None:
        states, pace = self._states[primary], Pace()
        for start in range(0, len(states), BUCKETS_AT_ONCE):
            some = states[start : start + BUCKETS_AT_ONCE]
            sizes = self.servers.ask([self._command(state, 0, 0) for state in some])
            for state, (_, _, _, entries, used_bytes, _) in zip(some, sizes, strict=True):
                if entries:
                    self._walk(primary, pace, state, used_bytes // entries)

    def _walk(self, primary: Primary, pace: Pace, state: bytes, mean_bytes: int) -> None:
        cursor = 0
        while True:
            count = min(MOST_AT_ONCE, pace.count(mean_bytes))
            began_s = self.clock()
            ((cursor, removed, freed_bytes, entries, used_bytes, again),) = self.servers.ask(
                [self._command(state, cursor, count)]
            )
            took_s = self.clock() - began_s
            known = self._removed[primary]
            self._removed[primary] = known + Amount(removed, freed_bytes)
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
