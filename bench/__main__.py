"""`python -m bench [NAME ...]`: run benchmarks and write one JSON file each to bench/results/."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from bench import enforce
from bench.result import Result, load_range

RESULTS = Path(__file__).parent / "results"

BENCHMARKS: Mapping[str, Callable[[], Coroutine[Any, Any, Result]]] = {
    enforce.NAME: enforce.measure,
}


def main() -> int:
    """Run the chosen benchmarks, or all; the exit code is 1 if one is out of its range."""
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    chosen = parser.parse_args().names or list(BENCHMARKS)
    unknown = sorted(set(chosen) - set(BENCHMARKS))
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    good = True
    RESULTS.mkdir(exist_ok=True)
    for name in chosen:
        print(f"run {name}", file=sys.stderr, flush=True)
        document = asyncio.run(BENCHMARKS[name]()).to_json(load_range(name))
        (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
        print(json.dumps(document, indent=2))
        good = good and bool(document["ok"])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
