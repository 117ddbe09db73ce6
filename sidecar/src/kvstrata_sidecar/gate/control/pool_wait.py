"""Pools that a new pod waits for: it is ready once its own memory holds their chunks, or their time is over.

The operator has them computed in every pod that acknowledged the policy. A pod that was ready once never waits again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from kvstrata.contract import ContractError
from kvstrata.contract.policy.pools import PoolShard, PoolVersion
from kvstrata_sidecar.gate.control.parts import Parts

LOOK_S = 0.5


class PoolWait:
    def __init__(self, parts: Parts) -> None:
        self._render_id, self._enforcement, self._link = parts.render_id, parts.enforcement, parts.link
        self._whole: set[tuple[str, str]] = set()  # complete pools: boot ids of cache servers and keyspaces
        self._over = False

    def awaited(self, waited_s: float) -> str:
        """Return the name of a pool to wait for after `waited_s` seconds; once it was empty, it stays empty."""
        if not self._over:
            for pool, version in self._missing():
                if waited_s < version.before_ready_s:
                    return pool
            self._over = True
        return ""

    async def run(self) -> None:
        while True:
            if not self._over:
                for _, version in tuple(self._missing()):
                    await self._look(version)
            await asyncio.sleep(LOOK_S)

    def _missing(self) -> Iterator[tuple[str, PoolVersion]]:
        bundle, boot = self._enforcement.bundle, self._enforcement.cache_boot
        for shard in bundle.pools.values() if bundle is not None else ():
            for version in _of_use(shard, self._render_id):
                if version.before_ready_s and (boot, version.keyspace) not in self._whole:
                    yield shard.pool, version

    async def _look(self, version: PoolVersion) -> None:
        memory = {tier.name for tier in self._link.state.tiers if tier.medium == "CPU"}
        try:
            holding = await self._link.pool(version.keyspace)
        except ContractError:
            return  # the cache server is away, or does not know the pool yet
        rows = [row for row in holding.tiers if row.name in memory]
        if holding.known and rows and all(0 < row.expected == row.stored for row in rows):
            self._whole.add((holding.boot, version.keyspace))


def _of_use(shard: PoolShard, render_id: str) -> tuple[PoolVersion, ...]:
    """Return the versions that requests here may hit: those rendered as this pod renders; without any, as while pods
    are replaced, the published ones: most templates make the same tokens as before."""
    own = tuple(version for version in shard.versions if version.render_id == render_id)
    return own or tuple(version for version in shard.versions if version.published)
