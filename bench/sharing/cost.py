"""Cost of a hit in a pool beside a private hit of the same prefix, in turn, on one cache server."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.sharing.optimum import Mode
from bench.sharing.scopes import Scopes
from bench.sharing.stand import Stand
from bench.sharing.trace import PREFIX
from e2e.cluster.progress import ClusterError
from kvstrata.contract.policy.pools import PoolState

PRIVATE, READER = 0, 1
"""Tenants: one that keeps the prefix in its own keyspace, one that reads the pool."""


@dataclass(frozen=True, slots=True)
class Hit:
    """Seconds that reads of the prefix took, each the mean over one turn."""

    wall_s: float
    cpu_s: float
    """Processor time of the cache server and of the server behind its tier."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Turns of private hits and of hits in the pool, pairwise."""

    private: tuple[Hit, ...]
    pool: tuple[Hit, ...]

    @property
    def wall_ratio(self) -> float:
        """How much longer a hit in the pool takes: the median over pairs of turns."""
        return statistics.median(b.wall_s / a.wall_s for a, b in zip(self.private, self.pool, strict=True))

    @property
    def cpu_ratio(self) -> float:
        """How much more processor time it takes: the median over pairs of turns."""
        return statistics.median(b.cpu_s / a.cpu_s for a, b in zip(self.private, self.pool, strict=True))

    def spread(self) -> dict[str, list[float]]:
        """The lowest and highest ratio of any pair."""
        pairs = list(zip(self.private, self.pool, strict=True))
        cpu, wall = [b.cpu_s / a.cpu_s for a, b in pairs], [b.wall_s / a.wall_s for a, b in pairs]
        return {"cpu": [round(min(cpu), 3), round(max(cpu), 3)], "wall": [round(min(wall), 3), round(max(wall), 3)]}


def hits_compared(stand: Stand, pairs: int, reads: int) -> Cost:
    """Store the prefix under a tenant and in a pool, and read both in turns of so many reads.

    The first of two turns is the private one and the pool's alternately (ABBA), so that neither has the advantage of
    coming later. One pair before the first is not counted. Raises ClusterError if any read is not a full hit.
    """
    scopes = Scopes.drawn(Mode.POOL, 2, PRIVATE)
    assert scopes.pool is not None  # noqa: S101
    stand.gate.enforce(scopes, PoolState.WARMING)
    for salt in (scopes.pool, scopes.keyspaces[PRIVATE]):
        stand.serve(salt, [PREFIX])
    stand.quiet()
    stand.gate.enforce(scopes)
    if stand.backing:
        stand.forget_memory()
    turns: dict[int, list[Hit]] = {PRIVATE: [], READER: []}
    for number in range(-1, pairs):
        for tenant in (PRIVATE, READER) if number % 2 else (READER, PRIVATE):
            hit = _turn(stand, scopes.keyspaces[tenant], reads)
            if number >= 0:
                turns[tenant].append(hit)
    return Cost(tuple(turns[PRIVATE]), tuple(turns[READER]))


def _turn(stand: Stand, salt: str, reads: int) -> Hit:
    prompts: Sequence[Sequence[int]] = [PREFIX] * reads
    begun_s, begun_cpu_s = time.perf_counter(), stand.cpu_s()
    found = stand.serve(salt, prompts, stores=False)
    wall_s, cpu_s = time.perf_counter() - begun_s, stand.cpu_s() - begun_cpu_s
    if set(found) != {len(PREFIX)}:
        raise ClusterError(f"of {len(PREFIX)} chunks these were found: {sorted(set(found))}")
    return Hit(wall_s / reads, cpu_s / reads)
