"""Decides which keyspace and rate limits a tenant gets. Pure: bundle, freshness and random salts are passed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.contract.policy.bundle import Bundle
from kvstrata.contract.policy.pools import PoolVersion
from kvstrata.contract.policy.rate import UNLIMITED, RateLimit
from kvstrata_sidecar.gate.http.errors import Reason, Refusal


@dataclass(frozen=True, slots=True)
class Grant:
    """The salt of one request. `keyspace` is False for a random salt; `withheld` is the reason for the audit log."""

    salt: str
    keyspace: bool
    withheld: str = ""


def decide(bundle: Bundle | None, tenant: str, fresh: bool, withheld: str, random_salt: Callable[[], str]) -> Grant:
    """Return the grant of `tenant` under `bundle`. `withheld` is why this pod serves without reuse, if it does. In this
    order: no bundle (503), an unknown tenant (a random salt, or 403), a suspended one or reuse switched off, a stale
    bundle under `onStale: Fence`, a pod without reuse, the tenant's keyspace. Raises Refusal."""
    if bundle is None:
        raise Refusal(503, Reason.NO_POLICY, "the cache policy is not loaded yet", retry_after_s=1)
    rules, entry = bundle.root.rules, bundle.entries.get(tenant)
    if entry is None:
        if rules.unknown_tenants == "Refuse":
            raise Refusal(403, Reason.UNKNOWN_TENANT, "no cache policy names this tenant, and the domain requires one")
        return Grant(random_salt(), False, "unknown_tenant")
    if entry.suspended:
        return Grant(random_salt(), False, "suspended")
    if rules.reuse == "Disabled":
        return Grant(random_salt(), False, "reuse_off")
    if rules.on_stale == "Fence" and not fresh:
        return Grant(random_salt(), False, "stale")
    if withheld:
        return Grant(random_salt(), False, withheld)
    return Grant(entry.keyspace, True)


def rate_limit(bundle: Bundle | None, tenant: str) -> RateLimit:
    """Return the limits of `tenant`: those of its entry, and the rules' where it has none."""
    if bundle is None:
        return UNLIMITED
    entry, default = bundle.entries.get(tenant), bundle.root.rules.rate
    return entry.rate.or_default(default) if entry is not None else default


@dataclass(frozen=True, slots=True)
class PoolSubject:
    """The warmer of the pool with this UID, the only writer under the pool's keyspace."""

    uid: str


def warming_version(bundle: Bundle | None, uid: str, scope: str, manifest: str) -> PoolVersion | None:
    """Return the version of a pool with this prefix of its keyspace and this manifest's digest, or None."""
    if bundle is None or bundle.root.rules.reuse == "Disabled":
        return None
    versions = (version for shard in bundle.pools.values() if shard.uid == uid for version in shard.versions)
    found = (one for one in versions if one.keyspace.startswith(scope) and one.manifest == manifest)
    return next(found, None)


def still_granted(bundle: Bundle, subject: str | PoolSubject, keyspace: str) -> bool:
    """Whether `bundle` would give `subject`, a tenant or a pool's warmer, this keyspace again."""
    if bundle.root.rules.reuse == "Disabled":
        return False
    if isinstance(subject, PoolSubject):
        versions = (one for shard in bundle.pools.values() if shard.uid == subject.uid for one in shard.versions)
        return any(one.keyspace == keyspace for one in versions)
    entry = bundle.entries.get(subject)
    return entry is not None and not entry.suspended and entry.keyspace == keyspace
