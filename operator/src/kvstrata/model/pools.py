"""Facts about prefix pools that are not API objects: contents of ConfigMaps, and answers of pods."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, TypeVar

from kvstrata.contract.messages.pools import WarmOutcome

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SourceReport:
    """The value of a ConfigMap's key at a time; `problem` is the reason why there is no text."""

    text: str | None = field(repr=False)
    problem: str
    at: datetime


@dataclass(frozen=True, slots=True)
class PodAnswer(Generic[T]):
    """A pod's rendering of a prefix, or its holdings of a pool; None if the pod did not answer as itself, or the
    request is too large to be sent. It holds for the two processes that `answer` names: after a restart of either it
    may differ."""

    answer: T | None
    at: datetime


@dataclass(frozen=True, slots=True)
class WarmReport:
    """Result of warming a prefix in a pod; None if the pod did not answer as itself. `failures` counts consecutive
    failures."""

    outcome: WarmOutcome | None
    at: datetime
    failures: int = 0

    @classmethod
    def after(cls, before: WarmReport | None, outcome: WarmOutcome | None, at: datetime) -> WarmReport:
        known = before.failures if before is not None else 0
        return cls(outcome, at, 0 if outcome is WarmOutcome.STORED else known + 1)
