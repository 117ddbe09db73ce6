"""The circuit breaker of one server of a tier: a pure state machine.

It starts open, so that nothing waits for a server that was never seen. Only probes, which nobody waits for, go to a
server whose breaker is not closed; the first that succeeds closes it. Each probe that fails doubles the pause, up to a
maximum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import StrEnum

NEVER_SEEN = "not connected yet"


class BreakerState(StrEnum):
    """What a breaker lets through: everything, one probe, or nothing."""

    CLOSED = "closed"
    HALF_OPEN = "half-open"
    OPEN = "open"


class Breaker:
    """Counts a server's failures in a row and says whether it may be used. Safe to share between threads.

    `clock` returns seconds of a clock that never goes back. `threshold` failures in a row open the breaker.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        threshold: int = 3,
        first_pause_s: float = 0.25,
        longest_pause_s: float = 2.0,
    ) -> None:
        self._clock = clock
        self._threshold = threshold
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._lock = threading.Lock()
        self._state = BreakerState.OPEN
        self._detail = NEVER_SEEN
        self._failures = 0
        self._pause_s = first_pause_s
        self._probe_at_s = clock()

    @property
    def state(self) -> BreakerState:
        """The current state."""
        return self._state

    @property
    def detail(self) -> str:
        """Why the breaker is not closed, or what failed last; empty when all is well."""
        return self._detail

    @property
    def closed(self) -> bool:
        """Whether the server may be used."""
        return self._state is BreakerState.CLOSED

    def probe_in_s(self) -> float | None:
        """Seconds until a probe is due (0 if it is), None while none is wanted."""
        with self._lock:
            if self._state is not BreakerState.OPEN:
                return None
            return max(0.0, self._probe_at_s - self._clock())

    def begin_probe(self) -> bool:
        """Claim the probe that is due. The caller reports `succeeded` or `failed` when it is over."""
        with self._lock:
            if self._state is not BreakerState.OPEN or self._clock() < self._probe_at_s:
                return False
            self._state = BreakerState.HALF_OPEN
            return True

    def vouched_for(self) -> None:
        """Close the breaker of a server that was never seen, because one that is in use sends there."""
        with self._lock:
            if self._state is BreakerState.OPEN and self._detail == NEVER_SEEN:
                self._close()

    def probe_succeeded(self) -> None:
        """Close the breaker."""
        with self._lock:
            self._close()

    def probe_failed(self, detail: str) -> None:
        """Open the breaker for twice as long as before."""
        with self._lock:
            self._pause_s = min(self._longest_pause_s, self._pause_s * 2)
            self._open(detail)

    def succeeded(self) -> None:
        """Note an operation that went well. It closes nothing: only probes do."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                self._failures = 0
                self._detail = ""

    def failed(self, detail: str, *, fatal: bool = False) -> None:
        """Note an operation that failed; `fatal` opens the breaker at once, as a refused password should."""
        with self._lock:
            if self._state is not BreakerState.CLOSED:
                return
            self._failures += 1
            self._detail = detail
            if fatal or self._failures >= self._threshold:
                self._open(detail)

    def _close(self) -> None:
        self._state = BreakerState.CLOSED
        self._detail = ""
        self._failures = 0
        self._pause_s = self._first_pause_s

    def _open(self, detail: str) -> None:
        self._state = BreakerState.OPEN
        self._detail = detail
        self._failures = 0
        self._probe_at_s = self._clock() + self._pause_s
