"""Reading bundles back from the API server: at the start, after a conflict, and after a watch event."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvstrata.clients.kube import Kube
from kvstrata.clients.resources import SECRET
from kvstrata.contract import ContractError
from kvstrata.contract.policy.bundle import ROOT_DATA_KEY, SHARD_DATA_KEY, Bundle, Entry, Root, Rules, decode_shard
from kvstrata.contract.policy.pools import PoolShard
from kvstrata.model.pods import CommittedBundle
from kvstrata.objects import labels, names
from kvstrata.plan.actions import CommitBundle
from kvstrata.plan.ownership import is_ours
from kvstrata.reconcile.domain_store import DomainStore

from .secrets import decode

log = logging.getLogger(__name__)


def bundle_of(raw: Mapping[str, Any]) -> str | None:
    """Return the model that a Secret of a bundle belongs to, or None."""
    own = raw["metadata"].get("labels") or {}
    model: str | None = own.get(labels.MODEL)
    return model if own.get(labels.COMPONENT) == "bundle" else None


async def read_bundle(kube: Kube, namespace: str, model: str, uid: str) -> CommittedBundle | None:
    """Read the bundle of the model with this UID; None if there is none. Foreign Secrets are ignored."""

    async def read(name: str) -> dict[str, Any] | None:
        found = await kube.get(SECRET, namespace, name)
        return found if found is not None and is_ours(found, uid) else None

    stored = await read(names.bundle_root(model))
    if stored is None:
        return None
    try:
        root = Root.decode(decode(stored).get(ROOT_DATA_KEY, b""))
    except ContractError:
        return assemble(model, {names.bundle_root(model): stored})
    shards = {}
    for name in (
        *(names.bundle_shard(model, ref.index, ref.slot) for ref in root.shards),
        *(names.pool_shard(model, ref.index, ref.slot) for ref in root.pools),
    ):
        shard = await read(name)
        if shard is not None:
            shards[name] = shard
    return assemble(model, {names.bundle_root(model): stored, **shards})


def assemble(model: str, secrets: Mapping[str, Mapping[str, Any]]) -> CommittedBundle | None:
    """Return a model's bundle from its namespace's Secrets by name, or None. If a shard is missing or damaged, the
    root is returned without entries: its revision must still be exceeded, and the next commit writes every shard
    anew. A damaged pool shard only drops its pool."""
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
            shard = secrets.get(names.bundle_shard(model, ref.index, ref.slot))
            data = decode(shard).get(SHARD_DATA_KEY, b"") if shard else b""
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
        stored = secrets.get(names.pool_shard(model, ref.index, ref.slot))
        try:
            shard = PoolShard.decode(decode(stored).get(SHARD_DATA_KEY, b"") if stored else b"", ref.digest)
        except ContractError as error:
            log.error("a pool's shard is damaged and is rewritten", extra={"model": model, "error": str(error)})
            refs.append(replace(ref, digest=""))
            continue
        pools[shard.pool], indexes[shard.pool] = shard, ref.index
        refs.append(ref)
    return replace(root, pools=tuple(refs)), pools, indexes


def shards_of(commit: CommitBundle) -> Iterator[tuple[str, bytes]]:
    """Yield names and data of the Secrets that a commit writes before it flips the root."""
    for index, data in commit.shards.items():
        yield names.bundle_shard(commit.model, index, commit.root.shards[index].slot), data
    slots = {ref.index: ref.slot for ref in commit.root.pools}
    for index, data in commit.pool_shards.items():
        yield names.pool_shard(commit.model, index, slots[index]), data


def bundle_secret(name: str, data: Mapping[str, bytes], model: str, owner: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": SECRET.api_version,
        "kind": SECRET.kind,
        "metadata": {
            "name": name,
            "labels": labels.of_model(model, "bundle"),
            "ownerReferences": [dict(owner)],
        },
        "type": "Opaque",
        "data": {data_key: base64.b64encode(value).decode() for data_key, value in data.items()},
    }


def take(domain: DomainStore, model: str, found: CommittedBundle | None) -> None:
    """Store what the API server holds for `model`. If it is not what this process committed, it was changed or
    deleted from outside: the known bundle is kept in a form that the next plan commits in full, under a revision
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
    current = domain.objects["CachedModel"].get(model)
    reported = (current.status.bundle_revision if current else None) or 0
    theirs = found.bundle.root if found else own.bundle.root
    revision = max(own.bundle.root.revision, theirs.revision, reported)
    log.warning("a bundle is not as it was committed and is rewritten", extra={"model": model, "above": revision})
    shards = theirs.shards or own.bundle.root.shards
    pools = theirs.pools if found else own.bundle.root.pools
    # No domain or digest matches, so everything is written anew, each shard into the unused slot.
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
