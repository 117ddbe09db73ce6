"""Terms of the policy in force for scopes in one shared tier."""

from __future__ import annotations

from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement
from kvstrata_sidecar.adapter.policy.limits import Bounds, SharedBounds, bounds_in
from kvstrata_sidecar.adapter.redis.client.commands import Terms
from kvstrata_sidecar.adapter.tier.interface import Block


class ScopeTerms:
    """Read at the last moment each time, because another policy may be in force. Thread-safe."""

    def __init__(self, tier: TierParams, enforcement: Enforcement) -> None:
        self._tier = tier
        self._enforcement = enforcement

    def of(self, keyspace: str) -> Terms:
        bounds = self._bounds(keyspace)
        return Terms(
            life_ms=1000 * (self._tier.default_ttl_s if bounds.retention_s is None else bounds.retention_s),
            bounds=bounds.shared(self._tier.capacity_bytes),
            encrypts=self._tier.encrypts,
        )

    def life_s(self, block: Block) -> float:
        if self._bounds(block.keyspace).limit_bytes == 0:
            return 0.0
        if not self._enforcement.readable.admits(block.keyspace, block.chunk_hash, self._tier.name):
            return 0.0
        return self.of(block.keyspace).life_ms / 1000

    def retention_ms(self, keyspace: str) -> int | None:
        """None means that the policy has no retention for this tier."""
        return self._bounds(keyspace).retention_ms

    def bounds(self, keyspace: str) -> SharedBounds | None:
        """None means unbounded."""
        return self._bounds(keyspace).shared(self._tier.capacity_bytes)

    def _bounds(self, keyspace: str) -> Bounds:
        view = self._enforcement.view
        return Bounds() if view is None else bounds_in(view.keyspaces.get(keyspace, ()), self._tier.name)
