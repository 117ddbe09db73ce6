"""Data keys that a key management service wraps: drawn, unwrapped and ended beside the loop, which does not wait.

Unwrapped keys are held in memory (`key_ring`) and sent to pods (`delivery`). A new leader has everything unwrapped;
until then the plans see what bundles name, so that pods go on. A key is lost if the service no longer unwraps its
record, or if a bundle names it and there is no record.

Unfinished work of a former process is found in the Secrets: records of epochs that no status names. Their keys are
unwrapped like others, so that the plans see and end them. `reconcile.keys.kms_domains` ends the keys of deleted
domains.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
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
    draw: set[str] = field(default_factory=set)
    unlock: set[str] = field(default_factory=set)
    strays: set[str] = field(default_factory=set)
    """Epochs that no status names and whose keys exist according to records."""
    spent: set[str] = field(default_factory=set)
    revoked: set[str] = field(default_factory=set)
    """Epochs whose keys a former process revoked, perhaps without deleting their wrapping keys."""
    ended: set[str] = field(default_factory=set)
    """Epochs whose keys were given up, so that late answers do not bring them back. Those that no status names are
    forgotten at the next turn."""
    unlisted: bool = False
    """Whether the leftovers of a former process are still to be listed."""
    stuck: str = ""
    """The portion that failed last; all others are tried before it."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def left(self) -> bool:
        return self.unlisted or any((self.draw, self.unlock, self.strays, self.spent, self.revoked))

    def clear(self) -> None:
        self.unlisted = False
        for wanted in (self.draw, self.unlock, self.strays, self.spent, self.revoked):
            wanted.clear()


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
            if world.domain is None and not (is_unreadable(world) and named_in_bundles(world)):
                continue
            if world.domain is not None and active_custody(world.domain) is not Kind.KMS:
                continue
            used = epochs_in_use(world)
            if world.domain is not None:
                domain.data_keys, domain.keys_unwrapping = dict(named_in_bundles(world)), frozenset(used)
            work = self._work.setdefault(namespace, _Work())
            work.unlock |= used
            work.unlisted = True
            self._wake(namespace)

    def keep(self, namespace: str, order: KeepInKms) -> None:
        """Start drawing keys for epochs, and ending keys that no pod needs any more."""
        domain = self._store.world(namespace).domain
        if domain is None or active_custody(domain) is not Kind.KMS:
            return
        work = self._work.setdefault(namespace, _Work())
        news = {*order.epochs} - work.unlock - work.draw
        work.draw |= news
        work.spent |= {*order.spent}
        if news:
            work.woken.set()
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
        wanted = tuple(epochs)
        custody = await self._kms_domains.of_domain(namespace, domain)
        if custody is None:
            unknown = Destruction(None, Undestroyed.CUSTODY_CANNOT_KNOW, (UNRECORDED,))
            return dict.fromkeys(wanted, unknown)
        return await custody.destroy(wanted)

    def _give_up(self, namespace: str, epochs: Iterable[str]) -> None:
        gone, work = frozenset(epochs), self._work.setdefault(namespace, _Work())
        for wanted in (work.draw, work.unlock, work.strays):
            wanted -= gone
        work.ended |= gone
        self._ring.remove(namespace, gone)
        domain = self._store.domain(namespace)
        domain.data_keys = {epoch: key for epoch, key in domain.data_keys.items() if epoch not in gone}
        domain.judged_epochs -= gone
        domain.keys_unwrapping -= gone

    def _wake(self, namespace: str) -> None:
        work = self._work[namespace]
        if work.task is None or work.task.done():
            work.task = asyncio.create_task(self._until_done(namespace, work), name=f"keys of {namespace}")

    async def _until_done(self, namespace: str, work: _Work) -> None:
        failures = 0
        while work.left:
            work.woken.clear()
            try:
                if not self._cut_down(namespace, work):
                    break
                await self._turn(namespace, work)
                self._tell(namespace, "")
                if not (work.spent or work.revoked):
                    failures = 0
                    continue
            except CustodyError as error:
                self._tell(namespace, str(error))
            except Exception:
                log.exception("data keys could not be kept; this is a defect", extra={"namespace": namespace})
                metrics.FAILURES.labels("CacheDomain", "Bug").inc()
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S[min(failures, len(RETRY_S) - 1)]):
                    await work.woken.wait()
            failures += 1

    def _cut_down(self, namespace: str, work: _Work) -> bool:
        """Drop obsolete requests; return whether the service must be asked at all."""
        world, domain = self._store.world(namespace), self._store.domain(namespace)
        elsewhere = world.domain is not None and active_custody(world.domain) is not Kind.KMS
        if elsewhere or (world.domain is None and not is_unreadable(world)):
            # The keys of a deleted domain are ended elsewhere, and a new domain draws other epochs.
            domain.keys_unwrapping -= work.draw | work.unlock
            work.clear()
            self._tell(namespace, "")
            return False
        if world.domain is None:
            return True
        used = epochs_in_use(world)
        late = (work.draw | work.unlock) - used
        work.strays |= late
        domain.keys_unwrapping -= late
        work.draw &= used
        work.unlock &= used
        work.ended &= used
        work.spent -= used
        # The scope of a lost key has a new epoch by now, or is ending.
        domain.keys_lost &= epochs_with_a_future(world)
        return True

    async def _turn(self, namespace: str, work: _Work) -> None:
        """Run every part once. Raises the first CustodyError after all parts ran."""
        custody, failures = await self._kms_domains.of_namespace(namespace), []
        for part in (self._take, self._take_strays, self._end):
            try:
                await part(namespace, custody, work)
            except CustodyError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    async def _take(self, namespace: str, custody: KmsCustody, work: _Work) -> None:
        """Draw, unwrap and hold the wanted keys, one Secret after the other, so that one failure delays no others
        for long."""
        portions, failures = by_shard(work.draw | work.unlock), []
        for shard in sorted(portions, key=lambda shard: (shard <= work.stuck, shard)):
            work.stuck = shard
            try:
                await self._take_some(namespace, custody, work, frozenset(portions[shard]))
            except OneKeyError as error:
                failures.append(error)
        work.stuck = ""
        if failures:
            raise failures[0]

    async def _take_some(self, namespace: str, custody: KmsCustody, work: _Work, portion: frozenset[str]) -> None:
        failure: CustodyError | None = None
        if fresh := portion & work.draw:
            self._require_leading()
            if not self._is_of(namespace, custody):
                return
            try:
                await custody.draw(fresh)
            except CustodyError as error:
                failure = error
        opened = await custody.open(portion)
        recorded = await custody.recorded(opened.none)
        if not self._is_of(namespace, custody):
            # Another CacheDomain replaced it meanwhile: its epochs get new keys.
            return
        unsure = portion - opened.found.keys() - opened.none
        if failure is not None:
            unsure |= fresh - recorded
        wanted = portion - unsure
        missing = wanted & opened.none
        domain = self._store.domain(namespace)
        lost = (recorded | frozenset(domain.data_keys)) & missing & epochs_with_a_future(self._store.world(namespace))
        self._hold(namespace, work, opened.found, missing)
        domain.keys_unwrapping -= wanted
        domain.keys_lost |= lost
        work.draw -= wanted
        work.unlock -= wanted
        if lost:
            log.warning("data keys cannot be unwrapped any more", extra={"namespace": namespace, "keys": len(lost)})
        self._queue_keys(namespace, everything=bool(lost))
        if failure := failure or opened.failure:
            raise failure

    def _hold(
        self, namespace: str, work: _Work, found: Mapping[str, bytes], missing: Iterable[str] = frozenset()
    ) -> None:
        domain = self._store.domain(namespace)
        for epoch, secret in found.items():
            if epoch not in work.ended:
                self._ring.add(namespace, epoch, secret)
        gone = frozenset(missing)
        kept = {epoch: key for epoch, key in domain.data_keys.items() if epoch not in gone}
        tell_data_keys(namespace, made=len(found.keys() - domain.data_keys), removed=0)
        domain.data_keys = {**kept, **self._ring.ids(namespace, found)}

    async def _take_strays(self, namespace: str, custody: KmsCustody, work: _Work) -> None:
        """Show the plans keys that only records name, so that they end. One that cannot be unwrapped is left alone."""
        if work.unlisted:
            listed = await custody.all()
            used = epochs_in_use(self._store.world(namespace))
            if not self._is_of(namespace, custody):
                return
            for epoch, revoked in listed.items():
                if epoch not in used | work.ended:
                    (work.revoked if revoked else work.strays).add(epoch)
            work.unlisted = False
        if not work.strays:
            return
        opened = await custody.open(frozenset(work.strays))
        if not self._is_of(namespace, custody):
            return
        self._hold(namespace, work, opened.found)
        if isinstance(opened.failure, OneKeyError):
            log.warning("unused data keys stay wrapped", extra={"namespace": namespace, "why": str(opened.failure)})
            work.strays.clear()
        work.strays -= opened.found.keys() | opened.none
        self._queue_keys(namespace, everything=False)
        if work.strays and opened.failure is not None:
            raise opened.failure

    async def _end(self, namespace: str, custody: KmsCustody, work: _Work) -> None:
        """Have the service delete the wrapping keys of unused keys, and remove their notes unless an erasure needs
        them. Keys that the service still has are retried; where it cannot know, the record stays as a note."""
        spent = frozenset(work.spent)
        asked = spent | work.revoked
        if not asked or not self._is_of(namespace, custody):
            return
        self._require_leading()
        await custody.revoke(spent)
        ended = await custody.end(asked)
        open_ones = {
            one.old for erasure in self._store.domain(namespace).erasures.values() for one in erasure.record.epochs
        }
        known = {epoch: end for epoch, end in ended.ends.items() if end.why_not is not Undestroyed.STILL_THERE}
        await custody.forget(
            epoch for epoch in spent - open_ones if epoch in known and known[epoch].confirmed is not None
        )
        tell_unended(namespace, ended.ends.values())
        work.spent -= known.keys()
        work.revoked -= known.keys()
        if done := spent & known.keys():
            self._give_up(namespace, done)
            tell_data_keys(namespace, made=0, removed=len(done))
            self._queue_keys(namespace, everything=False)
        if ended.failure is not None:
            raise ended.failure

    def _is_of(self, namespace: str, custody: KmsCustody) -> bool:
        domain = self._store.world(namespace).domain
        return domain is not None and domain.status.domain_id == custody.domain

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
