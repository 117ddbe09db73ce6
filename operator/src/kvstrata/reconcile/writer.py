"""The writer: carries out plans. The API server's answers go into the store."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from kvstrata.api.reasons import DomainReason
from kvstrata.clients.kube import Kube, KubeError, NotLeadingError
from kvstrata.clients.resources import BY_KIND, SECRET
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import OBJECTS
from kvstrata.plan import actions
from kvstrata.plan.actions import Plan, StatusWrite
from kvstrata.plan.budgets.admission import admitted_by
from kvstrata.plan.kinds.rejected import MOST_CHARACTERS, plan_refused

from . import metrics
from .audit import record_restore, record_status
from .background import utc_now
from .bundles import Bundles
from .children import ChildRefusedError, Children
from .claims import NameConflictError
from .events import Events, news_of
from .queue import WorkQueue
from .secrets import SecretStore
from .store import Store

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 0.25
"""How long a progress-only status waits. Without the wait, one edit costs three writes for each pod that acknowledges
it. A result, a refusal, a new epoch and the pods that hold a policy, on which the next leader depends, never wait."""

Worker = Callable[[str, Any], Awaitable[None] | None]
"""Carries out an action in a namespace, or starts to, beside the loop."""


class Writer:
    """Carries out plans. `workers` carry out, by type, the actions that the writer does not carry out itself.
    `followers` are called after each plan of an object of their kind, with its namespace and name."""

    def __init__(
        self,
        kube: Kube,
        store: Store,
        queue: WorkQueue,
        secret_store: SecretStore,
        workers: Mapping[type[Any], Worker],
        followers: Mapping[str, Iterable[Callable[[str, str], None]]],
    ) -> None:
        self._kube, self._store, self._queue, self._secret_store = kube, store, queue, secret_store
        self._workers, self._followers = workers, followers
        self._events = Events(kube)
        self._served: set[str] = set()
        self._stands_back: dict[str, str] = {}
        """By namespace, the reported reason."""
        self._children = children = Children(kube, store, queue)
        self.bundles = Bundles(kube, store, queue, secret_store)
        self.own_actions: Mapping[type[Any], Callable[[Key, Any], Awaitable[None]]] = {
            actions.EnsureSecret: self._ensure,
            actions.TurnSecret: self._turn,
            actions.TakeBack: self.bundles.take_back,
            actions.CommitBundle: self.bundles.commit,
            actions.EmptySecrets: self.bundles.empty,
            actions.Create: children.create,
            actions.SetFinalizers: children.set_finalizers,
            actions.Remove: self._remove,
            actions.ReadForeign: children.read_foreign,
            actions.StandBack: self._stand_back,
        }

    async def carry_out(self, key: Key, plan: Plan) -> None:
        """Write everything of `plan`, in its order. Raises KubeError on the first refusal, which is reported in the
        status of the object that the write is for; earlier writes stand."""
        if key.kind == "CacheDomain":
            self._note_claim(key, plan)
        granting = self._store.domain(key.namespace).granting
        # Plans made from here on must not give away the same capacity.
        granting.update(admitted_by(plan.statuses))
        try:
            await self._act(key, plan.actions)
            await self._children.apply(key, plan.apply)
            if not plan.statuses:
                self._queue.put_off_no_more(key)
            for write in plan.statuses:
                await self._write_status(key, write)
        except NameConflictError:
            await self._children.find_foreign(key.namespace, (*plan.apply, *plan.needs))
            if key.kind == BUNDLE:
                self._queue.add(Key("CachedModel", key.namespace, key.name))
            raise
        except KubeError as error:
            if error.is_refusal:
                await self._report_refusal(key, error)
            raise
        finally:
            for write in plan.statuses:
                granting.pop(write.key, None)
        if self._store.domain(key.namespace).refused.pop(key, None) is not None:
            self._queue.add_all(self._waiting_for(key))
        for other in plan.enqueue:
            self._queue.add(other)
        if plan.wake_after_s is not None:
            self._queue.add(key, plan.wake_after_s)
        for follow in self._followers.get(key.kind, ()):
            follow(key.namespace, key.name)

    def _waiting_for(self, key: Key) -> Iterable[Key]:
        """Return the objects whose status has why a bundle, or the CacheDomain, is not written."""
        if key.kind == BUNDLE:
            return (Key("CachedModel", key.namespace, key.name),)
        domain = self._store.domain(key.namespace)
        return [Key(kind, key.namespace, name) for kind in OBJECTS for name in domain.objects(kind)]

    async def _report_refusal(self, key: Key, error: KubeError) -> None:
        # The API server's own words name the object, but for an apply that its type refuses.
        refused = f"{error.child}: {error.message}" if isinstance(error, ChildRefusedError) else error.message
        domain = self._store.domain(key.namespace)
        if key.kind in (BUNDLE, "CacheDomain"):
            if key not in domain.refused:
                self._queue.add_all(self._waiting_for(key))
            domain.refused[key] = refused[:MOST_CHARACTERS]
        if key.kind == BUNDLE:  # it has no status of its own
            return
        for write in plan_refused(self._store.world(key.namespace), key, refused, utc_now()).statuses:
            with suppress(KubeError):  # the status itself may be refused
                await self._write_status(key, write)

    async def _act(self, key: Key, orders: Sequence[actions.Action]) -> None:
        """Carry out actions in order; every Secret with a name conflict is found."""
        conflict: NameConflictError | None = None
        for action in orders:
            try:
                if type(action) in self.own_actions:
                    await self.own_actions[type(action)](key, action)
                elif (work := self._workers[type(action)](key.namespace, action)) is not None:
                    await work
            except NameConflictError as error:
                conflict = error
        if conflict is not None:
            raise conflict

    def _note_claim(self, key: Key, plan: Plan) -> None:
        found = self._store.domain(key.namespace).objects(key.kind).get(key.name)
        if not any(isinstance(action, actions.StandBack) for action in plan.actions):
            self._stands_back.pop(key.namespace, None)
            if found is not None and found.status.served_by == self._store.installation is not None:
                self._served.add(key.namespace)
            metrics.SERVED_BY_ANOTHER.set(len(self._stands_back))

    async def _stand_back(self, key: Key, order: actions.StandBack) -> None:
        """Report it once. Raises NotLeadingError if this process served the namespace until now: its workers end with
        the process."""
        if self._stands_back.get(key.namespace) != order.why:
            self._stands_back[key.namespace] = order.why
            metrics.SERVED_BY_ANOTHER.set(len(self._stands_back))
            log.error("another installation serves a namespace", extra={"namespace": key.namespace, "why": order.why})
            if (found := self._store.domain(key.namespace).objects(key.kind).get(key.name)) is not None:
                await self._events.publish(found, DomainReason.SERVED_BY_ANOTHER, order.why, warning=True)
        if key.namespace in self._served:
            raise NotLeadingError(f"namespace {key.namespace} was handed over to another installation")

    async def _ensure(self, key: Key, order: actions.EnsureSecret) -> None:
        """Create or repair a Secret. Objects planned while the domain's key was written lack it."""
        domain = self._store.domain(key.namespace)
        before = domain.domain_key
        await self._secret_store.ensure(domain, order)
        if domain.domain_key != before:
            self._queue.add_all(self._store.keys_of(key.namespace))

    async def _remove(self, key: Key, order: actions.Remove) -> None:
        """Delete an object. A namespace under deletion may have lost the operator's rights, and deletes it itself."""
        try:
            await self._children.remove(key, order)
        except KubeError as error:
            if not (error.is_refusal and await self._kube.is_ending(key.namespace)):
                raise
        if order.kind == SECRET.kind:
            self._secret_store.forget(self._store.domain(key.namespace), order.name)

    async def _turn(self, key: Key, order: actions.TurnSecret) -> None:
        await self._secret_store.turn(self._store.domain(key.namespace), order)

    async def _write_status(self, reconciled: Key, write: StatusWrite) -> None:
        if not write.can_wait:
            self._queue.put_off_no_more(write.key)
        elif not self._queue.put_off(write.key, PROGRESS_INTERVAL_S):
            return
        key, resource = write.key, BY_KIND[write.key.kind]
        objects = self._store.domain(key.namespace).objects(key.kind)
        # Read now, because a watch may report this write before its answer arrives.
        before = objects.get(key.name)
        change = write.status, write.resource_version
        try:
            written = await self._kube.patch_status(resource, key.namespace, key.name, *change)
        except KubeError as error:
            if error.is_not_found:
                return
            fresh = await self._kube.get(resource, key.namespace, key.name) if error.is_conflict else None
            if fresh is not None:
                self._queue.add_all(self._store.observe(fresh))
            raise
        metrics.WRITES.labels(key.kind, "status").inc()
        affected = self._store.observe(written)
        if write.status.get("servedBy") and "servedBy" not in (written.get("status") or {}):
            dropped = "status.servedBy is dropped: upgrade the CustomResourceDefinitions (chart kvstrata-crds) first"
            raise KubeError(HTTPStatus.UNPROCESSABLE_ENTITY, "Invalid", dropped)
        after = objects.get(key.name)
        record_status(key, before, after, self._store.domain(key.namespace))
        metrics.count_lazy(before, after)
        metrics.count_reclaimed(key, before, after)
        if after is not None:
            for news in news_of(before, after):
                await self._events.publish(after, news.reason, news.message, warning=news.warning)
        story = record_restore(key, before, after)
        if story is not None and after is not None:
            await self._events.publish(after, DomainReason.RESTORE_DETECTED, story, warning=True)
        # The own status adds nothing for the reconciled object; others may depend on it (for example on an epoch).
        self._queue.add_all(affected - {reconciled})
