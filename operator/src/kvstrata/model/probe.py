"""Results of isolation probes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from kvstrata.contract.messages.probe import Probed, ProbeOutcome

PASSING = (ProbeOutcome.MOVED, ProbeOutcome.UNREADY)
"""Transient outcomes without a result about isolation: earlier results stand."""


class NoProbe(StrEnum):
    TOO_OLD = "TooOld"
    """The version of its gate or cache server cannot probe."""

    UNANSWERED = "Unanswered"
    """No answer, or not from this pod."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A probe's result, and a digest of the keyspaces that it covered."""

    probed: Probed
    at: datetime
    keyspaces: str


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """A pod's last probe, ended `at`, and the last conclusive one. `problem` is the reason why there was no answer,
    `passing` whether the answer was transient."""

    at: datetime
    shown: Shown | None = None
    problem: NoProbe | None = None
    passing: bool = False

    @classmethod
    def after(cls, before: ProbeReport | None, answer: Probed | NoProbe, keyspaces: str, at: datetime) -> ProbeReport:
        known = before.shown if before is not None else None
        if isinstance(answer, NoProbe):
            return cls(at, known, problem=answer)
        if answer.outcome in PASSING:
            return cls(at, known, passing=True)
        return cls(at, Shown(answer, at, keyspaces))
