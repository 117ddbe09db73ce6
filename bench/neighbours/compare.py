"""The whole benchmark: one trace, without and with a scanner, on each of three memories of the same size."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import platform
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

from bench.adapter.stand import servers
from bench.machine import Busyness
from bench.neighbours.caches import TIER, VALUE_BYTES, Cache, ExactLru, PolicyCache, RedisLru
from bench.neighbours.workload import (
    SCAN_RATE,
    SCANNER,
    TENANTS,
    TRACE_BLOCKS,
    Prompt,
    distinct_blocks,
    prompts_of,
    with_scanner,
)
from bench.result import OTHER_LOAD, Figure, Result
from bench.sharing.excerpt import TENTH
from bench.sharing.trace import CHUNK_TOKENS, load
from e2e.cluster.progress import Progress
from kvstrata.contract.policy.bundle import EnforcedBudget

NAME = "neighbours"
CAPACITY_PERCENT = 25
"""Room, in percent of all blocks: so much that the part of it that is guaranteed to one holds the longest prompt."""

GUARANTEED_PERCENT = 6
"""Of the room, to each of the neighbours."""

SCAN_LIMIT_PERCENT = 3
"""The scanner's limit, as a share of the capacity."""

Hits = Sequence[int]
"""Of each neighbour, by number."""


async def measure() -> Result:
    """Replay it six times."""
    return await asyncio.to_thread(_measure, Progress())


def _measure(progress: Progress) -> Result:
    prompts = prompts_in(TENTH)
    capacity = distinct_blocks(prompts) * CAPACITY_PERCENT // 100
    alone, beside = prompts, list(with_scanner(prompts))
    exact = [served(ExactLru(capacity), some) for some in (alone, beside)]
    ours: list[Hits] = []
    theirs: list[Hits] = []
    refused = 0
    with tempfile.TemporaryDirectory(prefix=NAME) as name, Busyness() as machine:
        directory = Path(name)
        for some, what in ((alone, "alone"), (beside, "beside a scanner")):
            with servers(directory, (), ()) as (budgeted, shared):
                pod = directory / f"pod-{len(ours)}"
                with (
                    progress.step(f"{TENANTS} tenants {what}, under budgets"),
                    closing(PolicyCache(pod, budgeted, capacity, budgets(capacity))) as tier,
                ):
                    ours.append(served(tier, some))
                    refused = tier.counters().get("refused", 0)
                with (
                    progress.step(f"{TENANTS} tenants {what}, in a Redis that evicts by itself"),
                    closing(RedisLru(shared, capacity)) as one_for_all,
                ):
                    theirs.append(served(one_for_all, some))
    asked = sum(len(prompt.blocks) for prompt in prompts)
    lost, lru_lost = lost_percent(*ours), lost_percent(*exact)
    return Result(
        name=NAME,
        figures={
            "neighbours_hits_lost": Figure(lost, "%"),
            "neighbours_hits_lost_worst": Figure(worst_percent(*ours), "%"),
            "hit_rate_alone": Figure(100 * sum(ours[0]) / asked, "%"),
            "hit_rate_beside_scanner": Figure(100 * sum(ours[1]) / asked, "%"),
            "hits_beside_scanner_of_lru_alone": Figure(100 * sum(ours[1]) / sum(exact[0]), "%"),
        },
        baseline={
            "lru_hits_lost": Figure(lru_lost, "%"),
            "lru_hits_lost_worst": Figure(worst_percent(*exact), "%"),
            "lru_hit_rate_alone": Figure(100 * sum(exact[0]) / asked, "%"),
            "lru_hit_rate_beside_scanner": Figure(100 * sum(exact[1]) / asked, "%"),
            "redis_lru_hits_lost": Figure(lost_percent(*theirs), "%"),
            "redis_lru_hits_lost_worst": Figure(worst_percent(*theirs), "%"),
            "redis_lru_hit_rate_alone": Figure(100 * sum(theirs[0]) / asked, "%"),
            "redis_lru_hit_rate_beside_scanner": Figure(100 * sum(theirs[1]) / asked, "%"),
        },
        ratio=lost / lru_lost,
        reproduce="make bench BENCH=neighbours",
        conditions={
            "tenants": TENANTS,
            "prompts": len(prompts),
            "blocks": asked,
            "distinct_blocks": distinct_blocks(prompts),
            "block_tokens": TRACE_BLOCKS * CHUNK_TOKENS,
            "capacity_blocks": capacity,
            "guaranteed_percent": GUARANTEED_PERCENT,
            "scanner_rate": SCAN_RATE,
            "scanner_limit_percent": SCAN_LIMIT_PERCENT,
            "refused_blocks": refused,
            "hits_by_tenant": {"alone": list(ours[0]), "beside_scanner": list(ours[1])},
            "lru_hits_by_tenant": {"alone": list(exact[0]), "beside_scanner": list(exact[1])},
            "processors": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            OTHER_LOAD: round(machine.others_percent),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        },
    )


def served(cache: Cache, prompts: Iterable[Prompt]) -> list[int]:
    """Serve all prompts in their order; return the hits of each neighbour."""
    hits = [0] * TENANTS
    for prompt in prompts:
        found = cache.serve(prompt)
        if prompt.tenant != SCANNER:
            hits[prompt.tenant] += found
    return hits


def lost_percent(alone: Hits, beside: Hits) -> float:
    """Return how many of their hits all neighbours together lost, in percent; negative if they found more."""
    return 100 * (1 - sum(beside) / sum(alone))


def worst_percent(alone: Hits, beside: Hits) -> float:
    """Return the same of the neighbour that lost the largest share."""
    return max(lost_percent([before], [now]) for before, now in zip(alone, beside, strict=True) if before)


def budgets(capacity_blocks: int) -> dict[int, EnforcedBudget]:
    """Return the budgets of the tenants' policies: neighbours have guarantees, the scanner has a limit."""
    room = capacity_blocks * VALUE_BYTES
    guaranteed = EnforcedBudget(TIER, guaranteed_bytes=room * GUARANTEED_PERCENT // 100)
    limited = EnforcedBudget(TIER, limit_bytes=room * SCAN_LIMIT_PERCENT // 100)
    return {**dict.fromkeys(range(TENANTS), guaranteed), SCANNER: limited}


def prompts_in(path: Path) -> list[Prompt]:
    """Return the prompts of a gzipped trace."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        starts_s = [json.loads(line)["timestamp"] / 1000 for line in lines]
    return prompts_of(load(path), starts_s)
