"""Plots: time to the first token and throughput of each arm, and prefill against restores from each tier.

A program for the environment of `requirements/bench-plot.txt`: JSON of `figures.evaluate` in, JSON of SVGs out, by the
ending of their files' names, for light and for dark pages. The same JSON gives the same bytes.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of a page."""

    text: str
    product: str
    other: str
    mark: str
    lines: Mapping[str, str]


THEMES = {
    "light": Theme(
        "#475569", "#2563eb", "#b6c2d1", "#0f172a",
        {"computed": "#c2410c", "engine": "#16803c", "memory": "#2563eb", "redis": "#8b5cf6", "nvme": "#0e7490"},
    ),
    "dark": Theme(
        "#a9b6c8", "#60a5fa", "#475569", "#f1f5f9",
        {"computed": "#fb923c", "engine": "#4ade80", "memory": "#60a5fa", "redis": "#c4b5fd", "nvme": "#22d3ee"},
    ),
}  # fmt: skip
SOURCES = {
    "computed": "computed",
    "engine": "engine's memory",
    "memory": "cache server's memory",
    "redis": "Redis",
    "nvme": "files",
}
MARKERS = {"computed": "o", "engine": "v", "memory": "s", "redis": "D", "nvme": "^"}
"""No line depends on its colour alone."""

ARMS_CAPTION = "Seconds to the first token, and requests for a second of processor time at saturation, by arm"
TIERS_CAPTION = "Seconds to the first token by length of the prompt, computed and restored from each tier"


def style(theme: Theme) -> dict[str, Any]:
    """Return matplotlib's settings."""
    coloured = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    return {
        "svg.fonttype": "none", "svg.hashsalt": "kvstrata", "figure.constrained_layout.wspace": 0.06,
        "font.sans-serif": "DejaVu Sans", "font.size": 13, "axes.titlesize": 14, "axes.titleweight": "bold",
        "axes.titlelocation": "left", "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False,
        "axes.spines.bottom": False, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.35,
        "xtick.bottom": False, "xtick.minor.bottom": False, "ytick.left": False, "legend.frameon": False,
        **dict.fromkeys(coloured, theme.text),
    }  # fmt: skip


def draw(drawing: Mapping[str, Any]) -> dict[str, str]:
    """Return all plots by the ending of their files."""
    plots: dict[str, str] = {}
    for name, theme in THEMES.items():
        with matplotlib.rc_context(style(theme)):
            plots[f"{name}.svg"] = _svg(_arms(drawing["arms"], theme), ARMS_CAPTION)
            if drawing["curves"]:
                plots[f"tiers.{name}.svg"] = _svg(_tiers(drawing["curves"], theme), TIERS_CAPTION)
    return plots


def _arms(arms: Sequence[Mapping[str, Any]], theme: Theme) -> Figure:
    figure = Figure(figsize=(860 / 72, 380 / 72), layout="constrained")
    first, rate = figure.subplots(1, 2, sharey=True)
    places = range(len(arms))
    colours = [theme.product if arm["product"] else theme.other for arm in arms]
    first.barh(places, [arm["first_p50"] for arm in arms], color=colours, height=0.62)
    first.plot(
        [arm["first_p95"] for arm in arms], places, linestyle="none", marker="|", markersize=15, markeredgewidth=2,
        color=theme.mark,
    )  # fmt: skip
    first.set_title("To the first token, s: p50, and p95 (line)", pad=10)
    rates = [arm["rate"] for arm in arms]
    below = [arm["rate"] - arm["rate_low"] for arm in arms]
    above = [arm["rate_high"] - arm["rate"] for arm in arms]
    rate.barh(places, rates, color=colours, height=0.62)
    rate.errorbar(rates, places, xerr=(below, above), fmt="none", ecolor=theme.mark, elinewidth=1.5, capsize=4)
    rate.set_title("Requests per processor second", pad=10)
    first.set_yticks(places, [f"{arm['title']} ({arm['arm']})" for arm in arms])
    first.invert_yaxis()
    for axes in (first, rate):
        axes.grid(visible=False, axis="y")
        axes.set_xlim(left=0)
    return figure


def _tiers(curves: Mapping[str, Mapping[str, Sequence[float]]], theme: Theme) -> Figure:
    figure = Figure(figsize=(860 / 72, 400 / 72), layout="constrained")
    axes: Axes = figure.subplots()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for source, title in SOURCES.items():
        if source in curves:
            axes.plot(
                curves[source]["tokens"], curves[source]["seconds"], label=title, color=theme.lines[source],
                marker=MARKERS[source], linewidth=2, markersize=7, markeredgewidth=0,
            )  # fmt: skip
    tokens = curves["computed"]["tokens"]
    axes.xaxis.set_major_locator(FixedLocator(list(tokens)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("tokens")
    axes.set_title("Seconds to the first token", pad=10)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=len(SOURCES))
    return figure


def _svg(figure: Figure, caption: str) -> str:
    output = io.BytesIO()
    figure.savefig(
        output, format="svg", transparent=True, metadata={"Title": caption, "Creator": None, "Date": None}
    )  # fmt: skip
    return output.getvalue().decode()


if __name__ == "__main__":
    json.dump(draw(json.load(sys.stdin)), sys.stdout)
