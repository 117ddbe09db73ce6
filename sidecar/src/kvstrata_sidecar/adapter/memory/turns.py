"""The thread that runs the evictor's turns: after events, and when something is due."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

GATHER_S = 0.005
"""How long a turn waits for more events: a prompt's blocks are committed one after the other."""

FAILURE_PAUSE_S = 0.1

logger = logging.getLogger(__name__)


class Turns:
    """Calls `turn`, which returns the seconds until its next call at the latest, from `start` to `close`. A failed turn
    is repeated. `clock` returns seconds."""

    def __init__(self, turn: Callable[[], float], clock: Callable[[], float]) -> None:
        self._turn = turn
        self._clock = clock
        self._failures = 0
        self._woken_s = clock()
        self._closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvs-memory", daemon=True)
        self.start = self._thread.start
        self.slowest_s = 0.0
        """The longest time from a call of `wake` to the end of its turn."""

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive() and not self._failures

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def wake(self) -> None:
        """Request a turn. Thread-safe, and fast."""
        if not self._wake.is_set():
            self._woken_s = self._clock()
            self._wake.set()

    def _run(self) -> None:
        wait_s = 0.0
        while True:
            woken = self._wake.wait(wait_s)
            if self._closed:
                return
            # Events of these few milliseconds belong to the same turn.
            time.sleep(GATHER_S)
            since_s = self._woken_s
            self._wake.clear()
            try:
                wait_s = self._turn()
                self._failures = 0
                if woken:
                    self.slowest_s = max(self.slowest_s, self._clock() - since_s)
            except Exception:
                self._failures += 1
                if self._failures == 1:
                    logger.exception("The policy of the memory could not be enforced; it is tried again")
                wait_s = FAILURE_PAUSE_S
