"""One JSON object a line on standard error. No prompt, API key, keyspace or salt is ever passed to these functions."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any


def event(level: str, message: str, **fields: Any) -> None:
    """Write one line. `fields` are plain values that may appear in the pod's log."""
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
    line = {"time": stamp, "level": level, "component": "gate", "message": message, **fields}
    sys.stderr.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")


info = partial(event, "info")
warning = partial(event, "warning")
