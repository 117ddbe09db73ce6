"""All children of an API object, in the order in which they are applied: rights and names before pods.

Secrets are not included: the caller makes their values once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier
from kvstrata.api.pod_template import PodTemplate
from kvstrata.objects.pod import access, workload
from kvstrata.objects.redis.cluster import build_shard_statefulset

from .context import BuildContext


def model_children(
    ctx: BuildContext,
    domain_id: str,
    model: CachedModel,
    tiers: Sequence[CacheTier],
    identity: str,
    *,
    shard_count: int = 1,
    has_pools: bool = False,
) -> tuple[dict[str, Any], ...]:
    """Return the children of a CachedModel. Existing ones that are absent here must be pruned."""
    return _present(
        ctx,
        model.spec.engine.pod_template,
        access.build_serviceaccount(model),
        access.build_role(model, shard_count, has_pools=has_pools),
        access.build_rolebinding(model),
        access.build_model_networkpolicy(ctx, model),
        workload.build_model_service(model),
        workload.build_pdb(model),
        workload.build_servicemonitor(model, ctx.service_monitors),
        workload.build_deployment(ctx, domain_id, model, tiers, identity, shard_count),
    )


def redis_tier_children(
    ctx: BuildContext,
    tier: CacheTier,
    models: Sequence[str] = (),
    *,
    restart_token: str | None = None,
    members: Mapping[int, int] | None = None,
) -> tuple[dict[str, Any], ...]:
    """Return the children of a managed Redis tier that `models` list; empty for any other tier. A changed
    `restart_token` replaces every pod. `members` gives the servers of each shard where that differs from spec: a
    leaving server hands over first."""
    managed = tier.spec.managed
    wanted = dict.fromkeys(range(managed.shards), None) if managed is not None else {}
    shards: Mapping[int, int | None] = wanted if members is None else members
    return _present(
        ctx,
        managed.pod_template if managed is not None else None,
        access.build_redis_networkpolicy(ctx, tier, models),
        workload.build_redis_service(tier),
        workload.build_redis_pdb(tier),
        *(build_shard_statefulset(ctx, tier, shard, restart_token, shards[shard]) for shard in sorted(shards)),
    )


def _present(
    ctx: BuildContext, chosen: PodTemplate | None, *objects: dict[str, Any] | None
) -> tuple[dict[str, Any], ...]:
    return tuple(ctx.labelled(built, chosen or PodTemplate()) for built in objects if built is not None)
