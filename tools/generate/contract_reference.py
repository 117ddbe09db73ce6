"""Reference pages of the contract: the audit log and receipts, from the dataclasses that read and write them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from enum import StrEnum
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from kvstrata.contract.messages.audit import AUDIT_VERSION, Action, Event, Happened, Line
from kvstrata.contract.receipt.facts import Erasure
from kvstrata.contract.receipt.record import RECEIPT_VERSION, Fault, HandOver, Head
from kvstrata.contract.receipt.residue import ReceiptClaim, Residue
from kvstrata.contract.wire import camel
from tools.generate.docstrings import field_docstrings

_PLAIN: dict[Any, str] = {str: "text", int: "number", bool: "true or false"}


def build_audit_reference() -> str:
    """Return the page of the audit log."""
    own = {camel(field.name) for field in fields(Happened)} - {"action"}
    every = {camel(field.name) for field in fields(Line)} - own
    lines = [_header("messages/audit.py"), "", "# Audit log", ""]
    lines += [f"Version {AUDIT_VERSION}. Where lines are, and what to do with them: [guide](../how-to/audit.md).", ""]
    lines += ["A line is one JSON object. Fields that do not apply are absent; there is no null and no free text.", ""]
    lines += ["## In every line", "", *_rows_named(every)]
    lines += ["## Where the action has it", "", *_rows_named(own)]
    lines += ["## Events", "", "| Event | Subject |", "|---|---|"]
    lines += [f"| {event.value} | {event.meaning} |" for event in Event]
    lines += ["", "## Actions", "", "| Action | Event | Source | Meaning | Fields |", "|---|---|---|---|---|"]
    for action in Action:
        sources, own_fields = ", ".join(action.sources), ", ".join(f"`{camel(name)}`" for name in action.fields)
        lines.append(f"| {action.value} | {action.event.value} | {sources} | {action.meaning} | {own_fields} |")
    return "\n".join([*lines, ""])


def _rows_named(names: Collection[str]) -> list[str]:
    """Return the fields of these names. Here absence stands for null."""
    chosen = [row.replace(", or null |", " |") for row in _rows(Line) if row.split("`")[1] in names]
    return ["| Field | Type | Meaning |", "|---|---|---|", *chosen, ""]


def build_receipt_reference() -> str:
    """Return the page of receipts."""
    lines = [_header("receipt"), "", "# Receipts", ""]
    lines += [f"Version {RECEIPT_VERSION}. Meaning and verification: [guide](../how-to/receipts.md).", ""]
    lines += [
        'A file is `{"record": …, "signatures": [{"publicKey": …, "value": …}]}` as canonical JSON: UTF-8, keys in',
        "order, no white space. Signed with ed25519 are the bytes `kvstrata receipt`, a line feed, and the record's",
        "canonical JSON; the digest of a record is the SHA-256 of the latter. Every field is present; null means",
        "no value.",
        "",
    ]
    lines += ["## Record", "", *_table(Head)]
    lines += ["`receipt` is the version. Beside these a record has `erasure` and `claims`, or `handOver`.", ""]
    lines += ["## handOver", "", *_table(HandOver)]
    lines += ["## erasure", "", *_table(Erasure)]
    lines += ["## Claims", "", "Derived from the facts, in this order.", "", "| Claim | Meaning |", "|---|---|"]
    lines += [f"| {claim.value} | {claim.meaning} |" for claim in ReceiptClaim]
    lines += ["", "## Residue", "", "| Residue | Meaning | Excluded claims |", "|---|---|---|"]
    for kind in Residue:
        denied = ", ".join(claim for claim in ReceiptClaim if claim in kind.denies) or (
            "(ordered)" if kind.asked else ""
        )
        lines.append(f"| {kind.value} | {kind.meaning} | {denied} |")
    lines += ["", "## Why a receipt or a chain is refused", "", "| Word | Meaning |", "|---|---|"]
    lines += [f"| {fault.value} | {fault.meaning} |" for fault in Fault]
    return "\n".join([*lines, ""])


def _header(source: str) -> str:
    return f"<!-- Generated from operator/src/kvstrata/contract/{source} by `make generate`. Do not edit. -->"


def _table(kind: Any) -> list[str]:
    """Return the fields of a dataclass, and of those inside it, as a table in Markdown."""
    return ["| Field | Type | Meaning |", "|---|---|---|", *_rows(kind), ""]


def _rows(kind: Any, path: str = "") -> Iterator[str]:
    """Yield a row for each field: its name in JSON, its type, and its docstring."""
    hints, meanings = get_type_hints(kind, include_extras=True), field_docstrings(kind)
    for field in fields(kind):
        here, hint = path + camel(field.name), hints[field.name]
        meaning = " ".join(meanings[field.name].split()).replace("|", "\\|")
        yield f"| `{here}` | {_type(hint)} | {meaning} |"
        inner, suffix = _inside(hint)
        if _has_rows(inner):
            yield from _rows(inner, f"{here}{suffix}.")


def _has_rows(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


def _inside(hint: Any) -> tuple[Any, str]:
    """Return the type inside a list or an optional value, and the suffix of its name."""
    arguments = get_args(hint)
    if get_origin(hint) is tuple:
        return arguments[0], "[]"
    return next((one for one in arguments if _has_rows(one)), hint), ""


def _type(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return str(arguments[1].meaning)
    if NoneType in arguments:
        return f"{_type(next(one for one in arguments if one is not NoneType))}, or null"
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if is_dataclass(hint):
        return "object"
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return " \\| ".join(f"`{member.value}`" for member in hint) if len(hint) < 8 else "word, see below"
    return _PLAIN[hint]
