"""Facts about prefix pools that are not objects of the API: what ConfigMaps hold, and what pods made of prefixes."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from kvstrata.contract.messages.pools import PoolReport, Rendered, WarmOutcome


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What a key of a ConfigMap held at a time; `problem` says why there is no text."""

    text: str | None = field(repr=False)
    problem: str
    at: datetime


class NoRendering(StrEnum):
    """Why a pod named no chunks of a prefix."""

    TOO_OLD = "TooOld"
    """It runs a version that cannot."""

    UNANSWERED = "Unanswered"
    """It did not answer, or not as itself."""

    OVERSIZE = "Oversize"
    """The prefix is larger than what is sent to a pod."""


@dataclass(frozen=True, slots=True)
class RenderReport:
    """What a pod answered when it was asked to name the chunks of a prefix: a rendering, or why there is none.

    It is the word of two processes, which `rendered` names: another start of either may say something else.
    """

    rendered: Rendered | None
    problem: NoRendering | None
    at: datetime


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What became of a prefix that a pod was asked to compute; None if the pod did not answer, or not as itself.

    `failures` is how often in a row it was in vain.
    """

    outcome: WarmOutcome | None
    at: datetime
    failures: int = 0

    @classmethod
    def after(cls, before: WarmReport | None, outcome: WarmOutcome | None, at: datetime) -> WarmReport:
        """Return the report that follows `before`."""
        known = before.failures if before is not None else 0
        return cls(outcome, at, 0 if outcome is WarmOutcome.STORED else known + 1)


@dataclass(frozen=True, slots=True)
class HoldingReport:
    """What a pod's tiers hold of a pool; None if the pod did not answer, or not as itself."""

    report: PoolReport | None
    at: datetime
