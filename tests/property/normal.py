"""A namespace without what chance, clocks and counters put into it, so that two runs can be compared.

Epochs, UIDs and the domain's id are replaced by whose they are; times, resourceVersions, bundle revisions and
Events, which may be lost, are left out; of generated Secrets only the keys stay, and of a bundle what a gate makes of
it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

from kvstrata.contract.policy.bundle import ROOT_DATA_KEY, SHARD_DATA_KEY, Bundle, Root, decode_shard
from kvstrata.contract.policy.keyspace import Scope, ScopeKind, derive_keyspace
from kvstrata.contract.policy.pools import PoolShard
from kvstrata.contract.wire import to_wire
from kvstrata.objects import labels, names
from kvstrata.objects.applied import APPLIED
from kvstrata.objects.mark import MARK
from tests.support.objects import NAMESPACE
from tests.support.worlds import Simulation

Raw = Mapping[str, Any]
Objects = Mapping[tuple[str, str, str], Raw]
HOLDERS = ("CacheDomain", "TenantGroup", "TenantCachePolicy", "PrefixPool")
_TIMES = frozenset(
    {
        "lastTransitionTime",
        "creationTimestamp",
        "startTime",
        "completionTime",
        "rolledTime",
        "took",
        "fencedBy",
        "observedAt",
        "warmedAt",
        "unusedSince",
    }
)
_COUNTERS = frozenset({"resourceVersion", "bundleRevision", "revision", "digest"})
_DIGESTS = frozenset({APPLIED, MARK, labels.TLS_REVISION})
"""Annotations that follow from random material; that they are current is tested by planning again."""


def normal(simulation: Simulation) -> dict[str, Any]:
    """Return the state of a namespace: objects by `Kind/name`, bundles by `bundle of <model>`."""
    objects = simulation.kube.objects
    told = _tokens(objects)

    def token(text: str) -> str:
        return told.get(text) or text.replace(*_domain_id(objects))

    state: dict[str, Any] = {}
    for (kind, _, name), raw in sorted(objects.items()):
        component = (raw["metadata"].get("labels") or {}).get(labels.COMPONENT)
        if kind == "Event" or (kind == "Secret" and component in ("bundle", "data-keys")):
            continue
        state[f"{kind}/{name}"] = _without_chance(raw, token) if kind != "Secret" else _of_secret(raw, token)
    # Which of the sixteen Secrets has a key is up to the epoch's first digit.
    state["data keys"] = sorted(map(token, data_keys(objects)))
    for kind, _, name in objects:
        if kind == "CachedModel":
            state[f"bundle of {name}"] = _bundle(objects, name, token)
    return state


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return where two states differ, and how."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        names_of_both = [*one, *(name for name in other if name not in one)]
        return [
            line for name in names_of_both for line in differences(one.get(name), other.get(name), f"{path}.{name}")
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [line for n, (left, right) in pairs for line in differences(left, right, f"{path}[{n}]")]
    return [] if one == other else [f"{path[1:]}: {one!r} != {other!r}"]


def read_bundle(objects: Objects, model: str) -> Bundle | None:
    """Return a bundle as a gate reads it, with every digest checked; None if there is no root.

    Raises ContractError or LookupError for one that no gate could read.
    """
    stored = objects.get(("Secret", NAMESPACE, names.bundle_root(model)))
    if stored is None:
        return None
    root = Root.decode(base64.b64decode(stored["data"][ROOT_DATA_KEY]))

    def data(name: str) -> bytes:
        return base64.b64decode(objects[("Secret", NAMESPACE, name)]["data"][SHARD_DATA_KEY])

    shards = [decode_shard(data(names.bundle_shard(model, ref.index, ref.slot)), ref.digest) for ref in root.shards]
    pools = [PoolShard.decode(data(names.pool_shard(model, ref.index, ref.slot)), ref.digest) for ref in root.pools]
    return Bundle.assemble(root, [entry for entries in shards for entry in entries], pools)


def domain_key(objects: Objects) -> bytes | None:
    """Return the domain's key."""
    stored = objects.get(("Secret", NAMESPACE, names.DOMAIN_KEY_SECRET))
    return base64.b64decode(stored["data"][names.DOMAIN_KEY_DATA_KEY]) if stored else None


def data_keys(objects: Objects) -> dict[str, bytes]:
    """Return the data keys in Secrets, by epoch."""
    return {
        epoch: base64.b64decode(value)
        for (kind, _, name), raw in objects.items()
        if kind == "Secret" and name.startswith(names.DATA_KEYS_PREFIX)
        for epoch, value in (raw.get("data") or {}).items()
    }


def own_scopes(raw: Raw) -> list[tuple[Scope, str]]:
    """Return the scope whose epoch this object decides on, with the epoch; and with the one that is to follow it."""
    status = raw.get("status") or {}
    told = [status.get("scope"), (status.get("next") or {}).get("scope")] if raw["kind"] in HOLDERS else []
    own = [one for one in told if one and not (raw["kind"] == "TenantCachePolicy" and one["kind"] != "Tenant")]
    return [(Scope(ScopeKind(one["kind"]), one["name"]), one["epoch"]) for one in own]


def _tokens(objects: Objects) -> dict[str, str]:
    """Return what stands for each random value: the object of a UID, the scope of an epoch and of its keyspace."""
    told = {raw["metadata"]["uid"]: f"uid of {kind} {name}" for (kind, _, name), raw in objects.items()}
    key = domain_key(objects)
    for raw in objects.values():
        for number, (scope, epoch) in enumerate(own_scopes(raw)):
            word = f"next of {scope}" if number else str(scope)
            assert told.setdefault(epoch, f"epoch of {word}") == f"epoch of {word}", "two scopes have one epoch"
            if key is not None:
                told[derive_keyspace(key, scope, epoch)] = f"keyspace of {word}"
    return told


def _domain_id(objects: Objects) -> tuple[str, str]:
    domain = objects.get(("CacheDomain", NAMESPACE, "default")) or {}
    return (domain.get("status") or {}).get("domainID") or "no domain id", "domain-id"


def _without_chance(value: Any, token: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        if "oldEpoch" in value:
            # Which one that was is told by the number of rolls, and that none came back by the history.
            value = {**value, "oldEpoch": "old", "newEpoch": "new"}
        if "uid" in value and "acked" in value:
            value = {name: inner for name, inner in value.items() if name != "acked"}  # a pod's, by revision
        dropped = _TIMES | _COUNTERS | _DIGESTS
        kept = {name: inner for name, inner in value.items() if name not in dropped}
        if "uid" in kept and "generation" in kept and value.get("ownerReferences"):
            # Of children: how often they were changed on the way is looked at in their history.
            del kept["generation"]
        return {token(name): _without_chance(inner, token) for name, inner in kept.items()}
    if isinstance(value, list):
        return [_without_chance(item, token) for item in value]
    return token(value) if isinstance(value, str) else value


def _of_secret(raw: Raw, token: Callable[[str], str]) -> Any:
    return {**_without_chance({k: v for k, v in raw.items() if k != "data"}, token), "keys": sorted(raw["data"])}


def _bundle(objects: Objects, model: str, token: Callable[[str], str]) -> Any:
    found = read_bundle(objects, model)
    if found is None:
        return None
    root = found.root
    return {
        "domain": token(root.domain),
        "model": token(root.model_uid),
        "rules": to_wire(root.rules),
        "pools": {
            name: [
                (token(v.keyspace), str(v.state), v.manifest, v.tiers, v.budgets, len(v.keys)) for v in shard.versions
            ]
            for name, shard in sorted(found.pools.items())
        },
        "entries": {
            tenant: (str(e.scope), token(e.keyspace), token(e.policy), e.suspended, e.budgets, len(e.keys), e.pools)
            for tenant, e in sorted(found.entries.items())
        },
    }
