"""Deployment, Service, disruption budget and ServiceMonitor of a model, and Service and budget of a managed Redis
tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstrata.api.base import Resource
from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier
from kvstrata.objects import labels, names, paths
from kvstrata.objects.context import BuildContext
from kvstrata.objects.labels import metadata
from kvstrata.objects.pod import gate
from kvstrata.objects.pod.pod import pod_template

REVISIONS_KEPT = 3
PROGRESS_MARGIN_S = 300
"""Time beyond startupTimeout for scheduling, pulling images and the other containers."""


def build_deployment(
    ctx: BuildContext,
    domain_id: str,
    model: CachedModel,
    tiers: Sequence[CacheTier],
    identity: str,
    shard_count: int = 1,
) -> dict[str, Any]:
    """Return the Deployment. A new pod becomes ready before an old one is deleted: an engine takes minutes to start.
    `tiers` are the ones to use, from fast to slow; `identity` is `cache_identity` of the same arguments."""
    warmup = model.spec.cache_server.warmup
    warm_up_s = warmup.timeout.in_seconds if warmup is not None else 0
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(
            names.model_child(model.name),
            model.namespace,
            labels.of_model(model.name),
            model.owner_reference(),
            {labels.IDENTITY: identity},
        ),
        "spec": {
            "replicas": model.spec.engine.replicas,
            "revisionHistoryLimit": REVISIONS_KEPT,
            "progressDeadlineSeconds": model.spec.engine.startup_timeout_s + warm_up_s + PROGRESS_MARGIN_S,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "selector": {"matchLabels": labels.selector_of_model(model.name)},
            "template": pod_template(ctx, domain_id, model, tiers, identity, shard_count),
        },
    }


def build_pdb(model: CachedModel) -> dict[str, Any] | None:
    """Return a budget of one voluntary disruption at a time; None below two replicas. With one replica a budget either
    protects nothing or blocks drains forever. Unready pods may always be evicted, so a crash loop blocks no drain."""
    if model.spec.engine.replicas < 2:
        return None
    own_labels, selector = labels.of_model(model.name), labels.selector_of_model(model.name)
    return _one_at_a_time(model, names.model_child(model.name), own_labels, selector)


def build_redis_pdb(tier: CacheTier) -> dict[str, Any] | None:
    """Return a budget of one voluntary disruption at a time for all shards together; None for any other tier."""
    if tier.spec.managed is None:
        return None
    return _one_at_a_time(tier, names.redis(tier.name), labels.of_tier(tier.name), labels.selector_of_tier(tier.name))


def _one_at_a_time(
    owner: Resource, name: str, own_labels: Mapping[str, str], selector: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(name, owner.namespace, own_labels, owner.owner_reference()),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": dict(selector)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


HTTPS_SERVICE_PORT = 443
HTTP_SERVICE_PORT = 80


def build_model_service(model: CachedModel) -> dict[str, Any]:
    """Return the Service of a model's gates, for callers (443 or 80) and scrapers (8081). Target ports are numbers: not
    every Kubernetes version resolves named ports of native sidecars."""
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
    """Return the headless Service of a managed Redis tier; None for any other tier. It publishes servers before they
    are ready, because they must find one another first."""
    if tier.spec.managed is None:
        return None
    ports = {"redis": paths.REDIS_PORT, "bus": paths.REDIS_BUS_PORT}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(names.redis(tier.name), tier.namespace, labels.of_tier(tier.name), tier.owner_reference()),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels.selector_of_tier(tier.name),
            "ports": [
                {"name": name, "port": port, "targetPort": port, "protocol": "TCP"} for name, port in ports.items()
            ],
        },
    }


def service_port(model: CachedModel) -> int:
    return HTTP_SERVICE_PORT if gate.caller_port_name(model) == "http" else HTTPS_SERVICE_PORT


SCRAPE_INTERVAL = "30s"


def build_servicemonitor(model: CachedModel, crd_installed: bool) -> dict[str, Any] | None:
    """Return the ServiceMonitor; None if its CRD is not installed."""
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
