"""Terms of the policy in force for scopes in one shared tier."""

from __future__ import annotations

from dataclasses import replace

from kvstrata.contract.policy.tiers import TierRules
from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement
from kvstrata_sidecar.adapter.policy.limits import Bounds, SharedBounds, bounds_in
from kvstrata_sidecar.adapter.redis.client.commands import Terms
from kvstrata_sidecar.adapter.redis.client.slots import Address


class ScopeTerms:
    """Read at the last moment each time, because another policy may be in force. Thread-safe."""

    def __init__(self, tier: TierParams, enforcement: Enforcement) -> None:
        self._tier = tier
        self._enforcement = enforcement

    @property
    def servers(self) -> tuple[Address, ...]:
        """The addresses of the tier's servers; none while the policy does not name the tier."""
        rules = self._rules()
        return tuple(Address(one.host, one.port) for one in (self._tier.endpoints if rules is None else rules.servers))

    @property
    def capacity_bytes(self) -> int | None:
        """The capacity that scopes divide; None if they do not."""
        rules = self._rules()
        return self._tier.capacity_bytes if rules is None else rules.capacity_bytes

    def of(self, keyspace: str) -> Terms:
        bounds = self._bounds(keyspace)
        return Terms(
            life_ms=1000 * (self._tier.default_ttl_s if bounds.retention_s is None else bounds.retention_s),
            bounds=bounds.shared(self.capacity_bytes),
            encrypts=self._tier.encrypts,
        )

    def retention_ms(self, keyspace: str) -> int | None:
        """None means that neither the policy nor the tier has a retention."""
        return self._bounds(keyspace).retention_ms

    def bounds(self, keyspace: str) -> SharedBounds | None:
        """None means unbounded."""
        return self._bounds(keyspace).shared(self.capacity_bytes)

    def in_tier(self, bounds: Bounds) -> Bounds:
        """Return a scope's bounds with the tier's retention where the scope has none."""
        rules = self._rules()
        if rules is None or bounds.retention_s is not None:
            return bounds
        return replace(bounds, retention_s=rules.retention_s)

    def _bounds(self, keyspace: str) -> Bounds:
        view = self._enforcement.view
        if view is None:
            return Bounds()
        return self.in_tier(bounds_in(view.keyspaces.get(keyspace, ()), self._tier.name))

    def _rules(self) -> TierRules | None:
        view = self._enforcement.view
        return None if view is None or self._tier.endpoints else view.tier(self._tier.name)
