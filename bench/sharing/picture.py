"""The benchmark's table and plot. Pure: the same numbers give the same bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.sharing.optimum import Mode


@dataclass(frozen=True, slots=True)
class Point:
    """What is shown of one mode and number of tenants, each beside the arithmetic optimum."""

    hit_rate: float
    best_hit_rate: float
    stored_bytes: int
    best_bytes: int
    prefill_tokens: int
    best_prefill_tokens: int


Points = Mapping[tuple[Mode, int], Point]

MIB = 1 << 20
WIDTH, HEIGHT = 860, 380
PANEL_WIDTH, PANEL_HEIGHT, TOP = 320, 230, 70
LEFT = (70, 500)
COLOURS = {Mode.ISOLATED: "#c2410c", Mode.POOL: "#2563eb", Mode.GROUP: "#16803c", Mode.PUBLIC: "#8b5cf6"}
"""Readable on white and on near-black."""

DASHES = {Mode.ISOLATED: "", Mode.POOL: "", Mode.GROUP: "7 4", Mode.PUBLIC: "2 4"}
"""So that no line depends on its colour alone, and one that lies on another lets it be seen."""

TEXT = "#6b7b93"
"""Of a middle grey: a picture that is shown as an image is not told reliably what it lies on."""

_STYLE = (
    f"text{{font-family:system-ui,sans-serif;font-size:13px;fill:{TEXT}}}.title{{font-weight:600;font-size:14px}}"
    f".grid{{stroke:{TEXT};stroke-opacity:.35}}.axis{{stroke:{TEXT}}}"
)


def table(points: Points, conditions: str) -> str:
    """Return all points as a Markdown table, a row for each number of tenants and mode."""
    lines = [
        "# Sharing, measured", "", conditions, "",
        "![Hit rate and stored bytes by number of tenants](sharing.svg)", "",
        "| tenants | mode | hit rate | at best | stored, MiB | at best | prefill tokens | at best |",
        "|--:|---|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for mode, tenants in sorted(points, key=lambda cell: (cell[1], list(Mode).index(cell[0]))):
        one = points[mode, tenants]
        lines.append(
            f"| {tenants} | {mode} | {one.hit_rate:.1%} | {one.best_hit_rate:.1%} "
            f"| {one.stored_bytes / MIB:.2f} | {one.best_bytes / MIB:.2f} "
            f"| {one.prefill_tokens:,} | {one.best_prefill_tokens:,} |"
        )
    return "\n".join(lines) + "\n"


def plot(points: Points, caption: str) -> str:
    """Return two panels, hit rate and stored bytes over the number of tenants (logarithmic), as an SVG."""
    counts = sorted({tenants for _, tenants in points})
    modes = [mode for mode in Mode if any(mode is one for one, _ in points)]
    rates = {cell: 100 * point.hit_rate for cell, point in points.items()}
    sizes = {cell: point.stored_bytes / MIB for cell, point in points.items()}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{_escaped(caption)}</title><style>{_STYLE}</style>",
        *_panel(LEFT[0], "Hit rate, % of prompt tokens", rates, modes, counts),
        *_panel(LEFT[1], "Stored, MiB", sizes, modes, counts),
        *_legend(modes),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _panel(
    left: int, title: str, values: Mapping[tuple[Mode, int], float], modes: Sequence[Mode], counts: Sequence[int]
) -> list[str]:
    bottom = TOP + PANEL_HEIGHT
    step, ceiling = _scale(max(values.values()))

    def across(index: int) -> float:
        return left + PANEL_WIDTH * (index / max(1, len(counts) - 1))

    def up(value: float) -> float:
        return bottom - PANEL_HEIGHT * value / ceiling

    parts = [f'<text class="title" x="{left}" y="{TOP - 18}">{_escaped(title)}</text>']
    for number in range(round(ceiling / step) + 1):
        value = number * step
        parts.append(
            f'<line class="grid" x1="{left}" x2="{left + PANEL_WIDTH}" y1="{up(value):.1f}" y2="{up(value):.1f}"/>'
        )
        parts.append(f'<text x="{left - 8}" y="{up(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for index, count in enumerate(counts):
        parts.append(f'<text x="{across(index):.1f}" y="{bottom + 20}" text-anchor="middle">{count}</text>')
    parts.append(f'<line class="axis" x1="{left}" x2="{left + PANEL_WIDTH}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text x="{left + PANEL_WIDTH / 2:g}" y="{bottom + 40}" text-anchor="middle">tenants</text>')
    for mode in modes:
        drawn = [(across(i), up(values[mode, n])) for i, n in enumerate(counts) if (mode, n) in values]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        parts.append(f'<polyline points="{line}" {_stroke(mode)}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[mode]}"/>' for x, y in drawn]
    return parts


def _legend(modes: Sequence[Mode]) -> list[str]:
    parts, left = [], LEFT[0]
    for mode in modes:
        parts.append(f'<line x1="{left}" x2="{left + 28}" y1="24" y2="24" {_stroke(mode)}/>')
        parts.append(f'<text x="{left + 36}" y="28">{_escaped(mode)}</text>')
        left += 70 + 8 * len(mode)
    return parts


def _stroke(mode: Mode) -> str:
    dash = f' stroke-dasharray="{DASHES[mode]}"' if DASHES[mode] else ""
    return f'fill="none" stroke="{COLOURS[mode]}" stroke-width="2"{dash}'


def _scale(highest: float) -> tuple[float, float]:
    """Return the distance of grid lines, 1, 2 or 5 times a power of ten, and the end of an axis from 0."""
    steps = (factor * 10.0**power for power in range(-3, 12) for factor in (1, 2, 5))
    step = next(step for step in steps if highest <= 6 * step)
    count = 1
    while count * step < highest:
        count += 1
    return step, count * step


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
