"""Services: the one that callers of a model use, and the headless one of a managed Redis tier."""

from __future__ import annotations

from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier
from kvstrata.objects import labels, names, paths
from kvstrata.objects.meta import metadata
from kvstrata.objects.pod import gate
from kvstrata.objects.redis.server import managed_by_us

HTTPS_SERVICE_PORT = 443
HTTP_SERVICE_PORT = 80


def build_model_service(model: CachedModel) -> dict[str, Any]:
    """Return the Service of a model: its gates, for callers (443 or 80) and for scrapers (8081).

    Target ports are numbers, because named ports of native sidecars are not resolved by every Kubernetes version.
    """
    name = gate.caller_port_name(model)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(
            names.model_child(model.name), model.namespace, labels.of_model(model.name), model.owner_reference()
        ),
        "spec": {
            "type": "ClusterIP",
            "selector": labels.selector_of_model(model.name),
            "ports": [
                {
                    "name": name,
                    "port": service_port(model),
                    "targetPort": gate.caller_port(model),
                    "protocol": "TCP",
                    "appProtocol": name,
                },
                {"name": "health", "port": paths.HEALTH_PORT, "targetPort": paths.HEALTH_PORT, "protocol": "TCP"},
            ],
        },
    }


def build_redis_service(tier: CacheTier) -> dict[str, Any] | None:
    """Return the headless Service of a managed Redis tier; None for any other tier.

    Servers of a cluster are named in it before they are ready: they must find one another first.
    """
    managed = managed_by_us(tier)
    if managed is None:
        return None
    ports = {"redis": paths.REDIS_PORT} | ({"bus": paths.REDIS_BUS_PORT} if managed.is_cluster else {})
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(names.redis(tier.name), tier.namespace, labels.of_tier(tier.name), tier.owner_reference()),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            **({"publishNotReadyAddresses": True} if managed.is_cluster else {}),
            "selector": labels.selector_of_tier(tier.name),
            "ports": [
                {"name": name, "port": port, "targetPort": port, "protocol": "TCP"} for name, port in ports.items()
            ],
        },
    }


def service_port(model: CachedModel) -> int:
    """Return the Service's port for callers."""
    return HTTP_SERVICE_PORT if gate.caller_port_name(model) == "http" else HTTPS_SERVICE_PORT
