"""The StatefulSet of a managed Redis tier with a single server, in memory only."""

from __future__ import annotations

from typing import Any

from kvstrata.api.cachetier import CacheTier
from kvstrata.api.pod_template import PodTemplate
from kvstrata.objects import labels, names, paths, sizing
from kvstrata.objects.container import amounts, chosen_amounts
from kvstrata.objects.context import BuildContext
from kvstrata.objects.pod.pod import placement
from kvstrata.objects.quantities import binary
from kvstrata.objects.redis.server import (
    listening_arguments,
    managed_by_us,
    memory_arguments,
    server_container,
    server_pod,
    server_volumes,
    stateful_set,
)

TERMINATION_GRACE_S = 10
"""Nothing needs to be saved at the end."""


def build_redis_statefulset(
    ctx: BuildContext, tier: CacheTier, restart_token: str | None = None
) -> dict[str, Any] | None:
    """Return the StatefulSet of a single managed Redis server; None for any other tier. A changed `restart_token`
    replaces the pod."""
    managed = managed_by_us(tier)
    if managed is None or managed.is_cluster:
        return None
    chosen = managed.pod_template or PodTemplate()
    selector = labels.selector_of_tier(tier.name)
    container = server_container(
        ctx,
        tier,
        managed,
        chosen_amounts(managed.resources, _default_resources(tier)),
        {
            "command": ["redis-server"],
            "args": redis_arguments(tier),
            "ports": [{"name": "redis", "containerPort": paths.REDIS_PORT, "protocol": "TCP"}],
        },
    )
    pod = {
        "terminationGracePeriodSeconds": TERMINATION_GRACE_S,
        "containers": [container],
        "volumes": server_volumes(tier, [names.ACL_FILE_KEY]),
        **placement(chosen, selector),
    }
    spec = {
        "replicas": 1,
        "updateStrategy": {"type": "RollingUpdate"},
        "template": server_pod(chosen, labels.of_tier(tier.name), restart_token, pod),
    }
    return stateful_set(tier, names.redis(tier.name), labels.of_tier(tier.name), selector, spec)


def redis_arguments(tier: CacheTier) -> list[str]:
    """Return the arguments of redis-server. They appear in the pod spec and hold no secret."""
    return [*listening_arguments(tier), *memory_arguments(sizing.redis_maxmemory_bytes(tier.spec))]


def _default_resources(tier: CacheTier) -> dict[str, Any]:
    memory = binary(sizing.redis_memory_limit_bytes(tier.spec))
    return amounts(requests={"cpu": "100m", "memory": memory}, limits={"memory": memory})
