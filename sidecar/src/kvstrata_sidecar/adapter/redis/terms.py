"""Terms of the policy in force for scopes in one shared tier."""

from __future__ import annotations

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement
from kvstrata_sidecar.adapter.redis.client.commands import Bounds, Terms
from kvstrata_sidecar.adapter.tier.interface import Block


class ScopeTerms:
    """Read at the last moment each time, because another policy may be in force. Thread-safe."""

    def __init__(self, tier: TierParams, enforcement: Enforcement) -> None:
        self._tier = tier
        self._enforcement = enforcement

    def of(self, keyspace: str) -> Terms:
        retention_ms = self.retention_ms(keyspace)
        return Terms(
            life_ms=1000 * self._tier.default_ttl_s if retention_ms is None else retention_ms,
            bounds=self.bounds(keyspace),
            encrypts=self._tier.encrypts,
        )

    def life_s(self, block: Block) -> float:
        budget = self._enforcement.budget(block.keyspace, self._tier.name)
        if budget is not None and budget.limit_bytes == 0:
            return 0.0
        if not self._enforcement.readable.admits(block.keyspace, block.chunk_hash, self._tier.name):
            return 0.0
        return self.of(block.keyspace).life_ms / 1000

    def retention_ms(self, keyspace: str) -> int | None:
        """None means that the policy has no retention for this tier."""
        retention_s = self._enforcement.retention_s(keyspace, self._tier.name)
        return None if retention_s is None else 1000 * retention_s

    def bounds(self, keyspace: str) -> Bounds | None:
        """None means unbounded."""
        budget = self._enforcement.budget(keyspace, self._tier.name) or EnforcedBudget(self._tier.name)
        capacity = self._tier.capacity_bytes
        if capacity is None:
            return None if budget.limit_bytes is None else Bounds(budget.limit_bytes)
        limit = capacity if budget.limit_bytes is None else min(capacity, budget.limit_bytes)
        return Bounds(limit, budget.guaranteed_bytes or 0, capacity)
