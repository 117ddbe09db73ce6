"""What an error of a tier's disk means, and whether the disk may be used now, and for what."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.tier.breaker import Breaker

FULL_PAUSE_S = 1.0
"""How long stores rest after the disk said that it has no room."""

READ_ONLY_PAUSE_S = 30.0
"""How long stores rest after the file system said that it is read-only: it rarely becomes otherwise by itself."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR})


class Fault(StrEnum):
    """What an error of the disk amounts to."""

    FULL = "full"
    READ_ONLY = "read-only"
    MISSING = "missing"
    BUSY = "busy"
    BROKEN = "broken"


class DiskError(Exception):
    """An operation on the disk failed; the message is for whoever looks after the disk and names no block."""

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
    """What the disk's answers so far mean for the next operation. Safe to share between threads.

    `recovering` is whether it is not yet known what is there; until then nothing may be stored, because how much a
    scope may add depends on it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.breaker = Breaker(clock)
        self.recovering = True
        self._full_until_s: float | None = None
        self._read_only_until_s: float | None = None

    @property
    def full(self) -> bool:
        """Whether the disk refused the newest block for want of room."""
        return self._full_until_s is not None

    @property
    def read_only(self) -> bool:
        """Whether the file system took no writing when it was tried last."""
        return self._read_only_until_s is not None

    @property
    def detail(self) -> str:
        """What is wrong, empty when all is well."""
        if self.breaker.detail:
            return self.breaker.detail
        if self.recovering:
            return "the directory is being read: blocks that were found are used, and none are stored"
        if self.read_only:
            return "the file system is read-only: blocks are read, and none are stored"
        return "the disk is full: it refuses blocks" if self.full else ""

    def refusal(self, *, storing: bool = False) -> Refusal | None:
        """Return why the disk may not be used now, None if it may."""
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
        """Note what an operation failed of; return the refusal that it amounts to, None for a failure of the disk."""
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
        """Note that an operation does not end: nothing goes to this disk any more until it answers a probe."""
        self.breaker.failed(why, fatal=True)

    def wrote(self) -> None:
        """Note that a block was written."""
        self._full_until_s = self._read_only_until_s = None
        self.breaker.succeeded()

    def read(self) -> None:
        """Note that a block was read."""
        self.breaker.succeeded()
