"""Meaning of a disk's errors, and whether the disk may be used now."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.tier.breaker import Breaker


class Fault(StrEnum):
    FULL = "full"
    READ_ONLY = "read-only"
    MISSING = "missing"
    BUSY = "busy"
    BROKEN = "broken"


_FAULTS = {
    errno.EROFS: Fault.READ_ONLY,
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), Fault.FULL),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), Fault.MISSING),
}

PAUSES = {Fault.READ_ONLY: (30.0, Refusal.READ_ONLY), Fault.FULL: (1.0, Refusal.TIER_FULL)}
"""Seconds without stores after a failed write, and their refusal. A file system is rarely read-only for a moment."""


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
        raise DiskError(_FAULTS.get(code, Fault.BROKEN), f"cannot {what}: {os.strerror(code)}") from error


class Health:
    """State of the disk after its answers so far. Thread-safe. `recovering`: the files are not counted yet. Nothing may
    be stored then, because a scope's remaining budget is unknown."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.breaker = Breaker(clock)
        self.recovering = True
        self._pauses_until_s: dict[Fault, float] = {}

    @property
    def full(self) -> bool:
        """Whether the disk had no room for the newest block."""
        return Fault.FULL in self._pauses_until_s

    @property
    def read_only(self) -> bool:
        """Whether the last write failed because the file system is read-only."""
        return Fault.READ_ONLY in self._pauses_until_s

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
        for fault, (_, refusal) in PAUSES.items():
            if self._clock() < self._pauses_until_s.get(fault, 0.0):
                return refusal
        return None

    def failed(self, error: DiskError) -> Refusal | None:
        """Record an error; return its refusal, None for a failure of the disk."""
        if error.fault in PAUSES:
            pause_s, refusal = PAUSES[error.fault]
            self._pauses_until_s[error.fault] = self._clock() + pause_s
            return refusal
        if error.fault is not Fault.MISSING:
            self.breaker.failed(str(error))
        return None

    def wrote(self) -> None:
        self._pauses_until_s = {}
        self.breaker.succeeded()
