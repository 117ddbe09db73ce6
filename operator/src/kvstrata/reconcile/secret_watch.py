"""Watch of Secrets: finds the operator's own that were deleted or changed from outside.

Only `SecretStore` keeps values. The event of this process' own write may precede the answer: for keys and certificates
both report the same, and a bundle is only marked, and read after its commit has ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvstrata.model.refs import BUNDLE, Key
from kvstrata.objects import names
from kvstrata.reconcile.domain_store import DomainStore

from .bundles import bundle_of
from .parse import owners, resource_version
from .secrets import SecretStore
from .store import Store

Raw = Mapping[str, Any]


class SecretWatch:
    """Passes events of Secrets to the SecretStore and marks bundles; each call returns the affected keys. Does nothing
    until the SecretStore is open: a new leader reads everything after opening it."""

    def __init__(self, store: Store, secret_store: SecretStore) -> None:
        self._store, self._secret_store = store, secret_store

    def observe(self, raw: Raw) -> frozenset[Key]:
        if not self._secret_store.is_open:
            return frozenset()
        domain = self._store.domain(raw["metadata"]["namespace"])
        name = raw["metadata"]["name"]
        before, key_before, keys_before = domain.secrets.get(name), domain.domain_key, domain.data_keys
        if before and resource_version(raw) <= int(before.resource_version or 0):
            return frozenset()
        self._secret_store.observe(domain, raw)
        model = bundle_of(raw)
        if model is not None:
            return self._mark(domain, model, raw)
        after = domain.secrets.get(name)
        if domain.domain_key != key_before:
            return frozenset(self._store.keys_of(domain.namespace))  # All keyspaces derive from it.
        if domain.data_keys != keys_before:
            return frozenset(self._store.key_holders(domain.namespace))
        same = before and after and before.has_same_content_as(after)
        return frozenset() if same else owners(raw)

    def forget(self, raw: Raw) -> frozenset[Key]:
        """`raw` is the last state of the deleted Secret."""
        if not self._secret_store.is_open:
            return frozenset()
        domain = self._store.domain(raw["metadata"]["namespace"])
        key_before, keys_before = domain.domain_key, domain.data_keys
        if not self._secret_store.forget(domain, raw["metadata"]["name"], resource_version(raw)):
            return frozenset()
        model = bundle_of(raw)
        if model is not None:
            return self._mark(domain, model, raw)
        if domain.domain_key != key_before:
            return frozenset(self._store.keys_of(domain.namespace))  # All keyspaces derive from it.
        if domain.data_keys != keys_before:
            return frozenset(self._store.key_holders(domain.namespace))
        return owners(raw)

    def _mark(self, domain: DomainStore, model: str, raw: Raw) -> frozenset[Key]:
        """Mark the bundle of `model` to be read again, unless the event is of this process' commit."""
        committed = domain.bundles.get(model)
        root = committed.bundle.root if committed else None
        named = {names.bundle_shard(model, ref.index, ref.slot) for ref in (root.shards if root else ())}
        named |= {names.pool_shard(model, ref.index, ref.slot) for ref in (root.pools if root else ())}
        name, version = raw["metadata"]["name"], resource_version(raw)
        if model not in domain.objects["CachedModel"]:
            return frozenset()
        if committed and version <= int(committed.resource_version or 0):
            return frozenset()
        if name == names.bundle_root(model):
            newest: float = version
        elif name in named:
            # The root does not change with its shards, so no version of it proves that they were read again.
            newest = math.inf
        else:
            # A free slot: a commit is filling it, or it is not read.
            return frozenset()
        domain.suspected_bundles[model] = max(newest, domain.suspected_bundles.get(model, 0))
        return frozenset({Key(BUNDLE, domain.namespace, model)})
