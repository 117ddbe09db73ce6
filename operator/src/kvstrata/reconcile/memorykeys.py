"""Data keys of namespaces whose custody is Memory: which there are, and what the rest of the operator sees of them.

A process that begins to lead has none. What bundles name it asks pods for (`reconcile.keys.delivery`), and until every
pod has answered the plans see those keys as if they were here: pods that have them go on. What no pod has, and every
epoch of before whose key no bundle names, is lost: its scope gets another epoch, because an operator that is gone may
have drawn a key for this one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Protocol

from kvstrata.contract.receipt.vocabulary import KeyCustody as Kind
from kvstrata.model.keyholders import FORMER, FormerHolders
from kvstrata.model.refs import Key
from kvstrata.plan.actions import KeepInMemory
from kvstrata.plan.keys.custody import in_force, named_in_bundles
from kvstrata.plan.keys.data_keys import epochs_with_a_future
from kvstrata.reconcile.keys.key_ring import MemoryCustody

from .audit import tell_memory
from .queue import WorkQueue
from .store import Store

log = logging.getLogger(__name__)

UNKNOWN = FormerHolders({FORMER: None})
"""Who had keys of before, as long as no note was read."""


class KeepsKeys(Protocol):
    """Keeps data keys out of Secrets, as `MemoryKeys` does, and for other custodies `reconcile.kmskeys.KmsKeys`."""

    async def keep(self, namespace: str, order: KeepInMemory) -> None:
        """Draw keys for epochs, and end those that nobody needs any more."""


class MemoryKeys:
    """The custodies of one operator process, by namespace.

    `entropy(n)` returns n random bytes, `now` the wall clock in UTC, `operator` names this operator's pod.
    """

    def __init__(
        self,
        store: Store,
        queue: WorkQueue,
        entropy: Callable[[int], bytes],
        now: Callable[[], datetime],
        operator: str,
    ) -> None:
        self._store, self._queue = store, queue
        self._entropy, self._now, self._operator = entropy, now, operator
        self._custodies: dict[str, MemoryCustody] = {}
        self._wanted: dict[str, dict[str, str]] = {}
        self._former: dict[str, FormerHolders] = {}
        self._unsure: dict[str, frozenset[str]] = {}
        """By namespace whose CacheDomain could not be read at the beginning, epochs whose key no bundle named then. If
        it turns out that Memory is in force they are lost, as is whatever lacks a key at that time."""

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Those with keys in memory, or with keys that pods are asked for."""
        return tuple(sorted({*self._custodies, *self._wanted}))

    def custody(self, namespace: str) -> MemoryCustody:
        """Return the custody of a namespace, made on first use."""
        found = self._custodies.get(namespace)
        if found is None:
            found = self._custodies[namespace] = MemoryCustody(self._entropy, self._now, self._operator)
        return found

    def wanted(self, namespace: str) -> dict[str, str]:
        """Return by epoch the ids of the keys that pods are asked for."""
        return self._wanted.get(namespace, {})

    def inherit(self, namespace: str, former: FormerHolders) -> None:
        """Take note of who may have keys that were drawn before this operator led."""
        self._former[namespace] = former

    def former(self, namespace: str) -> FormerHolders:
        """Return who may have keys that were drawn before this operator led."""
        return self._former.get(namespace, UNKNOWN)

    def begin(self) -> None:
        """Take note of what a former operator left behind: what bundles name is asked for, the rest is lost.

        Call it when the world is known, and before anything is planned.
        """
        for namespace in self._store.namespaces:
            world, domain = self._store.world(namespace), self._store.domain(namespace)
            named = named_in_bundles(world)
            # A CacheDomain that cannot be read now says nothing, and its bundles do.
            elsewhere = world.domain is not None and in_force(world.domain) is not Kind.MEMORY
            if elsewhere or (world.domain is None and not named):
                continue
            self.custody(namespace)
            self._wanted[namespace] = dict(named)
            domain.data_keys, domain.keys_awaited = dict(named), frozenset(named)
            unnamed = frozenset(epochs_with_a_future(world) - named.keys())
            if world.domain is not None:
                domain.keys_lost = unnamed
            else:
                self._unsure[namespace] = unnamed
            if named:
                log.info("data keys are asked back from pods", extra={"namespace": namespace, "keys": len(named)})

    async def keep(self, namespace: str, order: KeepInMemory) -> None:
        """Draw keys for epochs, and overwrite those that nobody needs any more."""
        custody, domain = self.custody(namespace), self._store.domain(namespace)
        unsure = self._unsure.pop(namespace, None)
        if unsure is not None:
            left = unsure & epochs_with_a_future(self._store.world(namespace)) - domain.data_keys.keys()
            domain.keys_lost |= left | frozenset(order.epochs)
            self._queue_all(namespace)
        await custody.draw(epoch for epoch in order.epochs if epoch not in domain.keys_lost)
        drawn = custody.ids(order.epochs)
        tell_memory(namespace, made=len(drawn.keys() - domain.data_keys), removed=len(order.spent))
        await custody.revoke(order.spent)
        self._drop(namespace, order.spent)
        domain.data_keys = {**domain.data_keys, **drawn}
        # One that was revoked and is named again, by a status that came back, gets no second key.
        if again := frozenset(order.epochs) - drawn.keys() - domain.keys_lost:
            domain.keys_lost |= again
            self._queue_all(namespace)

    async def revoke(self, namespace: str, epochs: Iterable[str]) -> None:
        """Overwrite keys, and give them to nobody any more."""
        wanted = tuple(epochs)
        await self.custody(namespace).revoke(wanted)
        self._drop(namespace, wanted)

    async def end(self) -> None:
        """Overwrite every key, because this process ends."""
        for custody in self._custodies.values():
            await custody.overwrite_all()

    def take_back(self, namespace: str, body: bytearray, holders: Iterable[str]) -> int:
        """Take keys that a pod sent back, and overwrite the message; return how many were missing.

        `holders` are the uids of all pods that may have them. Raises ContractError for what is no such message.
        """
        wanted = self._wanted.get(namespace, {})
        found = self.custody(namespace).recover(body, wanted, self.former(namespace), holders=holders)
        for epoch in found:
            wanted.pop(epoch, None)
        if found:
            self._store.domain(namespace).keys_awaited -= found
            if not wanted:
                log.info("every data key came back from pods", extra={"namespace": namespace})
                self._queue.add(Key("CacheDomain", namespace, "default"))
        return len(found)

    def give_up(self, namespace: str) -> None:
        """No pod has the keys that are still wanted: their epochs are replaced."""
        found = self._store.world(namespace).domain
        if found is None:
            return  # nobody knows whether they are in another custody
        if in_force(found) is not Kind.MEMORY:
            # Its CacheDomain could not be read when this process began, and who keeps them has them.
            self._wanted.pop(namespace, None)
            return
        domain, lost = self._store.domain(namespace), frozenset(self._wanted.pop(namespace, ()))
        if not lost:
            return
        log.warning("nobody has data keys any more", extra={"namespace": namespace, "keys": len(lost)})
        self._drop(namespace, lost)
        domain.keys_lost |= lost
        self._queue_all(namespace)

    def forget_replaced(self, namespace: str) -> None:
        """Forget lost keys whose epochs no status names any more."""
        domain = self._store.domain(namespace)
        if domain.keys_lost:
            left = domain.keys_lost & epochs_with_a_future(self._store.world(namespace))
            if left != domain.keys_lost:
                domain.keys_lost = left
                self._queue.add(Key("CacheDomain", namespace, "default"))

    def _queue_all(self, namespace: str) -> None:
        """Have everything planned anew: any status may name an epoch that is to be replaced."""
        for key in self._store.all_keys():
            if key.namespace == namespace:
                self._queue.add(key)

    def _drop(self, namespace: str, epochs: Iterable[str]) -> None:
        domain, gone = self._store.domain(namespace), frozenset(epochs)
        domain.data_keys = {epoch: key for epoch, key in domain.data_keys.items() if epoch not in gone}
        domain.judged_epochs -= gone
        domain.keys_awaited -= gone
        for epoch in gone:
            self._wanted.get(namespace, {}).pop(epoch, None)
