"""Tenants' policies as the gate hands them to the cache server: keyspaces, budgets and a pool, by mode of sharing."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from bench.sharing.optimum import GROUP_TENANTS, Mode
from kvstrata.contract.messages.adapter import AdapterAck, ApplyRequest, ChunkHashes, HashRequest
from kvstrata.contract.policy.budget import EnforcedBudget
from kvstrata.contract.policy.bundle import Bundle, Entry, Root, Rules
from kvstrata.contract.policy.cache_view import MANIFESTS_DIRECTORY, CacheView, manifests
from kvstrata.contract.policy.keyspace import PUBLIC_SCOPE, Scope, ScopeKind, derive_keyspace, epoch_from_random
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES, PoolShard, PoolState, PoolVersion, pack_hashes
from kvstrata_sidecar.gate.policy.volume import NamedFiles
from tests.tiers.gate_stand_in import DOMAIN, GateStandIn

POOL = "shared-prefix"
LIMIT_BYTES = 1 << 40
"""A limit that is never reached, so that accounting and ledger do their work and nothing is evicted."""

_RULES = Rules(stale_after_s=86_400, on_stale="ServeStale")


@dataclass(frozen=True, slots=True)
class Scopes:
    """The keyspaces of a number of tenants in one mode, new ones for each run, and of their pool, if there is one."""

    mode: Mode
    keyspaces: tuple[str, ...]
    """By tenant."""
    pool: str | None
    apart: frozenset[int] = frozenset()
    """Tenants that may not read the pool."""

    @classmethod
    def drawn(cls, mode: Mode, tenants: int, *apart: int) -> Scopes:
        """Return keyspaces that nothing was ever stored in; `apart` are tenants without the pool."""
        key, epoch = os.urandom(32), epoch_from_random(os.urandom(16))
        own = tuple(derive_keyspace(key, _scope(mode, tenant), epoch) for tenant in range(tenants))
        pool = derive_keyspace(key, Scope(ScopeKind.POOL, POOL), epoch) if mode is Mode.POOL else None
        return cls(mode, own, pool, frozenset(apart))

    @property
    def all(self) -> frozenset[str]:
        """All keyspaces, each once."""
        return frozenset(self.keyspaces) | ({self.pool} if self.pool else frozenset())

    def entries(self, budgets: tuple[EnforcedBudget, ...]) -> list[Entry]:
        """Return the tenants' entries in a bundle."""
        return [
            Entry(
                f"tenant-{number}", keyspace, _scope(self.mode, number), f"uid-{number}", budgets=budgets,
                pools=(POOL,) if self.pool and number not in self.apart else (),
            )
            for number, keyspace in enumerate(self.keyspaces)
        ]  # fmt: skip


class Gate:
    """Writes policies with the gate's own code and has `stand_in`'s adapter apply them.

    Pools consist of the whole chunks of the tokens `prefix`, and are kept in the CacheTier `tier`.
    """

    def __init__(self, stand_in: GateStandIn, tier: str, prefix: Sequence[int]) -> None:
        self._stand_in = stand_in
        self._tier = tier
        self._prefix = prefix
        self._manifests = NamedFiles(stand_in.policy_dir / MANIFESTS_DIRECTORY)
        self._limit_bytes = LIMIT_BYTES

    def enforce(self, scopes: Scopes, state: PoolState = PoolState.PUBLISHED) -> None:
        """Put the policies of these tenants in force; their pool, if they have one, is in `state`.

        Every policy has another limit than the one before, so that the adapter measures each scope's usage at once.
        """
        self._limit_bytes += 1
        budgets = (EnforcedBudget(self._tier, limit_bytes=self._limit_bytes),)
        shards = []
        if scopes.pool:
            version = PoolVersion(scopes.pool, "render", state, pack_hashes(self.hashes()), (self._tier,), budgets)
            shards.append(PoolShard(POOL, "uid-pool", (version,)))
        gate = self._stand_in
        gate.revision += 1
        root = Root(DOMAIN, "model", "uid", gate.revision, 1, _RULES, ())
        bundle = Bundle.assemble(root, scopes.entries(budgets), shards)
        named = manifests(bundle)
        gate.write_freshness()
        self._manifests.add(named)
        gate.write_policy(CacheView.of(bundle))
        gate.put(ApplyRequest(gate.revision, 1), AdapterAck)
        self._manifests.retain()

    def hashes(self) -> list[bytes]:
        """Return the names that the cache server itself gives the prefix's chunks, as a pool's warmer learns them."""
        tokens = struct.pack(f"<{len(self._prefix)}I", *self._prefix)
        hashes = self._stand_in.put(HashRequest(tokens), ChunkHashes).hashes
        return [hashes[at : at + CHUNK_HASH_BYTES] for at in range(0, len(hashes), CHUNK_HASH_BYTES)]


def _scope(mode: Mode, tenant: int) -> Scope:
    if mode is Mode.PUBLIC:
        return PUBLIC_SCOPE
    if mode is Mode.GROUP:
        return Scope(ScopeKind.GROUP, f"group-{tenant // GROUP_TENANTS}")
    return Scope(ScopeKind.TENANT, f"tenant-{tenant}")
