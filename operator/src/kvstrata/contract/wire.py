"""Frozen dataclasses as JSON that has one form only, and is read as strictly as it is written.

Every field is there, nothing else is, each has exactly its declared type and bounds. So a document that was read is
the document that was written, and two readers can never see two different things in it. Names are in camelCase.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from kvstrata.contract import ContractError

MAX_NUMBER = 1 << 53
"""Every JSON implementation reads numbers up to here exactly."""

MAX_TEXT = 1024
MAX_ROWS = 1 << 20

T = TypeVar("T")
Reader = Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a text: a regular expression for the whole of it, and what that is called."""

    pattern: str
    meaning: str


HexDigest = Annotated[str, Form("[0-9a-f]{64}", "SHA-256 in hexadecimal digits")]
Moment = Annotated[str, Form(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "time in UTC, in whole seconds")]
Name = Annotated[str, Form(r"[^\x00-\x1f\x7f]{0,256}", "text of at most 256 characters")]


def camel(name: str) -> str:
    """Return a field's name as it is in JSON."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def moment_in_s(text: str) -> int:
    """Return a `Moment` in seconds since 1970. Raises ValueError if there is no such moment."""
    return int(datetime.fromisoformat(text.removesuffix("Z") + "+00:00").timestamp())


def write(value: Any) -> Any:
    """Return what `value` is in JSON."""
    if is_dataclass(value):
        return {camel(field.name): write(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (tuple, list)):
        return [write(one) for one in value]
    return str(value) if isinstance(value, StrEnum) else value


def read(cls: type[T], raw: Any, where: str) -> T:
    """Return the dataclass that `raw` is. Raises ContractError, which says where, for anything else."""
    kind: Any = cls
    found: T = _reader(kind)(raw, where)
    return found


@cache
def _reader(kind: Any) -> Reader:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _formed(arguments[1])
    if origin is UnionType or (origin is not None and NoneType in arguments):
        return _optional(_reader(next(one for one in arguments if one is not NoneType)))
    if origin is tuple:
        return _rows(_reader(arguments[0]))
    if kind in _PLAIN:
        return _PLAIN[kind]
    return _enumerated(kind) if issubclass(kind, StrEnum) else _object(kind)


def _text(raw: Any, where: str) -> str:
    if type(raw) is not str or len(raw) > MAX_TEXT:
        raise ContractError(f"{where} is no text of at most {MAX_TEXT} characters")
    return raw


def _number(raw: Any, where: str) -> int:
    if type(raw) is not int or not 0 <= raw <= MAX_NUMBER:
        raise ContractError(f"{where} is no whole number from 0 to 2^53")
    return raw


def _truth(raw: Any, where: str) -> bool:
    if type(raw) is not bool:
        raise ContractError(f"{where} is neither true nor false")
    return raw


_PLAIN: Mapping[Any, Reader] = {str: _text, int: _number, bool: _truth}


def _formed(form: Form) -> Reader:
    pattern = re.compile(form.pattern, re.ASCII)
    is_moment = form in Moment.__metadata__  # type: ignore[attr-defined]

    def reader(raw: Any, where: str) -> str:
        text = _text(raw, where)
        if pattern.fullmatch(text) is None:
            raise ContractError(f"{where} is no {form.meaning}")
        if is_moment:
            try:
                moment_in_s(text)
            except ValueError:
                raise ContractError(f"{where} is no {form.meaning}") from None
        return text

    return reader


def _optional(inner: Reader) -> Reader:
    return lambda raw, where: None if raw is None else inner(raw, where)


def _rows(inner: Reader) -> Reader:
    def reader(raw: Any, where: str) -> tuple[Any, ...]:
        if type(raw) is not list or len(raw) > MAX_ROWS:
            raise ContractError(f"{where} is no list, or has more than {MAX_ROWS} rows")
        return tuple(inner(one, f"{where}[{index}]") for index, one in enumerate(raw))

    return reader


def _enumerated(kind: type[StrEnum]) -> Reader:
    members = {str(member): member for member in kind}

    def reader(raw: Any, where: str) -> StrEnum:
        if type(raw) is not str or raw not in members:
            raise ContractError(f"{where} is none of {', '.join(members)}")
        return members[raw]

    return reader


def _object(kind: type[Any]) -> Reader:
    hints = get_type_hints(kind, include_extras=True)
    names = {camel(field.name): (field.name, _reader(hints[field.name])) for field in fields(kind)}

    def reader(raw: Any, where: str) -> Any:
        if type(raw) is not dict:
            raise ContractError(f"{where} is no object")
        missing, unknown = names.keys() - raw.keys(), raw.keys() - names.keys()
        if missing or unknown:
            what = f"lacks {min(missing)}" if missing else "has a field that this version does not know"
            raise ContractError(f"{where} {what}")
        return kind(**{name: inner(raw[key], f"{where}.{key}") for key, (name, inner) in names.items()})

    return reader
