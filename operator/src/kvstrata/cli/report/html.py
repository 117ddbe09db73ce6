"""Elements of HTML and SVG. Every text and attribute is escaped; only elements are not escaped again."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def element(name: str, *children: str, **attributes: str | float) -> Markup:
    """Return an element. In the names of attributes `_` stands for `-`, and one at the end is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value) if isinstance(value, float) else str(value))}"'
        for key, value in attributes.items()
    )
    inside = "".join(child if isinstance(child, Markup) else escape(child) for child in children)
    return Markup(f"<{name}{written}>{inside}</{name}>")


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def data_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Markup:
    head = element("thead", element("tr", *(element("th", name, scope="col") for name in header)))
    body = element("tbody", *(element("tr", *(element("td", cell) for cell in row)) for row in rows))
    return element(
        "div", element("table", head, body), class_="scroll", tabindex="0", role="region", aria_label=header[0]
    )
