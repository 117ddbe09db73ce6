"""The ServiceMonitor of a CachedModel, for clusters with the Prometheus operator."""

from __future__ import annotations

from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.objects import labels, names
from kvstrata.objects.meta import metadata

SCRAPE_INTERVAL = "30s"


def build_servicemonitor(model: CachedModel, crd_installed: bool) -> dict[str, Any] | None:
    """Return the ServiceMonitor; None where that kind does not exist."""
    if not crd_installed:
        return None
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": metadata(
            names.model_child(model.name), model.namespace, labels.of_model(model.name), model.owner_reference()
        ),
        "spec": {
            "selector": {"matchLabels": labels.selector_of_model(model.name)},
            "endpoints": [{"port": "health", "path": "/metrics", "interval": SCRAPE_INTERVAL}],
            "podTargetLabels": [labels.MODEL, labels.IDENTITY],
        },
    }
