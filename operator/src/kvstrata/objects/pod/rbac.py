"""What a model's gate may do at the API server: read its own bundle and its callers' keys, by name, nothing else."""

from __future__ import annotations

from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.contract.policy.pools import MAX_POOLS
from kvstrata.contract.policy.shard_slots import SLOTS
from kvstrata.objects import labels, names
from kvstrata.objects.meta import metadata

RBAC = "rbac.authorization.k8s.io"


def build_serviceaccount(model: CachedModel) -> dict[str, Any]:
    """Return the ServiceAccount of a model's pods. No token is mounted by itself: only the gate gets one."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": _metadata(model),
        "automountServiceAccountToken": False,
    }


def build_role(model: CachedModel, shard_count: int, *, has_pools: bool = False) -> dict[str, Any]:
    """Return the Role. `shard_count` is the number of the bundle's shards, present and imminent, `has_pools` whether
    there may be shards of pools, too: of these all are named at once, because pools come and go.

    A Role has to name a shard before the root does, or gates cannot read the new bundle: apply it first.
    """
    shards = [names.bundle_shard(model.name, index, slot) for index in range(shard_count) for slot in SLOTS]
    if has_pools:
        shards += [names.pool_shard(model.name, index, slot) for index in range(MAX_POOLS) for slot in SLOTS]
    watched = [names.bundle_root(model.name)]
    keys = model.spec.gate.authentication.api_keys
    if keys is not None:
        watched.append(keys.secret_ref.name)
    rules = [{"apiGroups": [""], "resources": ["secrets"], "resourceNames": watched, "verbs": ["get", "watch"]}]
    if shards:
        rules.append({"apiGroups": [""], "resources": ["secrets"], "resourceNames": shards, "verbs": ["get"]})
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": "Role",
        "metadata": _metadata(model),
        "rules": rules,
    }


def build_rolebinding(model: CachedModel) -> dict[str, Any]:
    """Return the RoleBinding of the model's ServiceAccount to its Role."""
    name = names.model_child(model.name)
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": _metadata(model),
        "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": model.namespace}],
    }


def _metadata(model: CachedModel) -> dict[str, Any]:
    return metadata(
        names.model_child(model.name), model.namespace, labels.of_model(model.name), model.owner_reference()
    )
