"""Runs the work of `plan.keys.kms` beside the loop, which does not wait: a task for each namespace with a KMS.

Observes: the world, records of wrapped keys, and orders of the plan (`KeepInKms`). Writes: records, through
`kms_custody`; keys into the ring; their ids, lost epochs and problems into the store. Runs again when: a failure's
pause has passed, or the plan orders another key. The task ends when nothing is due.

A new leader has everything unwrapped; until then the plans see the keys that bundles name, so that pods continue.
`kms_domains` ends the keys of deleted domains.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field

from kvstrata.api.cachedomain import DOMAIN_NAME
from kvstrata.contract.receipt.facts import Statement
from kvstrata.contract.receipt.vocabulary import KeyCustody as Kind
from kvstrata.model.keys import Destruction, Undestroyed
from kvstrata.model.refs import Key
from kvstrata.plan.actions import KeepInKms
from kvstrata.plan.keys.custody import active_custody
from kvstrata.plan.keys.data_keys import epochs_in_use, epochs_with_a_future
from kvstrata.plan.keys.kms import KeyNeeds, KeyWork, judge_unwrapped, named_in_bundles, plan_keys
from kvstrata.reconcile import metrics
from kvstrata.reconcile.audit import record_data_keys
from kvstrata.reconcile.domain_store import DomainStore
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.keys.key_ring import KeyRing
from kvstrata.reconcile.keys.kms_custody import UNRECORDED, KmsCustody, OneKeyError
from kvstrata.reconcile.keys.kms_domains import KmsDomains, is_unreadable, record_unended
from kvstrata.reconcile.keys.wrapped_keys import by_shard
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.store import Store

log = logging.getLogger(__name__)

RETRY_S = (1.0, 2.0, 5.0, 15.0, 30.0)


@dataclass(slots=True, eq=False)
class NamespaceKeys:
    """The keys of one namespace, and the task that does the work that is due.

    `wanted` and `spent`: epochs of the plan's last order. `settled`: epochs with which this process is done: given up,
    ended, or without a usable key; no late answer revives them. `stuck`: the Secret that failed last; it is tried last.
    """

    namespace: str
    store: Store
    queue: WorkQueue
    ring: KeyRing
    kms_domains: KmsDomains
    wanted: frozenset[str] = frozenset()
    spent: frozenset[str] = frozenset()
    settled: frozenset[str] = frozenset()
    stuck: str = ""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def domain(self) -> DomainStore:
        return self.store.domain(self.namespace)

    @property
    def uses_kms(self) -> bool:
        """Whether the CacheDomain's custody is a KMS, or may be, because it cannot be read."""
        known = self.domain
        return is_unreadable(known) if known.domain is None else active_custody(known.domain) is Kind.KMS

    def wake(self) -> None:
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._until_done(), name=f"keys of {self.namespace}")

    def give_up(self, epochs: Iterable[str]) -> None:
        """Stop giving out the keys of these epochs, also those that are being unwrapped."""
        gone, domain = frozenset(epochs), self.domain
        self.settled |= gone
        self.ring.remove(self.namespace, gone)
        domain.data_keys = {epoch: key for epoch, key in domain.data_keys.items() if epoch not in gone}
        domain.judged_epochs -= gone
        domain.keys_unwrapping -= gone

    async def _until_done(self) -> None:
        failures = 0
        while self.uses_kms:
            self.woken.clear()
            done = False
            try:
                done = await self.turn()
                self._set_problem("")
            except CustodyError as error:
                self._set_problem(str(error))
            except Exception:
                log.exception("data keys could not be kept; this is a defect", extra={"namespace": self.namespace})
                metrics.FAILURES.labels("CacheDomain", "Bug").inc()
            if done and not self.woken.is_set():
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S[min(failures, len(RETRY_S) - 1)]):
                    await self.woken.wait()
            failures = 0 if done else failures + 1
        # The keys of a deleted domain are ended elsewhere, and a new domain draws other epochs.
        self.domain.keys_unwrapping = self.wanted = self.spent = frozenset()
        self._set_problem("")

    async def turn(self) -> bool:
        """Do the due work, one Secret after the other; return whether all is done. Raises the first CustodyError at the
        end, so that one failure delays no others for long."""
        custody, domain = await self.kms_domains.of_namespace(self.namespace), self.domain
        records = await custody.records()
        # The scope of a lost key has a new epoch by now, or is ending.
        domain.keys_lost &= epochs_with_a_future(domain)
        due = plan_keys(self._needs(), records, self.ring.epochs(self.namespace), self.settled)
        if domain.keys_unwrapping - due.unwrap:
            domain.keys_unwrapping &= due.unwrap
            self.queue.add_all(self.store.key_holders(self.namespace))
        self._lose(due.lost)
        self.spent &= due.destroy
        portions, failures = by_shard(due.draw | due.unwrap | due.destroy), list[CustodyError]()
        for shard in sorted(portions, key=lambda shard: (shard <= self.stuck, shard)):
            self.stuck = shard
            for part in (self._take, self._end):
                try:
                    await part(custody, due.within(portions[shard]))
                except CustodyError as error:
                    failures.append(error)
            if not all(isinstance(error, OneKeyError) for error in failures):
                raise failures[0]
        self.stuck = ""
        if failures:
            raise failures[0]
        if not self._is_of(custody):
            self.woken.set()
        return due.destroy <= self.settled

    def _needs(self) -> KeyNeeds:
        domain = self.domain
        lasting = epochs_with_a_future(domain) - domain.keys_lost
        return KeyNeeds(epochs_in_use(domain), lasting, self.wanted, domain.data_keys.keys(), self.spent)

    async def _take(self, custody: KmsCustody, due: KeyWork) -> None:
        """Draw, unwrap and hold keys. Answers about a CacheDomain that was replaced meanwhile are dropped."""
        if not (due.draw or due.unwrap) or not self._is_of(custody):
            return
        failure: CustodyError | None = None
        if due.draw:
            self.kms_domains.require_leading()
            try:
                await custody.draw(due.draw)
            except CustodyError as error:
                failure = error
        asked, domain = due.draw | due.unwrap, self.domain
        opened = await custody.open(asked)
        if not self._is_of(custody):
            return
        found = {epoch: secret for epoch, secret in opened.found.items() if secret is not None}
        none, unknown = opened.found.keys() - found.keys(), asked - opened.found.keys()
        refused = unknown if isinstance(opened.failure, OneKeyError) else frozenset[str]()
        for epoch in found.keys() - self.settled:
            self.ring.add(self.namespace, epoch, found[epoch])
        lost, left = judge_unwrapped(due, self._needs(), none, refused)
        record_data_keys(self.namespace, made=len(found.keys() - domain.data_keys))
        domain.data_keys = {**domain.data_keys, **self.ring.ids(self.namespace, found)}
        domain.keys_unwrapping -= opened.found.keys()
        self.settled |= left
        self._lose(lost)
        if refused & left:
            about = {"namespace": self.namespace, "why": str(opened.failure)}
            log.warning("unused data keys stay wrapped", extra=about)
        self.queue.add_all(self.store.key_holders(self.namespace))
        if failure := failure or (opened.failure if unknown - self.settled else None):
            raise failure

    def _lose(self, epochs: Set[str]) -> None:
        """Have epochs replaced whose keys cannot be had any more."""
        if epochs:
            log.warning("data keys are lost", extra={"namespace": self.namespace, "keys": len(epochs)})
            known = self.domain.data_keys.items()
            self.domain.data_keys = {epoch: key for epoch, key in known if epoch not in epochs}
            self.domain.keys_lost |= epochs
            self.queue.add_all(self.store.keys_of(self.namespace))

    async def _end(self, custody: KmsCustody, due: KeyWork) -> None:
        """Have the service delete the wrapping keys of unused keys, and remove their notes unless an erasure needs
        them. Keys that the service still has are retried; where it cannot know, the record stays as a note."""
        if not due.destroy or not self._is_of(custody):
            return
        self.kms_domains.require_leading()
        spent = self.spent & due.destroy
        await custody.revoke(spent)
        ended = await custody.destroy(due.destroy)
        asked = {left.old for erasure in self.domain.erasures.values() for left in erasure.record.epochs}
        answered = {epoch for epoch, end in ended.found.items() if end.why_not is not Undestroyed.STILL_THERE}
        await custody.forget(epoch for epoch in (spent & answered) - asked if ended.found[epoch].confirmed is not None)
        record_unended(self.namespace, ended.found.values())
        self.give_up(answered)
        self.spent -= answered
        record_data_keys(self.namespace, removed=len(spent & answered))
        self.queue.add_all(self.store.key_holders(self.namespace))
        ended.whole()

    def _is_of(self, custody: KmsCustody) -> bool:
        return self.domain.domain_id == custody.domain

    def _set_problem(self, problem: str) -> None:
        if self.domain.keys_problem != problem:
            self.domain.keys_problem = problem
            if problem:
                about = {"namespace": self.namespace, "problem": problem}
                log.warning("the custody of data keys is away", extra=about)
            self.queue.add(Key("CacheDomain", self.namespace, DOMAIN_NAME))


class KmsKeys:
    """The keys that services wrap; unwrapped ones are in `ring`. Leaving the context cancels running work."""

    def __init__(self, store: Store, queue: WorkQueue, ring: KeyRing, kms_domains: KmsDomains) -> None:
        self._store, self._kms_domains, self._shared = store, kms_domains, (store, queue, ring, kms_domains)
        self._namespaces: dict[str, NamespaceKeys] = {}
        self._settling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> KmsKeys:
        self._settling = asyncio.create_task(self._kms_domains.run(), name="keys of deleted domains")
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [task for task in (self._settling, *(keys.task for keys in self._namespaces.values())) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._kms_domains.close()

    def begin(self) -> None:
        """Start unwrapping everything in use, once the world is known and before anything is planned."""
        for namespace in self._store.namespaces:
            keys = self._of(namespace)
            if not keys.uses_kms:
                continue
            domain = keys.domain
            named = named_in_bundles(domain)
            if domain.domain is not None:
                domain.data_keys, domain.keys_unwrapping = named, frozenset(epochs_in_use(domain))
            elif not named:
                continue
            keys.wake()

    def keep(self, namespace: str, order: KeepInKms) -> None:
        """Start drawing keys for epochs, and ending keys that no pod needs any more."""
        keys, epochs, spent = self._of(namespace), frozenset(order.epochs), frozenset(order.spent)
        if keys.domain.domain is None or not keys.uses_kms:
            return
        if epochs - keys.wanted or spent - keys.spent:
            keys.woken.set()
        keys.wanted, keys.spent = epochs, keys.spent | spent
        keys.wake()

    async def revoke(self, namespace: str, domain: str, epochs: Iterable[str]) -> Mapping[str, Statement]:
        """Stop giving out keys of the domain with this id, and remove them from their Secrets. Raises CustodyError."""
        wanted = tuple(epochs)
        self._of(namespace).give_up(wanted)
        return await self._kms_domains.revoke(namespace, domain, wanted)

    async def destroy(self, namespace: str, domain: str, epochs: Iterable[str]) -> Mapping[str, Destruction]:
        custody = await self._kms_domains.of_domain(namespace, domain)
        return dict.fromkeys(epochs, UNRECORDED) if custody is None else (await custody.destroy(epochs)).whole()

    def _of(self, namespace: str) -> NamespaceKeys:
        return self._namespaces.setdefault(namespace, NamespaceKeys(namespace, *self._shared))
