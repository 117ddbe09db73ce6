"""The circuit breaker of one server of a tier: a pure state machine.

It starts open, so that no request waits for a server that was never reached. While it is not closed, only background
probes go to the server; the first that succeeds closes it. Each failed probe doubles the pause, up to a maximum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum

NEVER_SEEN = "not connected yet"


class BreakerState(StrEnum):
    CLOSED = "closed"
    HALF_OPEN = "half-open"
    OPEN = "open"


@dataclass(eq=False)
class Breaker:
    """Counts consecutive failures; `threshold` open the breaker. `detail` is why it is not closed, or the last failure;
    empty when all is well. `clock` returns monotonic seconds. Thread-safe."""

    _clock: Callable[[], float]
    _: KW_ONLY
    threshold: int = 3
    first_pause_s: float = 0.25
    longest_pause_s: float = 2.0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.state = BreakerState.OPEN
        self.detail = NEVER_SEEN
        self._failures = 0
        self._pause_s = self.first_pause_s
        self._probe_at_s = self._clock()

    @property
    def closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    def probe_in_s(self) -> float | None:
        """Seconds until a probe is due (0 if it is), None while none is wanted."""
        with self._lock:
            if self.state is not BreakerState.OPEN:
                return None
            return max(0.0, self._probe_at_s - self._clock())

    def begin_probe(self) -> bool:
        """Claim the probe that is due. The caller reports `probe_succeeded` or `probe_failed`."""
        with self._lock:
            if self.state is not BreakerState.OPEN or self._clock() < self._probe_at_s:
                return False
            self.state = BreakerState.HALF_OPEN
            return True

    def vouched_for(self) -> None:
        """Close the breaker of a server never reached, because a server in use redirects there."""
        with self._lock:
            if self.state is BreakerState.OPEN and self.detail == NEVER_SEEN:
                self._close()

    def probe_succeeded(self) -> None:
        with self._lock:
            self._close()

    def probe_failed(self, detail: str) -> None:
        with self._lock:
            self._pause_s = min(self.longest_pause_s, self._pause_s * 2)
            self._open(detail)

    def succeeded(self) -> None:
        """Record a success. Only probes close the breaker."""
        with self._lock:
            if self.state is BreakerState.CLOSED:
                self._failures = 0
                self.detail = ""

    def failed(self, detail: str, *, fatal: bool = False) -> None:
        """Record a failure; `fatal` opens the breaker at once, for example for a refused password."""
        with self._lock:
            if self.state is not BreakerState.CLOSED:
                return
            self._failures += 1
            self.detail = detail
            if fatal or self._failures >= self.threshold:
                self._open(detail)

    def _close(self) -> None:
        self.state = BreakerState.CLOSED
        self.detail = ""
        self._failures = 0
        self._pause_s = self.first_pause_s

    def _open(self, detail: str) -> None:
        self.state = BreakerState.OPEN
        self.detail = detail
        self._failures = 0
        self._probe_at_s = self._clock() + self._pause_s
