"""Reading bundles back from the API server, at the start and after a conflict."""

from __future__ import annotations

import logging
from dataclasses import replace

from kvstrata.adapters.kube import Kube
from kvstrata.adapters.resources import SECRET
from kvstrata.contract import ContractError
from kvstrata.contract.bundle import ROOT_DATA_KEY, SHARD_DATA_KEY, Bundle, Entry, Root, Rules, decode_shard
from kvstrata.model.facts import CommittedBundle
from kvstrata.objects import names

from .secrets import decode

log = logging.getLogger(__name__)


async def read_bundle(kube: Kube, namespace: str, model: str) -> CommittedBundle | None:
    """Return a model's bundle, or None if there is none.

    Of one with a shard that is missing or damaged the root is returned without entries: its revision must still be
    exceeded, and the next commit writes every shard anew.
    """
    stored = await kube.get(SECRET, namespace, names.bundle_root(model))
    if stored is None:
        return None
    version = stored["metadata"]["resourceVersion"]
    try:
        root = Root.decode(decode(stored).get(ROOT_DATA_KEY, b""))
    except ContractError as error:
        log.error("the bundle's root cannot be read and is replaced", extra={"model": model, "error": str(error)})
        nothing = Root(domain="", model=model, model_uid="", revision=0, term=0, rules=Rules(), shards=())
        return CommittedBundle(Bundle(nothing, {}), version)
    entries: dict[str, Entry] = {}
    try:
        for ref in root.shards:
            shard = await kube.get(SECRET, namespace, names.bundle_shard(model, ref.index, ref.slot))
            data = decode(shard).get(SHARD_DATA_KEY, b"") if shard else b""
            entries |= {entry.tenant: entry for entry in decode_shard(data, ref.digest)}
    except ContractError as error:
        log.error("a bundle's shard is damaged and is rewritten", extra={"model": model, "error": str(error)})
        return CommittedBundle(Bundle(replace(root, shards=(), rules_since=0), {}), version)
    return CommittedBundle(Bundle(root, entries), version)
