"""One codec for all messages: the fields and types of a frozen dataclass with slots are its wire form.

Bounds are in the types: a field is `Annotated` with one of the rules below. Rules between fields belong into
`__post_init__`, which raises ContractError. Everything else is in the class's `WIRE`.

Reading is tolerant by default: unknown fields are ignored, missing ones have their defaults. Evidence is read more
strictly (`complete`, `closed`). No error quotes a value, because values may be keys.

Calls dominate the cost, so each class is compiled once into a function that writes it and one that reads it, as
`dataclass` makes its methods. Their source is made of declarations only, never of data.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from functools import cache, partial
from itertools import count
from math import inf
from operator import length_hint
from types import NoneType, UnionType
from typing import Annotated, Any, Self, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

from . import CONTRACT_VERSION, MALFORMED, ContractError

MAX_NUMBER = 1 << 62
"""Larger than any amount of bytes."""

MAX_EXACT_NUMBER = 1 << 53
"""Every JSON implementation reads numbers up to here exactly."""

MAX_CLOSED_TEXT = 1024
MAX_ROWS = 1 << 20

T = TypeVar("T")
Work = Callable[[Any], Any]

_canonical = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, check_circular=False
).encode
_line = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


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
        return self.names.get(name) or (camel(name) if self.camel else name)


TOLERANT = Wire("a message")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def wired(what: str, *, kw_only: bool = False, **rules: Any) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass with slots that is written and read by `Wire(what, **rules)`."""

    def make(kind: type[T]) -> type[T]:
        made = dataclass(frozen=True, slots=True, kw_only=kw_only)(kind)
        made.WIRE = Wire(what, **rules)  # type: ignore[attr-defined]
        return made

    return make


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
Positive = Annotated[int, Range(1, MAX_NUMBER)]
ShortText = Annotated[str, Printable(253)]
Text = Annotated[str, Printable(512)]
Boot = Annotated[str, Printable(128)]
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
    return _canonical(value).encode()


def digest(value: Any) -> str:
    return digest_bytes(canonical_json(value))


def digest_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def encode(value: Any) -> bytes:
    return canonical_json(to_wire(value))


def encode_line(value: Mapping[str, Any]) -> bytes:
    """Return an object as one line of ASCII, in the order of its fields."""
    return _line(value).encode() + b"\n"


def decode(cls: type[T], data: bytes) -> T:
    """Raises ContractError, which names the place, for anything else."""
    try:
        raw = json.loads(data)
    except MALFORMED as error:
        raise ContractError(f"{TOLERANT.inside(cls).what} is malformed: {error}") from None
    return from_wire(cls, raw)


def no_constant(name: str) -> Any:
    """Refuse NaN and infinities, which JSON does not have."""
    raise ContractError(f"JSON has no {name}")


def to_wire(value: Any) -> Any:
    kind: Any = type(value)
    return _writer(kind, TOLERANT)(value)


def from_wire(cls: type[T], raw: Any, where: str = "") -> T:
    """Raises ContractError, which names the place, for anything else."""
    kind: Any = cls
    try:
        found: T = _reader(kind, TOLERANT)(raw)
        return found
    except _MisfitError as error:
        wrong = str(error)
    except ContractError:
        raise
    except MALFORMED as error:
        wrong = f" is malformed: {error}"
    raise ContractError((where or TOLERANT.inside(cls).what) + wrong)


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


@dataclass(frozen=True, slots=True)
class _Form:
    """How values of a type are read and written.

    `unread` is the source of a condition on `x`. If it holds, `read` converts the value or raises _MisfitError;
    otherwise the value is taken as it is. `write` returns the source that writes the value of an expression.
    """

    read: Work
    unread: str = "True"
    write: Callable[[str], str] = str


_NAMES = {"Misfit": _MisfitError, "ABSENT": object(), "new": object.__new__, "base64": base64, "left": length_hint}
_number = count()


def _named(value: Any) -> str:
    """Return a name of a value for compiled source."""
    _NAMES[name := f"_{next(_number)}"] = value
    return name


def _compiled(*lines: str) -> Work:
    """Return the function `made`."""
    made: dict[str, Work] = {}
    exec("\n".join(lines), _NAMES, made)  # noqa: S102
    return made["made"]


def _form(kind: Any, outer: Wire, rule: Any = None) -> _Form:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _form(arguments[0], outer, arguments[1])
    if NoneType in arguments:
        kinds = tuple(one for one in arguments if one is not NoneType)
        some = _form(kinds[0], outer, rule) if len(kinds) == 1 else _one_of(kinds, outer)
        written = str if some.write is str else lambda x: f"(None if {x} is None else {some.write(x)})"
        return _Form(some.read, f"x is not None and ({some.unread})", written)
    if origin is tuple:
        return _rows(arguments[0], rule or Items(), outer)
    if origin is UnionType or origin is Union:
        return _one_of(arguments, outer)
    if origin is not None:
        return _table(_form(arguments[0], outer), _form(arguments[1], outer))
    if kind is bool:
        return _checked("type(x) is not bool", "neither true nor false")
    if kind is int:
        rule = rule or (Range(0, MAX_EXACT_NUMBER) if outer.closed else Range(-MAX_NUMBER, MAX_NUMBER))
        unread = f"type(x) is not int or not {rule.least} <= x <= {rule.most}"
        return _checked(unread, f"no whole number from {rule.least} to {rule.most}")
    if kind is str:
        return _formed(rule) if isinstance(rule, Form) else _text(rule, outer)
    if kind is bytes:
        return _Form(_packed(rule), write=lambda x: f"base64.b64encode({x}).decode()")
    if kind is datetime:
        return _Form(_converted(datetime.fromisoformat, "no time"), write=lambda x: f"{x}.isoformat()")
    if kind is Any:
        return _checked("x is ABSENT", "missing")
    if issubclass(kind, StrEnum):
        members = {str(member): member for member in kind}
        return _Form(_converted(members.__getitem__, f"none of {', '.join(members)}"), write=lambda x: f"str({x})")
    name = _named(_writer(kind, outer))
    return _Form(_reader(kind, outer), write=lambda x: f"{name}({x})")


def _checked(unread: str, misfit: str) -> _Form:
    """Return the form of values that are taken as they are, or not at all."""
    return _Form(_compiled(f"def made(x): raise Misfit({f' is {misfit}'!r})"), unread)


def _converted(convert: Work, misfit: str) -> Work:
    def read(raw: Any) -> Any:
        try:
            return convert(raw)
        except (KeyError, TypeError, ValueError):
            raise _MisfitError(f" is {misfit}") from None

    return read


def _text(rule: Printable | None, outer: Wire) -> _Form:
    most = rule.most if rule else MAX_CLOSED_TEXT if outer.closed else inf
    unread = "type(x) is not str" + f" or len(x) > {most}" * (most < inf) + " or not x.isprintable()" * bool(rule)
    return _checked(unread, f"no text of at most {most} characters{' that can be shown' * bool(rule)}")


def _formed(rule: Form) -> _Form:
    match, misfit = re.compile(rule.pattern, re.ASCII).fullmatch, f"no {rule.meaning}"
    if rule.check is str:
        return _checked(f"type(x) is not str or not {_named(match)}(x)", misfit)

    def checked(raw: Any) -> Any:
        if not match(raw):
            raise ValueError
        rule.check(raw)
        return raw

    return _Form(_converted(checked, misfit))


def _packed(rule: Base64) -> Work:
    unpacked = _converted(partial(base64.b64decode, validate=True), "no base64")

    def read(raw: Any) -> Any:
        data = unpacked(raw)
        if len(data) % rule.unit or not rule.least <= len(data) // rule.unit <= rule.most:
            raise _MisfitError(f" has not between {rule.least} and {rule.most} parts of {rule.unit} bytes")
        return data

    return read


def _all(form: _Form) -> Work:
    """Return a reader of several values. Its errors have the number of the value."""
    return _compiled(
        "def made(raw):",
        " rest = iter(raw)",
        " try:",
        f"  return [{_named(form.read)}(x) if {form.unread} else x for x in rest]",
        " except Misfit as error:",
        "  raise Misfit(f'[{len(raw) - left(rest) - 1}]{error}') from None",
    )


def _rows(kind: Any, items: Items, outer: Wire) -> _Form:
    form = _form(kind, outer)
    read_all, known = _all(form), frozenset(map(str, kind)) if items.known_only else None

    def read(raw: Any) -> Any:
        if type(raw) is not list or not items.least <= len(raw) <= items.most:
            raise _MisfitError(f" is no list of {items.least} to {items.most} rows")
        found = tuple(read_all(raw if known is None else [one for one in raw if one in known]))
        if items.distinct and len(set(found)) < len(found):
            raise _MisfitError(" names something twice")
        return found

    return _Form(read, write=lambda x: f"[{form.write('x')} for x in {x}]")


def _table(keys: _Form, values: _Form) -> _Form:
    read_keys, read_values = _all(keys), _all(values)

    def read(raw: Any) -> Any:
        if type(raw) is not dict:
            raise _MisfitError(" is no object")
        return dict(zip(read_keys(raw), read_values(raw.values()), strict=True))

    return _Form(read, write=lambda x: f"{{{keys.write('key')}: {values.write('x')} for key, x in {x}.items()}}")


def _one_of(kinds: tuple[Any, ...], outer: Wire) -> _Form:
    """Classes are distinguished by their keys: the first class with all keys present is chosen."""
    readers = [({key for _, key, _ in _fields(kind, outer)}, _reader(kind, outer)) for kind in kinds]
    writers = _named({kind: _writer(kind, outer) for kind in kinds})

    def read(raw: Any) -> Any:
        if type(raw) is dict:
            for keys, read_one in readers:
                if keys <= raw.keys():
                    return read_one(raw)
        raise _MisfitError(f" is none of {', '.join(kind.__name__ for kind in kinds)}")

    return _Form(read, write=lambda x: f"{writers}[type({x})]({x})")


@cache
def _fields(kind: Any, outer: Wire) -> list[tuple[Any, str, _Form]]:
    """Return the fields of a class, each with its key and its form."""
    hints, wire = get_type_hints(kind, include_extras=True), outer.inside(kind)
    return [(one, wire.key(one.name), _form(hints[one.name], wire)) for one in fields(kind)]


def _default(one: Any) -> str:
    return _named(one.default) if one.default_factory is MISSING else f"{_named(one.default_factory)}()"


@cache
def _writer(kind: Any, outer: Wire) -> Work:
    wire, lines = outer.inside(kind), [" raw = {}"]
    if wire.row:
        row = (form.write(f"value.{one.name}") for one, _, form in _fields(kind, outer))
        return _compiled(f"made = lambda value: [{', '.join(row)}]")
    if wire.versioned:
        lines.append(f" raw['contract'] = {CONTRACT_VERSION}")
    for one, key, form in _fields(kind, outer):
        unless = f"if value.{one.name} != {_default(one)}: " if one.name in wire.omit else ""
        lines.append(f" {unless}raw[{key!r}] = {form.write(f'value.{one.name}')}")
    return _compiled("def made(value):", *lines, " return raw")


@cache
def _reader(kind: Any, outer: Wire) -> Work:
    wire, keys, required, lines = outer.inside(kind), list[str](), set[str](), list[str]()
    for number, (one, key, form) in enumerate(_fields(kind, outer)):
        keys.append(key)
        absent, read = "ABSENT", f"{_named(form.read)}(x)"
        if one.name not in wire.omit and (wire.complete or one.default is one.default_factory is MISSING):
            required.add(key)
        elif one.default is None:
            absent = "None"
        else:
            read = f"{_default(one)} if x is ABSENT else {read}"
        lines += (
            f"  x = raw[{number}] if length > {number} else {absent}" if wire.row else f"  x = get({key!r}, {absent})",
            f"  if {form.unread}:",
            f"   at = {key!r}",
            f"   x = {read}",
            f"  {_named(getattr(kind, one.name).__set__)}(found, x)",
        )

    def misfit(raw: Any, at: str, error: Exception) -> _MisfitError:
        lacking = required.difference(keys[: len(raw)] if wire.row else raw)
        return _MisfitError(f" lacks {min(lacking)}" if lacking else f".{at}{error}")

    versions, known = (CONTRACT_VERSION, CONTRACT_VERSION - 1), {*keys, *["contract"] * wire.versioned}
    return _compiled(
        "def made(raw):",
        f" if type(raw) is not {'list' if wire.row else 'dict'}:",
        f"  raise Misfit(' is no {'row' if wire.row else 'object'}')",
        f" if {wire.versioned} and raw.get('contract') not in {versions}:",
        f"  raise Misfit(' is of another version of the contract than {CONTRACT_VERSION}')",
        f" if {wire.closed} and not raw.keys() <= {_named(known)}:",
        "  raise Misfit(' has a field that this version does not know')",
        f" {'length = len(raw)' if wire.row else 'get = raw.get'}",
        f" found = new({_named(kind)})",
        " try:",
        *lines,
        f"  if {hasattr(kind, '__post_init__')}: found.__post_init__()",
        f" except Misfit as error: raise {_named(misfit)}(raw, at, error) from None",
        " return found",
    )
