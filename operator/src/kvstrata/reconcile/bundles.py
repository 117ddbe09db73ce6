"""Bundles at the API server: committed, and read back at the start, after a conflict and after a watch event."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import SECRET
from kvstrata.contract import ContractError
from kvstrata.contract.policy.bundle import ROOT_DATA_KEY, SHARD_DATA_KEY, Bundle, Entry, Root, Rules, decode_shard
from kvstrata.contract.policy.pools import PoolShard
from kvstrata.model.pods import CommittedBundle
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.objects import labels, mark, names
from kvstrata.objects.secret import build_secret
from kvstrata.plan.actions import CommitBundle, EmptySecrets, TakeBack
from kvstrata.plan.ownership import is_ours

from . import metrics
from .affected import affected_by_commit
from .audit import record_sharing
from .claims import NameConflictError
from .domain_store import DomainStore
from .queue import WorkQueue
from .secrets import SecretStore, decode
from .store import Store

log = logging.getLogger(__name__)

COMMIT_INTERVAL_S = 0.1
"""A bundle is committed at most ten times a second; the next commit carries edits in between."""


class Bundles:
    """Writes bundles."""

    def __init__(self, kube: Kube, store: Store, queue: WorkQueue, secret_store: SecretStore) -> None:
        self._kube, self._store, self._queue, self._secret_store = kube, store, queue, secret_store

    async def commit(self, key: Key, commit: CommitBundle) -> None:
        """Write changed shards into their free slots, then flip the root. Every foreign shard is found, then raised."""
        started = time.monotonic()
        self._queue.hold_off(key, COMMIT_INTERVAL_S)
        domain = self._store.domain(key.namespace)
        conflict: NameConflictError | None = None
        for name, data in shards_of(commit):
            try:
                await self._write_shard(domain, commit, name, data)
            except NameConflictError as error:
                conflict = error
        if conflict is not None:
            raise conflict
        bundle = Bundle(commit.root, commit.entries, commit.pools)
        version = await self._write_root(domain, commit, bundle)
        before = domain.bundles.get(commit.model)
        known = commit.compiled, commit.keyless, commit.pool_indexes
        domain.bundles[commit.model] = CommittedBundle(bundle, version, *known)
        domain.committed_at[commit.model] = (commit.root.revision, time.monotonic())
        metrics.COMMITS.observe(time.monotonic() - started)
        record_sharing(key.namespace, commit, before.bundle.entries if before else {}, domain)
        self._queue.add_all(affected_by_commit(self._store.world(key.namespace), commit, before))

    async def _write_root(self, domain: DomainStore, commit: CommitBundle, bundle: Bundle) -> str:
        """Write the root if it is at the version that the plan knew; return its new version."""
        encoded = {ROOT_DATA_KEY: commit.root.encode()}
        name = names.bundle_root(commit.model)
        body = bundle_secret(name, domain.namespace, encoded, commit.model, commit.owner)
        try:
            written = await self._write(domain, body, commit.resource_version)
        except KubeError as error:
            if error.is_refusal or error.status == HTTPStatus.TOO_MANY_REQUESTS:
                raise
            # The answer may have been lost after the write: then the stored bundle equals the intended one.
            await self._secret_store.read(domain, name, commit.owner)
            found = await read_bundle(self._kube, domain, commit.model, commit.owner)
            if found is None or found.bundle != bundle:
                take(domain, commit.model, found)
                raise
            return found.resource_version
        return str(written["metadata"]["resourceVersion"])

    async def _write_shard(self, domain: DomainStore, commit: CommitBundle, name: str, data: bytes) -> None:
        """Fill the unused slot of a shard, if it is as this process knows it. Otherwise another writer, perhaps
        another leader, changed it, and the plan is outdated."""
        known = domain.secrets.get(name)
        body = bundle_secret(name, domain.namespace, {SHARD_DATA_KEY: data}, commit.model, commit.owner)
        try:
            written = await self._write(domain, body, known.resource_version if known is not None else None)
        except KubeError as error:
            if error.is_conflict or error.is_not_found:
                await self._reread(domain, name, commit.owner)
                take(domain, commit.model, await self._read(domain, commit.model))
                self._queue.add(Key(BUNDLE, domain.namespace, commit.model))
            raise
        self._secret_store.observe(domain, written)

    async def empty(self, key: Key, order: EmptySecrets) -> None:
        """Empty unused Secrets; one that was written meanwhile is read again."""
        domain = self._store.domain(key.namespace)
        for name, version in order.versions.items():
            body = bundle_secret(name, domain.namespace, {}, order.model, order.owner)
            try:
                written = await self._write(domain, body, version)
            except KubeError as error:
                if error.is_not_found:
                    self._secret_store.forget(domain, name)
                    continue
                if error.is_conflict:
                    await self._reread(domain, name, order.owner)
                raise
            self._secret_store.observe(domain, written)

    async def take_back(self, key: Key, order: TakeBack) -> None:
        """Write owner reference and mark of a Secret; the version of a root that this process knows follows."""
        domain = self._store.domain(key.namespace)
        written = await self._secret_store.take_back(domain, order)
        if written is not None and key.kind == BUNDLE and order.name == names.bundle_root(key.name):
            take(domain, key.name, await self._read(domain, key.name))

    async def catch_up(self, key: Key) -> None:
        """Read the bundle of `key` again if a watch reported a version that this process did not write. It runs in
        the key's turn, never beside a commit of the same bundle, so the answers to own writes are known."""
        domain = self._store.domain(key.namespace)
        if key.kind != BUNDLE or key.name not in domain.suspected_bundles:
            return
        suspected = domain.suspected_bundles.pop(key.name)
        committed = domain.bundles.get(key.name)
        if committed is None or suspected <= int(committed.resource_version or 0):
            return
        try:
            take(domain, key.name, await self._read(domain, key.name))
        except KubeError:
            domain.suspected_bundles.setdefault(key.name, suspected)
            raise

    async def _write(self, domain: DomainStore, body: dict[str, Any], version: str | None) -> dict[str, Any]:
        """Create a Secret, or replace the one of that version."""
        body = mark.marked(domain.mark_key, body)
        if not version:
            return await self._kube.create(SECRET, domain.namespace, body)
        body["metadata"]["resourceVersion"] = version
        return await self._kube.replace(SECRET, domain.namespace, body)

    async def _read(self, domain: DomainStore, model: str) -> CommittedBundle | None:
        known = domain.models.get(model)
        return await read_bundle(self._kube, domain, model, known.owner_reference()) if known else None

    async def _reread(self, domain: DomainStore, name: str, owner: Mapping[str, Any]) -> None:
        if (stored := await self._secret_store.read(domain, name, owner)) is not None:
            self._secret_store.observe(domain, stored)
        else:
            self._secret_store.forget(domain, name)


def bundle_of(raw: Mapping[str, Any]) -> str | None:
    """Return the model that a Secret of a bundle belongs to, or None."""
    own = raw["metadata"].get("labels") or {}
    model: str | None = own.get(labels.MODEL)
    return model if own.get(labels.COMPONENT) == "bundle" else None


async def read_bundle(kube: Kube, domain: DomainStore, model: str, owner: Mapping[str, Any]) -> CommittedBundle | None:
    """Read the bundle of the model of reference `owner`; None if there is none. Foreign Secrets are ignored."""

    async def read(name: str) -> dict[str, Any] | None:
        found = await kube.get(SECRET, domain.namespace, name)
        return found if found is not None and is_ours(domain.mark_key, owner, found) else None

    stored = await read(names.bundle_root(model))
    if stored is None:
        return None
    shards: tuple[str, ...] = ()
    with suppress(ContractError):
        shards = shard_names(model, Root.decode(decode(stored).get(ROOT_DATA_KEY, b"")))
    found = {names.bundle_root(model): stored}
    for name in shards:
        if (shard := await read(name)) is not None:
            found[name] = shard
    return assemble(model, found)


def assemble(model: str, secrets: Mapping[str, Mapping[str, Any]]) -> CommittedBundle | None:
    """Return a model's bundle from its namespace's Secrets by name, or None. If a shard is missing or damaged, the
    root is returned without entries: its revision must still be exceeded, and the next commit writes every shard
    again. A damaged pool shard only drops its pool."""
    stored = secrets.get(names.bundle_root(model))
    if stored is None:
        return None
    version = stored["metadata"]["resourceVersion"]
    try:
        root = Root.decode(decode(stored).get(ROOT_DATA_KEY, b""))
    except ContractError as error:
        log.error("the bundle's root cannot be read and is replaced", extra={"model": model, "error": str(error)})
        nothing = Root(domain="", model=model, model_uid="", revision=0, term=0, rules=Rules(), shards=())
        return CommittedBundle(Bundle(nothing, {}), version)
    root, pools, indexes = _pools(model, root, secrets)
    entries: dict[str, Entry] = {}
    try:
        for ref in root.shards:
            data = _shard_in(secrets, names.bundle_shard(model, ref.index, ref.slot))
            entries |= {entry.tenant: entry for entry in decode_shard(data, ref.digest)}
    except ContractError as error:
        log.error("a bundle's shard is damaged and is rewritten", extra={"model": model, "error": str(error)})
        damaged = Bundle(replace(root, shards=(), rules_since=0), {}, pools)
        return CommittedBundle(damaged, version, pool_indexes=indexes)
    return CommittedBundle(Bundle(root, entries, pools), version, pool_indexes=indexes)


def _pools(
    model: str, root: Root, secrets: Mapping[str, Mapping[str, Any]]
) -> tuple[Root, dict[str, PoolShard], dict[str, int]]:
    """Return pools by name, their indexes, and the root without digests of unreadable shards."""
    pools: dict[str, PoolShard] = {}
    indexes: dict[str, int] = {}
    refs = []
    for ref in root.pools:
        try:
            shard = PoolShard.decode(_shard_in(secrets, names.pool_shard(model, ref.index, ref.slot)), ref.digest)
        except ContractError as error:
            log.error("a pool's shard is damaged and is rewritten", extra={"model": model, "error": str(error)})
            refs.append(replace(ref, digest=""))
        else:
            pools[shard.pool], indexes[shard.pool] = shard, ref.index
            refs.append(ref)
    return replace(root, pools=tuple(refs)), pools, indexes


def _shard_in(secrets: Mapping[str, Mapping[str, Any]], name: str) -> bytes:
    return decode(secrets.get(name, {})).get(SHARD_DATA_KEY, b"")


def shard_names(model: str, root: Root) -> tuple[str, ...]:
    shards = (names.bundle_shard(model, ref.index, ref.slot) for ref in root.shards)
    return *shards, *(names.pool_shard(model, ref.index, ref.slot) for ref in root.pools)


def shards_of(commit: CommitBundle) -> Iterator[tuple[str, bytes]]:
    """Yield names and data of the Secrets that a commit writes before it flips the root."""
    for index, data in commit.shards.items():
        yield names.bundle_shard(commit.model, index, commit.root.shards[index].slot), data
    slots = {ref.index: ref.slot for ref in commit.root.pools}
    for index, data in commit.pool_shards.items():
        yield names.pool_shard(commit.model, index, slots[index]), data


def bundle_secret(
    name: str, namespace: str, data: Mapping[str, bytes], model: str, owner: Mapping[str, Any]
) -> dict[str, Any]:
    return build_secret(name, namespace, labels.of_model(model, "bundle"), owner, data)


def take(domain: DomainStore, model: str, found: CommittedBundle | None) -> None:
    """Store the API server's bundle of `model`. If it differs from the one that this process committed, it was changed
    or deleted from outside: the known bundle is kept in a form that the next plan commits in full, under a revision
    above both."""
    own = domain.bundles.get(model)
    if own is None:
        if found is not None:
            domain.bundles[model] = found
        return
    if found is not None and int(found.resource_version) < int(own.resource_version or 0):
        return  # Read before a commit made meanwhile.
    if found is not None and found.bundle == own.bundle:
        domain.bundles[model] = found
        return
    current = domain.models.get(model)
    reported = (current.status.bundle_revision if current else None) or 0
    theirs = found.bundle.root if found else own.bundle.root
    revision = max(own.bundle.root.revision, theirs.revision, reported)
    log.warning("a bundle is not as it was committed and is rewritten", extra={"model": model, "above": revision})
    shards = theirs.shards or own.bundle.root.shards
    pools = theirs.pools if found else own.bundle.root.pools
    # No domain or digest matches, so everything is written again, each shard into the unused slot.
    root = replace(
        own.bundle.root,
        domain="",
        revision=revision,
        term=max(own.bundle.root.term, theirs.term),
        rules_since=revision + 1,
        shards=tuple(replace(ref, digest="") for ref in shards),
        pools=tuple(replace(ref, digest="", since=revision + 1) for ref in pools),
    )
    entries = {tenant: replace(entry, since=revision + 1) for tenant, entry in own.bundle.entries.items()}
    domain.bundles[model] = CommittedBundle(
        Bundle(root, entries, own.bundle.pools),
        found.resource_version if found else "",
        pool_indexes=found.pool_indexes if found else own.pool_indexes,
    )
