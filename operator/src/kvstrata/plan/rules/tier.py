"""Problems of a CacheTier that schema and CEL cannot see; no pod uses a tier with one."""

from __future__ import annotations

from pathlib import PurePosixPath

from kvstrata.api.cachetier import CacheTier
from kvstrata.api.reasons import SharedReason, TierReason
from kvstrata.model.world import World
from kvstrata.objects.tier_link import servers
from kvstrata.plan.actions import Decision
from kvstrata.plan.redis.backend import servers_held
from kvstrata.plan.rules import age_of


def has_servers_of_its_own(world: World, tier: CacheTier) -> Decision | None:
    """Two tiers on one server would count, limit and expire each other's blocks, which carry no tier name. All adapters
    use database 0. The older tier keeps its servers, regardless of the models that list it."""
    own, age = servers(tier), age_of(tier)
    for name, other in sorted(world.tiers.items()):
        if name == tier.name or (tier.spec.managed and other.spec.managed):
            continue  # Servers that the operator runs are named after their tier.
        held, others_age = _held(world, name)
        if others_age < age and (shared := own & held):
            named = sorted(".".join(host) + f":{port}" for host, port in shared)
            return Decision(
                SharedReason.TIERS_CONFLICT,
                f"CacheTier {name} was there before and is on the same server ({named[0]}): give one another server, "
                "or delete it and list the other in models",
            )
    return None


def has_a_folder_of_its_namespace(world: World, tier: CacheTier) -> Decision | None:
    """All pods of an installation run as one user, so a folder of a node is of one namespace."""
    place = tier.spec.nvme.host_path if tier.spec.nvme is not None else None
    if place is None or world.allowed_folders is None:
        return None
    allowed = [PurePosixPath(one, world.namespace) for one in world.allowed_folders]
    if PurePosixPath(place.path) in allowed:  # in it, a link that a pod made could lead anywhere on the node
        return None
    named = " or ".join(map(str, allowed)) or "a folder that hostPaths of the chart allows"
    why = f"the installation does not allow {place.path} of nodes to namespace {world.namespace}: name {named}"
    return Decision(TierReason.FOLDER_NOT_ALLOWED, why)


def _held(world: World, name: str) -> tuple[frozenset[tuple[tuple[str, ...], int]], tuple[float, str]]:
    """Return the servers that a tier holds, and its age; memoized because every tier's plan reads all others."""
    tier = world.tiers[name]
    return world.memo.get(servers_held, name, (tier,), lambda: (servers_held(tier), age_of(tier)))


RULES = (has_servers_of_its_own, has_a_folder_of_its_namespace)
