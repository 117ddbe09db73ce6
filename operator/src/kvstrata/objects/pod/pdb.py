"""The PodDisruptionBudgets of a CachedModel and of a managed Redis Cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstrata.api.base import Resource
from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier
from kvstrata.objects import labels, names
from kvstrata.objects.meta import metadata
from kvstrata.objects.redis.server import managed_by_us


def build_pdb(model: CachedModel) -> dict[str, Any] | None:
    """Return a budget of one voluntary disruption at a time; None below two replicas.

    With a single replica a budget either protects nothing or keeps nodes from being drained for ever. Pods that are
    not ready may always be evicted, so a crash loop does not block a drain.
    """
    if model.spec.engine.replicas < 2:
        return None
    own_labels, selector = labels.of_model(model.name), labels.selector_of_model(model.name)
    return _one_at_a_time(model, names.model_child(model.name), own_labels, selector)


def build_redis_pdb(tier: CacheTier) -> dict[str, Any] | None:
    """Return a budget of one voluntary disruption at a time for all shards together; None for any other tier.

    The operator itself replaces one server at a time, and waits until its replica is in step again.
    """
    managed = managed_by_us(tier)
    if managed is None or not managed.is_cluster:
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
