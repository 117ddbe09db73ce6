"""Data keys that a key management service wraps: drawn, unwrapped and ended beside the loop, which does not wait.

Keys that were unwrapped are held in memory like those of custody Memory, and brought to pods by the same courier. What
Secrets have is worth nothing without the service. A process that begins to lead has everything unwrapped; until that
is done the plans see what bundles name, so that pods go on. A key whose record is there and that the service does not
unwrap any more is lost, and so is one that a bundle names and of which there is no record.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from kvstrata.adapters.kube import Kube
from kvstrata.api.scalars import format_timestamp
from kvstrata.contract.receiptfacts import Word
from kvstrata.contract.receiptwords import KeyCustody as Kind
from kvstrata.contract.receiptwords import Party
from kvstrata.model.keycustody import Destruction, Revocation, Undestroyed
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.plan.datakeys import epochs_in_use, epochs_with_a_future
from kvstrata.plan.keycustody import in_force, named_in_bundles
from kvstrata.plan.types import KeepInMemory

from . import metrics
from .audit import tell_memory
from .custody import CustodyError
from .custody.kms import KmsCustody
from .custody.services import KmsServices
from .custody.wrapped import WrappedKeys, by_secret
from .memorykeys import MemoryKeys
from .queue import WorkQueue
from .store import Store

log = logging.getLogger(__name__)

RETRY_S = (1.0, 2.0, 5.0, 15.0, 30.0)
"""From a service that did not do it to the next attempt."""


@dataclass(slots=True)
class _Work:
    """What a namespace's service is to be asked."""

    draw: set[str] = field(default_factory=set)
    unlock: set[str] = field(default_factory=set)
    spent: set[str] = field(default_factory=set)
    stuck: str = ""
    """The Secret whose keys could not be had last: the others have their turn before it."""
    task: asyncio.Task[None] | None = None


class KmsKeys:
    """The keys of one operator process that services wrap, and for everybody else those of `memory`.

    `operator` is whose word a revocation is, `now` the wall clock in UTC, `leading` whether this process may write.
    Use it as a context manager, within one event loop: it ends what is under way.
    """

    def __init__(
        self,
        kube: Kube,
        store: Store,
        queue: WorkQueue,
        memory: MemoryKeys,
        services: KmsServices,
        operator: str,
        now: Callable[[], datetime],
        leading: Callable[[], bool],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._kube, self._store, self._queue, self._memory, self._services = kube, store, queue, memory, services
        self._operator, self._now, self._leading, self._sleep = operator, now, leading, sleep
        self._work: dict[str, _Work] = {}
        self._ended: dict[str, set[str]] = {}
        """By namespace, epochs whose keys were given up: an answer that was under way brings none of them back."""

    async def __aenter__(self) -> KmsKeys:
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [work.task for work in self._work.values() if work.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._services.close()

    def begin(self) -> None:
        """Have everything unwrapped that is in use. Call it when the world is known, and before anything is planned."""
        for namespace in self._store.namespaces:
            world, domain = self._store.world(namespace), self._store.domain(namespace)
            if world.domain is None or in_force(world.domain) is not Kind.KMS:
                continue
            named, used = named_in_bundles(world), epochs_in_use(world)
            self._memory.custody(namespace)
            domain.data_keys, domain.keys_awaited = dict(named), frozenset(used)
            if used:
                self._work.setdefault(namespace, _Work()).unlock |= used
                self._wake(namespace)

    async def keep(self, namespace: str, order: KeepInMemory) -> None:
        """Have keys drawn for epochs, and ended that nobody needs any more; nobody waits for the service."""
        domain = self._store.world(namespace).domain
        if domain is None or in_force(domain) is not Kind.KMS:
            await self._memory.keep(namespace, order)
            return
        work = self._work.setdefault(namespace, _Work())
        work.draw |= {epoch for epoch in order.epochs if epoch not in work.unlock}
        work.spent |= {*order.spent}
        await self._give_up(namespace, order.spent)
        tell_memory(namespace, made=0, removed=len(order.spent))
        self._wake(namespace)

    async def revoke(self, namespace: str, epochs: Iterable[str]) -> Mapping[str, Revocation]:
        """Take wrapped keys out of their Secrets, and give these keys to nobody any more. Raises CustodyError."""
        wanted = tuple(epochs)
        await self._give_up(namespace, wanted)
        if self._store.world(namespace).domain is None:
            # With the domain its Secrets went: what is not there needs no owner.
            word = Word(Party.OPERATOR, self._operator, format_timestamp(self._now()))
            return {epoch: Revocation(Kind.KMS, word) for epoch in wanted}
        return await (await self._custody(namespace)).revoke(wanted)

    async def destroy(self, namespace: str, epochs: Iterable[str]) -> Mapping[str, Destruction]:
        """Have the service delete what wrapped these keys, and return its word. Raises CustodyError."""
        wanted = tuple(epochs)
        if self._store.world(namespace).domain is None:
            gone = "with the CacheDomain went the note of what the service has to delete"
            return {epoch: Destruction(Kind.KMS, None, Undestroyed.CUSTODY_CANNOT_KNOW, (gone,)) for epoch in wanted}
        return await (await self._custody(namespace)).destroy(wanted)

    async def _give_up(self, namespace: str, epochs: Iterable[str]) -> None:
        gone = frozenset(epochs)
        self._ended.setdefault(namespace, set()).update(gone)
        await self._memory.revoke(namespace, gone)

    def _wake(self, namespace: str) -> None:
        work = self._work[namespace]
        if work.task is None or work.task.done():
            work.task = asyncio.create_task(self._until_done(namespace, work), name=f"keys of {namespace}")

    async def _until_done(self, namespace: str, work: _Work) -> None:
        failures = 0
        while work.draw or work.unlock or work.spent:
            if self._store.world(namespace).domain is None:
                # With the domain its Secrets went, and who has another draws other epochs.
                for wanted in (work.draw, work.unlock, work.spent):
                    wanted.clear()
                return
            try:
                custody = await self._custody(namespace)
                await self._take(namespace, custody, work)
                await self._end(namespace, custody, work)
                self._tell(namespace, "")
                failures = 0
                continue
            except CustodyError as error:
                self._tell(namespace, str(error))
            except Exception:
                log.exception("data keys could not be kept; this is a defect", extra={"namespace": namespace})
                metrics.FAILURES.labels("CacheDomain", "Bug").inc()
            await self._sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
            failures += 1

    async def _take(self, namespace: str, custody: KmsCustody, work: _Work) -> None:
        """Have what is wanted drawn and unwrapped, and hold it, Secret by Secret: the first have theirs before the last
        are asked for, and one that cannot be had stands in nobody's way for long."""
        portions = by_secret(work.draw | work.unlock)
        for name in sorted(portions, key=lambda name: (name <= work.stuck, name)):
            work.stuck = name
            await self._take_some(namespace, custody, work, frozenset(portions[name]))
        work.stuck = ""

    async def _take_some(self, namespace: str, custody: KmsCustody, work: _Work, wanted: frozenset[str]) -> None:
        if fresh := wanted & work.draw:
            self._require_leading()
            await custody.draw(fresh)
        found = await custody.unlock(wanted)
        recorded = await custody.recorded(wanted - found.keys())
        domain, ring = self._store.domain(namespace), self._memory.custody(namespace)
        ended = self._ended.get(namespace, set())
        for epoch, secret in found.items():
            if epoch not in ended:
                ring.take(epoch, secret)
        missing = wanted - found.keys()
        lost = (recorded | frozenset(domain.data_keys)) & missing & epochs_with_a_future(self._store.world(namespace))
        kept = {epoch: key for epoch, key in domain.data_keys.items() if epoch not in missing}
        tell_memory(namespace, made=len(found.keys() - domain.data_keys), removed=0)
        domain.data_keys = {**kept, **ring.ids(found)}
        domain.keys_awaited -= wanted
        domain.keys_lost |= lost
        work.draw -= wanted
        work.unlock -= wanted
        if lost:
            log.warning("nobody has data keys any more", extra={"namespace": namespace, "keys": len(lost)})
        self._queue_keys(namespace, everything=bool(lost))

    async def _end(self, namespace: str, custody: KmsCustody, work: _Work) -> None:
        """Have the service delete what wrapped keys that nobody needs, and forget them unless an erasure asks again."""
        spent = frozenset(work.spent)
        if not spent:
            return
        self._require_leading()
        await custody.revoke(spent)
        ends = await custody.destroy(spent)
        asked = {
            one.old for erasure in self._store.domain(namespace).erasures.values() for one in erasure.record.epochs
        }
        await custody.forget(epoch for epoch, end in ends.items() if end.confirmed is not None and epoch not in asked)
        work.spent -= spent

    async def _custody(self, namespace: str) -> KmsCustody:
        domain = self._store.world(namespace).domain
        if domain is None or domain.status.domain_id is None:
            raise CustodyError("there is no CacheDomain that says where the key management service is")
        if domain.spec.kms is None:
            raise CustodyError("spec.kms of the CacheDomain is gone, and its keys are wrapped by a service")
        client = await self._services.client(namespace, domain.spec.kms)
        stored = WrappedKeys(self._kube, namespace, domain.owner_reference())
        return KmsCustody(client, stored, domain.status.domain_id, self._now, self._operator)

    def _require_leading(self) -> None:
        if not self._leading():
            raise CustodyError("this process no longer leads")

    def _tell(self, namespace: str, problem: str) -> None:
        domain = self._store.domain(namespace)
        if domain.keys_problem != problem:
            domain.keys_problem = problem
            if problem:
                log.warning("the custody of data keys is away", extra={"namespace": namespace, "problem": problem})
            self._queue.add(Key("CacheDomain", namespace, "default"))

    def _queue_keys(self, namespace: str, *, everything: bool) -> None:
        if everything:
            for key in self._store.all_keys():
                if key.namespace == namespace:
                    self._queue.add(key)
            return
        self._queue.add(Key("CacheDomain", namespace, "default"))
        for model in self._store.domain(namespace).objects["CachedModel"]:
            self._queue.add(Key(BUNDLE, namespace, model))
