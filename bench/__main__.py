"""`python -m bench [NAME ...]`: run benchmarks and write one JSON file each to bench/results/.

A benchmark is a module of this package with a range of the same name in bench/ranges/. It has
`async def measure() -> Result`, makes all that it needs, and stops all that it started, however it ends.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
from pathlib import Path

import uvloop

from bench.result import RANGES, Result, load_range
from e2e.cluster.progress import ClusterError, describe

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run the chosen benchmarks, or all; the exit code is 1 if one is out of its range or failed."""
    known = sorted(path.stem for path in RANGES.glob("*.json"))
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    chosen = parser.parse_args().names or known
    unknown = sorted(set(chosen) - set(known))
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    # As Ctrl-C does: what a benchmark started is stopped on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        good = [_run(name) for name in chosen]
        return 0 if all(good) else 1
    except ClusterError as error:
        print(describe(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _run(name: str) -> bool:
    print(f"benchmark {name}", file=sys.stderr, flush=True)
    module = importlib.import_module(f"bench.{name.replace('-', '_')}")
    result: Result = uvloop.run(module.measure())
    document = result.to_json(load_range(name))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document, indent=2))
    return bool(document["ok"])


if __name__ == "__main__":
    sys.exit(main())
