"""The pods of a managed tier's servers: which there are, and why some do not come up."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from kvstrata.api.cachetier import CacheTier
from kvstrata.api.reasons import TierReason
from kvstrata.api.scalars import format_timestamp
from kvstrata.model.redis.cluster import ServerPod
from kvstrata.model.world import World
from kvstrata.objects import names
from kvstrata.plan.actions import Decision

STUCK_AFTER_S = 60.0
"""How much longer than it was given a pod takes that is stuck: a kubelet that lives tells its end within seconds."""


def server_pods(world: World, tier: CacheTier) -> Collection[ServerPod]:
    """Return the pods of a tier's servers. One of another kind that had its name may not be gone yet."""
    pods = world.servers.get(tier.name, {}).values()
    return tuple(pod for pod in pods if names.is_single_server(tier.name, pod.name) is not tier.spec.is_cluster)


def stuck_pod(world: World, tier: CacheTier, at: datetime) -> Decision | None:
    """Return which server's pod should have ended long before `at` and is still there, and what a person can do.

    As on a node that is lost: nobody can say that its server has ended, so no other pod may have its name. The operator
    does not take that on itself: whoever deletes the pod vouches for it.
    """
    pods = sorted(server_pods(world, tier), key=lambda pod: pod.name)
    stuck = [pod for pod in pods if pod.ends_by and (at - pod.ends_by).total_seconds() > STUCK_AFTER_S]
    if not stuck:
        return None
    first, more = stuck[0], f" ({len(stuck) - 1} more pods are stuck)" if len(stuck) > 1 else ""
    node = f"node {first.node}" if first.node else "its node"
    return Decision(
        TierReason.POD_STUCK,
        f"{first.name} was to be gone by {format_timestamp(first.ends_by or at)}, and {node} does not say that it is"
        f"{more}: no other takes its place until then. If the node is lost, run `kubectl -n {tier.namespace} "
        f"delete pod {first.name} --force --grace-period=0`, or taint the node with "
        "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
    )


def hindrance(world: World, tier: CacheTier) -> str:
    """Return which server's pod does not come up, why, and how many more; empty if nothing is known to hinder any."""
    hindered = sorted((pod for pod in server_pods(world, tier) if pod.trouble), key=lambda pod: pod.name)
    if not hindered:
        return ""
    more = f" ({len(hindered) - 1} more do not come up)" if len(hindered) > 1 else ""
    return f"{hindered[0].name}: {hindered[0].trouble}{more}"
