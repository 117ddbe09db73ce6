"""Who may hold keys that are in processes only, noted for the operators to come: the end of a key is the end of each.

Observes: pods of models and of the operator, notes (`custody.holders`). Writes: the note about a namespace, before this
operator asks for keys or brings any. Runs again when: a pod or an operator before this one may have ended.

How a former operator is known to have none: it said so when it ended in good order, or a process says so that was
started in the same pod, or its pod is on its way out and the kubelet reports its containers as ended. One whose pod
went without anybody seeing that is named for each key that it may have had, and so is a pod of a model; such a key can
be revoked, and is never called destroyed. The same holds if the note before is not of the leader before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from kvstrata.api.scalars import format_timestamp
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import POD
from kvstrata.contract.receipt.vocabulary import KeyCustody as Kind
from kvstrata.model.keyholders import FORMER, FormerHolders, HoldersNote
from kvstrata.model.keys import LetGo, Release
from kvstrata.model.pods import Pod
from kvstrata.plan.erasure.gather import epoch_of
from kvstrata.plan.keys.custody import in_force
from kvstrata.reconcile.erasure.record_store import Keep

from .keys import CustodyError
from .keys.holders import HolderNotes, StoredNote
from .memorykeys import MemoryKeys
from .store import Store

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""From a look for ends, or a note that could not be written, to the next."""
WORD_WITHIN_S = 5.0
"""How long a process that ends takes at most to leave word."""


@dataclass(slots=True)
class _Known:
    """A note as this process left it. `of_before` are ids of keys that may have been drawn before it led."""

    note: HoldersNote
    stored: StoredNote | None
    of_before: frozenset[str]
    doubtful: bool = False
    """Whether somebody else may have written it, or a write's answer was not heard."""


class KeyHolders:
    """The notes of one operator process. `namespace` is the operator's, `operator` names its pod, `leading` is whether
    it may write, `now` the wall clock in UTC."""

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        store: Store,
        memory: MemoryKeys,
        operator: str,
        now: Callable[[], datetime],
        leading: Callable[[], bool],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube, self._namespace, self._store, self._memory = kube, namespace, store, memory
        self._operator, self._now, self._leading, self._monotonic = operator, now, leading, monotonic
        self._notes, self._keep = HolderNotes(kube, namespace), Keep(kube, namespace)
        self._known: dict[str, _Known] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._not_before: dict[str, float] = {}

    async def enter(self, namespace: str) -> None:
        """Have it noted that this operator and all live pods of a namespace may have keys. Raises CustodyError.

        Call it before keys are asked for or brought.
        """
        if not self._in_memory(namespace):
            return
        async with self._locks[namespace]:
            known = await self._opened(namespace)
            if not (live := self._live(namespace)) <= known.note.pods:
                await self._write(namespace, known, known.note.entering(live))

    def is_due(self, namespace: str) -> bool:
        """Whether `tend` has something to do."""
        if not self._in_memory(namespace) or self._monotonic() < self._not_before.get(namespace, 0.0):
            return False
        known = self._known.get(namespace)
        if known is None:
            return not self._is_over(namespace)
        gone = known.note.pods - self._present(namespace)
        return bool(gone or self._others(known.note)) or self._is_over(namespace)

    async def tend(self, namespace: str) -> None:
        """Look which holders ended, and note it. Raises CustodyError."""
        self._not_before[namespace] = self._monotonic() + LOOK_S
        async with self._locks[namespace]:
            known = await self._opened(namespace)
            note, ends = known.note, list[Release]()
            if self._others(note):
                note = note.hearing(*await self._words(namespace, known))
                note, ends = await self._settled(namespace, note, known.of_before)
            await self._write(namespace, known, self._without_gone(namespace, note, known.of_before))
            for end in ends:
                self._memory.custody(namespace).let_go(end)
            if self._is_over(namespace) and known.stored is not None:
                await self._notes.remove(known.stored)
                del self._known[namespace]

    @asynccontextmanager
    async def telling_of_former_self(self) -> AsyncIterator[None]:
        """Note that the process which led in this pod before has ended, while this one does not lead: afterwards what
        is noted of this pod is about this process."""
        telling = asyncio.create_task(self._tell_of_former_self(), name="former self")
        try:
            yield
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)

    async def leave(self) -> None:
        """Overwrite every key, and leave word of it: without that the next operator has to see this one's end.

        Call it when nobody in this process uses keys any more.
        """
        await self._memory.end()
        try:
            async with asyncio.timeout(WORD_WITHIN_S):
                await self._say(LetGo.SAID)
        except (CustodyError, TimeoutError) as error:
            log.info("it was not noted that this process has no data keys any more", extra={"error": str(error)})

    async def _tell_of_former_self(self) -> None:
        while True:
            try:
                await self._say(LetGo.ENDED)
            except CustodyError as error:
                log.info("the end of a former process was not noted", extra={"error": str(error)})
                await asyncio.sleep(LOOK_S)
            else:
                return

    async def _say(self, how: LetGo) -> None:
        """Note that no process of this pod that led has a key any more."""
        word = self._release(self._operator, how)
        async for stored in self._notes.listed():
            if stored.note is not None and (told := stored.note.hearing(word)) != stored.note:
                await self._notes.write(stored.namespace, told, stored)

    async def _opened(self, namespace: str) -> _Known:
        """Return what is noted; at first, take over what the leader before left."""
        if (known := self._known.get(namespace)) is not None:
            return known
        stored = await self._notes.read(namespace)
        before, term = stored.note if stored is not None else None, self._store.term
        ids = await self._ids_of_before(namespace)
        formers: dict[str, Release | None]
        if before is not None and before.term in (term - 1, term):
            note = replace(before, term=term).about(ids).hearing(self._release(self._operator, LetGo.ENDED))
            note, ends = await self._settled(namespace, note, ids)
            formers = dict.fromkeys(note.operators) | {end.holder: end for end in ends}
        else:
            # Somebody led who left no note, or it is of another history.
            pods, lost = (before.pods, before.unaccounted) if before is not None else (frozenset[str](), {})
            note, formers = HoldersNote(term, {}, pods, lost).losing_sight(FORMER, ids), {FORMER: None}
        note = self._without_gone(namespace, note, ids)
        known = _Known(note, stored, ids)
        await self._write(namespace, known, replace(note, operators={**note.operators, self._operator: None}))
        self._memory.inherit(namespace, FormerHolders(formers, note.pods, note.unaccounted))
        self._known[namespace] = known
        return known

    async def _ids_of_before(self, namespace: str) -> frozenset[str]:
        """Return the ids of keys that may have been drawn before: those that bundles name, and those of erasures."""
        custody, ids = self._memory.custody(namespace), {*self._memory.wanted(namespace).values()}
        try:
            records = [record async for record in self._keep.records() if record.namespace == namespace]
        except KubeError as error:
            raise CustodyError(f"erasures that are kept could not be listed: {error.status} {error.reason}") from error
        for record in records:
            for key in record.keys:
                left = epoch_of(record, key.fingerprint)
                if key.custody is Kind.MEMORY and left is not None and not custody.knows(left.old):
                    ids.add(key.fingerprint)
        return frozenset(ids)

    async def _settled(
        self, namespace: str, note: HoldersNote, ids: frozenset[str]
    ) -> tuple[HoldersNote, list[Release]]:
        """Return a note without the operators of whom there is nothing to wait for, and the ends that are known."""
        ends = [one for one in note.operators.values() if one is not None]
        others = self._others(note)
        there = await self._operators() if others else {}
        for name in others:
            if name not in there:
                note = note.losing_sight(name, ids | self._memory.custody(namespace).held_by(name)).without(name)
                log.warning("an operator went that had data keys, and nobody saw its end", extra={"operator": name})
            elif _has_ended(there[name]):
                ends.append(self._release(name, LetGo.ENDED))
        for end in ends:
            note = note.without(end.holder)
        return note, ends

    def _without_gone(self, namespace: str, note: HoldersNote, ids: frozenset[str]) -> HoldersNote:
        """Return a note without pods that ended or vanished."""
        gone = note.pods - self._present(namespace)
        departed = self._store.domain(namespace).departures.values()
        clean = {one.uid for departures in departed for one in departures if one.clean}
        finished = {pod.uid for pod in self._pods(namespace) if pod.finished}
        for uid in sorted(gone - clean - finished):
            note = note.losing_sight(uid, ids | self._memory.custody(namespace).held_by(uid))
        return note.leaving(gone)

    async def _words(self, namespace: str, known: _Known) -> list[Release]:
        """Read the note again; return what operators said in it since."""
        stored = await self._notes.read(namespace)
        if stored is not None and stored.note is not None and stored.note.term > self._store.term:
            raise CustodyError("another operator leads, and wrote the note of who holds keys")
        known.stored, known.doubtful = stored, False
        said = stored.note.operators.values() if stored is not None and stored.note is not None else ()
        return [one for one in said if one is not None]

    async def _write(self, namespace: str, known: _Known, note: HoldersNote) -> None:
        if known.doubtful:
            note = note.hearing(*await self._words(namespace, known))
        if known.stored is None or known.stored.note != note:
            if not self._leading():
                raise CustodyError("this process no longer leads")
            known.doubtful = True
            known.stored = await self._notes.write(namespace, note, known.stored)
            known.doubtful = False
        known.note = note

    async def _operators(self) -> dict[str, Mapping[str, Any]]:
        """Return the pods of the operator's namespace by name."""
        try:
            return {raw["metadata"]["name"]: raw async for raw in self._kube.list(POD, self._namespace)}
        except KubeError as error:
            raise CustodyError(f"the operator's pods cannot be listed: {error.status} {error.reason}") from error

    def _others(self, note: HoldersNote) -> list[str]:
        return sorted(name for name, one in note.operators.items() if one is None and name != self._operator)

    def _in_memory(self, namespace: str) -> bool:
        domain = self._store.world(namespace).domain
        return domain is None or in_force(domain) is Kind.MEMORY

    def _is_over(self, namespace: str) -> bool:
        """Whether nobody has keys of a namespace, and nobody will ask for their end."""
        gone = self._store.world(namespace).domain is None and not self._store.domain(namespace).erasures
        return gone and not self._present(namespace)

    def _pods(self, namespace: str) -> Iterator[Pod]:
        for pods in self._store.domain(namespace).pods.values():
            yield from pods.values()

    def _present(self, namespace: str) -> frozenset[str]:
        return frozenset(pod.uid for pod in self._pods(namespace) if not pod.finished)

    def _live(self, namespace: str) -> frozenset[str]:
        return frozenset(pod.uid for pod in self._pods(namespace) if pod.live)

    def _release(self, holder: str, how: LetGo) -> Release:
        return Release(holder, how, format_timestamp(self._now()))


def _has_ended(pod: Mapping[str, Any]) -> bool:
    """Whether the kubelet reported all containers of an operator's pod as ended, and none will be started there again.

    Of a pod in which one will be, whoever is started there tells of its former self.
    """
    status = pod.get("status") or {}
    states = [container.get("state") or {} for container in status.get("containerStatuses") or ()]
    last = "deletionTimestamp" in pod["metadata"] or status.get("phase") in ("Succeeded", "Failed")
    return last and bool(states) and all("terminated" in state for state in states)
