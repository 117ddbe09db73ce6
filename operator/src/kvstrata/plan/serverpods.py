"""The pods of a managed tier's servers: which there are, and why some do not come up."""

from __future__ import annotations

from collections.abc import Collection

from kvstrata.api.cachetier import CacheTier
from kvstrata.model.topology import ServerPod
from kvstrata.model.world import World
from kvstrata.objects import names


def server_pods(world: World, tier: CacheTier) -> Collection[ServerPod]:
    """Return the pods of a tier's servers. One of another kind that had its name may not be gone yet."""
    pods = world.servers.get(tier.name, {}).values()
    return tuple(pod for pod in pods if names.is_single_server(tier.name, pod.name) is not tier.spec.is_cluster)


def hindrance(world: World, tier: CacheTier) -> str:
    """Return which server's pod does not come up, why, and how many more; empty if nothing is known to hinder any."""
    hindered = sorted((pod for pod in server_pods(world, tier) if pod.trouble), key=lambda pod: pod.name)
    if not hindered:
        return ""
    more = f" ({len(hindered) - 1} more do not come up)" if len(hindered) > 1 else ""
    return f"{hindered[0].name}: {hindered[0].trouble}{more}"
