"""How much tests try: a sample that there is time for, or all of it with KVSTRATA_SOAK=1 (`make soak`).

Each run of pytest begins with the sampled amounts. In a soak, random examples begin with KVSTRATA_SEED.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

SOAK = bool(os.environ.get("KVSTRATA_SOAK"))
SEED = int(os.environ.get("KVSTRATA_SEED", "0"))
TIMES = 20
"""How many times as many random examples and seeds a soak draws."""


@dataclass(frozen=True, slots=True)
class Amount:
    """So many of something: `sampled`, or the `whole` in a soak, or the value of the environment's `variable`."""

    what: str
    sampled: int
    whole: int
    variable: str

    def __int__(self) -> int:
        return int(os.environ.get(self.variable) or (self.whole if SOAK else self.sampled))

    def __str__(self) -> str:
        return f"{self.what}: {int(self):,} of {self.whole:,} ({self.variable})"


GENERATED_PER_KIND = Amount("generated objects of each kind", 500, 2_000, "KVSTRATA_GENERATED_PER_KIND")
TIER_PAIRS = Amount("pairs asked of a tier", 10_000, 100_000, "KVSTRATA_PAIRS")
LMCACHE_PAIRS = Amount("pairs asked of LMCache", 10_000, 100_000, "KVSTRATA_LMCACHE_PAIRS")
ENGINE_PAIRS = Amount("pairs asked of an engine", 300, 2_000, "KVSTRATA_ENGINE_PAIRS")
AMOUNTS = (GENERATED_PER_KIND, TIER_PAIRS, LMCACHE_PAIRS, ENGINE_PAIRS)


def examples(count: int) -> int:
    """Return how many examples a property test draws, of which it usually draws `count`."""
    return TIMES * count if SOAK else count


def seeds(count: int) -> range:
    """Return the seeds of a test that usually takes the first `count`."""
    return range(SEED, SEED + TIMES * count) if SOAK else range(count)


def sampled_lines() -> Iterator[str]:
    """Describe the sampled amounts, a line each."""
    if SOAK:
        yield f"soak: {TIMES} times the random examples, all tests on every kind of server, KVSTRATA_SEED={SEED}"
    else:
        yield f"sampled: one random example in {TIMES}; core tests alone on every kind of server (all: make soak)"
    yield from (f"{'soak' if int(one) >= one.whole else 'sampled'}: {one}" for one in AMOUNTS)
