"""Deployment, Service, disruption budget and ServiceMonitor of a model, and Service and budget of a managed Redis
tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstrata.api.cachedmodel import CachedModel, Rollout
from kvstrata.api.cachetier import CacheTier
from kvstrata.api.scalars import PodShare
from kvstrata.objects import labels, paths
from kvstrata.objects.context import BuildContext
from kvstrata.objects.owned import model_object, tier_object
from kvstrata.objects.pod import gate
from kvstrata.objects.pod.pod import pod_template

PDB = "PodDisruptionBudget"
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
    """Return the Deployment. A new pod becomes ready before an old one is deleted, because an engine takes minutes to
    start, unless `rollout` has another order.
    `tiers` are the ones to use, from fast to slow; `identity` is `cache_identity` of the same arguments."""
    spec = {
        "replicas": model.spec.engine.replicas,
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": model.spec.engine.startup_timeout.in_seconds + PROGRESS_MARGIN_S,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": _rolling_update(model.spec.engine.rollout)},
        "selector": {"matchLabels": labels.selector_of_model(model.name)},
        "template": pod_template(ctx, domain_id, model, tiers, identity, shard_count),
    }
    return model_object("apps/v1", "Deployment", model, {labels.IDENTITY: identity}, spec=spec)


def _rolling_update(rollout: Rollout) -> dict[str, int | str]:
    surge, missing = rollout.max_surge or PodShare("1"), rollout.max_unavailable
    missing = missing or PodShare("1" if surge.is_zero else "0")
    return {"maxUnavailable": missing.as_int_or_string, "maxSurge": surge.as_int_or_string}


def build_pdb(model: CachedModel) -> dict[str, Any] | None:
    """Return a budget of one voluntary disruption at a time; None below two replicas. With one replica a budget either
    protects nothing or blocks drains forever. Unready pods may always be evicted, so a crash loop blocks no drain."""
    if model.spec.engine.replicas < 2:
        return None
    return model_object("policy/v1", PDB, model, spec=_one_at_a_time(labels.selector_of_model(model.name)))


def build_redis_pdb(tier: CacheTier) -> dict[str, Any] | None:
    """Return a budget of one voluntary disruption at a time for all shards together; None for any other tier."""
    if tier.spec.managed is None:
        return None
    return tier_object("policy/v1", PDB, tier, spec=_one_at_a_time(labels.selector_of_tier(tier.name)))


def _one_at_a_time(selector: Mapping[str, str]) -> dict[str, Any]:
    pods = {"matchLabels": dict(selector)}
    return {"maxUnavailable": 1, "selector": pods, "unhealthyPodEvictionPolicy": "AlwaysAllow"}


def build_model_service(model: CachedModel) -> dict[str, Any]:
    """Return the Service of a model's gates, for callers (443 or 80) and scrapers (8081). Target ports are numbers: not
    every Kubernetes version resolves named ports of native sidecars."""
    name = gate.caller_port_name(model)
    callers = _port(name, 80 if name == "http" else 443, gate.caller_port(model)) | {"appProtocol": name}
    spec = {
        "type": "ClusterIP",
        "selector": labels.selector_of_model(model.name),
        "ports": [callers, _port("health", paths.HEALTH_PORT, paths.HEALTH_PORT)],
    }
    return model_object("v1", "Service", model, spec=spec)


def build_redis_service(tier: CacheTier) -> dict[str, Any] | None:
    """Return the headless Service of a managed Redis tier; None for any other tier. It publishes servers before they
    are ready, because they must find one another first."""
    if tier.spec.managed is None:
        return None
    ports = {"redis": paths.REDIS_PORT, "bus": paths.REDIS_BUS_PORT}
    spec = {
        "type": "ClusterIP",
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": labels.selector_of_tier(tier.name),
        "ports": [_port(name, port, port) for name, port in ports.items()],
    }
    return tier_object("v1", "Service", tier, spec=spec)


def _port(name: str, port: int, target: int) -> dict[str, Any]:
    return {"name": name, "port": port, "targetPort": target, "protocol": "TCP"}


def build_servicemonitor(model: CachedModel, crd_installed: bool) -> dict[str, Any] | None:
    """Return the ServiceMonitor; None if its CRD is not installed."""
    if not crd_installed:
        return None
    spec = {
        "selector": {"matchLabels": labels.selector_of_model(model.name)},
        "endpoints": [{"port": "health", "path": "/metrics", "interval": "30s"}],
        "podTargetLabels": [labels.MODEL, labels.IDENTITY],
    }
    return model_object("monitoring.coreos.com/v1", "ServiceMonitor", model, spec=spec)
