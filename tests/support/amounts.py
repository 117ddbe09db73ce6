"""How much tests try: enough to show claims (`make test`), all (the default), or more in a soak, by KVSTRATA_SIZE.

Each run of pytest begins with the amounts. In a soak, random examples begin with KVSTRATA_SEED.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

SIZE = os.environ.get("KVSTRATA_SIZE", "all")
"""`claims`, `all` or `soak`."""

CLAIMS = SIZE == "claims"
SOAK = SIZE == "soak"
SEED = int(os.environ.get("KVSTRATA_SEED", "0"))
TIMES = 20
"""How many times as many random examples and seeds a soak draws."""


@dataclass(frozen=True, slots=True)
class Amount:
    """So many of something in a run of each size, unless the environment's `variable` has another number."""

    what: str
    claims: int
    all: int
    soak: int
    variable: str

    def __int__(self) -> int:
        return int(os.environ.get(self.variable) or {"claims": self.claims, "soak": self.soak}.get(SIZE, self.all))

    def __str__(self) -> str:
        return f"{self.what}: {int(self):,} of {self.soak:,} ({self.variable})"


GENERATED_PER_KIND = Amount("generated objects of each kind", 50, 500, 2_000, "KVSTRATA_GENERATED_PER_KIND")
TIER_PAIRS = Amount("pairs asked of a tier", 10_000, 10_000, 100_000, "KVSTRATA_PAIRS")
LMCACHE_PAIRS = Amount("pairs asked of LMCache", 500, 10_000, 100_000, "KVSTRATA_LMCACHE_PAIRS")
ENGINE_PAIRS = Amount("pairs asked of an engine", 300, 300, 2_000, "KVSTRATA_ENGINE_PAIRS")
AMOUNTS = (GENERATED_PER_KIND, TIER_PAIRS, LMCACHE_PAIRS, ENGINE_PAIRS)


def examples(count: int) -> int:
    """Return how many examples a property test draws, of which it usually draws `count`."""
    return TIMES * count if SOAK else count


def seeds(count: int, claims: int | None = None) -> range:
    """Return the seeds of a test that usually takes the first `count`, and `claims` of them where claims are shown."""
    if SOAK:
        return range(SEED, SEED + TIMES * count)
    return range(claims if CLAIMS and claims is not None else count)


def amount_lines() -> Iterator[str]:
    """Describe the amounts, a line each."""
    yield f"size: {SIZE} (KVSTRATA_SIZE), KVSTRATA_SEED={SEED}"
    yield from (str(one) for one in AMOUNTS)
