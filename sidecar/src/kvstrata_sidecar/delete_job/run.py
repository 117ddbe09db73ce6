"""One run of a job on a tier: its pace and its report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from kvstrata.contract.messages.erase_report import End, Line, Outcome, StopReason
from kvstrata_sidecar.adapter.redis.client.commands import read_number
from kvstrata_sidecar.adapter.redis.client.resp import Command
from kvstrata_sidecar.delete_job.order import Order
from kvstrata_sidecar.delete_job.servers import Primary, Servers, StoppedError

CONFIRMED_WITHIN_S = 30.0
POLL_S = 0.1

GOAL_S = 0.002
"""Target duration of a command, well below the 10 ms limit."""

MOST_AT_ONCE = 256
"""The script's maximum."""

LEAST_AT_ONCE = 8
FIRST_AT_ONCE = 16
BYTES_AT_ONCE = 16 << 20
"""Fewer large values at once: a server frees their memory within the command."""

COMMANDS_SEEN = 32
"""Commands over which the minimum is taken; a slowdown is noticed after as many."""

LONGEST_PAUSE_S = 0.05

Row = TypeVar("Row")


class Pace:
    """Size of deleting commands, and the pause after each.

    A server serves no other client while it runs a script, so a command is bounded in time. The script itself does that
    if its server has a clock for it; this avoids relying on it. The time per value is the minimum over the last
    commands: the rest of the observed time is waiting, which smaller commands would not avoid.
    """

    def __init__(self) -> None:
        self._count = FIRST_AT_ONCE
        self._each_s: deque[float] = deque(maxlen=COMMANDS_SEEN)

    def count(self, mean_bytes: int) -> int:
        """Return how many values of this size the next command may delete."""
        return max(1, min(self._count, BYTES_AT_ONCE // max(1, mean_bytes)))

    def took(self, count: int, seconds: float) -> float:
        """Return the pause after a command: as long as the command itself, without waiting."""
        if count:
            self._each_s.append(seconds / count)
        each_s = min(self._each_s, default=0.0)
        fitting = int(GOAL_S / each_s) if each_s > 0 else MOST_AT_ONCE
        self._count = max(LEAST_AT_ONCE, min(MOST_AT_ONCE, 2 * self._count, fitting))
        return min(LONGEST_PAUSE_S, count * each_s)


@dataclass(eq=False)
class Run(ABC):
    """`report` receives the lines of its report; `clock` and `sleep` are in seconds."""

    order: Order
    servers: Servers
    report: Callable[[Line], None]
    clock: Callable[[], float] = field(kw_only=True)
    sleep: Callable[[float], None] = field(kw_only=True)

    def __post_init__(self) -> None:
        self._replicas = dict.fromkeys(self.servers.layout.primaries, (0, 0))
        self._paces = {primary: Pace() for primary in self.servers.layout.primaries}

    def run(self) -> bool:
        """Do the work and report; return whether it is complete."""
        outcome, reason, message = Outcome.ERASED, StopReason.NONE, ""
        try:
            self._work()
        except StoppedError as error:
            outcome, reason = Outcome.STOPPED, error.reason
            message = "".join(one for one in str(error) if one.isprintable())[:512]
        for line in self._lines():
            self.report(line)
        self.report(End(outcome, reason, message, self.servers.layout.digest, self._since_ms()))
        return outcome is Outcome.ERASED

    @abstractmethod
    def _work(self) -> None:
        """Do all of it. Raises StoppedError if it cannot continue now."""

    @abstractmethod
    def _lines(self) -> Iterator[Line]:
        """Return the report of the run."""

    def _since_ms(self) -> int:
        """Return the age of the newest tombstone when last reported, 0 without tombstones."""
        return 0

    def _on_each(self, work: Callable[[Primary], None]) -> None:
        """Run `work` on every primary, several at once. Raises the first StoppedError when all have ended."""
        with ThreadPoolExecutor(self.order.parallelism) as pool:
            for outcome in [pool.submit(work, primary) for primary in self.servers.layout.primaries]:
                outcome.result()

    def _await_replicas(self, primary: Primary) -> None:
        """Wait until all replicas confirm. Raises StoppedError if they do not in time."""
        written = self.servers.written(primary)
        give_up_at_s = self.clock() + CONFIRMED_WITHIN_S
        while True:
            replicas, in_step = self._replicas[primary] = self.servers.in_step(primary, written)
            if in_step >= replicas:
                return
            if self.clock() >= give_up_at_s:
                late = f"{replicas - in_step} of {replicas} replicas do not confirm"
                raise StoppedError(StopReason.REPLICAS_BEHIND, f"{primary.address}: {late}")
            self.sleep(POLL_S)

    def _require_same_map(self) -> None:
        if self.servers.look_again().digest != self.servers.layout.digest:
            raise StoppedError(StopReason.SLOT_MAP_CHANGED, "slots went to other servers meanwhile")


def parts(rows: Sequence[Row], size: int) -> Iterator[Sequence[Row]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def unlink(name: bytes) -> Command:
    return Command(name, (b"UNLINK", name), read_number)
