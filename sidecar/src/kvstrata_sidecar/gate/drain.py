"""Draining before the engine stops.

Kubernetes stops a native sidecar only after the main container, so a signal reaches the gate too late. Instead the
engine's preStop hook creates `draining` in the volume that both share and waits for `drained`: the gate sees the one,
turns unready, goes on serving for `grace_s` (until no Service sends new callers), lets what is in flight end, and
creates the other. Should the engine come back in the same pod (its liveness probe failed), both files go away.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from . import log

ENGINE_DIRECTORY = "/run/kvstrata/engine"
DRAINING_FILE = "draining"
DRAINED_FILE = "drained"
POLL_S = 0.1

PRESTOP_COMMAND = (
    "python3",
    "-S",
    "-c",
    "import os,time\n"
    f"d='{ENGINE_DIRECTORY}/'\n"
    f"open(d+'{DRAINING_FILE}','w').close()\n"
    f"while not os.path.exists(d+'{DRAINED_FILE}'): time.sleep({POLL_S})",
)
"""The engine container's preStop exec command. The pod's termination grace period bounds it."""


class Drain:
    """The drain's state; `poll` is called every `POLL_S` seconds with what it has to know."""

    def __init__(self, directory: Path, *, grace_s: float, clock: Callable[[], float]) -> None:
        self._draining_file = directory / DRAINING_FILE
        self._drained_file = directory / DRAINED_FILE
        self._grace_s = grace_s
        self._clock = clock
        self._since: float | None = None
        self._finished = False
        self._engine_was_down = False

    @property
    def active(self) -> bool:
        """Whether the pod is on its way out."""
        return self._since is not None

    @property
    def finished(self) -> bool:
        """Whether nothing is left to wait for."""
        return self._finished

    def begin(self) -> None:
        """Start to drain, by the hook's file or by a signal."""
        if self._since is None:
            self._since = self._clock()
            log.info("draining")

    def poll(self, *, in_flight: int, engine_ready: bool) -> None:
        """Look at the volume and at the requests in flight, and go on as far as both allow."""
        asked = self._draining_file.exists()
        if self._since is None:
            if asked:
                self._engine_was_down = False
                self.begin()
            return
        if not self._finished:
            if in_flight == 0 and self._clock() - self._since >= self._grace_s:
                self._finished = True
                self._drained_file.touch()
                log.info("drained")
            return
        if not engine_ready:
            self._engine_was_down = True
        elif self._engine_was_down and asked:
            self._draining_file.unlink(missing_ok=True)
            self._drained_file.unlink(missing_ok=True)
            self._since, self._finished, self._engine_was_down = None, False, False
            log.info("the engine is back; serving again")
