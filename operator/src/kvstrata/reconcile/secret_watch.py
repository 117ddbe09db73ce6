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

from .bundles import bundle_of, shard_names
from .parse import owners, resource_version
from .secrets import SecretStore
from .store import Store

Raw = Mapping[str, Any]


class SecretWatch:
    """Passes events of Secrets to the SecretStore and marks bundles; each call returns the affected keys. Events before
    the SecretStore is open are dropped: a new leader reads everything after opening it."""

    def __init__(self, store: Store, secret_store: SecretStore) -> None:
        self._store, self._secret_store = store, secret_store

    def observe(self, raw: Raw) -> frozenset[Key]:
        if not self._secret_store.is_open:
            return frozenset()
        domain, name = self._store.domain(raw["metadata"]["namespace"]), raw["metadata"]["name"]
        before, keys_before = domain.secrets.get(name), (domain.domain_key, domain.data_keys)
        if before and resource_version(raw) <= int(before.resource_version or 0):
            return frozenset()
        self._secret_store.observe(domain, raw)
        after = domain.secrets.get(name)
        same = before and after and before.has_same_content_as(after)
        return self._affected(domain, raw, keys_before, frozenset() if same else owners(raw))

    def forget(self, raw: Raw) -> frozenset[Key]:
        """`raw` is the last state of the deleted Secret."""
        if not self._secret_store.is_open:
            return frozenset()
        domain = self._store.domain(raw["metadata"]["namespace"])
        keys_before = domain.domain_key, domain.data_keys
        if not self._secret_store.forget(domain, raw["metadata"]["name"], resource_version(raw)):
            return frozenset()
        waiting = domain.waiting(slot := (raw["kind"], raw["metadata"]["name"]))
        domain.foreign.pop(slot, None)
        return self._affected(domain, raw, keys_before, owners(raw)) | waiting

    def _affected(
        self, domain: DomainStore, raw: Raw, keys_before: tuple[object, object], others: frozenset[Key]
    ) -> frozenset[Key]:
        """Return the keys of a bundle, or of data that a key protects; `others` for any other Secret."""
        domain_key, data_keys = keys_before
        if (model := bundle_of(raw)) is not None:
            return self._mark(domain, model, raw)
        if domain.domain_key != domain_key:
            return frozenset(self._store.keys_of(domain.namespace))  # All keyspaces derive from it.
        return frozenset(self._store.key_holders(domain.namespace)) if domain.data_keys != data_keys else others

    def _mark(self, domain: DomainStore, model: str, raw: Raw) -> frozenset[Key]:
        """Mark the bundle of `model` to be read again, unless the event is of this process' commit."""
        committed, name, version = domain.bundles.get(model), raw["metadata"]["name"], resource_version(raw)
        if model not in domain.models:
            return frozenset()
        if committed and version <= int(committed.resource_version or 0):
            return frozenset()
        if name == names.bundle_root(model):
            newest: float = version
        elif committed and name in shard_names(model, committed.bundle.root):
            # The root does not change with its shards, so no version of it proves that they were read again.
            newest = math.inf
        else:
            # A free slot: a commit is filling it, or it is not read.
            return frozenset()
        domain.suspected_bundles[model] = max(newest, domain.suspected_bundles.get(model, 0))
        return frozenset({Key(BUNDLE, domain.namespace, model)})
