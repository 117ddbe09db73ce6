"""Data keys that a key management service wraps: Secrets hold them wrapped, and the service can end them for good.

Each epoch's data key has a wrapping key of its own in the service, the smallest unit that the service can delete:
without it, copies of the data key in etcd's history and backups are useless. The deletion is verified by asking the
service again, and only its "no such key" counts; a refusal, a wrong mount or a service that was set up anew do not.

A restored backup of the service has its keys again: its answer describes its current state. Data keys in the memory of
pods are outside this module.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TypeVar

from kvstrata.api.scalars import format_timestamp
from kvstrata.clients.transit import AT_ONCE, KmsError, KmsFailure, Service, TransitClient
from kvstrata.contract.receipt.facts import Statement
from kvstrata.contract.receipt.vocabulary import Party
from kvstrata.contract.wire import canonical_json
from kvstrata.model.keys import Destruction, Undestroyed
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.keys.wrapped_keys import Change, Held, WrappedKey, WrappedKeys, by_shard

T = TypeVar("T")

_OF_ONE_KEY = frozenset({KmsFailure.REFUSED, KmsFailure.TOO_LARGE, KmsFailure.MALFORMED})
"""Failures that say nothing about other keys; after any other one they are not tried."""


UNRECORDED = "nobody knows any more which service has what wrapped it"


class OneKeyError(CustodyError):
    """One key cannot be read or ended; others may still work."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Result of unwrapping: the keys `found`, by epoch, and epochs with `none` any more. The state of all others is
    unknown, because of `failure`."""

    found: Mapping[str, bytes] = field(repr=False)
    none: frozenset[str]
    failure: CustodyError | None


@dataclass(frozen=True, slots=True)
class Left:
    """What is left of a deleted domain: keys that have not ended and why, the number of `notes` that erasures may
    still ask for, and Secrets with unreadable records. `found` is the number of records at the start: a key that has
    just ended may have been drawn by a process that still draws."""

    unended: Mapping[str, Destruction]
    notes: int
    unreadable: tuple[str, ...]
    found: int = 0

    def __bool__(self) -> bool:
        return bool(self.unended or self.notes or self.unreadable or self.found)


@dataclass(frozen=True, slots=True)
class Ended:
    """What is known of the end of keys, by epoch; the others are left out because of `failure`."""

    ends: Mapping[str, Destruction]
    failure: CustodyError | None


async def _never() -> str:
    return ""


def wrapping_key(domain: str, epoch: str) -> str:
    """Return the service's name for the key of an epoch: it reveals the domain's id, but not the epoch."""
    digest = hashlib.sha256(b"kvstrata wrapping key\n" + canonical_json([domain, epoch])).hexdigest()
    return f"kvstrata-{domain}-{digest[:32]}"


class KmsCustody:
    """The keys of the domain with this id. `now` is the wall clock in UTC; `operator` is this pod's name,
    for revocations. `why_not` returns why no key may be drawn any more, empty if it may; keys drawn meanwhile end
    at once."""

    def __init__(
        self,
        client: TransitClient,
        stored: WrappedKeys,
        domain: str,
        now: Callable[[], datetime],
        operator: str,
        why_not: Callable[[], Awaitable[str]] = _never,
    ) -> None:
        self._client, self._stored, self.domain, self._now, self._operator = client, stored, domain, now, operator
        self._why_not = why_not

    async def draw(self, epochs: Iterable[str]) -> None:
        """Create and wrap a key for each epoch without one. Existing keys of another operator stay, and new ones for
        the same epoch are dropped. Keys made before a failure are stored. Raises CustodyError."""
        wanted = tuple(epochs)
        there = await self._stored.read(wanted)
        missing = [epoch for epoch in wanted if epoch not in there]
        if not missing:
            return
        service = await self._service()
        for shard, some in by_shard(missing).items():
            made, failure = await _of_each(some, lambda epoch: self._made(service, epoch))
            await self._stored.change(shard, _fresh(made))
            if why_not := await self._why_not():
                # The end of the domain's keys may have begun before this was stored.
                await self._unmade(made)
                raise CustodyError(why_not)
            if failure is not None:
                raise failure

    async def open(self, epochs: Iterable[str]) -> Opened:
        """Unwrap the keys of these epochs as far as possible. Raises CustodyError if the service does not answer."""
        wanted = frozenset(epochs)
        records = {epoch: key for epoch, key in (await self._own(wanted)).items() if key.wrapped}
        if not records:
            return Opened({}, wanted, None)
        service = await self._service()
        asked, failure = await _of_each(records, lambda epoch: self._unwrapped(records[epoch], service))
        found = {epoch: secret for epoch, secret in asked.items() if secret is not None}
        return Opened(found, (wanted - records.keys()) | (asked.keys() - found.keys()), failure)

    async def recorded(self, epochs: Iterable[str]) -> frozenset[str]:
        """Return those epochs with a stored record of a key. Raises CustodyError."""
        return frozenset(await self._stored.read(epochs))

    async def all(self) -> Mapping[str, bool]:
        """Return every epoch with a record of this domain, and whether its key was revoked. Raises CustodyError."""
        held = await self._stored.held()
        return {epoch: not record.wrapped for epoch, record in self._of_domain(held.records).items()}

    async def leads_there(self) -> None:
        """Raise CustodyError unless the client reaches the service that wrapped the existing keys. It looks up a key
        that never exists: the service's id alone would not verify the mount."""
        service = await self._service()
        try:
            await self._client.look(wrapping_key(self.domain, "0" * 32))
        except KmsError as error:
            raise _failed(error) from error
        held = self._of_domain((await self._stored.held()).records).values()
        if strange := next((one for one in held if one.wrapped and not self._is_of(one, service)), None):
            raise CustodyError(f"{_another(strange)}; spec.kms is to be as it was as long as there are keys")

    async def end_all(
        self, asked: Callable[[], Awaitable[Set[str] | None]], over: MutableMapping[str, WrappedKey] | None = None
    ) -> Left:
        """End every key, and return what is left; when that is nothing, the Secrets are gone, too. `asked` returns
        the epochs that erasures may still ask about, None if unknown: their notes stay. `over` caches records of
        keys whose end the service confirmed earlier, and is updated. Raises CustodyError."""
        over = {} if over is None else over
        held = await self._stored.held()
        records = self._of_domain(held.records)
        for epoch in [epoch for epoch, record in over.items() if records.get(epoch) != record]:
            del over[epoch]
        unended, failure = dict[str, Destruction](), None
        if epochs := records.keys() - over.keys():
            await self.revoke(epochs)
            ended, revoked = await self.end(epochs), await self._own(epochs)
            for epoch, end in ended.ends.items():
                if end.confirmed is None:
                    unended[epoch] = end
                elif epoch in revoked:
                    over[epoch] = revoked[epoch]
            failure = ended.failure
        if over:
            wanted = await asked()
            spent = set[str]() if wanted is None else over.keys() - wanted
            await self.forget(spent)
            for epoch in spent:
                del over[epoch]
        if failure is not None:
            raise failure
        strange = {self._stored.name_of(epoch) for epoch in held.records.keys() - records.keys()}
        unreadable = tuple(sorted({*held.unreadable.values(), *strange}))
        if not (unended or over or unreadable):
            unreadable = await self._stored.remove()
        return Left(unended, len(over), unreadable, len(records))

    async def revoke(self, epochs: Iterable[str]) -> Mapping[str, Statement | None]:
        """Remove the wrapped keys from their Secrets, and keep notes of what the service must delete. Returns who
        removed each, None for one that is still there or whose record this version cannot read. Raises CustodyError."""
        wanted = tuple(epochs)
        at, shards = format_timestamp(self._now()), by_shard(wanted)
        for shard, some in shards.items():
            await self._stored.change(shard, _revoked(some, at))
        held = await self._stored.held(shards)
        return {epoch: self._revocation(epoch, held, at) for epoch in wanted}

    async def destroy(self, epochs: Iterable[str]) -> Mapping[str, Destruction]:
        ended = await self.end(epochs)
        if ended.failure is not None:
            raise ended.failure
        return ended.ends

    async def end(self, epochs: Iterable[str]) -> Ended:
        """Destroy revoked keys as far as possible. Raises CustodyError if the service does not answer."""
        wanted = tuple(epochs)
        records = await self._own(wanted)
        service = await self._service()
        return Ended(*await _of_each(wanted, lambda epoch: self._destroyed(records.get(epoch), service)))

    async def forget(self, epochs: Iterable[str]) -> None:
        """Remove the notes of keys whose end is on record; afterwards it cannot be asked for again."""
        for shard, some in by_shard(epochs).items():
            await self._stored.change(shard, _forgotten(some))

    async def _made(self, service: Service, epoch: str) -> WrappedKey:
        name = wrapping_key(self.domain, epoch)
        try:
            if (await self._client.make(name)).copyable:
                raise OneKeyError(f"key {name} of the key management service may be taken out of it: delete it there")
            drawn = await self._client.draw(name)
        except KmsError as error:
            raise _of_key(error) from error
        return WrappedKey(service.cluster, self._client.place, name, drawn.wrapped)

    async def _unmade(self, made: Mapping[str, WrappedKey]) -> None:
        await self.revoke(made)
        try:
            for record in made.values():
                await self._client.delete(record.key)
        except KmsError as error:
            raise _failed(error) from error
        await self.forget(made)

    async def _unwrapped(self, record: WrappedKey, service: Service) -> bytes | None:
        if not self._is_of(record, service):
            raise OneKeyError(_another(record))
        try:
            return await self._client.unwrap(record.key, record.wrapped)
        except KmsError as error:
            if error.reason is KmsFailure.NO_KEY:
                return None
            raise _of_key(error) from error

    async def _own(self, epochs: Iterable[str]) -> dict[str, WrappedKey]:
        """Return the records of these epochs that name their own wrapping key. A writer of the namespace's Secrets
        could plant another domain's record: its key is neither unwrapped nor deleted."""
        return self._of_domain(await self._stored.read(epochs))

    def _of_domain(self, stored: Mapping[str, WrappedKey]) -> dict[str, WrappedKey]:
        return {epoch: one for epoch, one in stored.items() if one.key == wrapping_key(self.domain, epoch)}

    def _revocation(self, epoch: str, held: Held, at: str) -> Statement | None:
        record = held.records.get(epoch)
        if epoch in held.unreadable or (record is not None and record.wrapped):
            return None
        since = record.revoked_at if record is not None else ""
        return Statement(Party.OPERATOR, self._operator, since or at)

    async def _destroyed(self, record: WrappedKey | None, service: Service) -> Destruction:
        if record is None:
            return Destruction(None, Undestroyed.CUSTODY_CANNOT_KNOW, (UNRECORDED,))
        if record.wrapped:
            return Destruction(None, Undestroyed.NOT_REVOKED)
        if not self._is_of(record, service):
            return Destruction(None, Undestroyed.ANOTHER_KMS, (_another(record),))
        try:
            before = await self._client.look(record.key)
            if before is not None and before.copyable:
                return Destruction(None, Undestroyed.EXPORTABLE, (f"key {record.key} can be exported",))
            if before is not None:
                await self._client.delete(record.key)
            if await self._client.look(record.key) is not None:
                return Destruction(None, Undestroyed.STILL_THERE, (f"key {record.key} was not deleted",))
        except KmsError as error:
            raise _of_key(error) from error
        seen = "was there, and was deleted" if before is not None else "had been deleted before"
        evidence = (
            f"key {record.key} in {record.place} {seen}; asked again, the service has no such key",
            f"service {service.cluster}, version {service.version}",
        )
        return Destruction(self._word_of(service), evidence=evidence)

    def _word_of(self, service: Service) -> Statement:
        return Statement(Party.CUSTODY, f"transit:{service.cluster}", format_timestamp(self._now()))

    def _is_of(self, record: WrappedKey, service: Service) -> bool:
        return record.service == service.cluster and record.place == self._client.place

    async def _service(self) -> Service:
        try:
            return await self._client.service()
        except KmsError as error:
            raise _failed(error) from error


async def _of_each(
    epochs: Iterable[str], ask: Callable[[str], Awaitable[T]]
) -> tuple[dict[str, T], CustodyError | None]:
    """Run `ask` for several epochs at a time, as many as there are connections: waiting for one would use up the
    timeout. Returns the results. After a failure that concerns more than one key nothing new starts, and the failure
    is returned."""
    waiting, found, failures = iter(tuple(epochs)), dict[str, T](), list[CustodyError]()

    def whole() -> CustodyError | None:
        return next((one for one in failures if not isinstance(one, OneKeyError)), None)

    async def ask_in_turn() -> None:
        for epoch in waiting:
            try:
                found[epoch] = await ask(epoch)
            except CustodyError as error:
                failures.append(error)
            if whole():
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(ask_in_turn())
    return found, whole() or (failures[0] if failures else None)


def _fresh(made: Mapping[str, WrappedKey]) -> Change:
    return lambda held: {epoch: key for epoch, key in made.items() if epoch not in held}


def _revoked(epochs: Iterable[str], at: str) -> Change:
    return lambda held: {
        epoch: replace(held[epoch], wrapped="", revoked_at=at)
        for epoch in epochs
        if epoch in held and held[epoch].wrapped
    }


def _forgotten(epochs: Iterable[str]) -> Change:
    return lambda held: {epoch: None for epoch in epochs if epoch in held and not held[epoch].wrapped}


def _failed(error: KmsError) -> CustodyError:
    return CustodyError(f"{error.reason}: {error}")


def _of_key(error: KmsError) -> CustodyError:
    return OneKeyError(f"{error.reason}: {error}") if error.reason in _OF_ONE_KEY else _failed(error)


def _another(record: WrappedKey) -> str:
    return f"key {record.key} is of service {record.service}, place {record.place}: another one answers"
