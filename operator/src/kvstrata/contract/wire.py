"""One codec for all messages: the fields and types of a frozen dataclass are its wire form.

Bounds are in the types: a field is `Annotated` with one of the rules below. Rules between fields belong into
`__post_init__`, which raises ContractError. Everything else is in the class's `WIRE`.

Reading is tolerant by default: unknown fields are ignored, missing ones have their defaults. Evidence is read more
strictly (`complete`, `closed`). No error quotes a value, because values may be keys.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from math import inf
from types import NoneType, UnionType
from typing import Annotated, Any, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from . import CONTRACT_VERSION, MALFORMED, ContractError

MAX_NUMBER = 1 << 62
"""Larger than any amount of bytes."""

MAX_EXACT_NUMBER = 1 << 53
"""Every JSON implementation reads numbers up to here exactly."""

MAX_CLOSED_TEXT = 1024
MAX_ROWS = 1 << 20

T = TypeVar("T")
Reader = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Wire:
    """How a class is written and read. A class without `WIRE` inherits from the class that contains it.

    `what` is its name in errors. `versioned`: it has the field `contract`, the version. `complete`: a missing field is
    an error, except those in `omit`, which are left out at their defaults. `closed`: an unknown field is an error, and
    texts and numbers without a rule are bounded as in receipts. `camel`: keys are in camelCase, except those in
    `names`. `row`: the class is a list of values, without keys.
    """

    what: str
    versioned: bool = False
    complete: bool = False
    closed: bool = False
    camel: bool = False
    row: bool = False
    omit: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict, hash=False)

    def inside(self, kind: Any) -> Wire:
        own: Wire | None = getattr(kind, "WIRE", None)
        return own or Wire(kind.__name__, complete=self.complete, closed=self.closed, camel=self.camel)

    def key(self, name: str) -> str:
        if name in self.names or not self.camel:
            return self.names.get(name, name)
        return camel(name)


TOLERANT = Wire("a message")


@dataclass(frozen=True, slots=True)
class Form:
    """A text that matches a regular expression as a whole; `meaning` names it in errors. `check` raises ValueError for
    texts that match and are still invalid."""

    pattern: str
    meaning: str
    check: Callable[[str], object] = str


@dataclass(frozen=True, slots=True)
class Printable:
    """A text of at most `most` printable characters."""

    most: int


@dataclass(frozen=True, slots=True)
class Range:
    """A whole number within bounds, both included."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Base64:
    """Between `least` and `most` parts of `unit` bytes."""

    unit: int
    most: int
    least: int = 0


@dataclass(frozen=True, slots=True)
class Items:
    """Number of rows of a list. `distinct`: no two are equal. `known_only`: unknown members of an enumeration are
    dropped."""

    least: int = 0
    most: int = MAX_ROWS
    distinct: bool = False
    known_only: bool = False


Count = Annotated[int, Range(0, MAX_NUMBER)]
ShortText = Annotated[str, Printable(253)]
Text = Annotated[str, Printable(512)]
HexDigest = Annotated[str, Form("[0-9a-f]{64}", "SHA-256 in hexadecimal digits")]


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def shown(text: str, most: int) -> str:
    """Return the displayable part of a pod's text: printable and bounded."""
    return "".join(character for character in text[:most] if character.isprintable())


def canonical_json(value: Any) -> bytes:
    """Return UTF-8 JSON with sorted keys and no white space; equal values give equal bytes. Raises ValueError for NaN
    and infinities, which JSON does not have."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value: Any) -> str:
    return digest_bytes(canonical_json(value))


def digest_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def encode(value: Any) -> bytes:
    return canonical_json(to_wire(value))


def encode_line(value: Mapping[str, Any]) -> bytes:
    """Return an object as one line of ASCII, in the order of its fields."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def decode(cls: type[T], data: bytes) -> T:
    """Raises ContractError, which names the place, for anything else."""
    try:
        raw = json.loads(data)
    except MALFORMED as error:
        raise ContractError(f"{TOLERANT.inside(cls).what} is malformed: {error}") from None
    return from_wire(cls, raw)


def to_wire(value: Any) -> Any:
    return _written(value, TOLERANT)


def from_wire(cls: type[T], raw: Any, where: str = "") -> T:
    """Raises ContractError, which names the place, for anything else."""
    where = where or TOLERANT.inside(cls).what
    try:
        kind: Any = cls
        found: T = _reader(kind, TOLERANT)(raw)
    except _MisfitError as error:
        raise ContractError(f"{where}{error}") from None
    except ContractError:
        raise
    except MALFORMED as error:
        raise ContractError(f"{where} is malformed: {error}") from None
    return found


def _written(value: Any, outer: Wire) -> Any:
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if kind is tuple:
        return [_written(one, outer) for one in value]
    if is_dataclass(kind):
        wire, parts = _parts(kind, outer)
        if wire.row:
            return [_written(getattr(value, name), wire) for name, _, _ in parts]
        written: dict[str, Any] = {"contract": CONTRACT_VERSION} if wire.versioned else {}
        for name, key, omitted in parts:
            one = getattr(value, name)
            if one != omitted:
                written[key] = _written(one, wire)
        return written
    if isinstance(value, Mapping):
        return {str(name): _written(one, outer) for name, one in value.items()}
    if kind is bytes:
        return base64.b64encode(value).decode()
    if kind is datetime:
        return value.isoformat()
    return str(value) if isinstance(value, StrEnum) else value


class Message:
    __slots__ = ()

    def encode(self) -> bytes:
        return encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises ContractError for anything else."""
        return decode(cls, data)


class Request(Message):
    """A message whose `encode` raises ContractError if its reader would refuse it."""

    __slots__ = ()

    def encode(self) -> bytes:
        data = encode(self)
        self.decode(data)
        return data


class _MisfitError(ContractError):
    """Its text continues a sentence that begins with the place of the error."""


@cache
def _parts(kind: Any, outer: Wire) -> tuple[Wire, list[tuple[str, str, Any]]]:
    """Return the `Wire` of a class, and each field with its key and the value at which it is omitted."""
    wire, nothing = outer.inside(kind), object()
    return wire, [
        (one.name, wire.key(one.name), _default(one) if one.name in wire.omit else nothing) for one in fields(kind)
    ]


def _default(one: Any) -> Any:
    return one.default_factory() if one.default_factory is not MISSING else one.default


def _opened(kind: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """Return a type without rules and None, its rules, and whether it may be None."""
    rules = kind.__metadata__ if get_origin(kind) is Annotated else ()
    kind = get_args(kind)[0] if rules else kind
    if NoneType not in get_args(kind):
        return kind, rules, False
    kind, more, _ = _opened(Union[tuple(one for one in get_args(kind) if one is not NoneType)])  # noqa: UP007
    return kind, rules + more, True


@cache
def _reader(kind: Any, outer: Wire) -> Reader:
    kind, rules, _ = _opened(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        return _rows(arguments[0], rules[0] if rules else Items(), outer)
    if origin is UnionType or origin is Union:
        return _one_of(arguments, outer)
    if origin is not None:
        return _table(_reader(arguments[0], outer), _reader(arguments[1], outer))
    if rules:
        return _RULES[type(rules[0])](rules[0])
    if is_dataclass(kind):
        return _object(kind, outer.inside(kind))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _member(kind)
    if kind is str:
        return _text(MAX_CLOSED_TEXT if outer.closed else inf)
    if kind is int:
        return _number(Range(0, MAX_EXACT_NUMBER) if outer.closed else Range(-MAX_NUMBER, MAX_NUMBER))
    return _PLAIN[kind]


def _text(most: float = inf, *, printable: bool = False) -> Reader:
    def reader(raw: Any) -> str:
        if type(raw) is not str or len(raw) > most or (printable and not raw.isprintable()):
            raise _MisfitError(f" is no text of at most {most} characters{' that can be shown' * printable}")
        return raw

    return reader


def _formed(rule: Form) -> Reader:
    match, check = re.compile(rule.pattern, re.ASCII).fullmatch, rule.check

    def reader(raw: Any) -> str:
        if type(raw) is not str or match(raw) is None:
            raise _MisfitError(f" is no {rule.meaning}")
        if check is not str:
            try:
                check(raw)
            except ValueError:
                raise _MisfitError(f" is no {rule.meaning}") from None
        return raw

    return reader


def _number(rule: Range) -> Reader:
    least, most = rule.least, rule.most

    def reader(raw: Any) -> int:
        if type(raw) is not int or not least <= raw <= most:
            raise _MisfitError(f" is no whole number from {least} to {most}")
        return raw

    return reader


def _packed(rule: Base64) -> Reader:
    def reader(raw: Any) -> bytes:
        try:
            data = base64.b64decode(raw, validate=True)
        except (TypeError, ValueError):
            raise _MisfitError(" is no base64") from None
        if len(data) % rule.unit or not rule.least <= len(data) // rule.unit <= rule.most:
            raise _MisfitError(f" has not between {rule.least} and {rule.most} parts of {rule.unit} bytes")
        return data

    return reader


def _truth(raw: Any) -> bool:
    if type(raw) is not bool:
        raise _MisfitError(" is neither true nor false")
    return raw


def _moment(raw: Any) -> datetime:
    try:
        return datetime.fromisoformat(raw)
    except (TypeError, ValueError):
        raise _MisfitError(" is no time") from None


_RULES: Mapping[Any, Callable[[Any], Reader]] = {
    Form: _formed,
    Printable: lambda rule: _text(rule.most, printable=True),
    Range: _number,
    Base64: _packed,
}
_PLAIN: Mapping[Any, Reader] = {bool: _truth, datetime: _moment, Any: lambda raw: raw}


def _rows(kind: Any, items: Items, outer: Wire) -> Reader:
    read = _reader(kind, outer)
    known = frozenset(map(str, kind)) if items.known_only else None

    def reader(raw: Any) -> tuple[Any, ...]:
        if type(raw) is not list or not items.least <= len(raw) <= items.most:
            raise _MisfitError(f" is no list of {items.least} to {items.most} rows")
        found: list[Any] = []
        try:
            for one in raw:
                if known is None or one in known:
                    found.append(read(one))
        except _MisfitError as error:
            raise _MisfitError(f"[{len(found)}]{error}") from None
        if items.distinct and len(set(found)) < len(found):
            raise _MisfitError(" names something twice")
        return tuple(found)

    return reader


def _table(read_key: Reader, read: Reader) -> Reader:
    def reader(raw: Any) -> dict[str, Any]:
        if type(raw) is not dict:
            raise _MisfitError(" is no object")
        found: dict[str, Any] = {}
        try:
            for key, one in raw.items():
                found[read_key(key)] = read(one)
        except _MisfitError as error:
            raise _MisfitError(f"[{len(found)}]{error}") from None
        return found

    return reader


def _one_of(kinds: tuple[Any, ...], outer: Wire) -> Reader:
    """Classes are distinguished by their keys: the first class with all keys present is chosen."""
    readers = [({outer.inside(kind).key(one.name) for one in fields(kind)}, _reader(kind, outer)) for kind in kinds]

    def reader(raw: Any) -> Any:
        if type(raw) is dict:
            for keys, read in readers:
                if keys <= raw.keys():
                    return read(raw)
        raise _MisfitError(f" is none of {', '.join(kind.__name__ for kind in kinds)}")

    return reader


def _member(kind: type[StrEnum]) -> Reader:
    members = {str(member): member for member in kind}

    def reader(raw: Any) -> StrEnum:
        if type(raw) is not str or raw not in members:
            raise _MisfitError(f" is none of {', '.join(members)}")
        return members[raw]

    return reader


def _plain(kind: Any, outer: Wire) -> frozenset[Any]:
    """Return the types of values that need no reader: calls dominate the cost of reading."""
    kind, rules, may_be_none = _opened(kind)
    plain = {kind} & ({bool} if rules or outer.closed else {bool, str})
    return frozenset(plain | {NoneType} if may_be_none else plain)


def _object(kind: Any, wire: Wire) -> Reader:
    hints = get_type_hints(kind, include_extras=True)
    parts = {
        wire.key(one.name): (one.name, _plain(hints[one.name], wire), _reader(hints[one.name], wire))
        for one in fields(kind)
    }
    optional = wire.omit if wire.complete else [one.name for one in fields(kind) if _default(one) is not MISSING]
    needed = {one.name for one in fields(kind)}.difference(optional)
    row, versioned, closed = wire.row, wire.versioned, wire.closed
    known, every = {*parts, "contract"} if versioned else set(parts), len(parts)

    def reader(raw: Any) -> Any:
        if row and type(raw) is list:
            raw = dict(zip(parts, raw, strict=False))
        elif row or type(raw) is not dict:
            raise _MisfitError(" is no row" if row else " is no object")
        if versioned and raw.get("contract") not in (CONTRACT_VERSION, CONTRACT_VERSION - 1):
            raise _MisfitError(f" is of another version of the contract than {CONTRACT_VERSION}")
        if closed and not raw.keys() <= known:
            raise _MisfitError(" has a field that this version does not know")
        found = {}
        try:
            for key, one in raw.items():
                part = parts.get(key)
                if part is not None:
                    name, plain, read = part
                    found[name] = one if type(one) in plain else read(one)
        except _MisfitError as error:
            raise _MisfitError(f".{key}{error}") from None
        if len(found) < every and not needed <= found.keys():
            raise _MisfitError(f" lacks {min(wire.key(name) for name in needed - found.keys())}")
        return kind(**found)

    return reader
