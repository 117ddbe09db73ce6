"""The form of a benchmark's result, and the checked-in ranges that it is held against."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

RANGES = Path(__file__).parent / "ranges"

OTHER_LOAD = "other_load_percent"
"""Condition of every result: the share of the processors that other programs took while times were measured."""

RUNS_LEFT = "runs_left"
"""Condition of a result that takes several calls: how many runs are missing, or are of earlier code."""

QUIET_PERCENT = 20
ON_A_QUIET_MACHINE = "on_a_quiet_machine"
"""Key of a bound that nothing can exceed but elapsed time, and so not judged while others keep the machine busy.

A machine is busy when other programs take more than QUIET_PERCENT of it; a local cluster at rest takes 17. Processor
time and counts hold on a busy machine, too, and are always judged.
"""

RATIO = "ratio"
"""Unit of one figure divided by another. Load can move a ratio of two elapsed times to either side."""

NOT_JUDGED: Final = "not judged"
Verdict = bool | Literal["not judged"]
"""Whether a figure, or all of a benchmark, is in its range; or that this run cannot judge it."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number with its unit, and its baseline in the same unit, where it has one."""

    value: float
    unit: str
    baseline: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form, rounded to the digits that mean something on a noisy machine."""
        form: dict[str, Any] = {"value": round(self.value, 4), "unit": self.unit}
        if self.baseline:
            form |= {"baseline": round(self.baseline, 4), "ratio": round(self.value / self.baseline, 3)}
        return form


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one benchmark. `ratio` is the main figure divided by the baseline of the same run.

    `beside` are texts that are written beside the result, by the endings of their files' names. `not_measured` holds,
    by the first part of their names, the reason why figures are absent.
    """

    name: str
    figures: Mapping[str, Figure]
    baseline: Mapping[str, Figure]
    ratio: float
    reproduce: str
    conditions: Mapping[str, Any]
    beside: Mapping[str, str] = field(default_factory=dict)
    not_measured: Mapping[str, str] = field(default_factory=dict)

    def to_json(self, limits: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
        """Return the document; `limits` maps names of figures (and `ratio`) to their `min` and `max`."""
        busy = self.conditions[OTHER_LOAD] > QUIET_PERCENT
        limits = {name: bounds for name, bounds in limits.items() if not name.startswith(tuple(self.not_measured))}
        judged = {**self.figures, "ratio": Figure(self.ratio, RATIO)}
        verdicts = {name: verdict(judged[name], bounds, busy=busy) for name, bounds in limits.items()}
        return {
            "name": self.name,
            "figures": {
                name: figure.to_json() | ({"range": dict(limits[name]), "ok": verdicts[name]} if name in limits else {})
                for name, figure in self.figures.items()
            },
            "baseline": {name: figure.to_json() for name, figure in self.baseline.items()},
            "ratio": round(self.ratio, 3),
            "range": {name: dict(bounds) for name, bounds in limits.items()},
            "ok": overall(verdicts.values()),
            "out_of_range": [name for name, ok in verdicts.items() if ok is False],
            "too_busy_to_judge": [name for name, ok in verdicts.items() if ok == NOT_JUDGED],
            **({"not_measured": dict(self.not_measured)} if self.not_measured else {}),
            "conditions": {**self.conditions, "machine": platform.machine(), "python": platform.python_version()},
            "reproduce": self.reproduce,
        }


def verdict(figure: Figure, bounds: Mapping[str, float], *, busy: bool) -> Verdict:
    """Judge one figure by its `bounds`.

    On a busy machine an elapsed time beyond its bound is not judged. One within its bound is: it would be shorter on a
    quiet machine. A ratio of elapsed times is not judged either way.
    """
    inside = bounds.get("min", -math.inf) <= figure.value <= bounds.get("max", math.inf)
    if busy and bounds.get(ON_A_QUIET_MACHINE) and (not inside or figure.unit == RATIO):
        return NOT_JUDGED
    return inside


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """Return False if one is, else NOT_JUDGED if one is, else True."""
    found = set(verdicts)
    return False if False in found else NOT_JUDGED if NOT_JUDGED in found else True


def load_range(name: str) -> dict[str, dict[str, float]]:
    """Return the checked-in range of a benchmark."""
    loaded: dict[str, dict[str, float]] = json.loads((RANGES / f"{name}.json").read_text())
    return loaded


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the sample below which `percent` of them lie (nearest rank). Raises ValueError for no samples."""
    if not samples:
        raise ValueError("a percentile needs samples")
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]
