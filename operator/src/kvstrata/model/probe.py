"""Results of isolation probes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from kvstrata.contract.messages.probe import Probed, ProbeOutcome

PASSING = (ProbeOutcome.MOVED, ProbeOutcome.UNREADY)
"""Transient outcomes without a result about isolation: earlier results stand."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A probe's result, and a digest of the keyspaces that it covered."""

    probed: Probed
    at: datetime
    keyspaces: str


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """A pod's last probe, ended `at`, and the last conclusive one. `passing`: the pod did not answer as itself, or its
    answer was transient."""

    at: datetime
    shown: Shown | None = None
    passing: bool = False

    @classmethod
    def after(cls, before: ProbeReport | None, answer: Probed | None, keyspaces: str, at: datetime) -> ProbeReport:
        known = before.shown if before is not None else None
        if answer is None or answer.outcome in PASSING:
            return cls(at, known, passing=True)
        return cls(at, Shown(answer, at, keyspaces))
