"""API objects for these tests, from the few fields that a test is about."""

from __future__ import annotations

from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier
from kvstrata.objects.context import BuildContext

CONTEXT = BuildContext(sidecar_image="sidecar:1", redis_image="redis:7")
DOMAIN_ID = "00112233445566aa"
IDENTITY = "0123456789abcdef"


def tier(name: str, **spec: Any) -> CacheTier:
    """Return a CacheTier in the namespace `team`."""
    metadata = {"name": name, "namespace": "team", "uid": f"uid-{name}"}
    return CacheTier.parse({"kind": "CacheTier", "metadata": metadata, "spec": spec})


def cpu_tier(capacity: str = "1Gi", **spec: Any) -> CacheTier:
    """Return a tier of medium CPU."""
    return tier("cpu", medium="CPU", capacityPerPod=capacity, **spec)


def nvme_tier(name: str = "disk") -> CacheTier:
    """Return a tier of files in a volume of the node."""
    return tier(name, medium="NVMe", capacityPerPod="1Gi", nvme={"emptyDir": {}})


def redis_tier(name: str = "shared", capacity: str = "64Mi", **managed: Any) -> CacheTier:
    """Return a managed Redis tier."""
    return tier(name, medium="Redis", capacity=capacity, encryption="Disabled", redis={"managed": managed})


def model(
    *, source: dict[str, Any] | None = None, gate: dict[str, Any] | None = None, **parts: dict[str, Any]
) -> CachedModel:
    """Return a CachedModel; `parts` are merged into spec.model, spec.engine and the like."""
    spec: dict[str, Any] = {
        "model": {"name": "tiny", "source": source or {"path": "/opt/tiny"}, **parts.pop("model", {})},
        "engine": {"image": "engine:1", **parts.pop("engine", {})},
        "gate": {"authentication": {"apiKeys": {"secretRef": {"name": "keys"}}}, **(gate or {})},
        **parts,
    }
    metadata = {"name": "tiny", "namespace": "team", "uid": "uid-tiny"}
    return CachedModel.parse({"kind": "CachedModel", "metadata": metadata, "spec": spec})
