"""The wall clock of the operator's own timestamps; plans are given the time, they never ask."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_now() -> datetime:
    """Return the current time, aware, in UTC."""
    return datetime.now(UTC)
