"""Locks between commands that run at the same time, each for one thing that is being made or changed."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from e2e.cluster.progress import Progress
from e2e.cluster.settings import Paths

CLUSTER = "cluster"
CONTROL_PLANE = "control-plane"


@contextmanager
def exclusive(paths: Paths, name: str, progress: Progress) -> Iterator[None]:
    """Hold the lock called ``name`` while the body runs; print a line when another command has to be waited for.

    The kernel drops the lock when its holder ends, however it ends. Programs that are started meanwhile do not inherit
    it.
    """
    paths.locks.mkdir(parents=True, exist_ok=True)
    with (paths.locks / name).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with progress.step(f"wait for another command that works on {name}"):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
