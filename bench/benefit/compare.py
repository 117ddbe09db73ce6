"""The whole benchmark: measures missing runs for an hour at most, then judges and draws all records."""

from __future__ import annotations

import gzip
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.benefit.arms import Settings, chosen
from bench.benefit.figures import Evaluated, evaluate
from bench.benefit.fleet import POD_BYTES, SPARE_BYTES, Installed, running
from bench.benefit.plan import Slot, State, estimate_s, of_earlier_code, remaining
from bench.benefit.play import Play
from bench.benefit.table import table
from bench.benefit.text import words
from bench.benefit.tiers import tiers_measured
from bench.benefit.workload import Family, families, workload
from bench.environment import ROOT, install
from bench.result import OTHER_LOAD, RUNS_LEFT, Result
from bench.sharing.excerpt import TENTH
from bench.sharing.stand import engine_python
from e2e.cluster.progress import ClusterError, Progress
from e2e.engine.models import SMOLLM2

NAME = "benefit"
REPRODUCE = "make bench BENCH=benefit"


@dataclass(frozen=True, slots=True)
class _Prepared:
    installed: Installed
    vocabulary: Sequence[str]
    traced: Sequence[Family]


async def measure(settings: Settings | None = None) -> Result:
    """Measure for at most `call_minutes`. Raises ClusterError if the main comparison is not complete once."""
    settings = settings or chosen()
    progress = Progress()
    plotter = install("plot", progress)
    prepared = _prepare(progress)
    state = State(settings)
    await _go_on(settings, state, prepared)
    left = remaining(settings, state.records)
    if any(slot.cell in settings.main and not slot.repeat for slot in left):
        raise ClusterError(
            f"{len(state.records)} runs are measured and {len(left)} are left, some of them in the main comparison",
            advice="run it again: it continues there",
        )
    return _result(settings, evaluate(settings, state.records, prepared.traced), plotter, state)


def _prepare(progress: Progress) -> _Prepared:
    python = engine_python(progress)
    with progress.step("the model"):
        model = SMOLLM2.folder(python)
    with gzip.open(TENTH, "rt", encoding="utf-8") as lines:
        traced = families(json.loads(line) for line in lines)
    return _Prepared(Installed(python, model), words(model / "tokenizer.json"), traced)


async def _go_on(settings: Settings, state: State, prepared: _Prepared) -> None:
    """Measure slot after slot until the time is up, or nothing is left."""
    until_s = time.monotonic() + 60 * settings.call_minutes
    while (slot := state.next(settings)) is not None:
        expected_s = estimate_s(state.records, slot)
        if time.monotonic() + expected_s > until_s:
            _report(
                f"the time of this call is up, {len(remaining(settings, state.records))} runs are left; run it again"
            )
            return
        left_s = sum(estimate_s(state.records, one) for one in remaining(settings, state.records))
        _report(f"{slot}; about {expected_s / 60:.0f} min, all that is left about {left_s / 60:.0f} min")
        begun_s = time.monotonic()
        record = await _measured(settings, slot, prepared)
        state.add(slot, record, time.monotonic() - begun_s)


async def _measured(settings: Settings, slot: Slot, prepared: _Prepared) -> dict[str, Any]:
    seed, cell, installed = f"repeat-{slot.repeat}", slot.cell, prepared.installed
    if cell is None:
        return await tiers_measured(settings, installed, prepared.vocabulary, seed, _report_part)
    missing = cell.pods * POD_BYTES + SPARE_BYTES - _available_bytes()
    if missing > 0:
        return {"skipped": f"{missing / 2**30:.1f} GiB of memory are missing", "others_percent": 0.0}
    drawn = workload(settings, cell.tenants, prepared.traced, seed)
    with tempfile.TemporaryDirectory(prefix="kvb-") as name:
        _report_part(f"{cell.pods} pods start")
        async with running(cell.arm, cell.pods, cell.tenants, settings, installed, Path(name)) as fleet:
            return await Play(fleet, cell, settings, seed, prepared.vocabulary).run(drawn, _report_part)


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def _result(settings: Settings, evaluated: Evaluated, plotter: Path, state: State) -> Result:
    shown = table(evaluated, REPRODUCE)
    return Result(
        name=NAME,
        figures=evaluated.figures,
        baseline=evaluated.baseline,
        ratio=evaluated.ratio,
        reproduce=REPRODUCE,
        conditions={
            "runs": evaluated.runs,
            RUNS_LEFT: len(remaining(settings, state.records)) + len(of_earlier_code(state.records, state.code)),
            "runs_of_earlier_code": len(of_earlier_code(state.records, state.code)),
            "pods": settings.pods,
            "tenants": settings.tenants,
            "processors": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            OTHER_LOAD: round(evaluated.others_percent),
            "load_average": evaluated.load_average,
            "spread": evaluated.spread,
        },
        beside={"md": shown, **_drawn(plotter, evaluated.drawing)},
        not_measured=evaluated.not_measured,
    )


def _drawn(plotter: Path, drawing: dict[str, Any]) -> dict[str, str]:
    """Return plots by the ending of their file. The program's environment is empty, so that no setting changes them."""
    done = subprocess.run(
        [plotter / "bin/python", "-m", "bench.benefit.picture"], cwd=ROOT, env={"MPLCONFIGDIR": str(plotter)},
        input=json.dumps(drawing), stdout=subprocess.PIPE, encoding="utf-8", check=True,
    )  # fmt: skip
    plots: dict[str, str] = json.loads(done.stdout)
    return plots


def _report(sentence: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {sentence}", file=sys.stderr, flush=True)


def _report_part(sentence: str) -> None:
    _report(f"  {sentence}")
