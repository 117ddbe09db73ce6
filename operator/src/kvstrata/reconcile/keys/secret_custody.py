"""Data keys in Secrets: sixteen for each domain, written by conditional writes.

Whatever is removed from a Secret stays in etcd's revisions until these are compacted and defragmented, and in every
backup that was made before. So a key can be revoked, and nobody can ever say that no copy of it exists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from kvstrata.api.scalars import format_timestamp
from kvstrata.clients.kube import KubeError
from kvstrata.contract.receipt.facts import Word
from kvstrata.contract.receipt.vocabulary import KeyCustody as Kind
from kvstrata.contract.receipt.vocabulary import Party
from kvstrata.model.keys import Destruction, Revocation, Undestroyed
from kvstrata.objects import labels, names
from kvstrata.plan.actions import EnsureSecret, Material
from kvstrata.plan.keys.custody import RESIDUE
from kvstrata.reconcile.domain_store import DomainStore
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.secrets import Keeper


class SecretCustody:
    """The keys of one domain as `Keeper` writes and knows them.

    `owner` is the CacheDomain's owner reference, `operator` the name of this operator's pod, whose word it is.
    """

    kind = Kind.SECRET

    def __init__(
        self,
        keeper: Keeper,
        domain: DomainStore,
        owner: Mapping[str, Any],
        operator: str,
        now: Callable[[], datetime],
    ) -> None:
        self._keeper, self._domain, self._owner, self._operator, self._now = keeper, domain, owner, operator, now

    async def draw(self, epochs: Iterable[str]) -> None:
        """Make a key for each epoch that has none."""
        await self._write(epochs, spent=False)

    async def unlock(self, epochs: Iterable[str]) -> Mapping[str, bytes]:
        """Return the keys of these epochs as this process saw them last."""
        kept = {epoch: self._domain.data_keys.get(epoch) for epoch in epochs}
        return {epoch: key for epoch, key in kept.items() if isinstance(key, bytes)}

    async def revoke(self, epochs: Iterable[str]) -> Mapping[str, Revocation]:
        """Take the keys out of their Secrets."""
        wanted = tuple(epochs)
        await self._write(wanted, spent=True)
        word = Word(Party.OPERATOR, self._operator, format_timestamp(self._now()))
        return {
            epoch: Revocation(self.kind, None if epoch in self._domain.data_keys else word, RESIDUE[self.kind])
            for epoch in wanted
        }

    async def destroy(self, epochs: Iterable[str]) -> Mapping[str, Destruction]:
        """Say that nobody can know."""
        return {epoch: Destruction(self.kind, None, Undestroyed.CUSTODY_CANNOT_KNOW) for epoch in epochs}

    async def _write(self, epochs: Iterable[str], *, spent: bool) -> None:
        by_secret: dict[str, list[str]] = defaultdict(list)
        for epoch in epochs:
            by_secret[names.data_keys_secret(epoch)].append(epoch)
        for name, some in sorted(by_secret.items()):
            order = EnsureSecret(
                name=name,
                material=Material.DATA_KEYS,
                labels=labels.of_domain("data-keys"),
                owner=self._owner,
                epochs=() if spent else tuple(sorted(some)),
                spent=tuple(sorted(some)) if spent else (),
            )
            try:
                await self._keeper.ensure(self._domain, order)
            except KubeError as error:
                raise CustodyError(f"Secret {name} was not written: {error.status} {error.reason}") from error
