"""Draining before the engine stops.

Kubernetes stops a native sidecar only after the main container, so a signal reaches the gate too late. Instead the
engine's preStop hook (`DRAIN_SCRIPT` in the operator's builder of that container) creates `draining` in the volume
that both share and waits for `drained`: the gate sees the one, turns unready, goes on serving for `grace_s` (until no
Service sends new callers), lets what is in flight end, and creates the other. A container that is only restarted runs
the hook too: an engine whose socket is younger than `draining` ends the drain.
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
    """The drain's state; `poll` is called every `POLL_S` seconds with what it has to know."""

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
        """Whether the pod is on its way out."""
        return self._since is not None

    def begin(self) -> None:
        """Start to drain, by the hook's file or by a signal."""
        if self._since is None:
            self._since = self._clock()
            log.info("draining")

    def poll(self, *, in_flight: int, engine_ready: bool) -> None:
        """Look at the volume and at the requests in flight, and go on as far as both allow."""
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
