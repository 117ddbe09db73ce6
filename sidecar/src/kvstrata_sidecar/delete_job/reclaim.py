"""Deletes a tier's blocks of identities that no pod has any more. The keyspaces stay in use.

Every name holds the identity that computed its block, and a bucket's index covers all identities. So each index is
walked, a few entries per command, and blocks of the given identities are deleted with their entries atomically. Blocks
of other identities are read and stored meanwhile. It is not urgent, so pauses are much longer than commands.

Safe to kill after every command. The next run walks again, and counts what it deletes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from kvstrata.contract.messages.erase_report import End, Erased, Line, Outcome, StopReason
from kvstrata.contract.receipt.facts import NOTHING, Amount
from kvstrata_sidecar.adapter.redis.client.commands import call, reads_numbers
from kvstrata_sidecar.adapter.redis.client.resp import Command
from kvstrata_sidecar.delete_job.order import Order
from kvstrata_sidecar.delete_job.pace import LONGEST_PAUSE_S, Pace
from kvstrata_sidecar.delete_job.servers import Primary, Servers, StoppedError

BUCKETS_AT_ONCE = 8
"""Buckets whose sizes are read in one exchange: a server runs all its commands before it serves others."""

MOST_AT_ONCE = 128
"""Entries of one command: deleting one takes much longer than checking it."""

PAUSE = 4.0
"""Pause as a multiple of the command's time."""


class Reclaim:
    def __init__(
        self,
        order: Order,
        servers: Servers,
        tell: Callable[[Line], None],
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._order = order
        self._servers = servers
        self._tell = tell
        self._clock = clock
        self._sleep = sleep
        self._identities = tuple(identity.encode() for identity in order.identities)
        self._removed = dict.fromkeys(servers.layout.primaries, NOTHING)
        buckets = servers.layout.buckets(order.domain, order.keyspaces)
        self._states = {primary: [state for _, state in some] for primary, some in buckets.items()}

    def run(self) -> bool:
        digest = self._servers.layout.digest
        try:
            with ThreadPoolExecutor(self._order.parallelism) as pool:
                for outcome in [pool.submit(self._walk_all, primary) for primary in self._states]:
                    outcome.result()
            if self._servers.look_again().digest != digest:
                raise StoppedError(StopReason.SLOT_MAP_CHANGED, "slots went to other servers meanwhile")
            end = End(Outcome.ERASED, StopReason.NONE, "", digest, 0)
        except StoppedError as error:
            message = "".join(one for one in str(error) if one.isprintable())[:512]
            end = End(Outcome.STOPPED, error.reason, message, digest, 0)
        for line in self._lines():
            self._tell(line)
        self._tell(end)
        return end.outcome is Outcome.ERASED

    def _walk_all(self, primary: Primary) -> None:
        states, pace = self._states[primary], Pace()
        for start in range(0, len(states), BUCKETS_AT_ONCE):
            some = states[start : start + BUCKETS_AT_ONCE]
            sizes = self._servers.ask([self._command(state, 0, 0) for state in some])
            for state, (_, _, _, entries, used_bytes, _) in zip(some, sizes, strict=True):
                if entries:
                    self._walk(primary, pace, state, used_bytes // entries)

    def _walk(self, primary: Primary, pace: Pace, state: bytes, mean_bytes: int) -> None:
        cursor = 0
        while True:
            count = min(MOST_AT_ONCE, pace.count(mean_bytes))
            began_s = self._clock()
            ((cursor, removed, freed_bytes, entries, used_bytes, again),) = self._servers.ask(
                [self._command(state, cursor, count)]
            )
            took_s = self._clock() - began_s
            known = self._removed[primary]
            self._removed[primary] = known + Amount(removed, freed_bytes)
            pace.took(removed if again else count, took_s)
            self._sleep(min(LONGEST_PAUSE_S, PAUSE * took_s))
            if not cursor and not again:
                return
            mean_bytes = used_bytes // entries if entries else mean_bytes

    def _command(self, state: bytes, cursor: int, count: int) -> Command:
        return call("cull", state, reads_numbers(6), cursor=cursor, count=count, identities=self._identities)

    def _lines(self) -> Iterator[Line]:
        for primary, amount in self._removed.items():
            yield Erased(None, primary.node, amount, amount, NOTHING)
