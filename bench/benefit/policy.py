"""The policy of the product's arms: keyspaces, budgets, data keys and the pool, as the operator compiles them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bench.benefit.arms import GROUP_TENANTS, Arm, Settings
from kvstrata.contract.policy.budget import EnforcedBudget
from kvstrata.contract.policy.bundle import Entry
from kvstrata.contract.policy.data_key import DataKey
from kvstrata.contract.policy.keyspace import Scope, ScopeKind, derive_keyspace, epoch_from_random
from kvstrata.contract.policy.pools import PoolShard, PoolState, PoolVersion

SHARED, MEMORY = "shared", "dram"
POOL = "common"
SHARED_BYTES = 8 << 30
"""Capacity of the tier in Redis: more than a run stores, as Redis has no bound in the other arms."""

RETENTION_S = 86_400


def tenant_name(tenant: int) -> str:
    """Return a tenant's name."""
    return f"tenant-{tenant}"


class Policy:
    """Keyspaces that nothing was ever stored in, one for each scope of an arm, with a data key and budgets each."""

    def __init__(self, arm: Arm, tenants: int, settings: Settings) -> None:
        self._arm, self._tenants = arm, tenants
        self._secret, self._epoch = os.urandom(32), epoch_from_random(os.urandom(16))
        scopes = {str(self._scope(tenant)) for tenant in range(tenants)}
        self._keys = {name: (DataKey(1, os.urandom(32)),) for name in (*scopes, POOL)}
        memory_bytes = int(settings.memory_gb * (1 << 30))
        part = 2 * (len(scopes) + 1)
        self._budgets = (
            EnforcedBudget(SHARED, SHARED_BYTES, SHARED_BYTES // part, RETENTION_S),
            EnforcedBudget(MEMORY, memory_bytes, memory_bytes // part, RETENTION_S),
        )

    def entries(self) -> list[Entry]:
        """Return the tenants' entries: half of each tier is guaranteed, in equal parts; limits are the tier's."""
        pools = (POOL,) if self._arm is Arm.POOL else ()
        return [self._entry(tenant, self._scope(tenant), pools) for tenant in range(self._tenants)]

    def pool(self, hashes: bytes, render_id: str, state: PoolState) -> PoolShard:
        """Return the pool of the common prompt in a state; `hashes` are its chunks' in ascending order."""
        keyspace = derive_keyspace(self._secret, Scope(ScopeKind.POOL, POOL), self._epoch)
        version = PoolVersion(
            keyspace, render_id, state, hashes, (MEMORY, SHARED), self._budgets, self._keys[POOL]
        )  # fmt: skip
        return PoolShard(POOL, f"uid-{POOL}", (version,))

    def _entry(self, tenant: int, scope: Scope, pools: Sequence[str]) -> Entry:
        keyspace = derive_keyspace(self._secret, scope, self._epoch)
        name = tenant_name(tenant)
        return Entry(
            name, keyspace, scope, f"uid-{name}", budgets=self._budgets, keys=self._keys[str(scope)], pools=tuple(pools)
        )

    def _scope(self, tenant: int) -> Scope:
        if self._arm is Arm.GROUP:
            return Scope(ScopeKind.GROUP, f"group-{tenant // GROUP_TENANTS}")
        return Scope(ScopeKind.TENANT, tenant_name(tenant))
