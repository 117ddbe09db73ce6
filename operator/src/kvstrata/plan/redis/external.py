"""External servers: whether pods may depend on them, and which servers pods use meanwhile.

Pods adopt external servers once all required checks have passed together, and keep them until other servers in spec
pass. A tier that gets worse reports it in status and causes misses; removing it would restart every pod and lose their
memory too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvstrata.api.cachetier import CacheTier, RedisExternal
from kvstrata.api.conditions import ConditionType
from kvstrata.api.reasons import TierReason
from kvstrata.contract.store.redis_keys import domain_pattern
from kvstrata.model.pods import BackendReport
from kvstrata.model.redis.cluster import SLOTS
from kvstrata.model.redis.external import ExternalReport, ServerFacts
from kvstrata.objects.quantities import readable
from kvstrata.objects.sizing import stored_bytes
from kvstrata.plan.actions import Decision
from kvstrata.plan.conditions import Finding, false, listed, true, unknown
from kvstrata.plan.redis.backend import external_of, in_force, is_external, not_asked

OLDEST_REDIS = (7, 0)
"""Redis 6.2 has ZMSCORE and ZRANGE with BYSCORE; 7.0 has the script semantics for full memory and rights, and is the
oldest tested version. Valkey began with the features of Redis 7.2."""

MAX_NAMED = 6


@dataclass(frozen=True, slots=True)
class Checked:
    tier: CacheTier
    report: ExternalReport
    domain: str

    def owner_of(self, servers: Iterable[ServerFacts]) -> str:
        if not self.tier.spec.is_cluster:
            return "the server"
        named = sorted(server.address for server in servers)
        return named[0] if len(named) == 1 else f"{len(named)} servers ({listed(named, MAX_NAMED)})"


Check = Callable[[Checked], Decision | None]


def modes_agree(checked: Checked) -> Decision | None:
    """Clients of a cluster and of a single server are incompatible."""
    wanted = checked.tier.spec.is_cluster
    others = [one for one in checked.report.answering if one.in_cluster_mode is (not wanted)]
    if not others:
        return None
    what, remedy = ("is not", "remove") if wanted else ("is", "set")
    return Decision(
        TierReason.CLUSTER_MODE_MISMATCH,
        f"{checked.owner_of(others)} {what} in cluster mode: {remedy} spec.redis.external.cluster: true, or name "
        "another server",
    )


def takes_writes(checked: Checked) -> Decision | None:
    """A replica refuses blocks. In a cluster the primaries are checked, regardless of the endpoints."""
    if checked.tier.spec.is_cluster or not any(one.is_replica for one in checked.report.answering):
        return None
    return Decision(
        TierReason.READ_ONLY_REPLICA, "the server is a replica and takes no blocks: name its primary in endpoints"
    )


def is_new_enough(checked: Checked) -> Decision | None:
    old = [one for one in checked.report.answering if one.software == "Redis" and _is_old(one.version)]
    if not old:
        return None
    versions = ", ".join(sorted({one.version for one in old}))
    return Decision(
        TierReason.TOO_OLD,
        f"{checked.owner_of(old)} runs Redis {versions}, and pods need the commands and script rules of 7.0 or later, "
        "or Valkey",
    )


def user_may(checked: Checked) -> Decision | None:
    """The user needs every command of the data plane, and the domain's keys."""
    lacking = [one for one in checked.report.answering if one.refused or one.keys_refused or one.unknown]
    if not lacking:
        return None
    refused = listed({name for one in lacking for name in one.refused}, MAX_NAMED)
    keys_refused = listed({name for one in lacking for name in one.keys_refused}, MAX_NAMED)
    absent = listed({name for one in lacking for name in one.unknown}, MAX_NAMED)
    parts = [
        *([f"its user may not run {refused}"] if refused else []),
        *([f"its user may not run {keys_refused} on keys ~{checked.domain}"] if keys_refused else []),
        *([f"it has no command {absent}"] if absent else []),
    ]
    return Decision(
        TierReason.MISSING_PERMISSIONS,
        f"{checked.owner_of(lacking)}: {'; '.join(parts)}. docs/how-to/external-tiers.md has a user's rules",
    )


def slots_are_covered(checked: Checked) -> Decision | None:
    """Blocks in a slot without an answering server are misses."""
    report = checked.report
    if not checked.tier.spec.is_cluster or not report.mapped:
        return None
    if report.covered < SLOTS:
        return Decision(
            TierReason.SLOTS_UNCOVERED,
            f"{SLOTS - report.covered} of {SLOTS} slots belong to no server, and their blocks are misses: give them to "
            "one (CLUSTER ADDSLOTS), or bring back the server that had them",
        )
    silent = sorted((one for one in report.servers if not one.reachable), key=lambda one: one.address)
    if not silent:
        return None
    return Decision(
        TierReason.SERVERS_AWAY,
        f"{len(silent)} of {len(report.servers)} primaries, with {SLOTS - report.answered} of {SLOTS} slots, do not "
        f"answer: {silent[0].message}",
    )


def is_large_enough(checked: Checked) -> Decision | None:
    """Guarantees are based on the tier's capacity, which the servers must have."""
    stored, bounds = stored_bytes(checked.tier.spec), [one.max_bytes for one in checked.report.answering]
    if not all(bounds) or not bounds or sum(bounds) >= stored or len(bounds) < len(checked.report.servers):
        return None
    owner_of = "the servers' maxmemory together" if checked.tier.spec.is_cluster else "the server's maxmemory"
    return Decision(
        TierReason.SERVER_TOO_SMALL,
        f"{owner_of} is {readable(sum(bounds))}, and blocks may take {readable(stored)} of the tier's capacity: raise "
        "it, or lower capacity",
    )


def makes_no_room_itself(checked: Checked) -> Decision | None:
    """An evicting server ignores tenants and deletes blocks and their index in its own order."""
    evicting = [one for one in checked.report.answering if one.eviction not in ("", "noeviction")]
    if not evicting:
        return None
    policies = ", ".join(sorted({one.eviction for one in evicting}))
    return Decision(
        TierReason.NOT_NOEVICTION,
        f"maxmemory-policy of {checked.owner_of(evicting)} is {policies}: when it is full it deletes blocks of any "
        "tenant, also guaranteed ones, and their accounting, which pods repair as drift, and it may forget which "
        "keyspaces are revoked. Set noeviction: pods make room themselves",
    )


def is_bounded(checked: Checked) -> Decision | None:
    """Pods limit only blocks; other data on an unbounded server has no limit."""
    unbounded = [one for one in checked.report.answering if one.version and not one.max_bytes]
    if not unbounded:
        return None
    return Decision(
        TierReason.MEMORY_UNBOUNDED,
        f"{checked.owner_of(unbounded)} has no maxmemory, so index, buffers and other data on it can take "
        "all of its node's memory: set maxmemory to the tier's capacity or more",
    )


REQUIRED: tuple[Check, ...] = (modes_agree, takes_writes, is_new_enough, user_may, slots_are_covered, is_large_enough)
"""Required before pods use the servers, in the order of reporting."""

WARNINGS: tuple[Check, ...] = (makes_no_room_itself, is_bounded)


def missing(tier: CacheTier, report: BackendReport | None, domain: str) -> Decision | None:
    return _first(REQUIRED, _checked(tier, report, domain))


def warning(tier: CacheTier, report: BackendReport | None, domain: str) -> Decision | None:
    return _first(WARNINGS, _checked(tier, report, domain))


def suitability(
    tier: CacheTier, report: BackendReport | None, away: Decision | None, domain: str
) -> tuple[Finding, ...]:
    """Return the conditions about external servers; empty for others. `away` is why no server answers. Before the first
    answer the last conditions stand."""
    if not is_external(tier):
        return ()
    kinds = [ConditionType.SERVERS_SUITABLE, *([ConditionType.SLOTS_COVERED] if tier.spec.is_cluster else [])]
    if away is not None:
        return tuple(unknown(kind, away.reason, away.message) for kind in kinds)
    if report is None:
        return tuple(not_asked(tier, kind) for kind in kinds)
    checked = _checked(tier, report, domain)
    failed = _first(REQUIRED, checked) or _first(WARNINGS, checked)
    suitable = true(ConditionType.SERVERS_SUITABLE, TierReason.SUITABLE, "the servers passed every check")
    if failed is not None:
        suitable = false(ConditionType.SERVERS_SUITABLE, failed.reason, failed.message)
    return (suitable, *([_coverage(checked)] if checked is not None and tier.spec.is_cluster else []))


def servers_to_use(tier: CacheTier, report: BackendReport | None, domain: str) -> dict[str, Any] | None:
    """Return status.external: the spec's servers if they passed, else the former ones."""
    declared, using = external_of(tier), in_force(tier)
    if declared is None:
        return None
    passed = report is not None and report.reachable and report.external is not None
    chosen = declared if passed and missing(tier, report, domain) is None else using and external_of(using)
    return {**dict.fromkeys(_FIELDS), **chosen.to_kubernetes()} if chosen is not None else None


_FIELDS = tuple(field.alias or name for name, field in RedisExternal.model_fields.items())
"""Field names of the API; absent ones are set to None, because a status is merged."""


def _checked(tier: CacheTier, report: BackendReport | None, domain: str) -> Checked | None:
    if report is None or report.external is None or not report.reachable:
        return None
    return Checked(tier, report.external, domain_pattern(domain))


def _first(checks: Iterable[Check], checked: Checked | None) -> Decision | None:
    if checked is None:
        return None
    return next((failed for check in checks if (failed := check(checked)) is not None), None)


def _coverage(checked: Checked) -> Finding:
    kind = ConditionType.SLOTS_COVERED
    if not checked.report.mapped:
        why = _first(REQUIRED, checked) or Decision(TierReason.ERROR, "no server reported the owners of slots")
        return unknown(kind, why.reason, why.message)
    failed = slots_are_covered(checked)
    if failed is not None:
        return false(kind, failed.reason, failed.message)
    count = len(checked.report.servers)
    return true(kind, TierReason.SLOTS_COVERED, f"all {SLOTS} slots have a server that answers, on {count} primaries")


def _is_old(version: str) -> bool:
    parts = version.split(".")[:2]
    return len(parts) == 2 and all(part.isdigit() for part in parts) and tuple(map(int, parts)) < OLDEST_REDIS
