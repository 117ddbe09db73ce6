"""All children of an API object, in the order in which they are applied: rights and names before pods.

Secrets are not included: the caller makes their values once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier
from kvstrata.objects.pod.access import (
    build_model_networkpolicy,
    build_redis_networkpolicy,
    build_role,
    build_rolebinding,
    build_serviceaccount,
)
from kvstrata.objects.pod.workload import (
    build_deployment,
    build_model_service,
    build_pdb,
    build_redis_pdb,
    build_redis_service,
    build_servicemonitor,
)
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
    service_monitors: bool = False,
) -> tuple[dict[str, Any], ...]:
    """Return the children of a CachedModel. Existing ones that are absent here must be pruned. `service_monitors`:
    whether the cluster knows ServiceMonitor."""
    return _present(
        build_serviceaccount(model),
        build_role(model, shard_count, has_pools=has_pools),
        build_rolebinding(model),
        build_model_networkpolicy(ctx, model),
        build_model_service(model),
        build_pdb(model),
        build_servicemonitor(model, service_monitors),
        build_deployment(ctx, domain_id, model, tiers, identity, shard_count),
    )


def redis_tier_children(
    ctx: BuildContext, tier: CacheTier, *, restart_token: str | None = None, members: Mapping[int, int] | None = None
) -> tuple[dict[str, Any], ...]:
    """Return the children of a managed Redis tier; empty for any other tier. A changed `restart_token` replaces every
    pod. `members` gives the servers of each shard where that differs from spec: a leaving server hands over first."""
    managed = tier.spec.managed
    wanted = dict.fromkeys(range(managed.effective_shards), None) if managed is not None else {}
    shards: Mapping[int, int | None] = wanted if members is None else members
    return _present(
        build_redis_networkpolicy(ctx, tier),
        build_redis_service(tier),
        build_redis_pdb(tier),
        *(build_shard_statefulset(ctx, tier, shard, restart_token, shards[shard]) for shard in sorted(shards)),
    )


def _present(*objects: dict[str, Any] | None) -> tuple[dict[str, Any], ...]:
    return tuple(built for built in objects if built is not None)
