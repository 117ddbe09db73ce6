"""Data keys that a key management service wraps: Secrets hold them wrapped, and the service can destroy them.

Each epoch's data key has a wrapping key of its own in the service, the smallest unit that the service can delete:
without it, copies of the data key in etcd's history and backups are useless. The deletion is verified by asking the
service again, and only its "no such key" counts; a refusal, a wrong mount or a service that was set up again do not. A
restored backup of the service has its keys again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

from kvstrata.api.scalars import format_timestamp
from kvstrata.clients.transit import AT_ONCE, KmsError, KmsFailure, Service, TransitClient
from kvstrata.contract.receipt.facts import Statement
from kvstrata.contract.receipt.vocabulary import Party
from kvstrata.model.keys import Destruction, Undestroyed
from kvstrata.plan.keys.kms import KeyRecords
from kvstrata.reconcile.background import Clock
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.keys.wrapped_keys import WrappedKey, WrappedKeys, by_shard, wrapping_key

T = TypeVar("T")

_OF_ONE_KEY = frozenset({KmsFailure.REFUSED, KmsFailure.TOO_LARGE, KmsFailure.MALFORMED})
"""Failures that do not concern other keys; after any other one they are not tried."""

UNRECORDED = Destruction(None, Undestroyed.CUSTODY_CANNOT_KNOW, ("no record names the service that wrapped it",))


class OneKeyError(CustodyError):
    """One key cannot be read or ended; others may still work."""


@dataclass(frozen=True, slots=True)
class Answers(Generic[T]):
    """Answers of the service by epoch. Epochs may lack because of `failure`."""

    found: Mapping[str, T] = field(repr=False)
    failure: CustodyError | None = None

    def whole(self) -> Mapping[str, T]:
        """Return the answers; raise the failure if one lacks."""
        if self.failure is not None:
            raise self.failure
        return self.found


WhyNot = Callable[[], Awaitable[str]]


class KmsCustody:
    """The keys of one domain. `operator` is this pod's name, for revocations. `why_not` returns why no key may be drawn
    any more, empty if it may. Every call may raise CustodyError."""

    def __init__(self, client: TransitClient, stored: WrappedKeys, now: Clock, operator: str, why_not: WhyNot) -> None:
        self._client, self._stored, self.domain, self._why_not = client, stored, stored.domain, why_not
        self._now, self._operator = now, operator

    async def records(self) -> KeyRecords:
        held = await self._stored.held()
        wrapped = frozenset(epoch for epoch, record in held.records.items() if record.wrapped)
        return KeyRecords(wrapped, held.records.keys() - wrapped, held.unusable)

    async def draw(self, epochs: Iterable[str]) -> None:
        """Create and wrap a key for each epoch without one. Existing keys of another operator stay, and new ones for
        the same epoch are dropped. Keys made before a failure are stored."""
        wanted = frozenset(epochs)
        missing = wanted - (await self._stored.read(wanted)).keys()
        if not missing:
            return
        service = await self._service()
        for shard, some in by_shard(missing).items():
            made = await _of_each(some, lambda epoch: self._made(service, epoch))
            await self._stored.change(shard, partial(_without, made.found))
            if why_not := await self._why_not():
                # The end of the domain's keys may have begun before this was stored.
                await self._undo(made.found)
                raise CustodyError(why_not)
            made.whole()

    async def open(self, epochs: Iterable[str]) -> Answers[bytes | None]:
        """Unwrap the keys of these epochs as far as possible; None where there is no key any more."""
        wanted = frozenset(epochs)
        records = {epoch: key for epoch, key in (await self._stored.read(wanted)).items() if key.wrapped}
        none = dict.fromkeys(wanted - records.keys())
        if not records:
            return Answers(none)
        service = await self._service()
        asked = await _of_each(records, lambda epoch: self._unwrapped(records[epoch], service))
        return Answers({**none, **asked.found}, asked.failure)

    async def leads_there(self) -> None:
        """Raise CustodyError unless the client reaches the service that wrapped the existing keys. It looks up a key
        that never exists: the service's id alone would not verify the mount."""
        service = await self._service()
        with _kms_errors():
            await self._client.is_copyable(wrapping_key(self.domain, "0" * 32))
        held = (await self._stored.held()).records.values()
        if strange := next((one for one in held if one.wrapped and not self._is_of(one, service)), None):
            raise CustodyError(f"{_another(strange)}; spec.kms is to be as it was as long as there are keys")

    async def revoke(self, epochs: Iterable[str]) -> Mapping[str, Statement | None]:
        """Remove the wrapped keys from their Secrets, and keep notes of keys that the service must delete. Returns the
        statement of each removal, None for one that is still there or whose record this version cannot read."""
        wanted = tuple(epochs)
        at, shards = format_timestamp(self._now()), by_shard(wanted)

        def revoked(held: Mapping[str, WrappedKey]) -> Mapping[str, WrappedKey]:
            there = {epoch: held[epoch] for epoch in wanted if epoch in held}
            return {epoch: replace(key, wrapped="", revoked_at=at) for epoch, key in there.items() if key.wrapped}

        for shard in shards:
            await self._stored.change(shard, revoked)
        held = await self._stored.held(shards)
        left = held.unusable.keys() | {epoch for epoch, record in held.records.items() if record.wrapped}
        since = {epoch: record.revoked_at for epoch, record in held.records.items()}
        stated = {epoch: Statement(Party.OPERATOR, self._operator, since.get(epoch) or at) for epoch in wanted}
        return {epoch: None if epoch in left else statement for epoch, statement in stated.items()}

    async def destroy(self, epochs: Iterable[str]) -> Answers[Destruction]:
        """Have the service delete the wrapping keys of revoked keys, as far as possible."""
        if not (wanted := tuple(epochs)):
            return Answers({})
        records, service = await self._stored.read(wanted), await self._service()
        return await _of_each(wanted, lambda epoch: self._destroyed(records.get(epoch), service))

    async def forget(self, epochs: Iterable[str]) -> None:
        """Remove the notes of keys whose end is on record; afterwards it cannot be asked for again."""
        wanted = frozenset(epochs)
        for shard in by_shard(wanted):
            await self._stored.change(
                shard, lambda held: {epoch: None for epoch in wanted & held.keys() if not held[epoch].wrapped}
            )

    async def _made(self, service: Service, epoch: str) -> WrappedKey:
        name = wrapping_key(self.domain, epoch)
        if await self._client.make(name):
            raise OneKeyError(f"key {name} of the key management service may be taken out of it: delete it there")
        drawn = await self._client.draw(name)
        return WrappedKey(service.cluster, self._client.place, name, drawn.wrapped)

    async def _undo(self, made: Mapping[str, WrappedKey]) -> None:
        await self.revoke(made)
        with _kms_errors():
            for record in made.values():
                await self._client.delete(record.key)
        await self.forget(made)

    async def _unwrapped(self, record: WrappedKey, service: Service) -> bytes | None:
        if not self._is_of(record, service):
            raise OneKeyError(_another(record))
        try:
            return await self._client.unwrap(record.key, record.wrapped)
        except KmsError as error:
            if error.reason is not KmsFailure.NO_KEY:
                raise
            return None

    async def _destroyed(self, record: WrappedKey | None, service: Service) -> Destruction:
        if record is None:
            return UNRECORDED
        if record.wrapped:
            return Destruction(None, Undestroyed.NOT_REVOKED)
        if not self._is_of(record, service):
            return Destruction(None, Undestroyed.ANOTHER_KMS, (_another(record),))
        copyable = await self._client.is_copyable(record.key)
        if copyable:
            return Destruction(None, Undestroyed.EXPORTABLE, (f"key {record.key} can be exported",))
        if copyable is not None:
            await self._client.delete(record.key)
        if await self._client.is_copyable(record.key) is not None:
            return Destruction(None, Undestroyed.STILL_THERE, (f"key {record.key} was not deleted",))
        seen = "was there, and was deleted" if copyable is not None else "had been deleted before"
        evidence = (
            f"key {record.key} in {record.place} {seen}; asked again, the service has no such key",
            f"service {service.cluster}, version {service.version}",
        )
        statement = Statement(Party.CUSTODY, f"transit:{service.cluster}", format_timestamp(self._now()))
        return Destruction(statement, evidence=evidence)

    def _is_of(self, record: WrappedKey, service: Service) -> bool:
        return record.service == service.cluster and record.place == self._client.place

    async def _service(self) -> Service:
        with _kms_errors():
            return await self._client.service()


async def _of_each(epochs: Iterable[str], ask: Callable[[str], Awaitable[T]]) -> Answers[T]:
    """Run `ask` for several epochs at a time, as many as there are connections: waiting for one would use up the
    timeout. After a failure that concerns more than one key nothing new starts, and that failure is returned."""
    waiting, found = iter(tuple(epochs)), dict[str, T]()
    of_one: CustodyError | None = None
    of_all: CustodyError | None = None

    async def ask_in_turn() -> None:
        nonlocal of_one, of_all
        while of_all is None and (epoch := next(waiting, None)) is not None:
            try:
                with _kms_errors(_OF_ONE_KEY):
                    found[epoch] = await ask(epoch)
            except OneKeyError as error:
                of_one = of_one or error
            except CustodyError as error:
                of_all = error

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(ask_in_turn())
    return Answers(found, of_all or of_one)


def _without(new: Mapping[str, T], known: Mapping[str, T]) -> Mapping[str, T]:
    return {epoch: one for epoch, one in new.items() if epoch not in known}


@contextmanager
def _kms_errors(of_one_key: Set[KmsFailure] = frozenset()) -> Iterator[None]:
    try:
        yield
    except KmsError as error:
        kind = OneKeyError if error.reason in of_one_key else CustodyError
        raise kind(f"{error.reason}: {error}") from error


def _another(record: WrappedKey) -> str:
    return f"key {record.key} is of service {record.service}, place {record.place}: another one answers"
