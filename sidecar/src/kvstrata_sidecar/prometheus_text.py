"""Prometheus' text format, for the pages of gates and cache servers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(slots=True)
class Histogram:
    """Durations by bucket: one for each of `bounds_s` (inclusive), and one for all that is longer."""

    bounds_s: tuple[float, ...]
    buckets: list[int] = field(default_factory=list)
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        self.buckets = self.buckets or [0] * (len(self.bounds_s) + 1)

    def add(self, seconds: float) -> None:
        self.buckets[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += seconds

    def copy(self) -> Histogram:
        return Histogram(self.bounds_s, list(self.buckets), self.sum_s)

    def lines(self, name: str, labels: Mapping[str, str]) -> Iterator[str]:
        total = 0
        for bound, count in zip((*map(str, self.bounds_s), "+Inf"), self.buckets, strict=True):
            total += count
            yield _line(f"{name}_bucket", {**labels, "le": bound}, total)
        yield _line(f"{name}_sum", labels, f"{self.sum_s:.6f}")
        yield _line(f"{name}_count", labels, total)


Row = tuple[Mapping[str, str], float | str | Histogram]
"""Labels and value."""


def family(name: str, kind: str, text: str, rows: Iterable[Row]) -> Iterator[str]:
    """Yield the lines of a family; without `text` it has no help."""
    if text:
        yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in rows:
        if isinstance(value, Histogram):
            yield from value.lines(name, labels)
        else:
            yield _line(name, labels, value)


def _line(name: str, labels: Mapping[str, str], value: float | str) -> str:
    shown = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels.items())
    return f"{name}{{{shown}}} {value}" if shown else f"{name} {value}"
