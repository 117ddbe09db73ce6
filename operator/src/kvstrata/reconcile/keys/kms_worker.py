"""Runs the work of `plan.keys.kms` beside the loop, which does not wait: a task for each namespace with a KMS.

Observes: the world, records of wrapped keys, and orders of the plan (`KeepInKms`). Writes: records, through
`kms_custody`; keys into the ring; their ids, lost epochs and problems into the store. Runs again when: a failure's
pause has passed, or the plan orders another key. The task ends when nothing is due.

A new leader has everything unwrapped; until then the plans see what bundles name, so that pods go on. It finds the
unfinished work of a former process in the Secrets. `kms_domains` ends the keys of deleted domains.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from kvstrata.api.scalars import format_timestamp
from kvstrata.contract.receipt.facts import Statement
from kvstrata.contract.receipt.vocabulary import KeyCustody as Kind
from kvstrata.contract.receipt.vocabulary import Party
from kvstrata.model.keys import Destruction, Undestroyed
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.plan.actions import KeepInKms
from kvstrata.plan.keys.custody import active_custody, named_in_bundles
from kvstrata.plan.keys.data_keys import epochs_in_use, epochs_with_a_future
from kvstrata.plan.keys.kms import KeyNeeds, KeyWork, judge_unwrapped, plan_keys
from kvstrata.reconcile import metrics
from kvstrata.reconcile.audit import tell_data_keys
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.keys.key_ring import KeyRing
from kvstrata.reconcile.keys.kms_custody import UNRECORDED, KmsCustody, OneKeyError
from kvstrata.reconcile.keys.kms_domains import KmsDomains, is_unreadable, tell_unended
from kvstrata.reconcile.keys.wrapped_keys import by_shard
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.store import Store

log = logging.getLogger(__name__)

RETRY_S = (1.0, 2.0, 5.0, 15.0, 30.0)


@dataclass(slots=True)
class _Work:
    """What is known of a namespace beside the world: the plan's last order, and the state of the task."""

    wanted: frozenset[str] = frozenset()
    spent: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)
    """Epochs with which this process is done: given up, ended, or without a usable key. No late answer revives them."""
    surveyed: bool = False
    """Whether all records were read, and everything due was done. Later turns read those of the order only."""
    stuck: str = ""
    """The Secret that failed last; all others are tried before it."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class KmsKeys:
    """The keys that services wrap; unwrapped ones are in `ring`. `operator` is named in revocations, `now` is the wall
    clock in UTC, `leading` whether this process may write. A context manager, for one event loop; leaving it cancels
    running work."""

    def __init__(
        self,
        store: Store,
        queue: WorkQueue,
        ring: KeyRing,
        kms_domains: KmsDomains,
        operator: str,
        now: Callable[[], datetime],
        leading: Callable[[], bool],
    ) -> None:
        self._store, self._queue, self._ring, self._kms_domains = store, queue, ring, kms_domains
        self._operator, self._now, self._leading = operator, now, leading
        self._work: dict[str, _Work] = {}
        self._settling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> KmsKeys:
        self._settling = asyncio.create_task(self._kms_domains.run(), name="keys of deleted domains")
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [task for task in (self._settling, *(work.task for work in self._work.values())) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._kms_domains.close()

    def begin(self) -> None:
        """Start unwrapping everything in use, after the world is known and before anything is planned. If the
        CacheDomain cannot be read, this waits until it can."""
        for namespace in self._store.namespaces:
            world, domain = self._store.world(namespace), self._store.domain(namespace)
            named = named_in_bundles(world) if self._uses_kms(namespace) else {}
            if world.domain is not None and self._uses_kms(namespace):
                domain.data_keys, domain.keys_unwrapping = named, frozenset(epochs_in_use(world))
            elif not named:
                continue
            self._wake(namespace)

    def keep(self, namespace: str, order: KeepInKms) -> None:
        """Start drawing keys for epochs, and ending keys that no pod needs any more."""
        if self._store.world(namespace).domain is None or not self._uses_kms(namespace):
            return
        work = self._work.setdefault(namespace, _Work())
        if {*order.epochs} - work.wanted or {*order.spent} - work.spent:
            work.woken.set()
        work.wanted = frozenset(order.epochs)
        work.spent |= {*order.spent}
        self._wake(namespace)

    async def revoke(self, namespace: str, domain: str, epochs: Iterable[str]) -> Mapping[str, Statement]:
        """Remove wrapped keys of the domain with this id from their Secrets, and stop giving out these keys. Raises
        CustodyError."""
        wanted = tuple(epochs)
        self._give_up(namespace, wanted)
        custody = await self._kms_domains.of_domain(namespace, domain)
        if custody is None:
            # A key without a record reaches no pod.
            return dict.fromkeys(wanted, Statement(Party.OPERATOR, self._operator, format_timestamp(self._now())))
        words = await custody.revoke(wanted)
        gone = {epoch: word for epoch, word in words.items() if word is not None}
        if kept := len(words) - len(gone):
            raise CustodyError(
                f"{kept} data keys are in Secrets still, or this version cannot read what is said of them"
            )
        return gone

    async def destroy(self, namespace: str, domain: str, epochs: Iterable[str]) -> Mapping[str, Destruction]:
        """Have the service delete what wrapped revoked keys. Raises CustodyError."""
        custody = await self._kms_domains.of_domain(namespace, domain)
        return dict.fromkeys(epochs, UNRECORDED) if custody is None else (await custody.destroy(epochs)).whole()

    def _give_up(self, namespace: str, epochs: Iterable[str]) -> None:
        gone, domain = frozenset(epochs), self._store.domain(namespace)
        self._work.setdefault(namespace, _Work()).settled |= gone
        self._ring.remove(namespace, gone)
        domain.data_keys = {epoch: key for epoch, key in domain.data_keys.items() if epoch not in gone}
        domain.judged_epochs -= gone
        domain.keys_unwrapping -= gone

    def _wake(self, namespace: str) -> None:
        work = self._work.setdefault(namespace, _Work())
        if work.task is None or work.task.done():
            work.task = asyncio.create_task(self._until_done(namespace, work), name=f"keys of {namespace}")

    def _uses_kms(self, namespace: str) -> bool:
        world = self._store.world(namespace)
        return is_unreadable(world) if world.domain is None else active_custody(world.domain) is Kind.KMS

    async def _until_done(self, namespace: str, work: _Work) -> None:
        failures = 0
        while self._uses_kms(namespace):
            work.woken.clear()
            work.surveyed, survey = False, not work.surveyed
            try:
                work.surveyed = await self._turn(namespace, work, survey=survey)
                self._tell(namespace, "")
            except CustodyError as error:
                self._tell(namespace, str(error))
            except Exception:
                log.exception("data keys could not be kept; this is a defect", extra={"namespace": namespace})
                metrics.FAILURES.labels("CacheDomain", "Bug").inc()
            if work.surveyed and not work.woken.is_set():
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S[min(failures, len(RETRY_S) - 1)]):
                    await work.woken.wait()
            failures = 0 if work.surveyed else failures + 1
        # The keys of a deleted domain are ended elsewhere, and a new domain draws other epochs.
        self._store.domain(namespace).keys_unwrapping = frozenset()
        del self._work[namespace]
        self._tell(namespace, "")

    async def _turn(self, namespace: str, work: _Work, *, survey: bool) -> bool:
        """Do everything that is due; return whether all of it is done. Raises the first CustodyError at the end."""
        custody, domain = await self._kms_domains.of_namespace(namespace), self._store.domain(namespace)
        records = await custody.records(None if survey else work.wanted | work.spent)
        world = self._store.world(namespace)
        # The scope of a lost key has a new epoch by now, or is ending.
        domain.keys_lost &= epochs_with_a_future(world)
        due = plan_keys(self._needs(namespace, work), records, self._ring.epochs(namespace), work.settled)
        if domain.keys_unwrapping - due.unwrap:
            domain.keys_unwrapping &= due.unwrap
            self._queue_keys(namespace, everything=False)
        work.spent &= due.destroy
        failures = []
        for part in (self._take, self._end):
            try:
                await part(namespace, custody, work, due)
            except CustodyError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        if not self._is_of(namespace, custody):
            work.woken.set()
            return False
        return due.destroy <= work.settled

    def _needs(self, namespace: str, work: _Work) -> KeyNeeds:
        return KeyNeeds.of(self._store.world(namespace), work.wanted, work.spent)

    async def _take(self, namespace: str, custody: KmsCustody, work: _Work, due: KeyWork) -> None:
        """Draw, unwrap and hold keys, one Secret after the other, so that one failure delays no others for long."""
        portions, failures = by_shard(due.draw | due.unwrap), []
        for shard in sorted(portions, key=lambda shard: (shard <= work.stuck, shard)):
            work.stuck = shard
            try:
                await self._take_some(namespace, custody, work, due, frozenset(portions[shard]))
            except OneKeyError as error:
                failures.append(error)
        work.stuck = ""
        if failures:
            raise failures[0]

    async def _take_some(
        self, namespace: str, custody: KmsCustody, work: _Work, due: KeyWork, portion: Set[str]
    ) -> None:
        failure: CustodyError | None = None
        if fresh := portion & due.draw:
            self._require_leading()
            if not self._is_of(namespace, custody):
                return
            try:
                await custody.draw(fresh)
            except CustodyError as error:
                failure = error
        opened = await custody.open(portion)
        if not self._is_of(namespace, custody):
            # Another CacheDomain replaced it meanwhile: its epochs get new keys.
            return
        found = {epoch: secret for epoch, secret in opened.found.items() if secret is not None}
        none, unknown = opened.found.keys() - found.keys(), portion - opened.found.keys()
        refused = unknown if isinstance(opened.failure, OneKeyError) else frozenset[str]()
        judged = judge_unwrapped(due, self._needs(namespace, work), work.settled, found.keys(), none, refused)
        for epoch in judged.hold:
            self._ring.add(namespace, epoch, found[epoch])
        domain = self._store.domain(namespace)
        tell_data_keys(namespace, made=len(judged.hold - domain.data_keys.keys()), removed=0)
        kept = {epoch: key for epoch, key in domain.data_keys.items() if epoch not in none}
        domain.data_keys = {**kept, **self._ring.ids(namespace, judged.hold)}
        domain.keys_unwrapping -= portion - unknown
        domain.keys_lost |= judged.lost
        work.settled |= judged.settled
        if judged.lost:
            log.warning(
                "data keys cannot be unwrapped any more", extra={"namespace": namespace, "keys": len(judged.lost)}
            )
        if left := refused & work.settled:
            log.warning("unused data keys stay wrapped", extra={"namespace": namespace, "keys": len(left)})
        self._queue_keys(namespace, everything=bool(judged.lost))
        if failure := failure or (opened.failure if unknown - work.settled else None):
            raise failure

    async def _end(self, namespace: str, custody: KmsCustody, work: _Work, due: KeyWork) -> None:
        """Have the service delete the wrapping keys of unused keys, and remove their notes unless an erasure needs
        them. Keys that the service still has are retried; where it cannot know, the record stays as a note."""
        if not due.destroy or not self._is_of(namespace, custody):
            return
        self._require_leading()
        spent = frozenset(work.spent & due.destroy)
        await custody.revoke(spent)
        ended = await custody.destroy(due.destroy)
        erasures = self._store.domain(namespace).erasures.values()
        asked = {left.old for erasure in erasures for left in erasure.record.epochs}
        answered = {epoch for epoch, end in ended.found.items() if end.why_not is not Undestroyed.STILL_THERE}
        await custody.forget(epoch for epoch in (spent & answered) - asked if ended.found[epoch].confirmed is not None)
        tell_unended(namespace, ended.found.values())
        self._give_up(namespace, answered)
        work.spent -= answered
        if done := spent & answered:
            tell_data_keys(namespace, made=0, removed=len(done))
            self._queue_keys(namespace, everything=False)
        if ended.failure is not None:
            raise ended.failure

    def _is_of(self, namespace: str, custody: KmsCustody) -> bool:
        return self._store.world(namespace).domain_id == custody.domain

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
