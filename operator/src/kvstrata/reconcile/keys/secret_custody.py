"""Data keys in Secrets, sixteen for each domain. A revoked key may survive in etcd's revisions and in backups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from kvstrata.objects import labels, names
from kvstrata.plan.actions import EnsureSecret, Material
from kvstrata.reconcile.domain_store import DomainStore
from kvstrata.reconcile.keys import custody_errors
from kvstrata.reconcile.secrets import SecretStore


async def revoke(
    secret_store: SecretStore, domain: DomainStore, owner: Mapping[str, Any], epochs: Iterable[str]
) -> frozenset[str]:
    """Remove the keys of these epochs from their Secrets; return the epochs whose keys are gone. `owner` is the
    CacheDomain's owner reference. Raises CustodyError."""
    by_secret: dict[str, list[str]] = defaultdict(list)
    for epoch in sorted(epochs):
        by_secret[names.data_keys_secret(epoch)].append(epoch)
    for name, some in sorted(by_secret.items()):
        order = EnsureSecret(
            name=name,
            material=Material.DATA_KEYS,
            labels=labels.of_domain("data-keys"),
            owner=owner,
            spent=tuple(some),
        )
        with custody_errors(f"Secret {name} was not written"):
            await secret_store.ensure(domain, order)
    return frozenset(epoch for some in by_secret.values() for epoch in some if epoch not in domain.data_keys)
