"""A process that stores, evicts and purges, and is killed at one call of the operating system after the other.

    python -m tests.files.dying_writer DIRECTORY

runs it once for each call, in DIRECTORY/1, DIRECTORY/2 and so on, until it comes to its end, and prints how often.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstrata.contract.policy.budget import EnforcedBudget
from kvstrata.contract.policy.bundle import Rules
from kvstrata.contract.policy.cache_view import CacheView
from kvstrata_sidecar.adapter.files.tier import FileTier
from kvstrata_sidecar.adapter.params import AdapterParams, FileTierParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, boottime_ns
from kvstrata_sidecar.adapter.tier.buffers import Spans
from kvstrata_sidecar.adapter.tier.tasks import Task
from tests.files.file_driver import BLOCK_BYTES, FILE_BYTES, aligned, block, purge
from tests.tiers.gate_stand_in import DOMAIN, IDENTITY, KEYSPACE_A, KEYSPACE_B

CALLS = ("open", "pwritev", "utime", "close", "rename", "unlink", "mkdir", "rmdir", "fsync")
LIMIT_BLOCKS = 2


def work(directory: Path) -> None:
    """Store more than fits, and purge."""
    enforcement = Enforcement(DOMAIN, lambda reopen=False: boottime_ns())
    budgets = (EnforcedBudget("disk", limit_bytes=LIMIT_BLOCKS * FILE_BYTES),)
    enforcement.apply(CacheView(DOMAIN, 1, 1, Rules(stale_after_s=3600), {KEYSPACE_A: budgets, KEYSPACE_B: ()}))
    params = FileTierParams("disk", directory, 1 << 30, 100, free_floor_percent=0, workers=1)
    answers: queue.Queue[Task] = queue.Queue()
    tier = FileTier(AdapterParams(DOMAIN, IDENTITY, params), params, enforcement, answers.put, spans=Spans())
    while tier.state().recovering:
        time.sleep(0.002)
    for number in (1, 2, 3, 4):
        tier.store([block(KEYSPACE_A, number), block(KEYSPACE_B, number)], [aligned(BLOCK_BYTES, number)] * 2)
        answers.get(timeout=60)
    purge(tier._eraser, [KEYSPACE_B])
    tier.close()


def die_at(step: int) -> None:
    """Kill this process when it makes its `step`th call that matters to the disk."""
    made = 0

    def dying(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal made
            made += 1
            if made == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return own(*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))


def main(directory: Path) -> int:
    for step in range(1, 1000):
        own = directory / str(step)
        own.mkdir()
        child = os.fork()
        if child == 0:
            die_at(step)
            work(own)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return step
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"step {step} ended with {status}")
    raise SystemExit("it never came to its end")


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
