"""Records of erasures as JSON: what was written is what is read, by whichever operator leads next.

Unlike receipts, they are read by operators only, of this version and those around it: a field that is missing has its
default, one that is not known is left out. A fact of an unknown kind is refused, because without it an erasure would
go another way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from kvstrata.contract import ContractError, contract_errors
from kvstrata.contract.wire import camel, canonical_json
from kvstrata.model.erasure.facts import Fact
from kvstrata.model.erasure.record import Erasure, ErasureOrder, ErasureRecord

VERSION = 1

Reader = Callable[[Any], Any]
_KINDS: Mapping[str, Any] = {kind.__name__: kind for kind in get_args(Fact)}


def encode(record: ErasureRecord) -> bytes:
    """Return a record's bytes."""
    told = [{"kind": type(fact).__name__, **_write(fact)} for _, fact in sorted(record.erasure.facts.items())]
    plain = {
        camel(field.name): _write(getattr(record, field.name)) for field in fields(record) if field.name != "erasure"
    }
    return canonical_json({"version": VERSION, **plain, "order": _write(record.erasure.order), "facts": told})


def decode(data: bytes) -> ErasureRecord:
    """Return the record that these bytes are. Raises ContractError for anything else."""
    with contract_errors("a record of an erasure"):
        raw = json.loads(data)
        if raw["version"] != VERSION:
            raise ContractError(f"a record of an erasure is of version {raw['version']}")
        facts = [_reader(_kind_of(told))(told) for told in raw["facts"]]
        erasure = Erasure(_reader(ErasureOrder)(raw["order"])).hearing(*facts)
        hints = get_type_hints(ErasureRecord, include_extras=True)
        plain = {
            field.name: _reader(hints[field.name])(raw[camel(field.name)])
            for field in fields(ErasureRecord)
            if field.name != "erasure"
        }
        return ErasureRecord(erasure=erasure, **plain)


def _kind_of(told: Mapping[str, Any]) -> Hashable:
    kind: Hashable = _KINDS[told["kind"]]
    return kind


def _write(value: Any) -> Any:
    if is_dataclass(value):
        return {camel(field.name): _write(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _write(one) for name, one in sorted(value.items())}
    if isinstance(value, tuple | list):
        return [_write(one) for one in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value) if isinstance(value, StrEnum) else value


@cache
def _reader(kind: Any) -> Reader:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _reader(arguments[0])
    if origin in (UnionType, Union):
        inner = _reader(next(one for one in arguments if one is not NoneType))
        return lambda raw: None if raw is None else inner(raw)
    if origin is tuple:
        row = _reader(arguments[0])
        return lambda raw: tuple(map(row, raw))
    if origin is not None and issubclass(origin, Mapping):
        value = _reader(arguments[1])
        return lambda raw: {name: value(one) for name, one in raw.items()}
    if kind is datetime:
        return datetime.fromisoformat
    if is_dataclass(kind):
        return _object(kind)
    return _plain(kind)


def _plain(kind: Any) -> Reader:
    def reader(raw: Any) -> Any:
        if issubclass(kind, StrEnum):
            return kind(raw)
        if type(raw) is not kind:
            raise ContractError(f"a field is no {kind.__name__}")
        return raw

    return reader


def _object(kind: Any) -> Reader:
    hints = get_type_hints(kind, include_extras=True)
    readers = {camel(field.name): (field.name, _reader(hints[field.name])) for field in fields(kind)}

    def reader(raw: Any) -> Any:
        return kind(**{name: inner(raw[key]) for key, (name, inner) in readers.items() if key in raw})

    return reader
