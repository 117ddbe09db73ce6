"""`python -m bench [NAME ...]`: run benchmarks and write one JSON file each to bench/results/.

Without names it runs those with a missing or old result, or one that is not ok: a run that was stopped continues.

A benchmark is a module of this package with a range of the same name in bench/ranges/. It has
`async def measure() -> Result`, makes all that it needs, and stops all that it started, however it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import uvloop

from bench.measured import RESULTS, due, measured
from bench.result import NOT_JUDGED, RANGES, Result, Verdict, load_range, overall
from e2e.cluster.progress import ClusterError, describe

EXIT_CODES: Mapping[Verdict, int] = {True: 0, False: 1, NOT_JUDGED: 3}


def main() -> int:
    """Run the chosen benchmarks, or those that are due; returns the exit code of EXIT_CODES, and 1 if one failed."""
    known = sorted(path.stem for path in RANGES.glob("*.json"))
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    chosen = parser.parse_args().names
    unknown = sorted(set(chosen) - set(known))
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    try:
        return EXIT_CODES[overall([_run(name) for name in chosen or _due(known)])]
    except ClusterError as error:
        print(describe(error), file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped", file=sys.stderr)
        return 130


def _due(known: Sequence[str]) -> list[str]:
    reasons = due(known)
    for name in known:
        print(f"{name}: {reasons.get(name, 'its result stands')}", file=sys.stderr, flush=True)
    return list(reasons)


def _run(name: str) -> Verdict:
    print(f"benchmark {name}", file=sys.stderr, flush=True)
    module = importlib.import_module(f"bench.{name.replace('-', '_')}")
    result: Result = uvloop.run(_until_stopped(module.measure()))
    document = result.to_json(load_range(name)) | {"measured": measured(name)}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    for ending, text in result.beside.items():
        (RESULTS / f"{name}.{ending}").write_text(text)
    print(json.dumps(document, indent=2))
    for name in document["out_of_range"]:
        print(f"{name} is out of its range in bench/ranges", file=sys.stderr)
    for name in document["too_busy_to_judge"]:
        print(f"{name} is not judged: other programs kept the machine too busy", file=sys.stderr)
    verdict: Verdict = document["ok"]
    return verdict


async def _until_stopped(measuring: Coroutine[Any, Any, Result]) -> Result:
    """Run a benchmark; SIGTERM ends it as Ctrl-C does, so that it stops the processes that it started."""
    task = asyncio.ensure_future(measuring)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


if __name__ == "__main__":
    sys.exit(main())
