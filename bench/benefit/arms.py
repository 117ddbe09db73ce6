"""The arms of the comparison, the cells of arm, pods and tenants, and the size of the measurement. Pure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

GROUP_TENANTS = 4
"""Tenants of a group; they also ask about the same documents, in every arm."""


class Arm(StrEnum):
    """A way to serve tenants. The letter is how the documentation calls it."""

    NO_REUSE = "a"
    """Neither a prefix cache nor a cache server."""

    PREFIX_CACHE = "b"
    """The engine's own prefix cache, without salts."""

    LMCACHE = "c"
    """LMCache with its own Redis adapter, as its documentation has it: no tenants."""

    SALTED = "d"
    """The same with a salt for each tenant, which its client sends."""

    ISOLATED = "e"
    """kvstrata: tenants isolated, with budgets and encryption."""

    POOL = "f"
    """As before, and the common prompt is in a prefix pool that all tenants read."""

    GROUP = "g"
    """As ISOLATED, and four tenants each share a scope."""

    TLS = "e-tls"
    """As ISOLATED, with TLS from callers to gates and from cache servers to Redis."""

    @property
    def label(self) -> str:
        """Its name in tables and plots."""
        return TITLES[self]

    @property
    def product(self) -> bool:
        """Whether it is kvstrata."""
        return self in (Arm.ISOLATED, Arm.POOL, Arm.GROUP, Arm.TLS)

    @property
    def caches(self) -> bool:
        """Whether it has cache servers and Redis."""
        return self not in (Arm.NO_REUSE, Arm.PREFIX_CACHE)

    def scope(self, tenant: int) -> str:
        """Return the scope whose blocks a tenant may find, besides a pool's."""
        if self in (Arm.NO_REUSE, Arm.PREFIX_CACHE, Arm.LMCACHE):
            return "everybody"
        return f"group-{tenant // GROUP_TENANTS}" if self is Arm.GROUP else f"tenant-{tenant}"


TITLES = {
    Arm.NO_REUSE: "no reuse",
    Arm.PREFIX_CACHE: "prefix cache",
    Arm.LMCACHE: "LMCache",
    Arm.SALTED: "LMCache, salts",
    Arm.ISOLATED: "kvstrata",
    Arm.POOL: "kvstrata, pool",
    Arm.GROUP: "kvstrata, groups",
    Arm.TLS: "kvstrata, TLS",
}

VARIED = (Arm.PREFIX_CACHE, Arm.SALTED, Arm.ISOLATED, Arm.POOL)
"""Arms that are also measured with other numbers of pods and tenants."""

WALL_JUDGED = (Arm.SALTED, Arm.ISOLATED, Arm.POOL)
"""Arms whose elapsed times are judged, so that their main runs are repeated where the machine was too busy."""


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One combination that is measured."""

    arm: Arm
    pods: int
    tenants: int

    def __str__(self) -> str:
        return f"{self.arm} {self.arm.label}, {self.pods} pods, {self.tenants} tenants"


@dataclass(frozen=True, slots=True)
class Settings:
    """Numbers of runs and requests, and sizes of engines and cache servers."""

    pods: int = 2
    tenants: int = 16
    repeats: int = 5
    other_pods: tuple[int, ...] = (1, 4)
    other_tenants: tuple[int, ...] = (1, 4, 64)
    other_repeats: int = 3
    first_requests: int = 16
    paced_requests: int = 12
    saturating_requests: int = 40
    in_flight_per_pod: int = 4
    output_tokens: int = 4
    max_tokens: int = 2048
    chunk_tokens: int = 64
    engine_tokens: int = 16_384
    """Tokens that an engine's own memory takes: about a tenth of a run's, as with a large model's traffic."""

    memory_gb: float = 0.5
    """A cache server's memory, 11,600 tokens."""

    tries: int = 3
    call_minutes: float = 60.0

    @property
    def main(self) -> list[Cell]:
        """The main comparison."""
        return [Cell(arm, self.pods, self.tenants) for arm in Arm]

    @property
    def others(self) -> list[Cell]:
        """One value changed at a time."""
        pods = [Cell(arm, pods, self.tenants) for pods in self.other_pods for arm in VARIED]
        return pods + [Cell(arm, self.pods, tenants) for tenants in self.other_tenants for arm in VARIED]


SMOKE = Settings(
    repeats=1, other_pods=(), other_tenants=(), first_requests=4, paced_requests=6, saturating_requests=10, tries=1
)
"""Every arm once, for a look whether all of it works."""


def chosen(environment: str | None = None) -> Settings:
    """Return the settings: the small ones if KVSTRATA_BENCH_SMOKE is set."""
    return SMOKE if (os.environ.get("KVSTRATA_BENCH_SMOKE") if environment is None else environment) else Settings()


def cells(settings: Settings) -> Sequence[Cell]:
    """Return all cells, the main comparison first."""
    return [*settings.main, *settings.others]
