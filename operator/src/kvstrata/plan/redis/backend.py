"""The last answer of a Redis tier's server, earlier conditions, and the servers that pods use."""

from __future__ import annotations

from kvstrata.api.cachetier import CacheTier, Redis, RedisExternal
from kvstrata.api.common import Condition
from kvstrata.api.conditions import ConditionType
from kvstrata.model.pods import BackendReport
from kvstrata.model.world import World
from kvstrata.objects.tier_link import RedisLink, redis_link, servers


def report_of(world: World, tier: CacheTier) -> BackendReport | None:
    """Return the last answer, if it came from a server in the present spec with the same parameters."""
    report, link = world.backends.get(tier.name), redis_link(tier)
    if report is None or link is None or report.endpoint not in addresses(link):
        return None
    asked = (report.username, report.password_secret, report.authority_secret, report.cluster)
    return report if asked == (*asked_as(link), tier.spec.is_cluster) else None


def asked_as(link: RedisLink) -> tuple[str | None, tuple[str, str] | None, tuple[str, str] | None]:
    """Return user, password and certificate authority of the operator's requests, the latter as (Secret, key)."""
    if link.operator_username is not None:
        return link.operator_username, link.operator_password, link.ca
    return link.username, link.password, link.ca


def addresses(link: RedisLink) -> list[str]:
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in link.endpoints]


def previous_condition(tier: CacheTier, condition: ConditionType = ConditionType.BACKEND_REACHABLE) -> Condition | None:
    """Return the last condition of this spec's generation, which a new leader repeats until it has an answer."""
    found = tier.status.condition(condition)
    return found if found is not None and found.observed_generation == tier.generation else None


def external_of(tier: CacheTier) -> RedisExternal | None:
    return tier.spec.redis.external if tier.spec.redis is not None else None


def is_external(tier: CacheTier) -> bool:
    return external_of(tier) is not None


def in_force(tier: CacheTier) -> CacheTier | None:
    """Return the tier with the servers that pods use, None if there are none yet. A tier that was ready before external
    servers were checked is in use."""
    declared, taken = external_of(tier), tier.status.external
    if declared is None or taken == declared:
        return tier
    if taken is None:
        ready = previous_condition(tier, ConditionType.READY)
        return tier if ready is not None and ready.status == "True" else None
    spec = tier.spec.model_copy(update={"redis": Redis(external=taken)})
    return tier.model_copy(update={"spec": spec})


def servers_held(tier: CacheTier) -> frozenset[tuple[tuple[str, ...], int]]:
    using = in_force(tier)
    return servers(tier) | (servers(using) if using is not None else frozenset())
