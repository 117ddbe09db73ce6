"""What pods said when they were asked to probe isolation."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from kvstrata.contract.messages.probe import Probed, ProbeOutcome

PASSING = (ProbeOutcome.MOVED, ProbeOutcome.UNREADY)
"""Outcomes that say nothing of isolation and are over soon: what was shown before stands."""


class NoProbe(StrEnum):
    """Why a pod did not say what a probe found."""

    TOO_OLD = "TooOld"
    """Its gate or its cache server is of a version that cannot."""

    UNANSWERED = "Unanswered"
    """It did not answer, or not as itself."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a probe found, when its answer came, and a digest of the keyspaces that were meant."""

    probed: Probed
    at: datetime
    keyspaces: str


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """A pod's last probe, ended `at`, and the last one that says something of isolation, if there was any.

    `problem` is why there was no answer, `passing` whether there was one that says nothing.
    """

    at: datetime
    shown: Shown | None = None
    problem: NoProbe | None = None
    passing: bool = False

    @classmethod
    def after(cls, before: ProbeReport | None, answer: Probed | NoProbe, keyspaces: str, at: datetime) -> ProbeReport:
        """Return the report that follows `before`."""
        known = before.shown if before is not None else None
        if isinstance(answer, NoProbe):
            return cls(at, known, problem=answer)
        if answer.outcome in PASSING:
            return cls(at, known, passing=True)
        return cls(at, Shown(answer, at, keyspaces))
