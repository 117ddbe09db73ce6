"""Make the excerpts of the Mooncake conversation trace that benchmarks replay.

    python -m bench.sharing.excerpt conversation_trace.jsonl

The whole trace is 12,031 requests of one hour. An excerpt keeps whole families of requests, those that share their
first block behind the system prompt, so that each request finds the earlier turns which it found in the whole trace.
Which families is decided by a digest of that block's id, not by anything that the benchmark measures.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

EXCERPT = Path(__file__).parent / "trace" / "mooncake_conversation_excerpt.jsonl.gz"
ONE_FAMILY_IN = 50
TENTH = Path(__file__).parent / "trace" / "mooncake_conversation_tenth.jsonl.gz"
"""A larger one, of one family in ten: for replays in which tenants need enough prompts each."""


def excerpt(rows: Iterable[dict[str, Any]], one_family_in: int = ONE_FAMILY_IN) -> list[dict[str, Any]]:
    """Return the requests of the chosen families, in their order."""
    # A request of one block is a family by itself: that block is the system prompt, which all requests share.
    families = ((row, row["hash_ids"][1] if row["hash_ids"][1:] else -number) for number, row in enumerate(rows))
    return [row for row, family in families if _digest(family) % one_family_in == 0]


def _digest(family: int) -> int:
    return int.from_bytes(hashlib.sha256(str(family).encode()).digest()[:8], "big")


def main() -> None:
    """Write the excerpts of the named file."""
    with open(sys.argv[1], encoding="utf-8") as source:
        rows = [json.loads(line) for line in source]
    for path, one_family_in in ((EXCERPT, ONE_FAMILY_IN), (TENTH, 10)):
        lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in excerpt(rows, one_family_in))
        path.write_bytes(gzip.compress(lines.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
