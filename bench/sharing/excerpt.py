"""Make the excerpt of the Mooncake conversation trace that the benchmark replays.

    python -m bench.sharing.excerpt conversation_trace.jsonl

The whole trace is 12,031 requests of one hour. The excerpt keeps whole families of requests, those that share their
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


def excerpt(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the requests of the chosen families, in their order."""
    # A request of one block is a family by itself: that block is the system prompt, which all requests share.
    return [row for number, row in enumerate(rows) if _chosen(row["hash_ids"][1] if row["hash_ids"][1:] else -number)]


def _chosen(family: int) -> bool:
    digest = hashlib.sha256(str(family).encode()).digest()
    return int.from_bytes(digest[:8], "big") % ONE_FAMILY_IN == 0


def main() -> None:
    """Write the excerpt of the named file."""
    with open(sys.argv[1], encoding="utf-8") as source:
        rows = [json.loads(line) for line in source]
    lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in excerpt(rows))
    EXCERPT.write_bytes(gzip.compress(lines.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
