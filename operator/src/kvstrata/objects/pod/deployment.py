"""The Deployment of a CachedModel's pods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier
from kvstrata.objects import labels, names
from kvstrata.objects.context import BuildContext
from kvstrata.objects.meta import metadata
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
    """Return the Deployment. A new pod is ready before an old one goes: an engine takes minutes to start.

    `tiers` are those to use, from fast to slow; `identity` is `cache_identity` of the same arguments; `shard_count` is
    the number of the bundle's shards.
    """
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
