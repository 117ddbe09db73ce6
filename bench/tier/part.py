"""The form in which a part of the benchmark gives its figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.result import Figure


@dataclass(frozen=True, slots=True)
class Part:
    """Figures of one part. `ratio` is its main figure held against its baseline, of the same run.

    `others_percent` is the share of the machine that other programs took while times were measured. `not_measured`
    holds, by the first part of their names, the reason why figures are absent.
    """

    figures: Mapping[str, Figure]
    baseline: Mapping[str, Figure]
    ratio: float
    conditions: Mapping[str, Any]
    others_percent: float
    not_measured: Mapping[str, str] = field(default_factory=dict)
