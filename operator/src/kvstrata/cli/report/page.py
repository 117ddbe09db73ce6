"""The report's page: self-contained, without scripts, light or dark as the reader's system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstrata.cli.report.html import Markup, data_table, element
from kvstrata.cli.report.panels import Panel
from kvstrata.cli.report.plots import amount, plot
from kvstrata.quantity import quantity_bytes

MOST_ROWS = 200
LIGHT = ("#0b6bb8", "#b8440b", "#127a43", "#8a3fae", "#8a6200", "#b3124f", "#0f7480", "#5a5f66", "#3d3d3d")
DARK = ("#6cb8f5", "#f5965a", "#63cf90", "#cf9bee", "#e0b94c", "#f57fa8", "#5fc9d6", "#b3b9c2", "#dddddd")
_DASHES = ("", "6 3", "2 3", "9 3 2 3", "12 4", "4 2", "1 3", "10 2 2 2 2 2", "3 5")
_STYLE = """
:root{color-scheme:light dark;--text:#1d2126;--soft:#59616b;--page:#fff;--card:#f6f7f9;--rule:#d9dde2;LIGHT}
@media(prefers-color-scheme:dark){:root{--text:#e6e8eb;--soft:#a3abb5;--page:#15181c;--card:#1e2227;--rule:#363c44;DARK}}
body{margin:0 auto;max-width:820px;padding:24px 16px;background:var(--page);color:var(--text);
font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:24px;margin:0}h2{font-size:18px;margin:0}p{margin:4px 0}.soft,figcaption{color:var(--soft)}
section{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:16px;margin:16px 0}
.total{font-size:26px;font-weight:600}figure{margin:12px 0 0}svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font-size:12px}.grid{stroke:var(--rule)}.line{fill:none;stroke-width:2;stroke-linecap:round}
.key{list-style:none;display:flex;flex-wrap:wrap;gap:4px 16px;padding:0;margin:8px 0}.key svg{width:26px;display:inline;
margin-right:6px}figure{overflow-x:auto}figure>svg{min-width:560px}.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13px}
th,td{text-align:left;padding:4px 12px 4px 0;border-bottom:1px solid var(--rule);vertical-align:top}
td,th{overflow-wrap:normal}
summary{cursor:pointer;color:var(--soft)}SERIES
"""


@dataclass(frozen=True, slots=True)
class Report:
    """`subject` names the reported models; `objects` are lists by kind, or the reason for their absence."""

    subject: str
    made_at: str
    source: str
    period: str
    panels: Sequence[Panel]
    policies: Sequence[Mapping[str, Any]] | str
    invalidations: Sequence[Mapping[str, Any]] | str
    notes: Sequence[str] = ()


def render(report: Report) -> str:
    head = element(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'),
        # Nothing in the file may load or run anything, any text of a cluster included.
        Markup(
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        ),
        element("title", f"KV cache of {report.subject}"),
        element("style", Markup(_style())),
    )
    facts = (("measured", report.source), ("time", report.period), ("made", report.made_at))
    header = element(
        "header",
        element("h1", f"KV cache of {report.subject}"),
        *(element("p", f"{name}: {text}", class_="soft") for name, text in facts),
        *(element("p", f"Not in this report: {note}", role="note") for note in report.notes),
    )
    panels = [_panel(panel) for panel in report.panels]
    body = element("body", header, element("main", *panels, _usage(report.policies), _erasures(report.invalidations)))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _style() -> str:
    colours = [";".join(f"--c{number}:{one}" for number, one in enumerate(palette)) for palette in (LIGHT, DARK)]
    series = "".join(
        f".c{number}{{stroke:var(--c{number});stroke-dasharray:{dash or 'none'}}}rect.c{number}{{fill:var(--c{number})"
        ";stroke:none}"
        for number, dash in enumerate(_DASHES)
    )
    return _STYLE.replace("LIGHT", colours[0]).replace("DARK", colours[1]).replace("SERIES", series)


def _section(title: str, *children: Markup) -> Markup:
    return element("section", element("h2", title), *children)


def _missing(reason: str) -> Markup:
    return element("p", f"Not available: {reason}.")


def _panel(panel: Panel) -> Markup:
    asked = panel.question
    if not panel.series:
        return _section(asked.title, _missing(panel.missing))
    is_rate = not asked.gauge and asked.unit != "%" and panel.series[0].points[0][0] > 0
    total = (
        element("p", element("span", amount(panel.total, asked.unit), class_="total"), f" {asked.figure}")
        if panel.total is not None
        else _missing("the total of this time")
    )
    partly = [_missing(f"a part, {panel.missing}")] if panel.missing else []
    return _section(asked.title, total, plot(panel, f"{asked.unit}/s" if is_rate else asked.unit), *partly)


def _usage(policies: Sequence[Mapping[str, Any]] | str) -> Markup:
    title = "Bytes of tenants in tiers, by status"
    if isinstance(policies, str):
        return _section(title, _missing(policies))
    rows = []
    for policy in policies:
        usage = (policy.get("status") or {}).get("usage") or {}
        for tier in usage.get("tiers") or ():
            sizes = (_size(tier.get(name)) for name in ("used", "limit", "guaranteed"))
            rows.append((policy["spec"]["tenant"], tier["tier"], *sizes, usage.get("observedAt") or "not available"))
    if not rows:
        return _section(title, _missing("no policy has usage in its status"))
    return _section(title, _limited(("Tenant", "Tier", "Used", "Limit", "Guaranteed", "Read at"), rows))


def _size(quantity: object) -> str:
    if quantity is None:
        return "-"
    try:
        return amount(quantity_bytes(str(quantity)), "bytes")
    except ValueError:
        return str(quantity)


def _erasures(invalidations: Sequence[Mapping[str, Any]] | str) -> Markup:
    title = "Invalidations and erasures, by their objects"
    if isinstance(invalidations, str):
        return _section(title, _missing(invalidations))
    if not invalidations:
        return _section(title, element("p", "There is no CacheInvalidation."))
    rows = []
    for one in sorted(invalidations, key=lambda one: str(one["metadata"].get("creationTimestamp")), reverse=True):
        status = one.get("status") or {}
        shown = [status.get(name) for name in ("scopeSummary", "phase", "startTime", "took", "keys")]
        shown += [_size(status.get("bytes")), (status.get("receiptDigest") or "-")[:16]]
        cells = (str(cell if cell is not None else "-") for cell in shown)
        rows.append((one["metadata"]["name"], one["spec"].get("mode", "-"), *cells))
    header = ("Name", "Mode", "Scope", "Phase", "Started", "Took", "Blocks", "Bytes", "Receipt")
    return _section(title, _limited(header, rows))


def _limited(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Markup:
    if len(rows) <= MOST_ROWS:
        return data_table(header, rows)
    left_out = element("p", f"{len(rows) - MOST_ROWS} more are left out.", class_="soft")
    return element("div", data_table(header, rows[:MOST_ROWS]), left_out)
