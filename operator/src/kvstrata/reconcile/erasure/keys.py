"""Removes data keys of erased data from their custody, and from bundles' free slots.

A bundle writes changes into the other slot of its shards; the previous content stays there until the next change. No
pod reads it any more, because all acknowledged a newer root, but a key in it would be a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime

from kvstrata.api.scalars import format_timestamp
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import SECRET
from kvstrata.contract.receipt.facts import Statement
from kvstrata.contract.receipt.vocabulary import KeyCustody, Party
from kvstrata.model.erasure.facts import KeyDestroyed, KeyNotDestroyed, KeyRemoved
from kvstrata.model.erasure.record import ErasureRecord
from kvstrata.model.keys import Destruction
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.objects import names
from kvstrata.plan.erasure.gather import epoch_of
from kvstrata.plan.erasure.orders import DestroyKeys, RevokeKeys
from kvstrata.reconcile.keys import CustodyError, secret_custody
from kvstrata.reconcile.keys.kms_worker import KmsKeys
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.secrets import SecretStore
from kvstrata.reconcile.store import Store


class KeyRevoker:
    """`operator` is named in the facts; `may_write` raises after leadership was lost."""

    def __init__(
        self,
        kube: Kube,
        store: Store,
        queue: WorkQueue,
        secret_store: SecretStore,
        operator: str,
        now: Callable[[], datetime],
        may_write: Callable[[], None],
        kms: KmsKeys,
    ) -> None:
        self._kube, self._store, self._queue, self._secret_store, self._kms = kube, store, queue, secret_store, kms
        self._operator, self._now, self._may_write = operator, now, may_write

    async def revoke(self, record: ErasureRecord, order: RevokeKeys) -> tuple[KeyRemoved, ...]:
        """Remove keys from their custody; return those that are gone. Raises CustodyError."""
        gone: list[KeyRemoved] = []
        for custody, named in _by_custody(record, order.fingerprints).items():
            if custody is KeyCustody.KMS:
                self._may_write()
                words = await self._kms.revoke(record.namespace, record.domain, named)
                gone += [KeyRemoved(named[epoch], word) for epoch, word in words.items()]
            else:
                gone += await self._remove(record, named)
        return tuple(gone)

    async def destroy(self, record: ErasureRecord, order: DestroyKeys) -> tuple[KeyDestroyed | KeyNotDestroyed, ...]:
        """Have the KMS delete the wrapping keys of removed keys. Raises CustodyError."""
        named = _by_custody(record, order.fingerprints).get(KeyCustody.KMS, {})
        ends = await self._kms.destroy(record.namespace, record.domain, named) if named else {}
        return tuple(self._end(named[epoch], end) for epoch, end in sorted(ends.items()))

    def _end(self, fingerprint: str, end: Destruction) -> KeyDestroyed | KeyNotDestroyed:
        if end.confirmed is not None:
            return KeyDestroyed(fingerprint, end.confirmed)
        return KeyNotDestroyed(fingerprint, "; ".join(end.evidence) or str(end.why_not), self._now())

    async def _remove(self, record: ErasureRecord, wanted: Mapping[str, str]) -> tuple[KeyRemoved, ...]:
        domain = self._store.domain(record.namespace)
        try:
            full = await self._free_slot_with_something(record.namespace)
        except KubeError as error:
            raise CustodyError(f"a bundle could not be read: {error.status} {error.reason}") from error
        if full is not None:
            raise CustodyError(f"Secret {full} still holds an earlier bundle, and is about to be emptied")
        found = self._store.world(record.namespace).domain
        if found is None:
            # The Secrets went with the domain.
            gone = frozenset(wanted) - domain.data_keys.keys()
        else:
            self._may_write()
            gone = await secret_custody.revoke(self._secret_store, domain, found.owner_reference(), wanted)
        word = Statement(Party.OPERATOR, self._operator, format_timestamp(self._now()))
        return tuple(KeyRemoved(wanted[epoch], word) for epoch in sorted(gone))

    async def _free_slot_with_something(self, namespace: str) -> str | None:
        """Return the name of a bundle's Secret that its root does not name and that is not empty. Only the committer
        of bundles knows which slot is filled next, so it empties the Secret."""
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


def _by_custody(record: ErasureRecord, fingerprints: Iterable[str]) -> dict[KeyCustody, dict[str, str]]:
    """Return fingerprints by epoch, by custody."""
    kept_by = {key.fingerprint: key.custody for key in record.keys}
    found: dict[KeyCustody, dict[str, str]] = {}
    for name in fingerprints:
        left = epoch_of(record, name)
        if left is not None:
            found.setdefault(kept_by[name], {})[left.old] = name
    return found
