"""Data keys of what is erased go: out of the Secrets that keep them, and out of the free slots of bundles.

A bundle writes what changed into the other slot of its shards, so what it was before stays there until the next change.
Nobody reads it any more, because every pod has acknowledged a newer root; a key in it would be a copy nevertheless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime

from kvstrata.adapters.kube import Kube, KubeError
from kvstrata.adapters.resources import SECRET
from kvstrata.api.scalars import format_timestamp
from kvstrata.contract.receiptfacts import Word
from kvstrata.contract.receiptwords import Party
from kvstrata.model.erasure import ErasureRecord
from kvstrata.model.erasurefacts import KeyRemoved
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.objects import names
from kvstrata.plan.erasuregather import epoch_of
from kvstrata.plan.erasureorders import RevokeKeys
from kvstrata.reconcile.custody import CustodyError
from kvstrata.reconcile.custody.secret import SecretCustody
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.secrets import Keeper
from kvstrata.reconcile.store import Store


class KeyRevoker:
    """Revokes data keys in Secrets. `operator` is whose word it is, `may_write` raises when this process may not."""

    def __init__(
        self,
        kube: Kube,
        store: Store,
        queue: WorkQueue,
        keeper: Keeper,
        operator: str,
        now: Callable[[], datetime],
        may_write: Callable[[], None],
    ) -> None:
        self._kube, self._store, self._queue, self._keeper = kube, store, queue, keeper
        self._operator, self._now, self._may_write = operator, now, may_write

    async def revoke(self, record: ErasureRecord, order: RevokeKeys) -> tuple[KeyRemoved, ...]:
        """Take keys out of wherever the operator put them; return those that are gone. Raises CustodyError."""
        wanted = {one.old: name for name in order.fingerprints if (one := epoch_of(record, name)) is not None}
        domain = self._store.domain(record.namespace)
        try:
            full = await self._free_slot_with_something(record.namespace)
        except KubeError as error:
            raise CustodyError(f"a bundle could not be read: {error.status} {error.reason}") from error
        if full is not None:
            raise CustodyError(f"Secret {full} still holds what a bundle said before, and is about to be emptied")
        found = self._store.world(record.namespace).domain
        if found is None:
            # With the domain its Secrets went: what is not there needs no owner.
            word = Word(Party.OPERATOR, self._operator, format_timestamp(self._now()))
            return tuple(KeyRemoved(name, word) for old, name in sorted(wanted.items()) if old not in domain.data_keys)
        self._may_write()
        custody = SecretCustody(self._keeper, domain, found.owner_reference(), self._operator, self._now)
        revoked = await custody.revoke(tuple(sorted(wanted)))
        return tuple(
            KeyRemoved(wanted[epoch], one.removed) for epoch, one in sorted(revoked.items()) if one.removed is not None
        )

    async def _free_slot_with_something(self, namespace: str) -> str | None:
        """Return the name of a Secret of a bundle that its root does not name and that is not empty.

        Whoever commits bundles empties it, because only they know which slot is to be filled next.
        """
        for model, name in tuple(self._free_slots(namespace)):
            stored = await self._kube.get(SECRET, namespace, name)
            if stored is not None and stored.get("data"):
                self._queue.add(Key(BUNDLE, namespace, model))
                return name
        return None

    def _free_slots(self, namespace: str) -> Iterator[tuple[str, str]]:
        for model, committed in sorted(self._store.domain(namespace).bundles.items()):
            for shard in committed.bundle.root.shards:
                yield model, names.bundle_shard(model, shard.index, shard.other_slot)
