"""Plot of the replays: hit rate and stored bytes by number of tenants.

A program for the environment of `requirements/bench-plot.txt`: JSON of `figures.series` in, an SVG out. The same JSON
gives the same bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import BinaryIO

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.sharing.optimum import Mode

CAPTION = "Hit rate and stored bytes by number of tenants, in four modes of sharing"
PANELS = {"hit_percent": "Hit rate, % of prompt tokens", "stored_mib": "Stored, MiB"}
COLOURS = {Mode.ISOLATED: "#c2410c", Mode.POOL: "#2563eb", Mode.GROUP: "#16803c", Mode.PUBLIC: "#8b5cf6"}
"""Readable on white and on near-black, as TEXT is: the background of the page is unknown."""

DASHES = {Mode.ISOLATED: "-", Mode.POOL: "-", Mode.GROUP: (0, (3.5, 2)), Mode.PUBLIC: (0, (1, 2))}
"""No line depends on its colour alone, and one that lies on another lets it be seen."""

TEXT = "#6b7b93"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvstrata",
    "figure.constrained_layout.wspace": 0.08,
    "font.sans-serif": "DejaVu Sans",
    "font.size": 13,
    "axes.titlesize": 14,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.alpha": 0.35,
    "xtick.bottom": False,
    "xtick.minor.bottom": False,
    "ytick.left": False,
    "legend.frameon": False,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), TEXT
    ),
}


def plot(series: Mapping[str, Mapping[str, Sequence[float]]], output: BinaryIO) -> None:
    """Write two panels with a line for each mode; the number of tenants is on a logarithmic axis."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(860 / 72, 380 / 72), layout="constrained")
        for axes, (panel, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
            _draw(axes, panel, series)
            axes.set_title(title, pad=12)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=len(series))
        metadata = {"Title": CAPTION, "Creator": None, "Date": None}
        figure.savefig(output, format="svg", transparent=True, metadata=metadata)


def _draw(axes: Axes, panel: str, series: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    axes.set_xscale("log", base=2)
    for mode in map(Mode, series):
        tenants, values = series[mode]["tenants"], series[mode][panel]
        axes.plot(
            tenants, values, label=mode, color=COLOURS[mode], linestyle=DASHES[mode], linewidth=2, marker="o",
            markersize=6, markeredgewidth=0, gid=f"{panel}-{mode.name}",
        )  # fmt: skip
        axes.set_xticks(tenants, [str(count) for count in tenants])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tenants")


if __name__ == "__main__":
    plot(json.load(sys.stdin), sys.stdout.buffer)
