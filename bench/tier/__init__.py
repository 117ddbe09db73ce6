"""`tier`: cost of tiers on Redis servers, their time to readiness, and the requests meanwhile.

Each part is a module with `async def measure(progress) -> Part`; its figures carry its name in front.
"""

from __future__ import annotations

import os

from bench.result import OTHER_LOAD, Result
from e2e.cluster.progress import Progress

from . import external, in_pods, killed, rendered, scaled

NAME = "tier"
WHOLE = "KVSTRATA_BENCH_WHOLE"
"""Set to run also the parts that take minutes and gigabytes of memory: servers killed, and shards added."""

PARTS = (external, rendered, in_pods)
LONG_PARTS = (killed, scaled)


async def measure() -> Result:
    """Measure every part; the ratio is that of the first."""
    progress = Progress()
    whole = bool(os.environ.get(WHOLE))
    parts = [await part.measure(progress) for part in (PARTS + LONG_PARTS if whole else PARTS)]
    left_out = {} if whole else {f"{name}_": f"only with {WHOLE}=1" for name in ("killed", "scaled")}
    not_measured = left_out | {name: why for part in parts for name, why in part.not_measured.items()}
    return Result(
        name=NAME,
        figures={name: figure for part in parts for name, figure in part.figures.items()},
        baseline={name: figure for part in parts for name, figure in part.baseline.items()},
        ratio=parts[0].ratio,
        reproduce=reproduce(whole=whole, pods=in_pods.NOT_MEASURED not in not_measured),
        conditions={
            **{name: value for part in parts for name, value in part.conditions.items()},
            OTHER_LOAD: round(max(part.others_percent for part in parts)),
        },
        not_measured=not_measured,
    )


def reproduce(*, whole: bool, pods: bool) -> str:
    """Return the command that measures the same again; pods are those of a local cluster with the product."""
    command = f"{WHOLE}=1 make bench BENCH={NAME}" if whole else f"make bench BENCH={NAME}"
    return f"make demo && {command}" if pods else command
