"""What an error of the disk amounts to."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

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
    """Nobody waits any more for what was written; it was removed again."""


@contextmanager
def told(what: str) -> Iterator[None]:
    """Raise what the disk answers within as DiskError; `what` completes "cannot"."""
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
