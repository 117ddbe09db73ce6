"""The day, the machine and the files of a benchmark's result.

`python -m bench.measured` lists results whose files have changed since; it fails nothing, because a machine for
measurements must have nothing else to do.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.result import RUNS_LEFT
from e2e.cluster.digests import digest_of
from e2e.cluster.settings import REPOSITORY

RESULTS = REPOSITORY / "bench" / "results"

CONTRACT = "operator/src/kvstrata/contract"
OPERATOR = "operator/src/kvstrata"
GATE = "sidecar/src/kvstrata_sidecar/gate"
ADAPTER = "sidecar/src/kvstrata_sidecar/adapter"
CONNECTOR = "sidecar/src/kvstrata_sidecar/connector"

FILES: dict[str, tuple[str, ...]] = {
    "adapter": (ADAPTER, CONTRACT, "bench/adapter"),
    "benefit": (GATE, ADAPTER, CONNECTOR, CONTRACT, "bench/benefit"),
    "enforce": (OPERATOR, GATE, "bench/enforce.py"),
    "erase": (ADAPTER, CONTRACT, "sidecar/src/kvstrata_sidecar/delete_job", "bench/erase"),
    "files": (f"{ADAPTER}/files", f"{ADAPTER}/tier", "bench/files"),
    "fingerprint": (CONNECTOR, "sidecar/src/kvstrata_sidecar/upstream", "bench/fingerprint.py"),
    "gate": (GATE, CONTRACT, "bench/gate"),
    "neighbours": (ADAPTER, CONTRACT, "bench/neighbours"),
    "outages": (OPERATOR, "bench/outages.py"),
    "render": (OPERATOR, "bench/render.py"),
    "sharing": (ADAPTER, CONTRACT, "bench/sharing"),
    "tier": (f"{OPERATOR}/plan/redis", f"{OPERATOR}/reconcile/redis", f"{ADAPTER}/redis", "bench/tier"),
}
"""The files and folders that decide the figures of each benchmark, besides its pinned peers."""


def measured(name: str) -> dict[str, Any]:
    """Return the day, the machine's processor and the digests of a benchmark's files as they are now."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": _processor(),
        "processors": os.cpu_count(),
        "files": {path: digest(path) for path in FILES[name]},
    }


def digest(path: str) -> str:
    """Return a digest of a file, or of the Python files of a folder."""
    place = REPOSITORY / path
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    return digest_of({str(file.relative_to(REPOSITORY)): digest_of({}, [file]) for file in files})[:16]


def old_results(results: Path = RESULTS) -> dict[str, list[str]]:
    """Return the files that have changed since each result was measured, by the benchmark's name; all if unknown."""
    found = {}
    for path in sorted(results.glob("*.json")):
        known = json.loads(path.read_text()).get("measured", {}).get("files", {})
        if changed := [one for one in FILES.get(path.stem, ()) if known.get(one) != digest(one)]:
            found[path.stem] = changed
    return found


def due(names: Iterable[str], results: Path = RESULTS) -> dict[str, str]:
    """Return the benchmarks with a missing or old result, or one that is not ok, and the reason."""
    old = old_results(results)
    reasons = {name: _reason(results / f"{name}.json", old.get(name, ())) for name in names}
    return {name: reason for name, reason in reasons.items() if reason}


def _reason(result: Path, changed: Sequence[str]) -> str:
    if not result.exists():
        return "it has no result"
    if changed:
        return f"its result is older than {', '.join(changed)}"
    document = json.loads(result.read_text())
    if left := document["conditions"].get(RUNS_LEFT):
        return f"{left} of its runs are left"
    ok = document["ok"]
    return "" if ok is True else "a figure is out of its range" if ok is False else "its result is not judged"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    for name, changed in old_results().items():
        print(f"bench/results/{name}.json is older than {', '.join(changed)}: make bench BENCH={name}", file=sys.stderr)
