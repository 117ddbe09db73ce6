"""Sequence diagrams: `docs/pictures/NAME.txt` in, `NAME.svg` out.

A text has the title in its first line and the columns, separated by `|`, in its second. Every other line is a step:
`A -> B: text` an arrow, `A: text` a box on a column, `== text` a heading across all columns. A background of its own
keeps a picture readable on light and dark pages.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import NamedTuple

FOLDER = Path("docs/pictures")
HEADER = "<!-- Generated from the text beside it by `make generate`. Do not edit. -->\n"
COLUMN, MARGIN, TOP, STEP, LINE = 210, 24, 76, 20, 16
CHARACTER = 6.7
"""Width of a character at 12 px, in a font that is wider than most."""

STYLE = (
    ".card{fill:#f6f8fa;stroke:#8c959f}.head{fill:#ddf4ff;stroke:#0969da}.note{fill:#fff;stroke:#57606a}"
    ".life{stroke:#8c959f;stroke-dasharray:3 4}.line{stroke:#24292f;stroke-width:1.4}.rule{stroke:#8c959f}"
    "text{fill:#1f2328;font-size:12px}.name{font-weight:600;font-size:13px}.title{font-weight:600;font-size:15px}"
)


class Step(NamedTuple):
    """A line of the text: `source` and `target` are columns, None where the step has none."""

    source: int | None
    target: int | None
    text: str


def parse(text: str) -> tuple[str, list[str], list[Step]]:
    """Return title, columns and steps. Raises ValueError for a step with an unknown column."""
    title, names, *lines = [line.strip() for line in text.splitlines() if line.strip()]
    columns = [name.strip() for name in names.split("|")]
    return title, columns, [_step(line, columns) for line in lines]


def _step(line: str, columns: list[str]) -> Step:
    if line.startswith("=="):
        return Step(None, None, line[2:].strip())
    where, _, text = line.partition(": ")
    source, arrow, target = (part.strip() for part in where.partition("->"))
    unknown = [name for name in (source, target) if name and name not in columns]
    if unknown or not text:
        raise ValueError(f"{line!r} is no step over the columns {columns}")
    return Step(columns.index(source), columns.index(target) if arrow else None, text.strip())


def wrap(text: str, width: float) -> list[str]:
    """Break text into lines of at most `width` pixels, at blanks."""
    lines = [""]
    for word in re.split(r"\s+", text):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and len(longer) * CHARACTER > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def render(text: str) -> str:
    """Return the SVG of one text."""
    title, columns, steps = parse(text)
    width = 2 * MARGIN + COLUMN * len(columns)
    body: list[str] = []
    y = TOP + 30
    for step in steps:
        drawn, height = _draw(step, y, len(columns))
        body += drawn
        y += height + STEP
    height = y + 4
    frame = [f'<rect class="card" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="10"/>']
    frame.append(f'<text class="title" x="{MARGIN}" y="30">{escape(title)}</text>')
    for index, name in enumerate(columns):
        x = _x(index)
        frame.append(f'<path class="life" d="M{x} {TOP + 4} V{y - 8}"/>')
        frame.append(f'<rect class="head" x="{x - 92}" y="{TOP - 28}" width="184" height="30" rx="6"/>')
        frame.append(f'<text class="name" x="{x}" y="{TOP - 8}" text-anchor="middle">{escape(name)}</text>')
    return (
        f'{HEADER}<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, \'DejaVu Sans\', sans-serif">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
        '<defs><marker id="end" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
        'orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="#24292f"/></marker></defs>\n'
        + "\n".join(frame + body)
        + "\n</svg>\n"
    )


def _x(column: int) -> int:
    return MARGIN + COLUMN * column + COLUMN // 2


def _draw(step: Step, y: int, columns: int) -> tuple[list[str], int]:
    """Return the elements of a step that begins at height `y`, and its own height."""
    if step.source is None:
        end = MARGIN + COLUMN * columns
        return [
            f'<path class="rule" d="M{MARGIN} {y} H{end}"/>',
            f'<text class="name" x="{MARGIN}" y="{y + 18}">{escape(step.text)}</text>',
        ], 22
    if step.target is None:
        lines = wrap(step.text, COLUMN - 36)
        height = LINE * len(lines) + 10
        box = f'<rect class="note" x="{_x(step.source) - 96}" y="{y}" width="192" height="{height}" rx="5"/>'
        return [box, *_lines(lines, _x(step.source), y + 17)], height
    left, right = sorted((_x(step.source), _x(step.target)))
    lines = wrap(step.text, right - left - 20)
    tall = LINE * len(lines)
    arrow = (
        f'<path class="line" d="M{_x(step.source)} {y + tall + 4} H{_x(step.target)}" fill="none" '
        'marker-end="url(#end)"/>'
    )
    middle, wide = (left + right) // 2, round(max(map(len, lines)) * CHARACTER)
    back = f'<rect x="{middle - wide // 2}" y="{y}" width="{wide}" height="{tall}" fill="#f6f8fa"/>'
    return [back, arrow, *_lines(lines, middle, y + 12)], tall + 6


def _lines(lines: list[str], x: int, y: int) -> list[str]:
    return [
        f'<text x="{x}" y="{y + LINE * number}" text-anchor="middle">{escape(line)}</text>'
        for number, line in enumerate(lines)
    ]


def build_pictures(root: Path) -> dict[Path, str]:
    """Return each picture of the documentation, relative to the repository."""
    return {
        FOLDER / f"{source.stem}.svg": render(source.read_text()) for source in sorted((root / FOLDER).glob("*.txt"))
    }
