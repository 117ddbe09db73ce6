"""JSON codec of erasure records.

Only operators of this and adjacent versions read them: a missing field has its default, an unknown one is ignored. A
fact of an unknown kind is refused, because an erasure without it would decide differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, get_args

from kvstrata.contract import ContractError, wire
from kvstrata.contract.wire import Wire, canonical_json, from_wire, to_wire
from kvstrata.model.erasure.facts import Fact, HeldKey
from kvstrata.model.erasure.record import Erasure, ErasureOrder, ErasureRecord, LeftEpoch

VERSION = 1

_KINDS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in get_args(Fact)}


@dataclass(frozen=True, slots=True)
class _Stored:
    WIRE: ClassVar[Wire] = Wire("a record of an erasure", camel=True)

    version: int
    namespace: str
    invalidation: str
    domain: str
    epochs: tuple[LeftEpoch, ...]
    keys: tuple[HeldKey, ...]
    order: ErasureOrder
    facts: tuple[Mapping[str, Any], ...]
    named: Mapping[str, tuple[str, ...]]
    named_tiers: tuple[str, ...]


def encode(record: ErasureRecord) -> bytes:
    told = tuple({"kind": type(fact).__name__, **to_wire(fact)} for _, fact in sorted(record.erasure.facts.items()))
    plain = {one.name: getattr(record, one.name) for one in fields(record) if one.name != "erasure"}
    return canonical_json(to_wire(_Stored(VERSION, order=record.erasure.order, facts=told, **plain)))


def decode(data: bytes) -> ErasureRecord:
    """Raises ContractError for anything but an encoded record."""
    stored = wire.decode(_Stored, data)
    if stored.version != VERSION:
        raise ContractError(f"a record of an erasure is of version {stored.version}")
    erasure = Erasure(stored.order).hearing(*map(_fact, stored.facts))
    plain = {one.name: getattr(stored, one.name) for one in fields(ErasureRecord) if one.name != "erasure"}
    return ErasureRecord(erasure=erasure, **plain)


def _fact(told: Mapping[str, Any]) -> Fact:
    kind = _KINDS.get(str(told.get("kind")))
    if kind is None:
        raise ContractError("a record of an erasure has a fact of a kind that this version does not know")
    fact: Fact = from_wire(kind, told, "a fact of an erasure")
    return fact
