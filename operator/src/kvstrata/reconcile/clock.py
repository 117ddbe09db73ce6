"""The clocks: of the operator's own timestamps, and of the Lease. Plans are given the time, they never ask."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def utc_now() -> datetime:
    """Return the current time, aware, in UTC."""
    return datetime.now(UTC)


def since_boot_s() -> float:
    """Return seconds since boot, those included in which the machine slept; no change of the wall clock moves it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
