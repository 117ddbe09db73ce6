"""What the benchmark of file tiers takes for the limit, and what it divides by it."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import pytest

from bench.files import compare
from bench.files.fio import LOOPS, Fio
from bench.result import Result, load_range
from e2e.cluster.progress import ClusterError

GB = 10**9


def _result(**seconds: list[float]) -> Result:
    """Of rounds in which each variant moves a GB in as many seconds, 1 where nothing else is said."""
    rounds = {
        name: [
            {"bytes": GB, "store_s": one, "load_s": one, "store_cpu_s": one / 2, "load_cpu_s": one / 2}
            for one in seconds.get(name, [1.0, 1.0, 1.0])
        ]
        for name in compare.VARIANTS
    }
    lookups = {"filling": [{"seconds": [0.001]}], "native": [{"seconds": [0.004]}]}
    return compare._result({1: rounds, 4: rounds}, lookups, "fio", others_percent=0.0)


def test_the_limit_is_the_engine_that_is_faster_in_most_rounds() -> None:
    result = _result(psync=[2.0, 2.0, 0.1], io_uring=[1.0, 1.0, 1.0], plain=[1.25, 1.25, 1.25])
    assert result.figures["plain_store_of_limit"].value == pytest.approx(0.8)
    assert result.ratio == pytest.approx(0.8)


def test_a_ratio_is_taken_within_rounds_so_that_a_disk_that_is_slow_for_a_while_changes_none() -> None:
    slow = [1.0, 10.0, 3.0]
    result = _result(psync=slow, io_uring=[one * 2 for one in slow], sealed=[one * 2 for one in slow])
    assert result.figures["sealed_of_limit"].value == pytest.approx(0.5)


def test_every_bound_is_of_a_figure_that_there_is() -> None:
    limits = load_range(compare.NAME)
    assert limits
    assert set(limits) <= {*_result().figures, "ratio"}


@pytest.mark.parametrize("moved", [LOOPS * (8 << 20), 8 << 20])
def test_a_run_of_fio_that_did_not_move_all_is_no_limit(tmp_path: Path, moved: int) -> None:
    program = tmp_path / "fio"
    told = {"io_bytes": moved, "bw_bytes": 4 << 20}
    told_json = json.dumps({"jobs": [{"read": told, "write": told}]})
    program.write_text(f"#!/bin/sh\necho 'note: something else'\necho '{told_json}'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    fio = Fio([str(program)], tmp_path, 4 << 20, 2, 2)
    if moved < LOOPS * (8 << 20):
        with pytest.raises(ClusterError, match="moved"):
            asyncio.run(fio.transfer("psync"))
    else:
        assert asyncio.run(fio.transfer("psync")) == {"bytes": 8 << 20, "store_s": 2.0, "load_s": 2.0}
