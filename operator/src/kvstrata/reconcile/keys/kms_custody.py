"""Data keys that a key management service wraps: Secrets hold them wrapped, and the service can end them for good.

Each epoch's data key has a key of its own in the service that wraps it, because that is the smallest thing that the
service can delete: once it is gone, what etcd's history and backups hold of the data key opens for nobody. That it is
gone is the service's word: it is asked again afterwards, and only its own "no such key" counts, not a refusal, not a
wrong mount, and not the emptiness of a service that was set up anew.

The service keeps backups of its own, and who restores one has its keys again: its word is about itself as it is. Pods
have the data keys in memory; what they say of them is asked of them.
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
from kvstrata.contract.receipt.facts import Word
from kvstrata.contract.receipt.vocabulary import Party
from kvstrata.contract.wire import canonical_json
from kvstrata.model.keys import Destruction, Undestroyed
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.keys.wrapped_keys import Change, Held, WrappedKey, WrappedKeys, by_shard

T = TypeVar("T")

_OF_ONE_KEY = frozenset({KmsFailure.REFUSED, KmsFailure.TOO_LARGE, KmsFailure.MALFORMED})
"""Failures that say nothing of other keys; after any other one they are not asked for."""


UNRECORDED = "nobody knows any more which service has what wrapped it"


class OneKeyError(CustodyError):
    """One key cannot be had or ended. What is asked of others may be answered all the same."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What came of unwrapping: the keys that were `found`, by epoch, and epochs that have `none` any more.

    Of every other one nothing is known, because of `failure`.
    """

    found: Mapping[str, bytes] = field(repr=False)
    none: frozenset[str]
    failure: CustodyError | None


@dataclass(frozen=True, slots=True)
class Left:
    """What there still is of a domain that is over: keys that have not ended, why they have not, the number of `notes`
    that somebody will ask for, and Secrets that hold what nobody can read.

    `found` is how many records there were when the look began: what has just ended may have been drawn just before, by
    somebody who still draws.
    """

    unended: Mapping[str, Destruction]
    notes: int
    unreadable: tuple[str, ...]
    found: int = 0

    def __bool__(self) -> bool:
        """Whether there is anything, or was."""
        return bool(self.unended or self.notes or self.unreadable or self.found)


@dataclass(frozen=True, slots=True)
class Ended:
    """What is known of the end of keys, by epoch; nothing of those that are left out, because of `failure`."""

    ends: Mapping[str, Destruction]
    failure: CustodyError | None


async def _never() -> str:
    return ""


def wrapping_key(domain: str, epoch: str) -> str:
    """Return what the service calls the key of an epoch: it tells the domain's id, and the epoch to nobody."""
    digest = hashlib.sha256(b"kvstrata wrapping key\n" + canonical_json([domain, epoch])).hexdigest()
    return f"kvstrata-{domain}-{digest[:32]}"


class KmsCustody:
    """The keys of the domain with this id.

    `now` is the wall clock in UTC, `operator` the name of this operator's pod, whose word a revocation is, `why_not`
    why no key of the domain may be drawn by now: what was drawn then ends at once. Empty if it may.
    """

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
        """Have the service make and wrap a key for each epoch that has none.

        Where another operator was faster its keys stay, and what the service made for this one is forgotten. What was
        made before a failure is stored. Raises CustodyError.
        """
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
                # Whoever ends the keys of the domain may have looked before this was stored.
                await self._unmade(made)
                raise CustodyError(why_not)
            if failure is not None:
                raise failure

    async def open(self, epochs: Iterable[str]) -> Opened:
        """Have the service unwrap what it can of these epochs' keys. Raises CustodyError if it cannot be asked."""
        wanted = frozenset(epochs)
        records = {epoch: key for epoch, key in (await self._own(wanted)).items() if key.wrapped}
        if not records:
            return Opened({}, wanted, None)
        service = await self._service()
        asked, failure = await _of_each(records, lambda epoch: self._unwrapped(records[epoch], service))
        found = {epoch: secret for epoch, secret in asked.items() if secret is not None}
        return Opened(found, (wanted - records.keys()) | (asked.keys() - found.keys()), failure)

    async def recorded(self, epochs: Iterable[str]) -> frozenset[str]:
        """Return those of these epochs for which a key was ever drawn, as far as is stored. Raises CustodyError."""
        return frozenset(await self._stored.read(epochs))

    async def all(self) -> Mapping[str, bool]:
        """Return every epoch of which there is a record of this domain, and whether its key was revoked.

        Raises CustodyError.
        """
        held = await self._stored.held()
        return {epoch: not record.wrapped for epoch, record in self._of_domain(held.records).items()}

    async def leads_there(self) -> None:
        """Raise CustodyError unless this way leads to the service that wrapped what there is, and may be gone.

        The service is asked about a key that nobody makes: which one it is it tells everybody, whatever the mount.
        """
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
        """End every key, and return what is left to do: when that is nothing, no Secret is there either.

        `asked` returns the epochs about which somebody will ask, None if nobody knows which: their notes stay. `over`
        has the records of notes whose end the service confirmed at earlier looks, and is brought up to date: it is not
        asked about them again. Raises CustodyError.
        """
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

    async def revoke(self, epochs: Iterable[str]) -> Mapping[str, Word | None]:
        """Take the wrapped keys out of their Secrets, and keep note of what the service has to delete.

        Returns by whom each was taken out, None for one that is still there. What is stored nowhere is given to no pod;
        of what this version cannot read that cannot be said. Raises CustodyError.
        """
        wanted = tuple(epochs)
        at, shards = format_timestamp(self._now()), by_shard(wanted)
        for shard, some in shards.items():
            await self._stored.change(shard, _revoked(some, at))
        held = await self._stored.held(shards)
        return {epoch: self._revocation(epoch, held, at) for epoch in wanted}

    async def destroy(self, epochs: Iterable[str]) -> Mapping[str, Destruction]:
        """Have the service delete the keys that wrapped these, ask it again, and return its word."""
        ended = await self.end(epochs)
        if ended.failure is not None:
            raise ended.failure
        return ended.ends

    async def end(self, epochs: Iterable[str]) -> Ended:
        """Do it for those of these revoked keys that it can be done for. Raises CustodyError if nobody can be asked."""
        wanted = tuple(epochs)
        records = await self._own(wanted)
        service = await self._service()
        return Ended(*await _of_each(wanted, lambda epoch: self._destroyed(records.get(epoch), service)))

    async def forget(self, epochs: Iterable[str]) -> None:
        """Remove the notes of keys whose end is on record: without them nobody can ask for it again."""
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
        """Have the service delete what it has just made, and remove what was stored of it."""
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
        """Return the records of these epochs that name the key which is theirs.

        Whoever may write the namespace's Secrets can put another domain's record there: its key is neither unwrapped
        for this one nor deleted.
        """
        return self._of_domain(await self._stored.read(epochs))

    def _of_domain(self, stored: Mapping[str, WrappedKey]) -> dict[str, WrappedKey]:
        return {epoch: one for epoch, one in stored.items() if one.key == wrapping_key(self.domain, epoch)}

    def _revocation(self, epoch: str, held: Held, at: str) -> Word | None:
        record = held.records.get(epoch)
        if epoch in held.unreadable or (record is not None and record.wrapped):
            return None
        since = record.revoked_at if record is not None else ""
        return Word(Party.OPERATOR, self._operator, since or at)

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

    def _word_of(self, service: Service) -> Word:
        return Word(Party.CUSTODY, f"transit:{service.cluster}", format_timestamp(self._now()))

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
    """Ask about several epochs at a time, as many as there are connections: one that waited for a connection would
    use up the time in which its answer is to come.

    Returns what came of it. After a failure that is not of one key alone nothing more is begun, what is under way ends,
    and the failure is told.
    """
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
