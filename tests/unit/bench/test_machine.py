"""Whose processor time counts as the benchmark's own. Amounts are of processor time, so a busy machine changes none."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from bench.machine import Busyness

BURNT_S = 0.5
TOLERANCE_S = 0.05
"""Accounts of processes are kept in steps of 10 ms."""

_BURN = f"import time\nwhile time.process_time() < {BURNT_S}: pass\n"
_WAIT_AND_BURN_AND_WAIT = f"input()\n{_BURN}print('burnt', flush=True)\ninput()\n"


def burn() -> None:
    """Run in a pool: use up the same time."""
    exec(_BURN, {})  # noqa: S102  (one text for both ways of starting it)


def waiting() -> subprocess.Popen[str]:
    """Return a child that waits for a line, uses its time, and waits for another line to end."""
    return subprocess.Popen(
        [sys.executable, "-c", _WAIT_AND_BURN_AND_WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def let_burn(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "burnt\n"


def test_a_child_that_ended_in_the_block_is_not_other_load() -> None:
    with Busyness() as busyness:
        subprocess.run([sys.executable, "-c", _BURN], check=True)
    assert busyness.ours_s >= BURNT_S - TOLERANCE_S


def test_a_child_that_lives_on_is_not_other_load() -> None:
    with Busyness() as busyness:
        child = waiting()
        let_burn(child)
    child.communicate("\n")
    assert busyness.ours_s >= BURNT_S - TOLERANCE_S


def test_a_pool_of_processes_that_makes_the_load_is_not_other_load() -> None:
    with Busyness() as busyness, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(burn).result()
    assert busyness.ours_s >= BURNT_S - TOLERANCE_S


def test_what_a_child_used_before_the_block_is_not_counted_when_it_ends_in_it() -> None:
    child = waiting()
    let_burn(child)
    with Busyness() as busyness:
        child.communicate("\n")
    assert busyness.ours_s < BURNT_S - TOLERANCE_S


def test_a_child_that_is_also_named_is_counted_once() -> None:
    child = waiting()
    with Busyness(child.pid) as busyness:
        let_burn(child)
    child.communicate("\n")
    assert BURNT_S - TOLERANCE_S <= busyness.ours_s < 2 * BURNT_S - TOLERANCE_S
