"""From tenant to keyspace: the decision that everything else serves.

Pure: the bundle, the freshness and a source of random salts come in, a salt or a refusal goes out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.contract.bundle import Bundle

from .errors import Reason, Refusal


@dataclass(frozen=True, slots=True)
class Grant:
    """The salt of one request. `keyspace` is False for a random salt, which nothing else will ever use."""

    salt: str
    keyspace: bool


def decide(bundle: Bundle | None, tenant: str, fresh: bool, random_salt: Callable[[], str]) -> Grant:
    """Return the grant of `tenant` under `bundle`.

    In this order: no bundle, an unknown tenant (`Refuse` or a random salt), a suspended one or reuse switched off, a
    stale bundle under `onStale: Fence`, the tenant's keyspace. Raises Refusal with status 503 or 403.
    """
    if bundle is None:
        raise Refusal(503, Reason.NO_POLICY, "the cache policy is not loaded yet", retry_after_s=1)
    rules, entry = bundle.root.rules, bundle.entries.get(tenant)
    if entry is None:
        if rules.unknown_tenants == "Refuse":
            raise Refusal(403, Reason.UNKNOWN_TENANT, "no cache policy names this tenant, and the domain requires one")
        return Grant(random_salt(), False)
    if entry.suspended or rules.reuse == "Off" or (rules.on_stale == "Fence" and not fresh):
        return Grant(random_salt(), False)
    return Grant(entry.keyspace, True)


def still_granted(bundle: Bundle, tenant: str, keyspace: str) -> bool:
    """Whether `bundle` would give `tenant` this keyspace again: the test for requests in flight."""
    entry = bundle.entries.get(tenant)
    return entry is not None and not entry.suspended and bundle.root.rules.reuse != "Off" and entry.keyspace == keyspace
