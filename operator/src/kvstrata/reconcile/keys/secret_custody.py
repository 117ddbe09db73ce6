"""Data keys in Secrets, sixteen for each domain. A revoked key may survive in etcd's revisions and in backups."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvstrata.plan.keys.data_keys import by_secret, keys_order
from kvstrata.reconcile.domain_store import DomainStore
from kvstrata.reconcile.keys import custody_errors
from kvstrata.reconcile.secrets import SecretStore


async def revoke(
    secret_store: SecretStore, domain: DomainStore, owner: Mapping[str, Any], epochs: Collection[str]
) -> frozenset[str]:
    """Remove the keys of these epochs from their Secrets; return the epochs whose keys are gone. `owner` is the
    CacheDomain's owner reference. Raises CustodyError."""
    for name, some in sorted(by_secret(epochs).items()):
        with custody_errors(f"Secret {name} was not written"):
            await secret_store.ensure(domain, keys_order(name, owner, spent=some))
    return frozenset(epochs) - domain.data_keys.keys()
