"""Draining before the engine stops.

Kubernetes stops a native sidecar only after the main container, so a signal reaches the gate too late. Instead the
engine's preStop hook (`DRAIN_SCRIPT` in the operator) creates `draining` in a shared volume and waits for `drained`.
The gate sees the first file, turns unready, serves for another `grace_s` while Services still send callers, lets
requests in flight end, and creates the second. A container restart runs the hook too: an engine whose socket is younger
than `draining` ends the drain.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kvstrata_sidecar.gate import log

DRAINING_FILE = "draining"
DRAINED_FILE = "drained"
POLL_S = 0.1


class Drain:
    """State of the drain; `poll` is called every `POLL_S` seconds."""

    def __init__(self, engine_socket: Path, *, grace_s: float, clock: Callable[[], float]) -> None:
        self._socket = engine_socket
        self._draining_file = engine_socket.with_name(DRAINING_FILE)
        self._drained_file = engine_socket.with_name(DRAINED_FILE)
        self._grace_s = grace_s
        self._clock = clock
        self._since: float | None = None
        self._finished = False

    @property
    def active(self) -> bool:
        return self._since is not None

    def begin(self) -> None:
        if self._since is None:
            self._since = self._clock()
            log.info("draining")

    def poll(self, *, in_flight: int, engine_ready: bool) -> None:
        asked = os.path.exists(self._draining_file)
        if asked and engine_ready and self._engine_is_younger():
            self._draining_file.unlink(missing_ok=True)
            self._drained_file.unlink(missing_ok=True)
            self._since, self._finished = None, False
            log.info("the engine is back after a drain")
        elif self._since is None:
            if asked:
                self.begin()
        elif not self._finished and in_flight == 0 and self._clock() - self._since >= self._grace_s:
            self._finished = True
            self._drained_file.touch()
            log.info("drained")

    def _engine_is_younger(self) -> bool:
        try:
            return self._socket.stat().st_mtime_ns > self._draining_file.stat().st_mtime_ns
        except OSError:
            return False
