"""What moving slots comes to: how far it has come, and why it did not go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class MoveReason(StrEnum):
    """How an order ended."""

    MOVED = "Moved"
    NOT_LEADING = "NotLeading"
    SERVER_AWAY = "ServerAway"
    REFUSED = "Refused"
    NOT_TRANSFERRED = "NotTransferred"
    JOB_FAILED = "JobFailed"
    JOB_HUNG = "JobHung"


@dataclass(slots=True)
class MoveStats:
    """What an order has done so far. `dropped` were values too large, without room at the target or meant to be
    dropped; `orphans` are keys that nobody would ever have found. Both are misses."""

    slots: int = 0
    keys: int = 0
    bytes: int = 0
    dropped: int = 0
    orphans: int = 0


@dataclass(frozen=True, slots=True)
class MoveReport:
    """How an order ended. `message` names server and slot; what remains of the order the next look finds."""

    reason: MoveReason
    message: str
    tally: MoveStats

    @property
    def done(self) -> bool:
        """Whether the order was carried out."""
        return self.reason is MoveReason.MOVED


class MoveFailedError(Exception):
    """An order cannot be carried on from here."""

    def __init__(self, reason: MoveReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


Told = Callable[[MoveStats], None]
"""Is called whenever an order has come further."""
