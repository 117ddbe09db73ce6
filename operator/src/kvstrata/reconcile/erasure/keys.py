"""Data keys of what is erased go: out of the Secrets or the memory that keeps them, and out of bundles' free slots.

A bundle writes what changed into the other slot of its shards, so what it was before stays there until the next change.
Nobody reads it any more, because every pod has acknowledged a newer root; a key in it would be a copy nevertheless.

Where keys were in memory only, their end can be known: whoever had one is asked, or has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Protocol

from kvstrata.api.scalars import format_timestamp
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import SECRET
from kvstrata.contract.receipt.facts import Word
from kvstrata.contract.receipt.vocabulary import KeyCustody, Party
from kvstrata.model.erasure.facts import KeyDestroyed, KeyNotDestroyed, KeyRemoved, Rolled
from kvstrata.model.erasure.record import ErasureRecord
from kvstrata.model.keys import Destruction
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.objects import names
from kvstrata.plan.erasure.gather import epoch_of
from kvstrata.plan.erasure.orders import DestroyKeys, RevokeKeys
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.keys.delivery import PodSilentError
from kvstrata.reconcile.keys.kms_worker import KmsKeys
from kvstrata.reconcile.keys.secret_custody import SecretCustody
from kvstrata.reconcile.memorykeys import MemoryKeys
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.secrets import Keeper
from kvstrata.reconcile.store import Store


class AskHolders(Protocol):
    """Asks pods for their word on keys, as `reconcile.keycourier.KeyCourier.ask_holders` does."""

    async def __call__(self, namespace: str, keys: Mapping[str, str], revisions: Mapping[str, int]) -> None:
        """Ask every pod in contact that may have them. Raises PodSilentError and CustodyError."""


class KeyRevoker:
    """Revokes data keys. `operator` is whose word it is, `may_write` raises when this process may not.

    `memory` and `kms` have the keys that are in no Secret, and `ask_holders` asks pods that had them.
    """

    def __init__(
        self,
        kube: Kube,
        store: Store,
        queue: WorkQueue,
        keeper: Keeper,
        operator: str,
        now: Callable[[], datetime],
        may_write: Callable[[], None],
        memory: MemoryKeys,
        kms: KmsKeys,
        ask_holders: AskHolders,
    ) -> None:
        self._memory, self._kms, self._ask_holders = memory, kms, ask_holders
        self._kube, self._store, self._queue, self._keeper = kube, store, queue, keeper
        self._operator, self._now, self._may_write = operator, now, may_write

    async def revoke(self, record: ErasureRecord, order: RevokeKeys) -> tuple[KeyRemoved, ...]:
        """Take keys out of wherever the operator put them; return those that are gone. Raises CustodyError."""
        gone: list[KeyRemoved] = []
        for custody, named in _by_custody(record, order.fingerprints).items():
            match custody:
                case KeyCustody.MEMORY:
                    gone += await self._overwrite(record, named)
                case KeyCustody.KMS:
                    self._may_write()
                    words = await self._kms.revoke(record.namespace, record.domain, named)
                    gone += [KeyRemoved(named[one], word.removed) for one, word in words.items() if word.removed]
                case _:
                    gone += await self._remove(record, named)
        return tuple(gone)

    async def destroy(self, record: ErasureRecord, order: DestroyKeys) -> tuple[KeyDestroyed | KeyNotDestroyed, ...]:
        """Ask whoever had removed keys, and return what their custody knows of their end. Raises CustodyError."""
        ends: dict[str, KeyDestroyed | KeyNotDestroyed] = {}
        for custody, named in _by_custody(record, order.fingerprints).items():
            if custody is KeyCustody.KMS:
                said = await self._kms.destroy(record.namespace, record.domain, named)
            else:
                said = await self._word_of_holders(record, named)
            ends |= {named[epoch]: self._end(named[epoch], end) for epoch, end in said.items()}
        return tuple(end for _, end in sorted(ends.items()))

    async def _word_of_holders(self, record: ErasureRecord, named: Mapping[str, str]) -> Mapping[str, Destruction]:
        stated = record.erasure.only(Rolled)
        revisions = {target.model: target.revision for target in stated.targets} if stated else {}
        try:
            await self._ask_holders(record.namespace, named, revisions)
        except PodSilentError as error:
            raise CustodyError(str(error)) from error
        return await self._memory.custody(record.namespace).destroy(named)

    def _end(self, fingerprint: str, end: Destruction) -> KeyDestroyed | KeyNotDestroyed:
        if end.confirmed is not None:
            return KeyDestroyed(fingerprint, end.confirmed)
        return KeyNotDestroyed(fingerprint, "; ".join(end.evidence) or str(end.why_not), self._now())

    async def _overwrite(self, record: ErasureRecord, wanted: Mapping[str, str]) -> tuple[KeyRemoved, ...]:
        """Overwrite keys that are in memory only.

        A key that this process never had is given to nobody either; whether it is gone, nobody can say.
        """
        if not wanted:
            return ()
        self._may_write()
        custody = self._memory.custody(record.namespace)
        awaited = self._memory.wanted(record.namespace).keys() & wanted.keys()
        if awaited:
            raise CustodyError(f"{len(awaited)} data keys are still asked back from pods")
        strange = [epoch for epoch in wanted if not custody.knows(epoch)]
        own = Word(Party.OPERATOR, self._operator, format_timestamp(self._now()))
        revoked = {epoch: one.removed for epoch, one in (await custody.revoke(wanted)).items()}
        await self._memory.revoke(record.namespace, wanted)
        words = revoked | dict.fromkeys(strange, own)
        return tuple(KeyRemoved(wanted[epoch], word) for epoch, word in sorted(words.items()) if word is not None)

    async def _remove(self, record: ErasureRecord, wanted: Mapping[str, str]) -> tuple[KeyRemoved, ...]:
        """Take keys out of their Secrets."""
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


def _by_custody(record: ErasureRecord, fingerprints: Iterable[str]) -> dict[KeyCustody, dict[str, str]]:
    """Return fingerprints by their epoch, by the custody that had the key."""
    kept_by = {key.fingerprint: key.custody for key in record.keys}
    found: dict[KeyCustody, dict[str, str]] = {}
    for name in fingerprints:
        left = epoch_of(record, name)
        if left is not None:
            found.setdefault(kept_by[name], {})[left.old] = name
    return found
