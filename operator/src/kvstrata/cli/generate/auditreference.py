"""The reference of the audit log: one page of Markdown, from what writes its lines."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from kvstrata.cli.generate.fieldtable import rows
from kvstrata.contract.messages.audit import AUDIT_VERSION, Action, Event, Happened, Line
from kvstrata.contract.wire import camel

HEADER = "<!-- Generated from operator/src/kvstrata/contract/messages/audit.py by `make generate`. Do not edit. -->"


def build_audit_reference() -> str:
    """Return the page."""
    own = {camel(field.name) for field in fields(Happened)} - {"action"}
    every = {camel(field.name) for field in fields(Line)} - own
    lines = [HEADER, "", "# Audit log", ""]
    lines += [f"Version {AUDIT_VERSION}. Where lines are, and what to do with them: [guide](../guides/audit.md).", ""]
    lines += ["A line is one JSON object. What does not apply is absent; there is no null, and no free text.", ""]
    lines += ["## In every line", "", *_table(every)]
    lines += ["## Where the action has it", "", *_table(own)]
    lines += ["## Events", "", "| Event | It is about |", "|---|---|"]
    lines += [f"| {event.value} | {event.meaning} |" for event in Event]
    lines += ["", "## Actions", "", "| Action | Event | Told by | Meaning | Fields |", "|---|---|---|---|---|"]
    for action in Action:
        by, told = ", ".join(action.sources), ", ".join(f"`{camel(name)}`" for name in action.told)
        lines.append(f"| {action.value} | {action.event.value} | {by} | {action.meaning} | {told} |")
    return "\n".join([*lines, ""])


def _table(names: Collection[str]) -> list[str]:
    """Return the fields of these names. Here absence stands for null."""
    chosen = [row.replace(", or null |", " |") for row in rows(Line) if row.split("`")[1] in names]
    return ["| Field | Type | Meaning |", "|---|---|---|", *chosen, ""]
