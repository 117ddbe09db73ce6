"""The report's panels: a question, a figure, and lines over time or bars; or the reason for which they are absent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvstrata.cli.pages import Page

MOST_SERIES = 8
OTHERS = "all others"


@dataclass(frozen=True, slots=True)
class Series:
    """Values by time in seconds of the epoch; a single one has the time 0 and is a total."""

    label: str
    points: Sequence[tuple[float, float]]

    @property
    def last(self) -> float:
        return self.points[-1][1]


@dataclass(frozen=True, slots=True)
class Part:
    """Series of one metric, distinguished by `labels`. `weight` is the metric to which a share refers. `largest`: pods
    report the same quantity, so the largest counts, not the sum."""

    metric: str
    labels: tuple[str, ...]
    prefix: str = ""
    where: tuple[tuple[str, str], ...] = ()
    weight: str = ""
    largest: bool = False

    def label(self, found: Mapping[str, str]) -> str:
        """Return the name of a series with these labels."""
        named = " · ".join(filter(None, (found.get(name) for name in self.labels))) or "all"
        return f"{self.prefix} {named}" if self.prefix else named


@dataclass(frozen=True, slots=True)
class Question:
    """A panel to fill. `unit` is % (of 1), bytes, s or blocks; a gauge is shown as it is, a counter by its growth."""

    key: str
    title: str
    figure: str
    unit: str
    parts: tuple[Part, ...]
    gauge: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """`missing` is the reason for which there is no series, or not all of them."""

    question: Question
    total: float | None
    series: Sequence[Series]
    missing: str = ""


QUESTIONS = (
    Question(
        "hits", "Hit rate", "of all prompt tokens came from a cache", "%",
        (Part("kvstrata_gate_cached_prompt_tokens_total", ("tenant",), weight="kvstrata_gate_prompt_tokens_total"),),
    ),
    Question(
        "saved", "Prefill saved", "of prefill that requests did not wait for", "s",
        (Part("kvstrata_gate_prefill_avoided_seconds_total", ("source",)),),
    ),
    Question(
        "bytes", "Bytes by scope", "in use", "bytes",
        (
            Part("kvstrata_cache_tier_used_bytes", ("tier", "scope"), largest=True),
            Part("kvstrata_gate_memory_used_bytes", ("tier", "scope"), "memory"),
        ),
        gauge=True,
    ),
    Question(
        "evictions", "Evictions", "made room for newer ones", "blocks",
        (
            Part("kvstrata_cache_blocks_total", ("tier",), "tier", (("operation", "evicted"),)),
            Part("kvstrata_cache_memory_evicted_total", ("cause",), "memory,"),
        ),
    ),
)  # fmt: skip
ERASURES = Question(
    "erasures", "Erasures", "judged since the operator's start", "erasures",
    (Part("kvstrata_erasures_total", ("outcome",)),),
    gauge=True,
)  # fmt: skip


def from_pages(question: Question, pages: Sequence[Page]) -> Panel:
    """Fill a panel from pages of gates: counters since their start, gauges of now."""
    if not pages:
        return Panel(question, None, (), "no pod of a model answered")
    series: list[Series] = []
    total = whole = 0.0
    for part in question.parts:
        found = _sums(part, part.metric, pages)
        total += sum(found.values())
        if part.weight:
            weights = _sums(part, part.weight, pages)
            whole += sum(weights.values())
            found = {key: found[key] / weight for key, weight in weights.items() if weight and key in found}
        series += [Series(part.label(dict(zip(part.labels, key, strict=True))), ((0, found[key]),)) for key in found]
    without = [part.metric for part in question.parts if not any(part.metric in page.samples for page in pages)]
    missing = f"no pod has {' or '.join(without)}" if without else ""
    if not series:
        return Panel(question, None, (), missing or "pods counted nothing since their start")
    return Panel(question, total / whole if whole else total, fewer(series, question), missing)


def _sums(part: Part, metric: str, pages: Iterable[Page]) -> dict[tuple[str, ...], float]:
    """Return the values of all pods together, by the values of the part's labels."""
    found: dict[tuple[str, ...], float] = {}
    for sample in (sample for page in pages for sample in page.samples.get(metric, ())):
        if all(sample.labels.get(name) == value for name, value in part.where):
            key = tuple(sample.labels.get(name, "") for name in part.labels)
            former = found.get(key, 0.0)
            found[key] = max(former, sample.value) if part.largest else former + sample.value
    return found


def fewer(series: Sequence[Series], question: Question) -> list[Series]:
    """Return the largest series by their last value; others are added up, where they can be."""
    ordered = sorted(series, key=lambda one: (-one.last, one.label))
    kept, rest = ordered[:MOST_SERIES], ordered[MOST_SERIES:]
    if rest and question.unit != "%":
        sums: dict[float, float] = defaultdict(float)
        for time_s, value in (point for one in rest for point in one.points):
            sums[time_s] += value
        kept.append(Series(f"{OTHERS} ({len(rest)})", sorted(sums.items())))
    return kept
