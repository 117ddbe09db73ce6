"""Removes data keys of erased data from their custody, and from bundles' free slots.

A bundle writes changes into the other slot of its shards; the previous content stays there until the next change. No
pod reads it any more, because all acknowledged a newer root, but a key in it would be a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvstrata.api.scalars import format_timestamp
from kvstrata.clients.kube import Kube
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
from kvstrata.plan.keys.data_keys import by_secret, keys_order
from kvstrata.reconcile.domain_store import DomainStore
from kvstrata.reconcile.keys import CustodyError, custody_errors
from kvstrata.reconcile.keys.kms_worker import KmsKeys
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.secrets import SecretStore
from kvstrata.reconcile.store import Store


@dataclass(frozen=True, slots=True)
class KeyRevoker:
    """`operator` is named in the facts; `may_write` raises after leadership was lost."""

    kube: Kube
    store: Store
    queue: WorkQueue
    secret_store: SecretStore
    operator: str
    now: Callable[[], datetime]
    may_write: Callable[[], None]
    kms: KmsKeys

    async def revoke(self, record: ErasureRecord, order: RevokeKeys) -> tuple[KeyRemoved, ...]:
        """Remove keys from their custody; return those that are gone. Raises CustodyError."""
        gone: list[KeyRemoved] = []
        for custody, named in _by_custody(record, order.fingerprints).items():
            if custody is KeyCustody.KMS:
                self.may_write()
                words = await self.kms.revoke(record.namespace, record.domain, named)
                gone += [KeyRemoved(named[epoch], word) for epoch, word in words.items()]
            else:
                gone += await self._remove(record, named)
        return tuple(gone)

    async def destroy(self, record: ErasureRecord, order: DestroyKeys) -> tuple[KeyDestroyed | KeyNotDestroyed, ...]:
        """Have the KMS delete the wrapping keys of removed keys. Raises CustodyError."""
        named = _by_custody(record, order.fingerprints).get(KeyCustody.KMS, {})
        ends = await self.kms.destroy(record.namespace, record.domain, named) if named else {}
        return tuple(self._end(named[epoch], end) for epoch, end in sorted(ends.items()))

    def _end(self, fingerprint: str, end: Destruction) -> KeyDestroyed | KeyNotDestroyed:
        if end.confirmed is not None:
            return KeyDestroyed(fingerprint, end.confirmed)
        return KeyNotDestroyed(fingerprint, "; ".join(end.evidence) or str(end.why_not), self.now())

    async def _remove(self, record: ErasureRecord, wanted: Mapping[str, str]) -> tuple[KeyRemoved, ...]:
        domain = self.store.domain(record.namespace)
        with custody_errors("a bundle could not be read"):
            full = await self._full_slot(record.namespace)
        if full is not None:
            raise CustodyError(f"Secret {full} still holds an earlier bundle, and is about to be emptied")
        found = self.store.world(record.namespace).domain
        # Without their domain the Secrets are gone.
        if found is not None:
            self.may_write()
            await revoke_in_secrets(self.secret_store, domain, found.owner_reference(), wanted)
        gone = frozenset(wanted) - domain.data_keys.keys()
        word = Statement(Party.OPERATOR, self.operator, format_timestamp(self.now()))
        return tuple(KeyRemoved(wanted[epoch], word) for epoch in sorted(gone))

    async def _full_slot(self, namespace: str) -> str | None:
        """Return the name of a bundle's Secret that its root does not name and that is not empty. Only the committer
        of bundles knows which slot is filled next, so it empties the Secret."""
        for model, committed in sorted(self.store.domain(namespace).bundles.items()):
            for shard in committed.bundle.root.shards:
                name = names.bundle_shard(model, shard.index, shard.other_slot)
                stored = await self.kube.get(SECRET, namespace, name)
                if stored is not None and stored.get("data"):
                    self.queue.add(Key(BUNDLE, namespace, model))
                    return name
        return None


def _by_custody(record: ErasureRecord, fingerprints: Iterable[str]) -> dict[KeyCustody, dict[str, str]]:
    """Return fingerprints by epoch, by custody."""
    kept_by = {key.fingerprint: key.custody for key in record.keys}
    found: dict[KeyCustody, dict[str, str]] = {}
    for name in fingerprints:
        left = epoch_of(record, name)
        if left is not None:
            found.setdefault(kept_by[name], {})[left.old] = name
    return found


async def revoke_in_secrets(
    secret_store: SecretStore, domain: DomainStore, owner: Mapping[str, Any], epochs: Collection[str]
) -> None:
    """Remove the keys of these epochs from their Secrets, sixteen for each domain.

    A revoked key may survive in etcd's revisions and in backups. `owner` is the CacheDomain's owner reference. Raises
    CustodyError.
    """
    for name, some in sorted(by_secret(epochs).items()):
        with custody_errors(f"Secret {name} was not written"):
            await secret_store.ensure(domain, keys_order(name, owner, spent=some))
