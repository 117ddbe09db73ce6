"""Tables of fields for the reference: dataclasses of the contract, by their names in JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import StrEnum
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from kvstrata.api.docstrings import field_docstrings
from kvstrata.contract.wire import camel

_PLAIN: dict[Any, str] = {str: "text", int: "number", bool: "true or false"}


def table(kind: Any) -> list[str]:
    """Return the fields of a dataclass, and of those inside it, as a table in Markdown."""
    return ["| Field | Type | Meaning |", "|---|---|---|", *rows(kind), ""]


def rows(kind: Any, path: str = "") -> Iterator[str]:
    """Yield a row for each field: its name in JSON, its type, and what its docstring says."""
    hints, meanings = get_type_hints(kind, include_extras=True), field_docstrings(kind)
    for field in fields(kind):
        here, hint = path + camel(field.name), hints[field.name]
        meaning = " ".join(meanings[field.name].split()).replace("|", "\\|")
        yield f"| `{here}` | {_type(hint)} | {meaning} |"
        inner, suffix = _inside(hint)
        if _is_rows(inner):
            yield from rows(inner, f"{here}{suffix}.")


def _is_rows(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


def _inside(hint: Any) -> tuple[Any, str]:
    """Return what a list or an optional value holds, and how that is written behind its name."""
    arguments = get_args(hint)
    if get_origin(hint) is tuple:
        return arguments[0], "[]"
    return next((one for one in arguments if _is_rows(one)), hint), ""


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
