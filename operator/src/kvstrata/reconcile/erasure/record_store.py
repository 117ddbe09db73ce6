"""Storage of erasure records: one Secret each, in the operator's namespace.

The namespace of the order may be going away, and a record names keyspaces and epochs. Writes are conditional: of two
operators that both think they lead, the second finds the first one's record and merges its facts, which gives the same
in any order.

Only operators of this and adjacent versions read a record: a missing field has its default, an unknown one is ignored.
A fact of an unknown kind is refused, because an erasure without it would decide differently.
"""

from __future__ import annotations

import base64
import logging
import lzma
from collections.abc import AsyncIterator, Mapping
from dataclasses import fields
from typing import Any, get_args

from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import SECRET
from kvstrata.contract import ContractError, wire
from kvstrata.contract.wire import canonical_json, from_wire, to_wire, wired
from kvstrata.model.erasure.facts import Fact, HeldKey
from kvstrata.model.erasure.record import Erasure, ErasureOrder, ErasureRecord, LeftEpoch, StoredRecord
from kvstrata.objects import labels
from kvstrata.objects.secret import build_secret
from kvstrata.reconcile.claims import require_own

PREFIX = "kvstrata-erasure-"
DATA_KEY = "record.json.xz"
COMPONENT = "erasure"
ATTEMPTS = 5

log = logging.getLogger(__name__)


class RecordStore:
    """`namespace` is the operator's. Every call may raise KubeError, of which NameConflictError is for a Secret of
    others, which is left alone."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self._kube, self._namespace = kube, namespace

    async def read(self, uid: str) -> StoredRecord | None:
        """Return the record of an order; None if there is none. Raises ContractError for an unreadable one."""
        stored = await self._find(uid)
        return _kept(stored) if stored is not None else None

    async def records(self, *, whole: bool = False) -> AsyncIterator[ErasureRecord]:
        """Yield every readable record; unreadable ones are logged. With `whole`, they raise ContractError."""
        selector = ",".join(f"{name}={value}" for name, value in sorted(labels.of_receipts(COMPONENT).items()))
        async for stored in self._kube.list(SECRET, self._namespace, selector):
            try:
                yield _kept(stored).record
            except ContractError as error:
                if whole:
                    raise
                log.error("a record of an erasure cannot be read", extra={"error": str(error)})

    async def create(self, record: ErasureRecord) -> StoredRecord:
        """Store a new record, or return the one that another operator stored first."""
        try:
            return _kept(await self._kube.create(SECRET, self._namespace, self._body(record)))
        except KubeError as error:
            if not error.is_conflict:
                raise
            if (found := await self.read(record.erasure.order.uid)) is None:
                raise
            return found

    async def write(self, kept: StoredRecord, record: ErasureRecord) -> StoredRecord:
        """Store more facts, merged with those that another operator stored meanwhile."""
        for _ in range(ATTEMPTS):
            if kept.record == record:
                return kept
            body = self._body(record)
            body["metadata"]["resourceVersion"] = kept.version
            try:
                return _kept(await self._kube.replace(SECRET, self._namespace, body))
            except KubeError as error:
                if not error.is_conflict:
                    raise
                if (found := await self.read(record.erasure.order.uid)) is None:
                    raise
                kept, record = found, found.record.merged_with(record)
        raise KubeError(409, "Conflict", f"{name_of(record.erasure.order.uid)} is written by others all the time")

    async def remove(self, uid: str) -> None:
        stored = await self._find(uid)
        if stored is not None:
            there = stored["metadata"]["uid"], stored["metadata"]["resourceVersion"]
            await self._kube.delete(SECRET, self._namespace, name_of(uid), *there)

    async def _find(self, uid: str) -> dict[str, Any] | None:
        stored = await self._kube.get(SECRET, self._namespace, name_of(uid))
        if stored is not None:
            require_own(SECRET.kind, stored, {"labels": labels.of_receipts(COMPONENT)})
        return stored

    def _body(self, record: ErasureRecord) -> dict[str, Any]:
        # Without a time: the same record gives the same bytes.
        name, data = name_of(record.erasure.order.uid), {DATA_KEY: _packed(encode(record))}
        return build_secret(name, self._namespace, labels.of_receipts(COMPONENT), None, data)


def name_of(uid: str) -> str:
    return f"{PREFIX}{uid}"


def _packed(data: bytes) -> bytes:
    """Compress a record. Digests, most of its size, repeat far apart, so the dictionary spans it all."""
    sought = {"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": max(1 << 16, len(data))}
    return lzma.compress(data, filters=[sought])


def _kept(stored: dict[str, Any]) -> StoredRecord:
    metadata = stored["metadata"]
    try:
        data = lzma.decompress(base64.b64decode((stored.get("data") or {}).get(DATA_KEY, "")))
    except (EOFError, ValueError, lzma.LZMAError) as error:
        raise ContractError(f"Secret {metadata['name']} holds no record of an erasure") from error
    return StoredRecord(decode(data), metadata["resourceVersion"])


VERSION = 1

_KINDS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in get_args(Fact)}


@wired("a record of an erasure", camel=True)
class _Stored:
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
    rows = tuple({"kind": type(fact).__name__, **to_wire(fact)} for _, fact in sorted(record.erasure.facts.items()))
    plain = {one.name: getattr(record, one.name) for one in fields(record) if one.name != "erasure"}
    return canonical_json(to_wire(_Stored(VERSION, order=record.erasure.order, facts=rows, **plain)))


def decode(data: bytes) -> ErasureRecord:
    """Raises ContractError for anything but an encoded record."""
    stored = wire.decode(_Stored, data)
    if stored.version != VERSION:
        raise ContractError(f"a record of an erasure is of version {stored.version}")
    erasure = Erasure(stored.order).with_facts(*map(_fact, stored.facts))
    plain = {one.name: getattr(stored, one.name) for one in fields(ErasureRecord) if one.name != "erasure"}
    return ErasureRecord(erasure=erasure, **plain)


def _fact(row: Mapping[str, Any]) -> Fact:
    if (kind := _KINDS.get(str(row.get("kind")))) is None:
        raise ContractError("a record of an erasure has a fact of a kind that this version does not know")
    fact: Fact = from_wire(kind, row, "a fact of an erasure")
    return fact
