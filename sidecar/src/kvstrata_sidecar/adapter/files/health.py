"""Meaning of a disk's errors, and whether the disk may be used now."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.tier.breaker import Breaker

FULL_PAUSE_S = 1.0

READ_ONLY_PAUSE_S = 30.0
"""Pause of stores after the file system was read-only, which rarely ends by itself."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR})


class Fault(StrEnum):
    FULL = "full"
    READ_ONLY = "read-only"
    MISSING = "missing"
    BUSY = "busy"
    BROKEN = "broken"


class DiskError(Exception):
    """An operation on the disk failed; the message names no block."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class TooLateError(Exception):
    """The task of a written block was over; the file was removed again."""


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Raise OSErrors as DiskError; `what` completes "cannot" in its message."""
    try:
        yield
    except OSError as error:
        code = error.errno or 0
        if code in _FULL:
            fault = Fault.FULL
        elif code == errno.EROFS:
            fault = Fault.READ_ONLY
        elif code in _MISSING:
            fault = Fault.MISSING
        else:
            fault = Fault.BROKEN
        raise DiskError(fault, f"cannot {what}: {os.strerror(code)}") from error


class Health:
    """State of the disk after its answers so far. Thread-safe. `recovering`: the files are not counted yet. Nothing may
    be stored then, because a scope's remaining budget is unknown."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.breaker = Breaker(clock)
        self.recovering = True
        self._full_until_s: float | None = None
        self._read_only_until_s: float | None = None

    @property
    def full(self) -> bool:
        """Whether the disk had no room for the newest block."""
        return self._full_until_s is not None

    @property
    def read_only(self) -> bool:
        """Whether the last write failed because the file system is read-only."""
        return self._read_only_until_s is not None

    @property
    def detail(self) -> str:
        if self.breaker.detail:
            return self.breaker.detail
        if self.recovering:
            return "the directory is being read: blocks that were found are used, and none are stored"
        if self.read_only:
            return "the file system is read-only: blocks are read, and none are stored"
        return "the disk is full: it refuses blocks" if self.full else ""

    def refusal(self, *, storing: bool = False) -> Refusal | None:
        if not self.breaker.closed:
            return Refusal.BREAKER_OPEN
        if not storing:
            return None
        if self.recovering:
            return Refusal.RECOVERING
        now_s = self._clock()
        if self._read_only_until_s is not None and now_s < self._read_only_until_s:
            return Refusal.READ_ONLY
        if self._full_until_s is not None and now_s < self._full_until_s:
            return Refusal.TIER_FULL
        return None

    def failed(self, error: DiskError) -> Refusal | None:
        """Record an error; return its refusal, None for a failure of the disk."""
        if error.fault is Fault.FULL:
            self._full_until_s = self._clock() + FULL_PAUSE_S
            return Refusal.TIER_FULL
        if error.fault is Fault.READ_ONLY:
            self._read_only_until_s = self._clock() + READ_ONLY_PAUSE_S
            return Refusal.READ_ONLY
        if error.fault is not Fault.MISSING:
            self.breaker.failed(str(error))
        return None

    def stalled(self, why: str) -> None:
        """Record an operation that does not end: the disk is not used until it answers a probe."""
        self.breaker.failed(why, fatal=True)

    def wrote(self) -> None:
        self._full_until_s = self._read_only_until_s = None
        self.breaker.succeeded()

    def read(self) -> None:
        self.breaker.succeeded()
