"""Figures of benchmarks in documents, taken from bench/results.

`<!-- tier.pods_apply_to_ready -->3.1<!-- / -->` in a page is that figure of bench/results/tier.json: the name of one of
its figures, baselines or conditions, or `ratio`. Readers see the number alone. It has two digits: the third differs
from run to run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path("bench/results")
PAGES = ("README.md", "docs/**/*.md")
END = "<!-- / -->"
FIGURE = re.compile(rf"<!-- (?P<result>[\w-]+)\.(?P<name>\w+) -->(?P<text>[^<\n]*{END})?")

Results = Mapping[str, Mapping[str, float]]


class FigureError(ValueError):
    """A page cites a figure that no result has, or in a wrong form."""


def build_pages(root: Path) -> dict[Path, str]:
    """Return every page that cites figures, with the numbers of the results.

    Raises:
        FigureError: names the page, the line and the fault.
    """
    results = {path.stem: _numbers(json.loads(path.read_text())) for path in (root / RESULTS).glob("*.json")}
    texts = {path: path.read_text() for pattern in PAGES for path in sorted(root.glob(pattern))}
    return {
        path.relative_to(root): "".join(_lines(path.relative_to(root), text, results))
        for path, text in texts.items()
        if END in text or FIGURE.search(text)
    }


def shown(value: float) -> str:
    """Return two significant digits and all before the point; integers are exact: 0.056, 3.1, 40, 9,164."""
    if isinstance(value, int):
        return f"{value:,}"
    rounded = float(f"{value:.1e}")
    decimals = max(0, 1 - math.floor(math.log10(abs(rounded)))) if rounded else 0
    return f"{value:,.{decimals}f}"


def _numbers(document: Mapping[str, Any]) -> dict[str, float]:
    measured = {name: one["value"] for part in ("baseline", "figures") for name, one in document[part].items()}
    conditions = {name: value for name, value in document["conditions"].items() if isinstance(value, int | float)}
    return {**conditions, **measured, "ratio": document["ratio"]}


def _lines(page: Path, text: str, results: Results) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        found = list(FIGURE.finditer(line))
        if line.count(END) != len(found) or any(one["text"] is None for one in found):
            raise FigureError(f"{page}:{number}: a figure is `<!-- RESULT.NAME -->NUMBER{END}` in one line")
        if line.lstrip().startswith("<!--") and found:
            raise FigureError(f"{page}:{number}: Markdown takes a line that begins with a comment as HTML")
        for one in found:
            if one["result"] not in results:
                raise FigureError(f"{page}:{number}: there is no result {RESULTS / one['result']}.json")
            if one["name"] not in results[one["result"]]:
                raise FigureError(f"{page}:{number}: {RESULTS / one['result']}.json has no number {one['name']}")
        yield FIGURE.sub(
            lambda one: f"<!-- {one['result']}.{one['name']} -->{shown(results[one['result']][one['name']])}{END}", line
        )
