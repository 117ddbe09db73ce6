"""Results of moving slots: progress, and the reason for an end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class MoveReason(StrEnum):
    MOVED = "Moved"
    NOT_LEADING = "NotLeading"
    SERVER_AWAY = "ServerAway"
    REFUSED = "Refused"
    NOT_TRANSFERRED = "NotTransferred"
    JOB_FAILED = "JobFailed"
    JOB_HUNG = "JobHung"


@dataclass(slots=True)
class MoveStats:
    """Progress of an order. `dropped` values were too large, without room at the target, or meant to be dropped;
    `orphans` are keys without an index. Both are misses for readers."""

    slots: int = 0
    keys: int = 0
    bytes: int = 0
    dropped: int = 0
    orphans: int = 0


@dataclass(frozen=True, slots=True)
class MoveReport:
    """How an order ended. `message` names server and slot; the next look finds the remaining work."""

    reason: MoveReason
    message: str
    tally: MoveStats

    @property
    def done(self) -> bool:
        return self.reason is MoveReason.MOVED


class MoveFailedError(Exception):
    def __init__(self, reason: MoveReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


OnProgress = Callable[[MoveStats], None]
