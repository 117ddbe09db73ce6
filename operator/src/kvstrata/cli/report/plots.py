"""Plots as inline SVG: lines over time, or bars of totals. Series differ by colour and by dashes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise

from kvstrata.cli.report.html import Markup, data_table, element
from kvstrata.cli.report.panels import Panel, Series

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 240, 72, 12, 12, 28
BAR, LABEL = 26, 230
GAP_STEPS = 1.5
"""A longer time without a value breaks a line."""

_UNITS = {
    "bytes": ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")),
    "s": ((3600, "h"), (1, "s"), (0.001, "ms")),
}
_CAPTIONS = {"s/s": "seconds saved in each second", "blocks/s": "blocks in each second"}


def amount(value: float, unit: str) -> str:
    """Return a value for people: a share as percent, bytes and seconds in a fitting unit, other counts as they are."""
    if unit == "%":
        return f"{value * 100:.3g} %"
    size, name = next((pair for pair in _UNITS.get(unit, ()) if value >= pair[0]), (1, unit))
    return f"{_number(value / size)} {name}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"


def plot(panel: Panel, unit: str) -> Markup:
    """Return a plot with its values as a table. `unit` is that of the plotted values."""
    if len(panel.series[0].points) == 1 and panel.series[0].points[0][0] == 0:
        rows = [(one.label, amount(one.last, unit)) for one in panel.series]
        return element("figure", _bars(panel, unit), _values(("Series", "Value"), rows))
    lines, legend = _lines(panel, unit), element("ul", *map(_key, range(len(panel.series)), panel.series), class_="key")
    caption = [element("figcaption", _CAPTIONS[unit])] if unit in _CAPTIONS else []
    rows5 = [
        (
            one.label, amount(min(values), unit), amount(sum(values) / len(values), unit), amount(max(values), unit),
            amount(one.last, unit),
        )
        for one in panel.series
        if (values := [value for _, value in one.points])
    ]  # fmt: skip
    return element("figure", *caption, lines, legend, _values(("Series", "Least", "Mean", "Most", "Last"), rows5))


def _values(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Markup:
    return element("details", element("summary", "Values"), data_table(header, rows))


def _key(number: int, one: Series) -> Markup:
    line = element("line", x1=1, y1=5, x2=25, y2=5, class_=f"line c{number}")
    return element("li", element("svg", line, width=26, height=10, aria_hidden="true"), one.label)


def _svg(panel: Panel, height: int, *shapes: Markup) -> Markup:
    key = panel.question.key
    labels = element("title", panel.question.title, id=f"{key}-title")
    return element("svg", labels, *shapes, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_labelledby=f"{key}-title")


def _text(text: str, x: float, y: float, anchor: str = "start") -> Markup:
    return element("text", text, x=x, y=y, text_anchor=anchor)


def _bars(panel: Panel, unit: str) -> Markup:
    most = max(1.0 if unit == "%" else 0.0, *(one.last for one in panel.series)) or 1.0
    width, shapes = WIDTH - LABEL - 110, list[Markup]()
    for number, one in enumerate(panel.series):
        y = number * BAR
        long = width * max(0.0, one.last) / most
        label = one.label if len(one.label) <= 34 else f"{one.label[:33]}…"
        shapes.append(_text(label, LABEL - 8, y + 17, "end"))
        shapes.append(element("rect", x=LABEL, y=y + 4, width=max(1.0, long), height=BAR - 8, class_=f"bar c{number}"))
        shapes.append(_text(amount(one.last, unit), LABEL + max(1.0, long) + 6, y + 17))
    return _svg(panel, len(panel.series) * BAR + 4, *shapes)


def _lines(panel: Panel, unit: str) -> Markup:
    times = sorted({time_s for one in panel.series for time_s, _ in one.points})
    first, last = times[0], max(times[-1], times[0] + 1)
    step_s = min((after - before for before, after in pairwise(times)), default=1.0)
    most = 1.0 if unit == "%" else max(value for one in panel.series for _, value in one.points)
    size = next((size for size, _ in _UNITS.get(unit, ()) if most >= size), 1)
    top, step = (size * number for number in _ticks(most / size))

    def x(time_s: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (time_s - first) / (last - first)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top

    shapes = list[Markup]()
    for number in range(round(top / step) + 1):
        there = y(number * step)
        shapes.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=there, y2=there, class_="grid"))
        tick = amount(number * step, unit) if unit in ("%", *_UNITS) else _number(number * step)
        shapes.append(_text(tick, LEFT - 8, there + 4, "end"))
    clock = "%H:%M" if last - first <= 2 * 86_400 else "%d %b"
    for number in range(5):
        time_s = first + (last - first) * number / 4
        anchor = ("start", "middle", "middle", "middle", "end")[number]
        shapes.append(_text(datetime.fromtimestamp(time_s, UTC).strftime(clock), x(time_s), HEIGHT - 8, anchor))
    for number, one in enumerate(panel.series):
        path, before = "", -math.inf
        for time_s, value in one.points:
            path += f"{'L' if time_s - before <= GAP_STEPS * step_s else 'M'}{x(time_s):.1f} {y(value):.1f}"
            before = time_s
        # A point without neighbours has a visible end.
        shapes.append(element("path", d=path + "h.1", class_=f"line c{number}"))
    return _svg(panel, HEIGHT, *shapes)


def _ticks(most: float) -> tuple[float, float]:
    """Return the end of an axis from zero, and the distance of its four or five lines."""
    if most <= 0:
        return 1.0, 1.0
    power = 10.0 ** math.floor(math.log10(most / 4))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor * 4 >= most * 0.999)
    return step * math.ceil(most / step * 0.999), step
