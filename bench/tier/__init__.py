"""`tier`: what tiers on Redis servers cost, how fast they are ready, and what becomes of requests meanwhile.

Each part is a module with `async def measure(progress) -> Part`; its figures carry its name in front.
"""

from __future__ import annotations

from bench.result import OTHER_LOAD, Result
from e2e.cluster.progress import Progress

from . import external, in_pods, killed, rendered, scaled

NAME = "tier"
PARTS = (external, rendered, killed, scaled, in_pods)


async def measure() -> Result:
    """Measure every part; the ratio is that of the first."""
    progress = Progress()
    parts = [await part.measure(progress) for part in PARTS]
    return Result(
        name=NAME,
        figures={name: figure for part in parts for name, figure in part.figures.items()},
        baseline={name: figure for part in parts for name, figure in part.baseline.items()},
        ratio=parts[0].ratio,
        reproduce="make bench BENCH=tier",
        conditions={
            **{name: value for part in parts for name, value in part.conditions.items()},
            OTHER_LOAD: round(max(part.others_percent for part in parts)),
        },
        not_measured={name: why for part in parts for name, why in part.not_measured.items()},
    )
