"""Raw objects of the API as a user would write them, from the few fields that a test is about."""

from __future__ import annotations

from typing import Any

NAMESPACE = "team"
GROUP_VERSION = "kvstrata.io/v1alpha1"

Raw = dict[str, Any]


def own(kind: str, name: str, spec: Raw, **metadata: Any) -> Raw:
    """Return an object of this API group; `metadata` adds to its metadata."""
    return {
        "apiVersion": GROUP_VERSION,
        "kind": kind,
        "metadata": {"name": name, "namespace": NAMESPACE, **metadata},
        "spec": spec,
    }


def domain(**spec: Any) -> Raw:
    """Return the namespace's CacheDomain."""
    return own("CacheDomain", "default", spec)


def cpu_tier(name: str = "cpu", **spec: Any) -> Raw:
    """Return a tier in the memory of each pod."""
    return own("CacheTier", name, {"medium": "CPU", "capacityPerPod": "1Gi", **spec})


def redis_tier(name: str = "shared", **spec: Any) -> Raw:
    """Return a managed Redis tier that this version can run."""
    base = {"medium": "Redis", "capacity": "64Mi", "encryption": "Disabled", "redis": {"managed": {}}}
    return own("CacheTier", name, {key: value for key, value in {**base, **spec}.items() if value is not None})


STALLED_REDIS: Raw = {"external": {"endpoints": ["taken.example:6379"]}}
"""Servers for `redis_tier` that make it `Stalled` with TiersConflict, where `older_tier` has them."""


def older_tier() -> Raw:
    """Return a tier with the servers `STALLED_REDIS`; create it before the tier that is to be stalled."""
    return redis_tier("older", redis=STALLED_REDIS)


def model(name: str = "tiny", *, tiers: tuple[str, ...] = (), labels: dict[str, str] | None = None, **spec: Any) -> Raw:
    """Return a CachedModel with API keys and `tiers`."""
    base: Raw = {
        "model": {"name": name, "source": {"path": "/opt/tiny"}},
        "engine": {"image": "engine:1", "replicas": 1},
        "gate": {"authentication": {"apiKeys": {"secretRef": {"name": "keys"}}}},
    }
    base["tiers"] = [{"name": tier} for tier in tiers]
    return own("CachedModel", name, {**base, **spec}, **({"labels": labels} if labels else {}))


def policy(tenant: str, *, name: str | None = None, group: str | None = None, **spec: Any) -> Raw:
    """Return the policy of one tenant: isolated unless `group` or `isolation` is given."""
    isolation = {"isolation": "Group", "groupRef": {"name": group}} if group else {"isolation": "Isolated"}
    return own("TenantCachePolicy", name or tenant, {"tenant": tenant, **isolation, **spec})


def group(name: str, *members: str, **spec: Any) -> Raw:
    """Return a TenantGroup that shares fully."""
    return own("TenantGroup", name, {"members": list(members), "sharing": "Full", **spec})


def pool(name: str, *tenants: str, model: str = "tiny", **spec: Any) -> Raw:
    """Return a PrefixPool with one text, which these tenants may read; all may where none is named."""
    base: Raw = {
        "modelRef": {"name": model},
        "prefixes": [{"name": "manual", "text": "You are a patient assistant."}],
        "readers": {"tenants": list(tenants)} if tenants else {"public": True},
    }
    return own("PrefixPool", name, {**base, **spec})


def config_map(name: str, **data: str) -> Raw:
    """Return a ConfigMap."""
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def invalidation(name: str, **spec: Any) -> Raw:
    """Return a lazy CacheInvalidation."""
    return own("CacheInvalidation", name, {"mode": "Lazy", **spec})


def pod(
    name: str,
    model: str = "tiny",
    *,
    state: str = "running",
    ready: bool = True,
    render_id: str = "",
    identity: str = "",
) -> Raw:
    """Return a pod of a model; `state` is waiting, running or terminated for its one reported container."""
    owned = {"app.kubernetes.io/managed-by": "kvstrata", "kvstrata.io/model": model}
    if render_id:
        owned["kvstrata.io/render"] = render_id
    if identity:
        owned["kvstrata.io/identity"] = identity
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": owned},
        "spec": {"nodeName": "node"},
        "status": {
            "phase": "Running",
            "podIP": "127.0.0.9",
            "containerStatuses": [{"name": "engine", "state": {state: {}}}],
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def server_pod(name: str, tier: str = "shared", **status: Any) -> Raw:
    """Return a pod of a managed tier's server."""
    owned = {"app.kubernetes.io/managed-by": "kvstrata", "kvstrata.io/tier": tier}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": f"uid-{name}", "labels": owned},
        "spec": {"nodeName": "node"},
        "status": status,
    }
