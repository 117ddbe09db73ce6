"""The form of a benchmark's result, and the checked-in ranges that it is held against."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RANGES = Path(__file__).parent / "ranges"

OTHER_LOAD = "other_load_percent"
"""Condition: the share of the machine's processors that other programs took while times were measured."""

QUIET_PERCENT = 15
ON_A_QUIET_MACHINE = "on_a_quiet_machine"
"""Key of a bound that says nothing while other programs take more than QUIET_PERCENT of the machine: elapsed time.

Processor time, counts and ratios within one run hold on a busy machine, too, and are always judged.
"""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number with its unit, and what it is held against, in the same unit, where it has such a thing."""

    value: float
    unit: str
    baseline: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form, rounded to what a noisy machine can mean."""
        told: dict[str, Any] = {"value": round(self.value, 4), "unit": self.unit}
        if self.baseline:
            told |= {"baseline": round(self.baseline, 4), "ratio": round(self.value / self.baseline, 3)}
        return told


@dataclass(frozen=True, slots=True)
class Result:
    """What one benchmark measured. `ratio` is the main figure divided by the baseline of the same run.

    `beside` are texts that are written beside the result, by the endings of their files' names. `not_measured` says
    why figures are not there whose names begin with a word.
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
        values = {name: figure.value for name, figure in self.figures.items()} | {"ratio": self.ratio}
        busy = self.conditions.get(OTHER_LOAD, 0) > QUIET_PERCENT
        limits = {name: bounds for name, bounds in limits.items() if not name.startswith(tuple(self.not_measured))}
        outside = [
            name
            for name, bounds in limits.items()
            if not bounds.get("min", float("-inf")) <= values[name] <= bounds.get("max", float("inf"))
        ]
        not_judged = [name for name in outside if busy and limits[name].get(ON_A_QUIET_MACHINE)]
        broken = [name for name in outside if name not in not_judged]
        return {
            "name": self.name,
            "figures": {
                name: {**figure.to_json(), **_judged(limits.get(name), ok=name not in broken)}
                for name, figure in self.figures.items()
            },
            "baseline": {name: figure.to_json() for name, figure in self.baseline.items()},
            "ratio": round(self.ratio, 3),
            "range": {name: dict(bounds) for name, bounds in limits.items()},
            "ok": not broken,
            "out_of_range": broken,
            "too_busy_to_judge": not_judged,
            **({"not_measured": dict(self.not_measured)} if self.not_measured else {}),
            "conditions": {**self.conditions, "machine": platform.machine(), "python": platform.python_version()},
            "reproduce": self.reproduce,
        }


def _judged(bounds: Mapping[str, float] | None, *, ok: bool) -> dict[str, Any]:
    return {} if bounds is None else {"range": dict(bounds), "ok": ok}


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
