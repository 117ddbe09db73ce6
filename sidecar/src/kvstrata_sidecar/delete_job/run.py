"""One run of a job on a tier, and its report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvstrata.contract.messages.erase_report import End, Line, Outcome, StopReason
from kvstrata_sidecar.delete_job.order import Order
from kvstrata_sidecar.delete_job.servers import Primary, Servers, StoppedError, await_replicas


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
        def confirmed(replicas: int, in_step: int) -> None:
            self._replicas[primary] = replicas, in_step

        await_replicas(self.servers, primary, confirmed, clock=self.clock, sleep=self.sleep)

    def _require_same_map(self) -> None:
        if self.servers.look_again().digest != self.servers.layout.digest:
            raise StoppedError(StopReason.SLOT_MAP_CHANGED, "slots went to other servers meanwhile")
